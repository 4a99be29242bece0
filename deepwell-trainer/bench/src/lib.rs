//! Benchmarks of the kernels and of training, each row with its roofline time.
//!
//! # Brief overview
//!
//! [`run_sections`] measures [`Section`]s in this process and reports every [`Row`] as soon as it
//! is measured. Kernels run as programs of one call on the device's [`deepwell_kernels::Backend`],
//! selected by its catalog: random data, enough copies of the operands to exceed the last-level
//! cache twice, and the calls over all copies captured as one graph and replayed (`timer`). Models
//! run as an [`Engine`](deepwell_trainer::Engine) (`model`). A [`Report`] is printed as text and
//! written as JSON, Markdown and HTML. [`peers`] runs PyTorch on the same shapes.
//!
//! The roofline time of a row is the larger of FLOPs over the datasheet's peak of the unit that
//! executes them and bytes over the memcpy bandwidth measured before ([`measure_copy`]); the share
//! of a row is roofline time over measured time.
//!
//! ```
//! use deepwell_bench::{RowEvent, Section, Settings, run_sections};
//! use deepwell_trainer::{Device, TrainError};
//!
//! # fn main() -> Result<(), TrainError> {
//! let settings = Settings {
//!     device: Device::Cpu,
//!     model: "llama-micro".to_owned(),
//!     precision: "mxfp8".to_owned(),
//!     beside_bf16: false,
//!     batch_size: 1,
//!     seq_len: 32,
//!     iterations: 1,
//!     copy_gbps: Some(20.0),
//!     kernels: Vec::new(),
//!     mixtures: Vec::new(),
//!     mixture_tokens: 0,
//! };
//! let mut rows = 0;
//! let mut count = |event| rows += usize::from(matches!(event, RowEvent::Row(_)));
//! run_sections(&settings, &deepwell_probe::probe(), &[Section::Optimizer], &mut count)?;
//! assert!(rows > 0);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `cuda` | yes | measurements on NVIDIA GPUs; building needs no toolkit |
//! | `emulated` | yes | measurements on an emulated GPU, for tests |

mod cases;
mod choices;
mod device_copy;
mod expert_gemms;
mod fill;
mod interleaved_timing;
mod layer;
mod layer_program;
mod layer_time;
mod load;
mod machine;
mod measure;
mod measure_links;
mod model;
mod moe;
mod page;
pub mod peer_task;
pub mod peers;
mod report;
mod row;
mod section;
mod shapes;
mod text;
mod timer;
mod token_ops;
pub mod tune;

pub use device_copy::measure_copy;
pub use layer::MixtureSize;
pub use load::LoadSampler;
pub use machine::Machine;
pub use measure::{
    CpuMeasurements, GemmRate, GpuMeasurements, LaunchTimes, measure_cpu, measure_gpu,
};
pub use measure_links::{AllReduceRate, LinkMeasurements, PeerRate, measure_links};
pub use report::{Report, Settings};
pub use row::{PeerTime, Row, RowEvent, geometric_mean};
pub use section::{Section, run_sections};
