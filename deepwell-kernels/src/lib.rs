//! Kernel specs, registry, executor and backends.
//!
//! # Brief overview
//!
//! A [`Backend`] runs the calls of a [`deepwell_ir::Program`] over one arena. The [`Executor`]
//! verifies a program, has the backend prepare its calls, and runs them. [`CpuBackend`] is always
//! available; its kernels are plain functions on slices, in the folders of [`ops`]. [`CpuCatalog`]
//! tells the planner which CPU kernels serve a call, and gives a reason for every kernel that does
//! not. Each op's `oracle` computes the op in f64 with plain loops, as a reference. A backend that
//! is one rank of several runs collectives through a [`Comm`].
//!
//! ```
//! use deepwell_kernels::cpu::gemm::{Operand, Output, Tier, gemm};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (x, w) = ([1.0f32, 2.0, 3.0, 4.0], [1.0f32, 0.0, 0.0, 1.0]);
//! let mut y = [0.0f32; 4];
//! let out = Output::F32 { data: &mut y, accumulate: false };
//! gemm(Tier::F32, 2, 2, 2, Operand::rows_f32(&x, 2), Operand::rows_f32(&w, 2), out, &mut [])?;
//! assert_eq!(y, x);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! No feature is on by default. The CPU backend and all specs are always present: planning for a
//! GPU needs no feature.
//!
//! | feature | what it adds |
//! |---|---|
//! | `cuda` | the backend for NVIDIA GPUs; libraries are looked up when a device is opened |
//! | `emulated` | the same backend on an emulator of the kernels' PTX, without a GPU |
//! | `mpi` | CPU ranks in several processes, by the MPI library that it is built and started with |

#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod comm;
pub mod cpu;
pub mod cuda;
mod error;
mod executor;
pub mod ops;
mod registry;
mod runtime;
mod single_call;

pub use backend::{
    Backend, CallTime, HostBuffer, Issue, PreparedCall, READBACKS, Readback, ReadbackTime,
    Recording,
};
pub use comm::{
    Comm, CommError, Exchange, InProcess, Monitor, ProcessComm, ProcessLimits, ProcessMonitor,
    TcpDoor, TcpPeer, connect_tcp,
};
#[cfg(feature = "mpi")]
pub use comm::{connect_mpi, mpi_version};
pub use cpu::{CpuBackend, CpuCatalog, cpu_target};
pub use error::KernelError;
pub use executor::{CallAction, Executor, LoadedProgram, Observer};
pub use ops::quantize::cpu::decode_statistics;
pub use runtime::epilogue::{EpilogueSet, no_epilogue};
pub use runtime::predict::Predict;
pub use single_call::SingleCall;
