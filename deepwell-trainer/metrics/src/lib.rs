//! Metrics written during training.
//!
//! # Brief overview
//!
//! [`StepLine`] is one step as a line of text and, with the same fields, as a JSON object.
//! [`JsonlWriter`] appends such objects to `metrics.jsonl`, one per line, and truncates the file
//! after a step, so that a resumed run continues at its checkpoint. [`EventWriter`] writes scalars
//! for TensorBoard; [`read_events`] reads them.
//!
//! ```
//! use deepwell_metrics::StepLine;
//! let line = StepLine {
//!     step: 120,
//!     steps_total: 1000,
//!     loss: Some(2.3101),
//!     grad_norm: 0.85,
//!     tokens_per_s: 10_400.0,
//!     speed_of_light: Some(0.412),
//! };
//! assert_eq!(
//!     line.to_string(),
//!     "step 120 [12.0%] | loss 2.3101 | grad norm 0.85 | 10.4k tok/s | 41.2% of roofline"
//! );
//! ```

mod error;
mod events;
mod jsonl;
pub mod nonfinite;
mod proto;
mod step_line;

pub use error::MetricsError;
pub use events::{EventWriter, Scalar, read_events};
pub use jsonl::{FlushPolicy, JsonlWriter, Truncated};
pub use step_line::StepLine;
