//! Splits a matrix into two column ranges, and joins them again.

use serde::{Deserialize, Serialize};

use super::Check;
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{Dim, IrError, Node, OpError, Shape};

/// x `[T, N]` → the first `columns` columns, and the rest.
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

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let gradients = [0, 1].map(|index| context.gradient_of(node.outputs[index]));
        match gradients {
            [None, None] => Ok(()),
            [Some(first), Some(rest)] => {
                let dx = context.emit_fresh(JoinColumns {}, "", &[first, rest])?[0];
                context.contribute(node.inputs[0], dx)
            }
            // No op creates zeros for the unused part.
            _ => Err(IrError::NotDifferentiable {
                node: node.name.clone(),
                op: format!("{} of which one part alone is used", self.name()),
            }),
        }
    }
}

/// first `[T, A]`, rest `[T, B]` → `[T, A + B]`: inverse of [`SplitColumns`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JoinColumns {}

impl OpRule for JoinColumns {
    fn name(&self) -> &'static str {
        "join_columns"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["first", "rest"])?;
        let dtype = check.same_float(&[0, 1])?;
        let tokens = check.rank(0, 2)?[0];
        let (first, rest) = (check.fixed(0, 1)?, check.fixed(1, 1)?);
        check.shape(1, &Shape(vec![tokens, Dim::fixed(rest)]))?;
        let whole = Shape(vec![tokens, Dim::fixed(first + rest)]);
        Ok(vec![OutputType::activation("", whole, dtype)])
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }
}
