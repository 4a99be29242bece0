//! Matrices one behind the other put side by side.

use serde::{Deserialize, Serialize};

use super::Check;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{OpError, Shape};

/// x `[P·M, N, ..]` → `[M, P·N, ..]`: `P` matrices `[M, N, ..]` that lie one behind the other, put
/// side by side. The last dimension is of whole bytes.
///
/// What ranks gather of a weight that is stored transposed is in such parts, for each has quantized
/// some of its rows. There is no derivative: what is quantized has none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JoinParts {
    /// How many parts there are.
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
