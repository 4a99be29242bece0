//! Errors of preparing and running calls.

use deepwell_ir::{DType, IrError};
use thiserror::Error;

/// Errors of backends and the executor.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The program breaks a rule; nothing was prepared.
    #[error(transparent)]
    Program(#[from] IrError),
    /// A call names a kernel that the backend does not have.
    #[error("call `{call}`: backend `{backend}` has no kernel `{kernel}`")]
    UnknownKernel {
        /// The call.
        call: String,
        /// The backend.
        backend: &'static str,
        /// The kernel asked for.
        kernel: String,
    },
    /// A kernel does not take an operand of this type.
    #[error("call `{call}`: operand {operand} expected as {expected}, got {got}")]
    OperandType {
        /// The call.
        call: String,
        /// Position of the operand.
        operand: usize,
        /// The types that the kernel supports.
        expected: String,
        /// The type in the program.
        got: DType,
    },
    /// The call ran and refused its data.
    #[error("call `{call}`: {what}")]
    Run {
        /// The call.
        call: String,
        /// The kernel's message.
        what: String,
    },
    /// The allocation of the arena failed.
    #[error(
        "cannot allocate an arena of {bytes} bytes\n\
         hint: a smaller micro-batch or more recomputation needs less"
    )]
    OutOfMemory {
        /// Size asked for.
        bytes: usize,
    },
    /// The program needs a larger arena than the executor has.
    #[error("program `{program}` wants an arena of {needs} bytes, there are {has}")]
    ArenaTooSmall {
        /// The program.
        program: String,
        /// Size of the program's arena.
        needs: usize,
        /// Size of the executor's arena.
        has: usize,
    },
    /// The program has another part of its arena in host memory than the executor.
    #[error(
        "program `{program}` has {needs} bytes of its arena in host memory, the executor has {has}"
    )]
    HostPart {
        /// The program.
        program: String,
        /// The program's part in host memory.
        needs: usize,
        /// The executor's part in host memory.
        has: usize,
    },
    /// A kernel was not compiled for the device.
    #[error(
        "no compiled `{file}.cu` for {architecture}; looked in {}\n\
         hint: run `cargo xtask kernels`, or name a folder of cubins in `DEEPWELL_KERNELS_DIR`",
        looked_in.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NoImage {
        /// Name of the source file.
        file: String,
        /// The device's architecture.
        architecture: String,
        /// Folders that were tried.
        looked_in: Vec<std::path::PathBuf>,
    },
    /// The CUDA driver refused something.
    #[error(transparent)]
    Driver(#[from] crate::cuda::DriverError),
    /// Bytes of the wrong length for a value.
    #[error("value `{value}`: expected {expected} bytes, got {got}")]
    ValueLength {
        /// The value.
        value: String,
        /// Size of the value.
        expected: usize,
        /// Number of bytes given.
        got: usize,
    },
}

impl KernelError {
    /// A host buffer that another backend made.
    pub(crate) fn foreign_buffer(backend: &str) -> KernelError {
        KernelError::Run {
            call: "copy".to_string(),
            what: format!("expected a host buffer of the `{backend}` backend, got another's"),
        }
    }
}
