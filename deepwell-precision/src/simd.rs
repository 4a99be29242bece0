//! Running a kernel with the widest vector instructions of the machine.
//!
//! Kernels are ordinary loops over arrays of fixed length. Inlined into a function that is compiled
//! for AVX-512 or AVX2 they become vector code of that width; every operation is exact or rounds
//! as IEEE 754 says, so the bits do not depend on the width. Without the feature `std` there is no
//! asking what the machine has, and kernels are compiled for what the compiler assumes of it.

/// A loop that is worth the widest instructions. `call` has to be `#[inline(always)]`, as does all
/// that it calls.
pub(crate) trait Kernel {
    /// What comes out of the loop.
    type Output;

    /// Runs the loop.
    fn call(self) -> Self::Output;
}

/// Instruction set that a kernel runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// The widest that this machine has.
    Native,
    /// What the compiler assumes of any machine.
    #[cfg(test)]
    Baseline,
    /// AVX2, where the machine has it.
    #[cfg(all(test, feature = "std", target_arch = "x86_64"))]
    Avx2,
}

impl Level {
    /// Runs `kernel`.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(feature = "std")]
            Self::Native => pulp::Arch::new().dispatch(Dispatched(kernel)),
            #[cfg(not(feature = "std"))]
            Self::Native => kernel.call(),
            #[cfg(test)]
            Self::Baseline => kernel.call(),
            #[cfg(all(test, feature = "std", target_arch = "x86_64"))]
            Self::Avx2 => match pulp::x86::V3::try_new() {
                Some(v3) => v3.vectorize(Dispatched(kernel)),
                None => kernel.call(),
            },
        }
    }
}

/// A kernel in the form that is handed to functions compiled for one instruction set.
#[cfg(feature = "std")]
struct Dispatched<K>(K);

#[cfg(feature = "std")]
impl<K: Kernel> pulp::NullaryFnOnce for Dispatched<K> {
    type Output = K::Output;

    #[inline(always)]
    fn call(self) -> K::Output {
        self.0.call()
    }
}
