//! Concatenation of stacked matrices along columns.

use serde::{Deserialize, Serialize};

use super::Check;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{OpError, Shape};

/// x `[P·M, N, ..]` → `[M, P·N, ..]`: concatenates `P` consecutive matrices `[M, N, ..]` along
/// columns. The last dimension must fill whole bytes.
///
/// An all-gather of a weight with transposed storage yields such parts, because each rank has
/// quantized some of the rows. The op has no derivative, because quantized tensors have none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JoinParts {
    /// Number of parts.
    pub parts: usize,
}

impl OpRule for JoinParts {
    fn name(&self) -> &'static str {
        "join_parts"
    }

    fn attributes(&self) -> String {
        format!("parts={}", self.parts)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x"])?;
        let TensorType { shape, dtype } = &inputs[0];
        let [all_rows, columns, rest @ ..] = shape.0.as_slice() else {
            return Err(check.error("at least two dimensions", shape.to_string()));
        };
        let Some(rows) = all_rows.part_of(self.parts) else {
            let expected = format!("a first dimension of {} parts", self.parts);
            return Err(check.error(expected, all_rows.to_string()));
        };
        let last = rest.last().unwrap_or(columns).as_fixed();
        let is_whole = |last: usize| (last * dtype.bits() as usize).is_multiple_of(8);
        if !last.is_some_and(is_whole) {
            return Err(check.error("a last dimension of whole bytes", format!("{dtype}{shape}")));
        }
        let joined = [&[rows, columns.times(self.parts)], rest].concat();
        Ok(vec![OutputType::activation("", Shape(joined), *dtype)])
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }
}
