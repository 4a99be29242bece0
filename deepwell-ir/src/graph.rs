//! The model as a graph of typed ops over tensors.
//!
//! Nodes are in execution order, which is a topological order; passes rebuild the list rather than
//! patch it. A tensor has one producer. Exceptions are parameter gradients and the loss: these are
//! accumulators, and every writer after the first adds to them (two uses of a tied weight, several
//! micro-batches).

use std::collections::HashSet;
use std::fmt;

use deepwell_precision::Role;
use serde::{Deserialize, Serialize};

use crate::{DType, Dim, Link, Op, Shape};

/// Index of a tensor in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TensorId(pub u32);

/// Index of a node in the captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub u32);

impl TensorId {
    /// The id as an index into [`Graph::tensors`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Part of a transformer that a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tag {
    /// Token embedding.
    Embed,
    /// Attention block: projections, RoPE, attention, its residual add.
    Attn,
    /// Feed-forward block.
    Mlp,
    /// Normalization.
    Norm,
    /// Router of a mixture of experts.
    Router,
    /// Experts of a mixture of experts.
    Experts,
    /// Output head and loss.
    Head,
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tag::Embed => "embed",
            Tag::Attn => "attn",
            Tag::Mlp => "mlp",
            Tag::Norm => "norm",
            Tag::Router => "router",
            Tag::Experts => "experts",
            Tag::Head => "head",
        })
    }
}

/// When a node runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Once per optimizer step: makes the compute copies of the master weights.
    Weights,
    /// Once per micro-batch.
    Forward,
    /// Once per micro-batch, after its forward.
    Backward,
    /// Once per micro-batch, after its backward, if weight gradients are computed separately from
    /// input gradients: [`crate::defer_weight_gradients`].
    WeightGradients,
    /// Once per step, after the last micro-batch.
    Optimizer,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Weights => "weights",
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::WeightGradients => "weight_gradients",
            Phase::Optimizer => "optimizer",
        })
    }
}

/// Initialization of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
}

/// Content of an input that the host writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputRole {
    /// Token ids, i32 `[B·S]`, of each micro-batch.
    Tokens,
    /// The next token ids, i32 `[B·S]`, of each micro-batch.
    Targets,
    /// Reciprocal of the number of tokens of a step counted in the loss, f32 `[1]`.
    LossScale,
    /// Seed of stochastic rounding and number of the step, u64 `[2]`, of each micro-batch.
    RoundingKey,
    /// Begin and end of each token's document within the sequence, i32 `[B·S, 2]`, for each
    /// micro-batch. The end is one past the last token.
    Documents,
    /// Position of each token within its document, i32 `[B·S]`, for each micro-batch.
    Positions,
    /// Input without a role in training; only the caller knows its meaning.
    Other,
}

impl InputRole {
    /// Name of the input, fixed for every role but [`InputRole::Other`].
    pub const fn name(self) -> &'static str {
        match self {
            InputRole::Tokens => "tokens",
            InputRole::Targets => "targets",
            InputRole::LossScale => "loss_scale",
            InputRole::RoundingKey => "rounding_key",
            InputRole::Documents => "documents",
            InputRole::Positions => "positions",
            InputRole::Other => "other",
        }
    }

    /// Whether the host writes the input once per step rather than per micro-batch.
    pub const fn is_per_step(self) -> bool {
        matches!(self, InputRole::LossScale)
    }

    /// The input as a tensor; `None` for [`InputRole::Other`].
    pub fn tensor(self) -> Option<Tensor> {
        let (dtype, shape) = match self {
            InputRole::Tokens | InputRole::Targets | InputRole::Positions => {
                (DType::I32, vec![Dim::TOKENS])
            }
            InputRole::Documents => (DType::I32, vec![Dim::TOKENS, Dim::fixed(2)]),
            InputRole::LossScale => (DType::F32, vec![Dim::fixed(1)]),
            InputRole::RoundingKey => (DType::U64, vec![Dim::fixed(2)]),
            InputRole::Other => return None,
        };
        let kind = TensorKind::Input { role: self };
        let (name, shape) = (self.name().to_string(), Shape(shape));
        Some(Tensor { name, shape, dtype, kind, link: None })
    }
}

/// What a tensor is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    /// Written by the host before each micro-batch, or each step.
    Input {
        /// Content of the input.
        role: InputRole,
    },
    /// A trained tensor: the FP32 master copy.
    Parameter {
        /// Initialization.
        init: Init,
        /// Role in the precision policy.
        role: Role,
    },
    /// A compute copy of a parameter, made in [`Phase::Weights`].
    WeightCopy,
    /// Value between nodes of one micro-batch, stored in the policy's activation type.
    Activation,
    /// Like an activation, but with an element type fixed by the op: row statistics, log-sum-exp,
    /// block scales.
    Statistic,
    /// FP32 gradient of this parameter; an accumulator.
    ParameterGradient {
        /// The parameter.
        parameter: TensorId,
    },
    /// The FP32 loss; an accumulator.
    Loss,
}

impl TensorKind {
    /// Whether several nodes may write the tensor, each adding its contribution.
    pub fn is_accumulator(&self) -> bool {
        matches!(self, TensorKind::ParameterGradient { .. } | TensorKind::Loss)
    }
}

/// A tensor of a [`Graph`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    /// Unique name; parameters carry the name of the source model.
    pub name: String,
    /// Row-major shape.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
    /// Kind of the tensor.
    pub kind: TensorKind,
    /// Source of a derived tensor: plane of a quantization, cast,
    /// recomputation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
}

/// One op applied to tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Unique name, `layers.3.mlp.down_proj` for example.
    pub name: String,
    /// Operation of the node.
    pub op: Op,
    /// Operands read.
    pub inputs: Vec<TensorId>,
    /// Operands written.
    pub outputs: Vec<TensorId>,
    /// Part of the model.
    pub tag: Tag,
    /// Transformer layer, counted from 0.
    pub layer: Option<u32>,
    /// Phase of the step.
    pub phase: Phase,
    /// Whether backward recomputes the outputs of this forward node instead of keeping them.
    pub recompute: bool,
    /// Node of the captured graph that this node computes, differentiates, repeats or serves.
    pub source: NodeId,
    /// Whether this node is the recomputation of a forward node during backward.
    pub repeats: bool,
}

/// Last pass applied to a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Forward only, as captured.
    Captured,
    /// Forward and backward.
    Differentiated,
    /// Recomputed forwards inserted.
    Recomputed,
    /// Casts and quantizations are explicit.
    Quantized,
    /// Neighbouring ops merged.
    Fused,
}

/// A model: tensors and the nodes between them, in execution order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// Name of the model.
    pub name: String,
    /// Passes applied so far.
    pub stage: Stage,
    /// All tensors, indexed by [`TensorId`].
    pub tensors: Vec<Tensor>,
    /// Nodes in execution order.
    pub nodes: Vec<Node>,
    /// The scalar that training minimizes.
    pub loss: Option<TensorId>,
}

impl Graph {
    /// Returns the tensor with this id.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// All tensor ids with their tensors.
    pub fn tensors_with_ids(&self) -> impl Iterator<Item = (TensorId, &Tensor)> {
        self.tensors.iter().enumerate().map(|(i, t)| (TensorId(i as u32), t))
    }

    /// Parameters in the order of capture, with shape and kind.
    pub fn parameters(&self) -> impl Iterator<Item = (TensorId, &Tensor)> {
        self.tensors_with_ids().filter(|(_, t)| matches!(t.kind, TensorKind::Parameter { .. }))
    }

    /// Number of trained values.
    pub fn parameter_count(&self) -> u64 {
        self.parameters()
            .filter_map(|(_, t)| t.shape.as_fixed())
            .map(|shape| shape.iter().map(|&n| n as u64).product::<u64>())
            .sum()
    }

    /// Number of transformer layers.
    pub fn layer_count(&self) -> usize {
        let last = self.nodes.iter().filter_map(|node| node.layer).max();
        last.map_or(0, |last| last as usize + 1)
    }

    /// Parameters with weight decay: tensors of two or more dimensions, except expert biases (one
    /// vector per expert).
    pub fn decaying(&self) -> HashSet<TensorId> {
        let of_node = |node: &Node| match &node.op {
            Op::GroupedBias(_) => node.inputs.get(1).copied(),
            _ => None,
        };
        let biases: HashSet<TensorId> = self.nodes.iter().filter_map(of_node).collect();
        let matrices = self.parameters().filter(|(_, tensor)| tensor.shape.rank() > 1);
        matrices.map(|(id, _)| id).filter(|id| !biases.contains(id)).collect()
    }

    /// Selection biases of routers: parameters that [`crate::ops::SelectionBiasUpdate`] updates
    /// instead of AdamW.
    pub fn selection_biases(&self) -> HashSet<TensorId> {
        let of_node = |node: &Node| match &node.op {
            Op::Route(route) if route.selection_bias => node.inputs.get(1).copied(),
            _ => None,
        };
        self.nodes.iter().filter_map(of_node).collect()
    }

    /// All parameters with a gradient accumulator, each with the accumulator's id.
    pub fn parameter_gradients(&self) -> Vec<(TensorId, TensorId)> {
        self.tensors_with_ids()
            .filter_map(|(id, t)| match t.kind {
                TensorKind::ParameterGradient { parameter } => Some((parameter, id)),
                _ => None,
            })
            .collect()
    }

    /// Finds a tensor by its name.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.tensors_with_ids().find(|(_, t)| t.name == name).map(|(id, _)| id)
    }

    /// Adds a tensor.
    pub fn add_tensor(&mut self, tensor: Tensor) -> TensorId {
        self.tensors.push(tensor);
        TensorId(self.tensors.len() as u32 - 1)
    }

    /// Returns the input of a training role, created on first use.
    pub(crate) fn host_input(&mut self, role: InputRole) -> TensorId {
        let kind = TensorKind::Input { role };
        if let Some((id, _)) = self.tensors_with_ids().find(|(_, tensor)| tensor.kind == kind) {
            return id;
        }
        let tensor = role.tensor().expect("a role that training knows");
        self.add_tensor(tensor)
    }

    /// Serializes the graph as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a graph holds only plain data")
    }

    /// Reads and verifies the output of [`Graph::to_json`].
    ///
    /// # Errors
    /// Text that is not a graph, or a graph that breaks a rule of [`crate::verify`].
    pub fn from_json(text: &str) -> Result<Graph, crate::IrError> {
        let graph: Graph = serde_json::from_str(text)
            .map_err(|source| crate::IrError::Json { what: "graph", source })?;
        crate::verify(&graph)?;
        Ok(graph)
    }
}
