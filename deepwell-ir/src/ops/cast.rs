//! Change of storage type.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, OpError};

/// Round to nearest even into `to`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cast {
    /// Storage type of the output, F32 or BF16.
    pub to: DType,
}

impl OpRule for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn attributes(&self) -> String {
        format!("to={}", self.to)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x"])?;
        check.same_float(&[0])?;
        if !self.to.is_high_precision() {
            return Err(check.error("a cast to f32 or bf16", self.to.name()));
        }
        Ok(vec![OutputType {
            suffix: "".into(),
            shape: inputs[0].shape.clone(),
            dtype: self.to,
            kind: OutputKind::Copy,
        }])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }
}
