//! Sizes other than the model's: on a GPU sizes known from peers, on a CPU small sizes.

/// `(M, N, K)` of GEMMs.
pub(super) fn gemms(is_gpu: bool) -> &'static [(usize, usize, usize)] {
    if is_gpu {
        &[
            (4096, 4096, 4096),
            (8192, 8192, 8192),
            (16384, 4096, 4096),
            (8192, 14336, 4096),
            (8192, 4096, 14336),
        ]
    } else {
        &[(256, 256, 256), (512, 512, 512), (512, 1408, 256)]
    }
}

/// Rows and columns of block quantizations.
pub(super) fn quantizations(is_gpu: bool) -> &'static [(usize, usize)] {
    if is_gpu { &[(16384, 8192)] } else { &[(512, 1024)] }
}

/// An attention with as many key heads as query heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionSize {
    /// Sequences.
    pub(super) batch: usize,
    /// Heads.
    pub(super) heads: usize,
    /// Tokens of a sequence.
    pub(super) seq: usize,
    /// Width of a query and of a key.
    pub(super) head_dim: usize,
    /// Width of a value.
    pub(super) value_dim: usize,
    /// Whether a token attends only to earlier tokens.
    pub(super) causal: bool,
}

/// Attentions. On a GPU also those of Gemma (256 elements), and of DeepSeek (values narrower than
/// keys).
pub(super) fn attentions(is_gpu: bool) -> &'static [AttentionSize] {
    const fn size(
        [batch, heads, seq]: [usize; 3],
        (head_dim, value_dim): (usize, usize),
        causal: bool,
    ) -> AttentionSize {
        AttentionSize { batch, heads, seq, head_dim, value_dim, causal }
    }
    if is_gpu {
        const {
            &[
                size([1, 8, 128], (64, 64), false),
                size([2, 8, 256], (64, 64), false),
                size([4, 16, 256], (128, 128), false),
                size([8, 16, 512], (128, 128), false),
                size([1, 32, 1024], (128, 128), false),
                size([4, 16, 2048], (128, 128), true),
                size([2, 16, 8192], (128, 128), true),
                size([1, 16, 16384], (128, 128), true),
                size([4, 16, 4096], (64, 64), true),
                size([4, 16, 2048], (256, 256), true),
                size([4, 16, 2048], (256, 256), false),
                size([2, 8, 8192], (256, 256), true),
                size([4, 16, 2048], (192, 128), true),
                size([2, 16, 8192], (192, 128), true),
            ]
        }
    } else {
        const {
            &[
                size([1, 4, 128], (64, 64), false),
                size([1, 4, 256], (64, 64), true),
                size([1, 4, 128], (128, 128), true),
            ]
        }
    }
}

/// Rows and columns of norms and activations.
pub(super) fn pointwise(is_gpu: bool) -> &'static [(usize, usize)] {
    if is_gpu { &[(16384, 4096)] } else { &[(512, 512)] }
}

/// A projection of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertSize {
    /// Tokens.
    pub(super) tokens: usize,
    /// Experts.
    pub(super) experts: usize,
    /// Experts of a token.
    pub(super) top_k: usize,
    /// Outputs of the projection.
    pub(super) n: usize,
    /// Inputs of the layer.
    pub(super) k: usize,
}

/// Gates of mixtures: number and size of the experts of DeepSeek-V2-Lite, Qwen3-30B-A3B and
/// Mixtral-8x7B, and small sizes.
pub(super) fn experts(is_gpu: bool) -> &'static [ExpertSize] {
    const fn size(
        tokens: usize,
        (experts, top_k): (usize, usize),
        (n, k): (usize, usize),
    ) -> ExpertSize {
        ExpertSize { tokens, experts, top_k, n, k }
    }
    if is_gpu {
        const {
            &[
                size(16384, (64, 6), (1408, 2048)),
                size(16384, (128, 8), (768, 2048)),
                size(16384, (8, 2), (14336, 4096)),
                size(2048, (8, 2), (768, 1024)),
            ]
        }
    } else {
        const { &[size(512, (8, 2), (128, 128))] }
    }
}

/// Tokens of sequences with heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenSize {
    /// Sequences.
    pub(super) batch: usize,
    /// Tokens of a sequence.
    pub(super) seq: usize,
    /// Heads of a token.
    pub(super) heads: usize,
    /// Width of a head.
    pub(super) head_dim: usize,
}

/// Norms of heads, and positions of tokens: the width of Qwen3-8B's queries, and of GPT-2.
pub(super) fn tokens(is_gpu: bool) -> &'static [TokenSize] {
    const fn size(batch: usize, seq: usize, heads: usize, head_dim: usize) -> TokenSize {
        TokenSize { batch, seq, heads, head_dim }
    }
    if is_gpu {
        const { &[size(8, 2048, 32, 128), size(32, 1024, 12, 64)] }
    } else {
        const { &[size(4, 128, 4, 128)] }
    }
}
