//! A call of another framework without an equivalent op here.

use serde::{Deserialize, Serialize};

use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, IrError, Node, OpError, Shape};

/// An output of an [`Opaque`] op.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpaqueOutput {
    /// Row-major shape.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
}

/// A call kept in a captured graph under the name in the source framework, so that the surrounding
/// graph stays readable. The op cannot be run, has no derivative and counts no FLOPs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opaque {
    /// Name of the op in the source framework, `aten.sin.default` for example.
    pub target: String,
    /// Non-tensor arguments, for display.
    pub arguments: String,
    /// Outputs according to the source framework.
    pub outputs: Vec<OpaqueOutput>,
}

impl OpRule for Opaque {
    fn name(&self) -> &'static str {
        "opaque"
    }

    fn attributes(&self) -> String {
        if self.arguments.is_empty() {
            self.target.clone()
        } else {
            format!("{} {}", self.target, self.arguments)
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        // F32 outputs follow the policy's activation type.
        let narrow = inputs.iter().any(|input| input.dtype == DType::Bf16);
        let output = |(index, output): (usize, &OpaqueOutput)| OutputType {
            suffix: if index == 0 { String::new() } else { index.to_string() }.into(),
            shape: output.shape.clone(),
            dtype: match output.dtype {
                DType::F32 if narrow => DType::Bf16,
                dtype => dtype,
            },
            kind: if output.dtype.is_high_precision() {
                OutputKind::Activation
            } else {
                OutputKind::Statistic
            },
        };
        Ok(self.outputs.iter().enumerate().map(output).collect())
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }

    fn backward(&self, node: &Node, _context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        Err(IrError::NotDifferentiable { node: node.name.clone(), op: self.target.clone() })
    }
}
