//! Ops: plain data, one file per op under `ops/`.
//!
//! An op says what it takes and gives ([`OpRule::infer`]), what it costs ([`OpRule::flops`]) and
//! how it is differentiated ([`OpRule::backward`]). A new op is a new file and one line in the
//! list below; kernels are found by [`Op::name`].

use std::borrow::Cow;

use deepwell_precision::{Direction, QuantFormat};
use serde::{Deserialize, Serialize};

use crate::autodiff::BackwardContext;
use crate::ops::Epilogue;
use crate::{DType, Graph, IrError, Node, OpError, OperandType, Shape, TensorId};

/// Shape and element type of an operand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// Row-major shape.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
}

/// What kind of tensor an output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    /// A fresh activation.
    Activation,
    /// A fresh tensor whose type the policy does not change.
    Statistic,
    /// A compute copy of a parameter when the input is one, else like a statistic.
    Copy,
    /// An activation when the first input is one or there is none, else like a statistic.
    SameAsInput,
    /// Added to: the loss or a parameter gradient. Made once per graph, not per node.
    Accumulator,
}

/// An output that an op says it gives.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputType {
    /// Appended to the node's name to name the tensor; empty for the main output.
    pub suffix: Cow<'static, str>,
    /// Row-major shape.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
    /// What it is.
    pub kind: OutputKind,
}

impl OutputType {
    /// An activation.
    pub fn activation(suffix: &'static str, shape: Shape, dtype: DType) -> OutputType {
        OutputType { suffix: suffix.into(), shape, dtype, kind: OutputKind::Activation }
    }

    /// A tensor whose type the policy does not change.
    pub fn statistic(suffix: &'static str, shape: Shape, dtype: DType) -> OutputType {
        OutputType { suffix: suffix.into(), shape, dtype, kind: OutputKind::Statistic }
    }

    /// An FP32 accumulator.
    pub fn accumulator(suffix: &'static str, shape: Shape) -> OutputType {
        let kind = OutputKind::Accumulator;
        OutputType { suffix: suffix.into(), shape, dtype: DType::F32, kind }
    }
}

/// Which of the three GEMMs of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmKind {
    /// `y = x · wᵀ`.
    Fprop,
    /// `dx = dy · w`.
    Dgrad,
    /// `dw = dyᵀ · x`.
    Wgrad,
}

impl GemmKind {
    /// All three, in the order they run.
    pub const ALL: [GemmKind; 3] = [GemmKind::Fprop, GemmKind::Dgrad, GemmKind::Wgrad];

    /// The same for a precision policy.
    pub const fn direction(self) -> Direction {
        match self {
            GemmKind::Fprop => Direction::Fprop,
            GemmKind::Dgrad => Direction::Dgrad,
            GemmKind::Wgrad => Direction::Wgrad,
        }
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            GemmKind::Fprop => "fprop",
            GemmKind::Dgrad => "dgrad",
            GemmKind::Wgrad => "wgrad",
        }
    }
}

/// Which unit does an op's arithmetic: the roofline divides by its peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MathUnit {
    /// Plain FP32 arithmetic.
    F32,
    /// BF16 matrix units, FP32 accumulation.
    Bf16,
    /// MXFP8 matrix units, FP32 accumulation.
    Mxfp8,
    /// NVFP4 matrix units, FP32 accumulation.
    Nvfp4,
}

/// What every op says of itself.
pub trait OpRule {
    /// Lower-case name; kernels are registered under it.
    fn name(&self) -> &'static str;

    /// Attributes as they stand in text forms, `eps=1e-5` for example.
    fn attributes(&self) -> String {
        String::new()
    }

    /// Checks operand types and says what comes out.
    ///
    /// # Errors
    /// Operands that the op does not take: how many, which shape, which type.
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError>;

    /// How many outputs there are, whatever the operands; an op that gives more than one says so
    /// here to be the core of a [`crate::ops::Fused`].
    fn result_count(&self) -> usize {
        1
    }

    /// Floating-point operations, a multiply-add counted as two. `shapes` are those of the
    /// inputs, then of the outputs.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64;

    /// Bytes that pass through the link to other ranks, in its busier direction. `operands` are the
    /// inputs, then the outputs.
    fn bytes_on_link(&self, _operands: &[OperandType]) -> u64 {
        0
    }

    /// The unit that does the arithmetic when operands are stored in `operands` (inputs first).
    fn unit(&self, _operands: &[DType]) -> MathUnit {
        MathUnit::F32
    }

    /// Adds the nodes that compute gradients of the inputs from those of the outputs.
    ///
    /// # Errors
    /// [`IrError::NotDifferentiable`] unless the op has a rule.
    fn backward(&self, node: &Node, _context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        Err(IrError::NotDifferentiable { node: node.name.clone(), op: self.name().to_string() })
    }
}

macro_rules! ops {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Everything that a graph or program can compute.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "op", rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum Op {
            $($(#[$doc])* $name(crate::ops::$name),)*
        }

        impl Op {
            /// The op's own rules.
            pub fn rule(&self) -> &dyn OpRule {
                match self { $(Op::$name(op) => op,)* }
            }
        }

        $(impl From<crate::ops::$name> for Op {
            fn from(op: crate::ops::$name) -> Op { Op::$name(op) }
        })*
    };
}

ops! {
    /// Rows of a table by token id.
    Embedding,
    /// Gradient of the table.
    EmbeddingBackward,
    /// Learned positions added to each token.
    AddPositions,
    /// Gradient of the position table.
    AddPositionsBackward,
    /// `y = x · wᵀ (+ bias)`.
    Linear,
    /// `dx = dy · w`.
    LinearInputGrad,
    /// `dw = dyᵀ · x`.
    LinearWeightGrad,
    /// `db = sum over tokens of dy`.
    BiasGrad,
    /// Root-mean-square normalization.
    RmsNorm,
    /// Residual add and normalization in one pass.
    AddRmsNorm,
    /// Gradients of [`Op::RmsNorm`].
    RmsNormBackward,
    /// Root-mean-square normalization of each head.
    HeadRmsNorm,
    /// Gradients of [`Op::HeadRmsNorm`].
    HeadRmsNormBackward,
    /// Normalization by mean and variance.
    LayerNorm,
    /// Residual add and [`Op::LayerNorm`] in one pass.
    AddLayerNorm,
    /// Gradients of [`Op::LayerNorm`].
    LayerNormBackward,
    /// Rotary position embedding.
    Rope,
    /// Rotation back.
    RopeBackward,
    /// Causal attention with grouped query heads.
    Attention,
    /// Keys and values of latent attention.
    LatentKeyValue,
    /// Gradients of [`Op::LatentKeyValue`].
    LatentKeyValueBackward,
    /// Gradients of [`Op::Attention`].
    AttentionBackward,
    /// [`Op::Attention`] to the keys of one of several ranks.
    AttentionPart,
    /// Gradients of one rank's queries and one rank's keys.
    AttentionPartBackward,
    /// Attention to the keys of several ranks, of that to each.
    MergeAttention,
    /// [`Op::Rope`] or its backward to a part of the sequence.
    RopeOfPart,
    /// `silu(gate) · up`.
    SwiGlu,
    /// Gradients of [`Op::SwiGlu`].
    SwiGluBackward,
    /// Gaussian error linear unit.
    Gelu,
    /// Gradient of [`Op::Gelu`].
    GeluBackward,
    /// Rectified linear unit.
    Relu,
    /// Gradient of [`Op::Relu`].
    ReluBackward,
    /// The experts of each token, and their gates.
    Route,
    /// Gradient of [`Op::Route`].
    RouteBackward,
    /// The feed-forward blocks of a mixture.
    Experts,
    /// A router's projection, in FP32.
    RouterLogits,
    /// Gradients of [`Op::RouterLogits`].
    RouterLogitsBackward,
    /// How often each expert was chosen.
    CountExperts,
    /// Biases of a router that follow those counts.
    SelectionBiasUpdate,
    /// Auxiliary losses of a router.
    RouterLoss,
    /// The same with the gradient in one pass.
    RouterLossGrad,
    /// Where each pair of token and expert goes.
    Dispatch,
    /// Where each pair goes among the ranks that have the experts.
    DispatchToRanks,
    /// Rows of tokens to rows of pairs.
    Permute,
    /// Sums of rows of pairs to rows of tokens.
    Unpermute,
    /// The same of the sum of two matrices.
    AddUnpermute,
    /// The gated activation of experts, times the router's gates.
    ExpertSwiGlu,
    /// Gradients of [`Op::ExpertSwiGlu`].
    ExpertSwiGluBackward,
    /// A matrix in two parts.
    SplitColumns,
    /// Two matrices side by side.
    JoinColumns,
    /// Parts one behind the other, side by side.
    JoinParts,
    /// A call of another framework that no op here stands for.
    Opaque,
    /// Element-wise sum.
    Add,
    /// Output head and cross-entropy, by chunks.
    LinearCrossEntropy,
    /// The same with its gradients in one pass.
    LinearCrossEntropyGrad,
    /// Rows of a table of which ranks have some each.
    VocabParallelEmbedding,
    /// Gradient of the rows that a rank has.
    VocabParallelEmbeddingBackward,
    /// What other ranks need of the logits that a rank has.
    VocabParallelSums,
    /// Cross-entropy of logits that are spread over ranks.
    VocabParallelCrossEntropy,
    /// The same with its gradients in one pass.
    VocabParallelCrossEntropyGrad,
    /// [`Op::AddPositions`] to a part of the tokens.
    AddPositionsOfPart,
    /// What a part of the tokens adds to the gradient of the position table.
    AddPositionsOfPartBackward,
    /// A bias added to each row.
    AddBias,
    /// Change of storage type.
    Cast,
    /// Block quantization along one or both axes.
    Quantize,
    /// Quantized data and scales back to high precision.
    Dequantize,
    /// Elements of a quantized operand, rounded at random.
    StochasticRound,
    /// An op and what is made of its results, in one kernel.
    Fused,
    /// Two GEMMs of one matrix.
    DualGemm,
    /// Biases of experts.
    GroupedBias,
    /// Gradients of [`Op::GroupedBias`].
    GroupedBiasBackward,
    /// A GEMM for each group of rows.
    GroupedGemm,
    /// `dx = dy · w` for each group.
    GroupedGemmInputGrad,
    /// `dw = dyᵀ · x` for each group.
    GroupedGemmWeightGrad,
    /// One of the three on quantized operands.
    ScaledGroupedGemm,
    /// GEMM of two quantized matrices with their scales.
    ScaledGemm,
    /// An exchange between ranks.
    Collective,
    /// Global norm of all gradients.
    GradNorm,
    /// Sums of squares of parts of the gradients.
    SumsOfSquares,
    /// Global norm of gradients that ranks have parts of.
    NormOfSums,
    /// What a step of the optimizer needs for all parameters.
    AdamWCoefficients,
    /// Optimizer update of a bucket of parameters.
    AdamW,
}

impl Op {
    /// Lower-case name; of a fused op the names of all that it does.
    pub fn name(&self) -> Cow<'static, str> {
        match self {
            Op::Fused(op) => op.full_name().into(),
            op => op.rule().name().into(),
        }
    }

    /// The core of a fused op, which has the call's first inputs; any other op itself.
    pub fn leading(&self) -> &Op {
        match self {
            Op::Fused(op) => &op.core,
            op => op,
        }
    }

    /// What follows the core of a fused op; nothing for any other.
    pub fn epilogue(&self) -> &[Epilogue] {
        match self {
            Op::Fused(op) => &op.epilogue,
            _ => &[],
        }
    }

    /// The formats of quantized operands that the op reads or makes.
    pub fn formats(&self) -> Vec<QuantFormat> {
        match self {
            Op::Quantize(op) => vec![op.format],
            Op::Dequantize(op) => vec![op.format],
            Op::StochasticRound(op) => vec![op.format],
            Op::ScaledGemm(op) => vec![op.a, op.b],
            Op::ScaledGroupedGemm(op) => vec![op.a, op.b],
            Op::DualGemm(op) => op.gemm.formats(),
            Op::AdamW(op) => {
                let of_copies = op.copies.iter().map(|copy| copy.kind.to_op().formats());
                of_copies.flatten().collect()
            }
            Op::Fused(op) => {
                let made = op.quantizations().map(|step| step.quantize.format);
                op.core.formats().into_iter().chain(made).collect()
            }
            _ => Vec::new(),
        }
    }

    /// What the op gives for inputs of known sizes.
    ///
    /// # Errors
    /// Operands that the op does not take, see [`OpRule::infer`].
    pub fn outputs_of(&self, inputs: &[OperandType]) -> Result<Vec<OperandType>, OpError> {
        let inputs: Vec<TensorType> = inputs
            .iter()
            .map(|input| TensorType {
                shape: Shape::new(input.shape.iter().copied()),
                dtype: input.dtype,
            })
            .collect();
        let outputs = self.rule().infer(&inputs)?;
        Ok(outputs
            .into_iter()
            .map(|output| OperandType {
                dtype: output.dtype,
                // Nothing but sizes went in.
                shape: output.shape.as_fixed().unwrap_or_default(),
            })
            .collect())
    }
}

/// The types of a node's inputs.
pub(crate) fn input_types(graph: &Graph, inputs: &[TensorId]) -> Vec<TensorType> {
    inputs
        .iter()
        .map(|&id| {
            let tensor = graph.tensor(id);
            TensorType { shape: tensor.shape.clone(), dtype: tensor.dtype }
        })
        .collect()
}
