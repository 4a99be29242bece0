//! One matrix taken apart into two side by side.

use serde::{Deserialize, Serialize};

use super::Check;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{Dim, OpError, Shape};

/// x `[T, N]` → its first `columns` columns, and the rest.
///
/// No kernel computes it yet, nor has it a derivative: it holds a model's structure and counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SplitColumns {
    /// Columns of the first output.
    pub columns: usize,
}

impl OpRule for SplitColumns {
    fn name(&self) -> &'static str {
        "split_columns"
    }

    fn attributes(&self) -> String {
        format!("columns={}", self.columns)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x"])?;
        let dtype = check.same_float(&[0])?;
        let tokens = check.rank(0, 2)?[0];
        let whole = check.fixed(0, 1)?;
        if self.columns == 0 || self.columns >= whole {
            let expected = format!("a cut inside of {whole} columns");
            return Err(check.error(expected, self.columns.to_string()));
        }
        let part = |columns| Shape(vec![tokens, Dim::fixed(columns)]);
        Ok(vec![
            OutputType::activation("first", part(self.columns), dtype),
            OutputType::activation("rest", part(whole - self.columns), dtype),
        ])
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }
}
