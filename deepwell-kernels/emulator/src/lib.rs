//! Runs PTX for Hopper and Blackwell on a CPU.
//!
//! # Brief overview
//!
//! A kernel's PTX text is parsed ([`ptx`]) and decoded into typed instructions ([`decode`]).
//! Unknown instruction forms are listed before anything runs. The engine ([`engine`]) runs warps of
//! 32 lanes over memory spaces ([`memory`]). Asynchronous units are queues: bulk copies ([`bulk`]),
//! warp-group MMAs ([`wgmma`]) and fifth-generation tensor cores ([`tcgen05`]). MMA arithmetic is
//! in [`numerics`], number formats in [`number`]. The tracker ([`hazard`]) records who may see
//! which bytes, and reports accesses that no synchronization orders.
//!
//! ```
//! use deepwell_emulator::launch::{Arguments, Emulator, LaunchSpec, Settings};
//!
//! let ptx = "
//!     .version 9.0
//!     .target sm_90a
//!     .address_size 64
//!     .visible .entry write_lane(.param .u64 out)
//!     {
//!         .reg .b32 %r<2>;
//!         .reg .b64 %rd<4>;
//!         ld.param.u64 %rd1, [out];
//!         mov.u32 %r1, %tid.x;
//!         mul.wide.u32 %rd2, %r1, 4;
//!         add.s64 %rd3, %rd1, %rd2;
//!         st.global.u32 [%rd3], %r1;
//!         ret;
//!     }";
//! let mut emulator = Emulator::new(Settings::default());
//! let module = emulator.load(ptx)?;
//! let out = emulator.allocate(4 * 64, "out");
//! let report = emulator.launch(
//!     module,
//!     &LaunchSpec {
//!         kernel: "write_lane".to_owned(),
//!         grid: [1, 1, 1],
//!         block: [64, 1, 1],
//!         cluster: [1, 1, 1],
//!         shared_bytes: 0,
//!         arguments: Arguments::new().u64(out).bytes(),
//!         programmatic: false,
//!     },
//! )?;
//! assert!(report.is_clean());
//! assert_eq!(emulator.read(out + 4 * 63, 4)?, [63, 0, 0, 0]);
//! # Ok::<(), deepwell_emulator::error::EmulatorError>(())
//! ```
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `launch-files` | yes | launches as TOML files with buffers beside them |
//! | `command` | yes | the command `deepwell-emulate`; turns `launch-files` on |

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod bulk;
pub mod cycles;
pub mod decode;
pub mod engine;
pub mod error;
pub mod hazard;
pub mod launch;
#[cfg(feature = "launch-files")]
pub mod launch_file;
pub mod mbarrier;
pub mod memory;
pub mod mutation;
pub mod number;
pub mod numerics;
pub mod observe;
pub mod place;
pub mod proof;
pub mod ptx;
pub mod scalar;
pub mod tcgen05;
pub mod trace;
pub mod warp_mma;
pub mod wgmma;
