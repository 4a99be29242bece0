//! A tensor in device memory.

use deepwell_ir::{DType, storage_bytes};

use super::driver::{Argument, DevicePtr};

/// An operand in device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    /// First byte.
    pub pointer: DevicePtr,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

impl DeviceTensor {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        // The arena holds the operand, or the program's verifier would have rejected it.
        storage_bytes(self.dtype, &self.shape).unwrap_or(usize::MAX)
    }

    /// The address as an argument.
    pub fn argument(&self) -> Argument {
        Argument::Pointer(self.pointer)
    }
}
