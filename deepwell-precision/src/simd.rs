//! Runs a kernel with the widest vector instructions of the machine.
//!
//! Kernels are ordinary loops over arrays of fixed length. Inlined into a function compiled for
//! AVX-512, loops become vector code of this width; every operation is exact or rounds according to
//! IEEE 754, so the bits do not depend on the width. Without the feature `std` there is no run-time
//! detection, and kernels are compiled for the target's baseline.

/// A loop that benefits from wide instructions. `call` and all functions that it calls must be
/// `#[inline(always)]`.
pub(crate) trait Kernel {
    /// Result of the loop.
    type Output;

    /// Runs the loop.
    fn call(self) -> Self::Output;
}

/// Instruction set that a kernel runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// The widest set of this machine.
    Native,
    /// The compiler's baseline.
    #[cfg(test)]
    Baseline,
}

impl Level {
    /// Runs `kernel`. Its code for each instruction set is compiled once, for all levels.
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

/// A kernel in the form expected by functions compiled for one instruction set.
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
