//! Running a kernel with the widest vector instructions of the machine.
//!
//! Kernels are ordinary loops over arrays of fixed length. Inlined into a function that is compiled
//! for AVX-512 or AVX2 they become vector code of that width; every operation is exact or rounds
//! as IEEE 754 says, so the bits do not depend on the width.

use pulp::NullaryFnOnce;

/// Instruction set that a kernel runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// The widest that this machine has.
    Native,
    /// What the compiler assumes of any machine.
    #[cfg(test)]
    Baseline,
    /// AVX2, where the machine has it.
    #[cfg(all(test, target_arch = "x86_64"))]
    Avx2,
}

impl Level {
    /// Runs `kernel`, whose `call` has to be `#[inline(always)]`, as does all that it calls.
    pub(crate) fn run<K: NullaryFnOnce>(self, kernel: K) -> K::Output {
        match self {
            Self::Native => pulp::Arch::new().dispatch(kernel),
            #[cfg(test)]
            Self::Baseline => kernel.call(),
            #[cfg(all(test, target_arch = "x86_64"))]
            Self::Avx2 => match pulp::x86::V3::try_new() {
                Some(v3) => v3.vectorize(kernel),
                None => kernel.call(),
            },
        }
    }
}
