//! One file per op or family of ops: attributes, types, cost, derivative.

mod adamw;
mod add;
mod add_bias;
mod add_positions;
mod amax;
mod attention;
mod capacity;
mod cast;
mod collective;
mod context;
mod dequantize;
mod dispatch;
mod dispatch_to_ranks;
mod dual_gemm;
mod embedding;
mod expert_swiglu;
mod experts;
mod fused;
mod gelu;
mod grouped_bias;
mod grouped_gemm;
mod head_rms_norm;
mod host_copy;
mod join_parts;
mod latent_key_value;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
mod opaque;
mod permute;
mod product_error;
mod quantize;
mod quantize_operands;
mod relu;
mod rms_norm;
mod rope;
mod route;
mod router_logits;
mod router_loss;
mod scaled_gemm;
mod selection_bias;
mod split_columns;
mod stochastic_round;
mod stored_swiglu;
mod swiglu;
mod vocab_parallel;
mod weight_copy;

pub use adamw::{
    AdamW, AdamWCoefficients, GradNorm, MasterFormat, MomentFormat, NormOfSums, SumsOfSquares,
};
pub use add::Add;
pub use add_bias::AddBias;
pub use add_positions::{
    AddPositions, AddPositionsBackward, AddPositionsOfPart, AddPositionsOfPartBackward,
};
pub use amax::Amax;
pub use attention::{Attention, AttentionBackward, AttentionHeads, HeadsFirst};
pub use capacity::{capacity, capacity_sizes_rows};
pub use cast::Cast;
pub use collective::{Collective, CollectiveKind, Reduction};
pub use context::{
    AttentionPart, AttentionPartBackward, KeySource, MergeAttention, PartPlaces, RopeOfPart,
    Zigzag, seen_keys,
};
pub use dequantize::Dequantize;
pub use dispatch::{Dispatch, GroupedRows, RowsOf};
pub use dispatch_to_ranks::DispatchToRanks;
pub use dual_gemm::DualGemm;
pub use embedding::{Embedding, EmbeddingBackward};
pub use expert_swiglu::{ExpertSwiGlu, ExpertSwiGluBackward};
pub use experts::{ExpertActivation, Experts};
pub use fused::{Activation, Epilogue, Fused, QuantizeStep};
pub use gelu::{Gelu, GeluBackward};
pub use grouped_bias::{GroupedBias, GroupedBiasBackward};
pub use grouped_gemm::{GroupedGemm, GroupedGemmDgrad, GroupedGemmWgrad, ScaledGroupedGemm};
pub use head_rms_norm::{HeadRmsNorm, HeadRmsNormBackward};
pub use host_copy::{HostCopy, HostCopyDirection};
pub use join_parts::JoinParts;
pub use latent_key_value::{LatentKeyValue, LatentKeyValueBackward};
pub use layer_norm::{AddLayerNorm, LayerNorm, LayerNormBackward};
pub use linear::{BiasGrad, Linear, LinearDgrad, LinearWgrad};
pub use linear_cross_entropy::{IGNORED_TARGET, LinearCrossEntropy, LinearCrossEntropyGrad};
pub use opaque::{Opaque, OpaqueOutput};
pub use permute::{AddUnpermute, Permute, Unpermute};
pub use product_error::{
    ProductError, SAMPLED_ROWS, SampleOperand, first_sampled_row, sampled_group,
};
pub use quantize::{Axis, Quantize};
pub use quantize_operands::QuantizeOperands;
pub use relu::{Relu, ReluBackward};
pub use rms_norm::{AddRmsNorm, RmsNorm, RmsNormBackward};
pub use rope::{Rope, RopeBackward, RopeByTable};
pub use route::{Route, RouteBackward, RouteGroups, RouteScore};
pub use router_logits::{RouterLogits, RouterLogitsBackward};
pub use router_loss::{RouterLoss, RouterLossGrad};
pub use scaled_gemm::ScaledGemm;
pub use selection_bias::{CountExperts, SelectionBiasUpdate};
pub use split_columns::{JoinColumns, SplitColumns};
pub use stochastic_round::{PartOfColumns, StochasticRound};
pub use stored_swiglu::{StoredSwiGlu, StoredSwiGluBackward};
pub use swiglu::{SwiGlu, SwiGluBackward};
pub use vocab_parallel::{
    VocabParallelCrossEntropy, VocabParallelCrossEntropyGrad, VocabParallelEmbedding,
    VocabParallelEmbeddingBackward, VocabParallelSums, VocabSlice,
};
pub use weight_copy::{CopyKind, WeightCopy};

use crate::op::TensorType;
use crate::{DType, Dim, OpError, PlaneType, Shape};

/// Operand checks shared by most ops; every error names the op.
pub(crate) struct Check<'a> {
    pub(crate) op: &'static str,
    pub(crate) inputs: &'a [TensorType],
}

impl<'a> Check<'a> {
    /// Checks that the number of inputs equals the number of names.
    pub(crate) fn count(
        op: &'static str,
        inputs: &'a [TensorType],
        names: &[&str],
    ) -> Result<Check<'a>, OpError> {
        let check = Check { op, inputs };
        if inputs.len() != names.len() {
            return Err(check.error(
                format!("{} operands ({})", names.len(), names.join(", ")),
                inputs.len().to_string(),
            ));
        }
        Ok(check)
    }

    pub(crate) fn error(&self, expected: impl Into<String>, got: impl Into<String>) -> OpError {
        OpError { op: self.op, expected: expected.into(), got: got.into() }
    }

    /// Checks the rank of input `index` and returns its dimensions.
    pub(crate) fn rank(&self, index: usize, rank: usize) -> Result<&'a [Dim], OpError> {
        let shape = &self.inputs[index].shape;
        if shape.rank() != rank {
            return Err(self.error(
                format!("operand {index} of rank {rank}"),
                format!("{shape}, rank {}", shape.rank()),
            ));
        }
        Ok(&shape.0)
    }

    /// Checks the shape of input `index`.
    pub(crate) fn shape(&self, index: usize, expected: &Shape) -> Result<(), OpError> {
        let shape = &self.inputs[index].shape;
        if shape != expected {
            return Err(self.error(format!("operand {index} {expected}"), shape.to_string()));
        }
        Ok(())
    }

    /// Checks the element type of input `index`.
    pub(crate) fn dtype(&self, index: usize, dtype: DType) -> Result<(), OpError> {
        let got = self.inputs[index].dtype;
        if got != dtype {
            return Err(self.error(format!("operand {index} as {dtype}"), got.name()));
        }
        Ok(())
    }

    /// Checks that the inputs from `first` on are these planes.
    pub(crate) fn planes(&self, first: usize, planes: &[PlaneType]) -> Result<(), OpError> {
        for (index, plane) in (first..).zip(planes) {
            self.dtype(index, plane.dtype)?;
            self.shape(index, &plane.shape)?;
        }
        Ok(())
    }

    /// Checks that the inputs `indices` share one type, F32 or BF16, and returns the type.
    pub(crate) fn same_float(&self, indices: &[usize]) -> Result<DType, OpError> {
        let dtype = self.inputs[indices[0]].dtype;
        if !dtype.is_high_precision() {
            return Err(self.error(format!("operand {} as f32 or bf16", indices[0]), dtype.name()));
        }
        for &index in indices {
            self.dtype(index, dtype)?;
        }
        Ok(dtype)
    }

    /// Size of dimension `axis` of input `index`, which must be fixed.
    pub(crate) fn fixed(&self, index: usize, axis: usize) -> Result<usize, OpError> {
        let dim = self.inputs[index].shape.0[axis];
        dim.as_fixed().ok_or_else(|| {
            self.error(format!("dimension {axis} of operand {index} fixed"), dim.to_string())
        })
    }
}

/// Product of sizes as u64, for FLOP counts.
pub(crate) fn product(shape: &[usize]) -> u64 {
    shape.iter().map(|&n| n as u64).product()
}
