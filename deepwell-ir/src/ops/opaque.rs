//! A call of another framework that no op here stands for.

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

/// A call that stays in a captured graph under the name that its framework has for it, so that what
/// is around it can still be read. Nothing is known of what it computes: it is not run, it has no
/// derivative, and it counts no FLOPs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opaque {
    /// The op's name in its framework, `aten.sin.default` for example.
    pub target: String,
    /// Its arguments that are no tensors, for people.
    pub arguments: String,
    /// What it gives, as its framework says.
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
        // Activations follow the type that the policy gives to all of them.
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
