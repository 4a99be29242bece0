//! Running a kernel with the widest vector instructions of the machine.
//!
//! Kernels are ordinary loops over arrays of fixed length. Inlined into a function that is compiled
//! for AVX-512 they become vector code of that width; every operation is exact or rounds as IEEE
//! 754 says, so the bits do not depend on the width. Without the feature `std` there is no asking
//! what the machine has, and kernels are compiled for what the compiler assumes of it.

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
}

impl Level {
    /// Runs `kernel`. Each instruction set's code of it is there once, whichever level asks for it.
    #[cfg(feature = "std")]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        self.arch().dispatch(Dispatched(kernel))
    }

    /// Runs `kernel`.
    #[cfg(not(feature = "std"))]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.call()
    }

    #[cfg(feature = "std")]
    fn arch(self) -> pulp::Arch {
        match self {
            Self::Native => pulp::Arch::new(),
            #[cfg(test)]
            Self::Baseline => pulp::Arch::Scalar,
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
