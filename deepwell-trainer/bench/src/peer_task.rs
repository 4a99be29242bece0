//! Tasks that PyTorch runs for comparison with a row of the benchmark.

use deepwell_ir::capture::{ModelConfig, ModelFamily};
use serde::{Deserialize, Serialize};

/// A task for the peers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum PeerTask {
    /// A GEMM.
    Gemm {
        /// `fprop`, `dgrad` or `wgrad`: decides the layout of the operands.
        gemm: String,
        /// Rows of the result.
        m: usize,
        /// Columns of the result.
        n: usize,
        /// Elements of the contraction.
        k: usize,
        /// Whether operands are FP8 with the scales that PyTorch offers, otherwise BF16.
        fp8: bool,
    },
    /// The GEMMs of the experts of a mixture.
    GroupedGemm {
        /// `fprop`, `dgrad` or `wgrad`.
        gemm: String,
        /// Rows of each expert.
        rows: Vec<usize>,
        /// Outputs of the layer.
        n: usize,
        /// Inputs of the layer.
        k: usize,
        /// Operands in FP8 with a scale for each row, else in BF16.
        fp8: bool,
    },
    /// Forward and backward of a mixture's layer.
    MoeLayer {
        /// Tokens.
        tokens: usize,
        /// Width of a token.
        hidden: usize,
        /// Width of an expert.
        width: usize,
        /// Experts of a token.
        top_k: usize,
        /// Pairs of each expert.
        pairs: Vec<usize>,
        /// GEMMs in FP8 with a scale for each row, else in BF16.
        fp8: bool,
    },
    /// Block quantization.
    Quantize {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
        /// Type of the elements: `bf16` or `f32`.
        dtype: String,
        /// `row`, `column` or `both`.
        axis: String,
        /// Elements of a block, or along each side of a square block.
        block: usize,
        /// Whether blocks are square; otherwise a block is one row.
        square: bool,
    },
    /// Attention or its gradients.
    Attention {
        /// Sequences.
        batch: usize,
        /// Query heads.
        heads: usize,
        /// Key and value heads.
        kv_heads: usize,
        /// Tokens of a sequence.
        seq: usize,
        /// Width of a query and of a key.
        head_dim: usize,
        /// Width of a value.
        value_dim: usize,
        /// Whether a token attends only to earlier tokens.
        causal: bool,
        /// Gradients.
        backward: bool,
    },
    /// A norm or an activation.
    Pointwise {
        /// Name of the op, or of its producer if the op also quantizes.
        op: String,
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
        /// Output and axis of each quantization after the op.
        quantized: Vec<(usize, String)>,
        /// Elements of a block.
        block: usize,
    },
    /// One update.
    #[serde(rename = "adamw")]
    AdamW {
        /// Elements of each parameter.
        lengths: Vec<usize>,
    },
    /// Norm of all gradients.
    GradNorm {
        /// Elements of each gradient.
        lengths: Vec<usize>,
    },
    /// Rotary position embedding or its gradient.
    Rope {
        /// Sequences.
        batch: usize,
        /// Tokens of a sequence.
        seq: usize,
        /// Heads.
        heads: usize,
        /// Width of a head.
        head_dim: usize,
        /// Gradients.
        backward: bool,
    },
    /// Steps of training.
    Train {
        /// Scaling of torchao for FP8 linear layers, `tensorwise` or `rowwise`; none: BF16.
        recipe: Option<String>,
        /// Sequences.
        batch: usize,
        /// Tokens of a sequence.
        seq: usize,
        /// The trained model.
        #[serde(flatten)]
        model: PeerModel,
    },
    /// The forward pass of a model with its loss, in BF16.
    Forward {
        /// Sequences.
        batch: usize,
        /// Tokens of a sequence.
        seq: usize,
        /// The model.
        #[serde(flatten)]
        model: PeerModel,
    },
}

/// A model supported by transformers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerModel {
    /// `llama` or `gpt2`.
    pub family: String,
    /// Width.
    pub hidden: usize,
    /// Width of the feed-forward layers.
    pub intermediate: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
}

impl PeerModel {
    /// Returns a Llama or a GPT-2; none for models that the peers lack at the same sizes.
    pub fn of(config: &ModelConfig) -> Option<PeerModel> {
        match config {
            ModelConfig::Llama(config) if config.family == ModelFamily::Llama => Some(PeerModel {
                family: "llama".to_string(),
                hidden: config.hidden_size,
                intermediate: config.intermediate_size,
                layers: config.num_layers,
                heads: config.num_heads,
                kv_heads: config.num_kv_heads,
                vocab: config.vocab_size,
            }),
            ModelConfig::Gpt2(config) => Some(PeerModel {
                family: "gpt2".to_string(),
                hidden: config.hidden_size,
                intermediate: config.intermediate_size,
                layers: config.num_layers,
                heads: config.num_heads,
                kv_heads: config.num_heads,
                vocab: config.vocab_size,
            }),
            _ => None,
        }
    }
}
