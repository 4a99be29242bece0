//! An exported graph as plain data.

use std::collections::{HashMap, HashSet};

/// Element types of exported tensors, as far as capture distinguishes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scalar {
    F32,
    Bf16,
    F16,
    F64,
    /// Any integer type.
    Int {
        bytes: usize,
    },
    Bool,
}

impl Scalar {
    /// The type for a number of the schema's `ScalarType`.
    pub(super) fn of(number: u64) -> Option<Scalar> {
        Some(match number {
            1 | 2 => Scalar::Int { bytes: 1 },
            3 => Scalar::Int { bytes: 2 },
            4 => Scalar::Int { bytes: 4 },
            5 => Scalar::Int { bytes: 8 },
            6 => Scalar::F16,
            7 => Scalar::F32,
            8 => Scalar::F64,
            12 => Scalar::Bool,
            13 => Scalar::Bf16,
            _ => return None,
        })
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Scalar::F32 => 4,
            Scalar::Bf16 | Scalar::F16 => 2,
            Scalar::F64 => 8,
            Scalar::Int { bytes } => bytes,
            Scalar::Bool => 1,
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, Scalar::F32 | Scalar::Bf16 | Scalar::F16 | Scalar::F64)
    }
}

/// Shape, strides and offset of an exported tensor, all in elements, and element type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorMeta {
    pub(super) scalar: Scalar,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
    pub(super) offset: usize,
}

impl TensorMeta {
    /// Number of storage elements up to the tensor's last element; `None` on overflow.
    pub(super) fn storage_elements(&self) -> Option<usize> {
        if self.shape.len() != self.strides.len() {
            return None;
        }
        let steps = self.shape.iter().zip(&self.strides);
        let last = steps.map(|(&size, &stride)| size.saturating_sub(1).checked_mul(stride));
        let last = last.into_iter().try_fold(self.offset, |sum, step| sum.checked_add(step?))?;
        last.checked_add(1)
    }
}

/// An argument of a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Arg {
    /// `None`, or an argument without effect on rules: a device, a memory format.
    Other,
    Tensor(String),
    Tensors(Vec<Option<String>>),
    Int(i64),
    Ints(Vec<i64>),
    Float(f64),
    Bool(bool),
    Text(String),
    Type(Scalar),
}

/// One call of an op.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AtenNode {
    /// `aten.add.Tensor`, as PyTorch prints it.
    pub(super) target: String,
    pub(super) args: Vec<(String, Arg)>,
    /// Names of the result tensors.
    pub(super) outputs: Vec<String>,
    /// Path of the module that made the call, `model.layers.0.mlp` for example.
    pub(super) path: String,
}

/// Kind of a graph input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum InputKind {
    /// A trained tensor, by its name in the module.
    Parameter(String),
    /// A stored tensor that is not trained.
    Buffer(String),
    /// An input from the caller.
    User,
}

/// An exported graph.
#[derive(Clone, Debug, Default)]
pub(super) struct Exported {
    pub(super) torch_version: String,
    pub(super) inputs: Vec<(String, InputKind)>,
    /// Tensors returned by the program.
    pub(super) outputs: Vec<String>,
    pub(super) nodes: Vec<AtenNode>,
    pub(super) tensors: HashMap<String, TensorMeta>,
    /// Names of empty tensors, which are not in `tensors`.
    pub(super) empty: HashSet<String>,
    /// Parameters with `requires_grad = false`, by name in the module.
    pub(super) frozen: HashSet<String>,
}
