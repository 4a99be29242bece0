//! Runs PTX for Hopper and Blackwell on a CPU.
//!
//! # Brief overview
//!
//! A kernel's PTX text is parsed ([`ptx`]) and decoded into typed instructions ([`decode`]); what
//! is not known is listed before anything runs. The engine ([`engine`]) runs warps of 32 lanes
//! over memory spaces ([`memory`]) with the asynchronous parts of the machine as queues: bulk
//! copies ([`bulk`]), warp-group products ([`wgmma`]) and the fifth-generation tensor cores
//! ([`tcgen05`]). Their arithmetic is in [`numerics`], their formats in [`number`]. The tracker
//! ([`hazard`]) follows who may see which bytes, and reports accesses that nothing orders.

pub mod bulk;
pub mod decode;
pub mod engine;
pub mod error;
pub mod hazard;
pub mod launch;
pub mod mbarrier;
pub mod memory;
pub mod number;
pub mod numerics;
pub mod place;
pub mod ptx;
pub mod scalar;
pub mod tcgen05;
pub mod trace;
pub mod warp_mma;
pub mod wgmma;
