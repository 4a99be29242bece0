//! Predicted times, by which passes choose between equivalent ops.

use crate::{Op, TensorType};

/// Predicted time of an op on the target in seconds: `predict(op, inputs, outputs)`. `None` without
/// a kernel.
pub type Predict<'a> = &'a dyn Fn(&Op, &[TensorType], &[TensorType]) -> Option<f64>;
