//! Ops: plain data, one file per op under `ops/`.
//!
//! An op defines its operand and output types ([`OpRule::infer`]), its cost ([`OpRule::flops`]) and
//! its derivative ([`OpRule::backward`]). A new op is a new file and one line in the list below.
//! Kernels are looked up by [`Op::name`].

use std::borrow::Cow;

use deepwell_precision::QuantFormat;
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

/// Kind of tensor that an output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    /// A fresh activation.
    Activation,
    /// A fresh tensor whose element type the policy does not change.
    Statistic,
    /// A compute copy of a parameter if the input is a parameter, otherwise a statistic.
    Copy,
    /// An activation if the first input is one or if there are no inputs, otherwise a statistic.
    SameAsInput,
    /// Added to: the loss or a parameter gradient. Created once per graph, not per node.
    Accumulator,
}

/// Type of one output of an op.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputType {
    /// Suffix appended to the node's name to name the tensor; empty for the main output.
    pub suffix: Cow<'static, str>,
    /// Row-major shape.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
    /// Kind of the output.
    pub kind: OutputKind,
}

impl OutputType {
    /// An activation.
    pub fn activation(suffix: &'static str, shape: Shape, dtype: DType) -> OutputType {
        OutputType { suffix: suffix.into(), shape, dtype, kind: OutputKind::Activation }
    }

    /// A tensor whose element type the policy does not change.
    pub fn statistic(suffix: &'static str, shape: Shape, dtype: DType) -> OutputType {
        OutputType { suffix: suffix.into(), shape, dtype, kind: OutputKind::Statistic }
    }

    /// An FP32 accumulator.
    pub fn accumulator(suffix: &'static str, shape: Shape) -> OutputType {
        let kind = OutputKind::Accumulator;
        OutputType { suffix: suffix.into(), shape, dtype: DType::F32, kind }
    }
}

/// Unit that executes an op's arithmetic; the roofline divides FLOPs by the peak of that unit.
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

/// Properties that every op defines.
pub trait OpRule {
    /// Lower-case name, the key under which kernels are registered.
    fn name(&self) -> &'static str;

    /// Attributes in the format of text forms, `eps=1e-5` for example.
    fn attributes(&self) -> String {
        String::new()
    }

    /// Checks operand types and returns output types.
    ///
    /// # Errors
    /// A wrong number of operands, a wrong shape or a wrong type.
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError>;

    /// Number of outputs, independent of the operands. An op with several outputs must override
    /// this to be the core of a [`crate::ops::Fused`].
    fn result_count(&self) -> usize {
        1
    }

    /// Floating-point operations; a multiply-add counts as two. `shapes` holds the input shapes,
    /// then the output shapes.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64;

    /// Bytes over the link to other ranks, in the busier direction. `operands` holds inputs, then
    /// outputs.
    fn bytes_on_link(&self, _operands: &[OperandType]) -> u64 {
        0
    }

    /// Unit that executes the arithmetic for the given element types of operands (inputs first).
    fn unit(&self, _operands: &[DType]) -> MathUnit {
        MathUnit::F32
    }

    /// Adds the nodes that compute input gradients from output gradients.
    ///
    /// # Errors
    /// [`IrError::NotDifferentiable`] if the op has no rule.
    fn backward(&self, node: &Node, _context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        Err(IrError::NotDifferentiable { node: node.name.clone(), op: self.name().to_string() })
    }
}

macro_rules! ops {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// All operations of graphs and programs.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "op", rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum Op {
            $($(#[$doc])* $name(crate::ops::$name),)*
        }

        impl Op {
            /// Returns the rules of the op.
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
    LinearDgrad,
    /// `dw = dyᵀ · x`.
    LinearWgrad,
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
    /// [`Op::Attention`] over the keys of one of several ranks.
    AttentionPart,
    /// Gradients of one rank's queries and one rank's keys.
    AttentionPartBackward,
    /// Attention over the keys of several ranks, merged from the per-rank results.
    MergeAttention,
    /// [`Op::Rope`] or its backward for a part of the sequence.
    RopeOfPart,
    /// Rotary position embedding by angles of a table.
    RopeByTable,
    /// `silu(gate) · up`.
    SwiGlu,
    /// Gradients of [`Op::SwiGlu`].
    SwiGluBackward,
    /// [`Op::SwiGlu`] of stored inputs.
    StoredSwiGlu,
    /// [`Op::SwiGluBackward`] of stored inputs.
    StoredSwiGluBackward,
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
    /// Update of a router's selection biases from those counts.
    SelectionBiasUpdate,
    /// Auxiliary losses of a router.
    RouterLoss,
    /// [`Op::RouterLoss`] and gradient in one pass.
    RouterLossGrad,
    /// Destination row of each pair of token and expert.
    Dispatch,
    /// Destination row of each pair among the expert-parallel ranks.
    DispatchToRanks,
    /// Gathers token rows into pair rows.
    Permute,
    /// Sums pair rows into token rows.
    Unpermute,
    /// [`Op::Unpermute`] of the sum of two matrices.
    AddUnpermute,
    /// The gated activation of experts, times the router's gates.
    ExpertSwiGlu,
    /// Gradients of [`Op::ExpertSwiGlu`].
    ExpertSwiGluBackward,
    /// Splits a matrix into two column ranges.
    SplitColumns,
    /// Concatenates two matrices along columns.
    JoinColumns,
    /// Concatenates stacked parts along columns.
    JoinParts,
    /// A call of another framework without an equivalent op here.
    Opaque,
    /// Element-wise sum.
    Add,
    /// Output head and cross-entropy, by chunks.
    LinearCrossEntropy,
    /// [`Op::LinearCrossEntropy`] and gradients in one pass.
    LinearCrossEntropyGrad,
    /// Rows of a table that is split over ranks.
    VocabParallelEmbedding,
    /// Gradient of the rank's rows of the table.
    VocabParallelEmbeddingBackward,
    /// Statistics of a rank's logits, for an all-gather.
    VocabParallelSums,
    /// Cross-entropy of logits that are split over ranks.
    VocabParallelCrossEntropy,
    /// [`Op::VocabParallelCrossEntropy`] and gradients in one pass.
    VocabParallelCrossEntropyGrad,
    /// [`Op::AddPositions`] for a part of the tokens.
    AddPositionsOfPart,
    /// Contribution of a part of the tokens to the gradient of the position table.
    AddPositionsOfPartBackward,
    /// A bias added to each row.
    AddBias,
    /// Change of storage type.
    Cast,
    /// The largest magnitude of a tensor.
    Amax,
    /// Block quantization along one or both axes.
    Quantize,
    /// Block quantization to the rowwise and the columnwise operand of GEMMs, in two formats.
    QuantizeOperands,
    /// The part of an operand that an output tile of a GEMM reads.
    SampleOperand,
    /// The error of a quantized GEMM, on one tile of its output.
    ProductError,
    /// Quantized data and scales back to high precision.
    Dequantize,
    /// Stochastically rounded elements of a quantized operand.
    StochasticRound,
    /// An op and an epilogue over its results, in one kernel.
    Fused,
    /// Two GEMMs with one common operand.
    DualGemm,
    /// Biases of experts.
    GroupedBias,
    /// Gradients of [`Op::GroupedBias`].
    GroupedBiasBackward,
    /// A GEMM for each group of rows.
    GroupedGemm,
    /// `dx = dy · w` for each group.
    GroupedGemmDgrad,
    /// `dw = dyᵀ · x` for each group.
    GroupedGemmWgrad,
    /// A grouped GEMM (one of the three kinds) on quantized operands.
    ScaledGroupedGemm,
    /// GEMM of two quantized matrices with their scales.
    ScaledGemm,
    /// A collective between ranks.
    Collective,
    /// Global norm of all gradients.
    GradNorm,
    /// Partial sums of squares of the gradients.
    SumsOfSquares,
    /// Global norm of gradients that are sharded over ranks.
    NormOfSums,
    /// Scalars of an optimizer step that all parameters share.
    AdamWCoefficients,
    /// Optimizer update of a bucket of parameters.
    AdamW,
    /// Copy of offloaded state to or from the device.
    HostCopy,
}

impl Op {
    /// Lower-case name; for a fused op, the names of the core and of the epilogue.
    pub fn name(&self) -> Cow<'static, str> {
        match self {
            Op::Fused(op) => op.full_name().into(),
            op => op.rule().name().into(),
        }
    }

    /// Core of a fused op, which reads the call's first inputs; for any other op the op itself.
    pub fn leading(&self) -> &Op {
        match self {
            Op::Fused(op) => &op.core,
            op => op,
        }
    }

    /// Epilogue of a fused op; empty for any other op.
    pub fn epilogue(&self) -> &[Epilogue] {
        match self {
            Op::Fused(op) => &op.epilogue,
            _ => &[],
        }
    }

    /// Formats of the quantized operands that the op reads or writes.
    pub fn formats(&self) -> Vec<QuantFormat> {
        match self {
            Op::Amax(op) => vec![op.format],
            Op::Quantize(op) => vec![op.format],
            Op::QuantizeOperands(op) => vec![op.row.format, op.column.format],
            Op::Dequantize(op) => vec![op.format],
            Op::StochasticRound(op) => vec![op.format],
            Op::ScaledGemm(op) => vec![op.a, op.b],
            Op::ProductError(op) => vec![op.a, op.b],
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

    /// Output types for inputs of known sizes.
    ///
    /// # Errors
    /// Operands that the op does not accept, see [`OpRule::infer`].
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
                // All input sizes are fixed, so output sizes are fixed.
                shape: output.shape.as_fixed().unwrap_or_default(),
            })
            .collect())
    }
}

/// Types of a node's inputs.
pub(crate) fn input_types(graph: &Graph, inputs: &[TensorId]) -> Vec<TensorType> {
    inputs
        .iter()
        .map(|&id| {
            let tensor = graph.tensor(id);
            TensorType { shape: tensor.shape.clone(), dtype: tensor.dtype }
        })
        .collect()
}
