//! Benchmarks of the kernels and of training, each row beside the least time that the hardware
//! allows.
//!
//! # Brief overview
//!
//! [`run_sections`] measures [`Section`]s in this process and hands every [`Row`] on as soon as it
//! is there. Kernels run as programs of one call on the device's [`deepwell_kernels::Backend`],
//! chosen by its catalog: random data, as many copies of the operands as pass the last-level cache
//! twice, the calls over all copies recorded as one graph and replayed (`timer`). Models run as
//! an [`crate::Engine`] (`model`). A [`Report`] is printed as text, written as JSON, Markdown and
//! HTML. [`peers`] runs PyTorch on the same shapes.
//!
//! The roofline time of a row is the larger of FLOPs over the datasheet's peak of the unit that
//! does them and bytes over the bandwidth of a copy that was measured before ([`measure_copy`]);
//! its share is roofline time over time.

mod cases;
mod choices;
mod device_copy;
mod fill;
mod layer;
mod layer_program;
mod layer_time;
mod load;
mod machine;
mod measure;
mod measure_links;
mod model;
mod moe;
mod of_experts;
mod of_tokens;
mod page;
pub mod peer_task;
pub mod peers;
mod report;
mod row;
mod section;
mod shapes;
mod text;
mod timer;
pub mod tune;
mod turns;

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
