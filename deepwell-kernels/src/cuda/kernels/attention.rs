//! `attention.cu`: softmax attention with grouped query heads, on tensor cores.

use deepwell_ir::ops::AttentionHeads;
use deepwell_ir::{KernelRequest, Op};

use super::support::all_bf16;
use crate::KernelError;
use crate::cuda::driver::Argument;
use crate::cuda::prepare::{CallView, Device, Step, Tensor};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};

/// Threads of a block, as in the source.
const THREADS: u32 = 128;
/// Queries of a block.
const BLOCK_QUERIES: usize = 128;
/// Keys of one of the two buffers.
const STAGE_KEYS: usize = 64;
/// Widths of a head that kernels are compiled for.
const HEAD_DIMS: [usize; 4] = [16, 32, 64, 128];

/// Rows of scores of a call at most.
const ROWS_MAX: usize = i32::MAX as usize;
/// Elements from one token to the next at most.
const WIDTH_MAX: usize = 1 << 22;

pub(super) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_attention",
    ops: &["attention"],
    architectures: &Architecture::ALL,
    library: None,
    reject,
    workspace_bytes: no_workspace,
    prepare,
}];

/// Sizes of an attention, from its heads and the shape of lse.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Tokens of a sequence.
    pub(super) seq: usize,
    /// Query heads.
    pub(super) heads: usize,
    /// Key and value heads.
    pub(super) kv_heads: usize,
    /// Query heads of all sequences.
    pub(super) batch_heads: usize,
    /// Width of a head.
    pub(super) head_dim: usize,
}

impl Sizes {
    pub(super) fn new(heads: &AttentionHeads, lse: &[usize]) -> Sizes {
        Sizes {
            seq: lse[2],
            heads: heads.heads,
            kv_heads: heads.kv_heads,
            batch_heads: lse[0] * heads.heads,
            head_dim: heads.head_dim,
        }
    }

    /// Key and value heads of all sequences.
    pub(super) fn key_heads(&self) -> usize {
        self.batch_heads / self.heads.max(1) * self.kv_heads
    }

    /// How many of `heads` heads are worked on side by side, so that the `streamed` tensors of
    /// each (of `seq` rows) stay within a third of the second-level cache.
    pub(super) fn section(&self, heads: usize, streamed: usize, l2_bytes: u64) -> usize {
        let bytes = (streamed * self.seq * self.head_dim * 2).max(1);
        (l2_bytes as usize / 3 / bytes).clamp(1, heads.max(1))
    }
}

/// Why the kernels of an attention cannot serve one of such heads and rows.
pub(super) fn reject_heads(heads: &AttentionHeads, lse: &[usize]) -> Option<String> {
    if !HEAD_DIMS.contains(&heads.head_dim) {
        return Some(format!("takes heads of {HEAD_DIMS:?}, not of {}", heads.head_dim));
    }
    if !(heads.scale > 0.0 && heads.scale.is_finite()) {
        return Some(format!("takes a positive scale, not {}", heads.scale));
    }
    // Rows and tiles are counted in 32 bits, and so are distances within a tile of 128 tokens.
    if lse.iter().product::<usize>() > ROWS_MAX {
        return Some(format!("takes at most {ROWS_MAX} rows of scores, not those of {lse:?}"));
    }
    let width = heads.heads * heads.head_dim;
    if width > WIDTH_MAX {
        return Some(format!("takes at most {WIDTH_MAX} elements a token, not {width}"));
    }
    None
}

/// Powers of two are what the kernels take: `scale * log2(e)`.
pub(super) fn scale_log2(heads: &AttentionHeads) -> f32 {
    (heads.scale * std::f64::consts::LOG2_E) as f32
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::Attention(op) = request.op else { return Some("takes `attention`".to_string()) };
    all_bf16(request, &[0, 1, 2, 3]).or_else(|| reject_heads(&op.heads, &request.operands[4].shape))
}

/// Dynamic shared memory: a tile of queries, two buffers of keys and of values, and an offset.
pub(super) fn shared_bytes(head_dim: usize) -> u32 {
    ((BLOCK_QUERIES + 2 * 2 * STAGE_KEYS) * head_dim * 2 + 16) as u32
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Attention(op) = &call.call.op else {
        return Err(call.refuse("expected `attention`"));
    };
    let [q, k, v] = [0, 1, 2].map(|index| call.input(index));
    let (out, lse): (Tensor, Tensor) = (call.output(0), call.output(1));
    let sizes = Sizes::new(&op.heads, &lse.shape);
    let shared = shared_bytes(sizes.head_dim);
    let function =
        device.function("attention", &format!("attention_d{}", sizes.head_dim), shared)?;
    // Whole groups, which share keys and values.
    let l2_bytes = device.driver.properties().l2_bytes;
    let section = sizes.section(sizes.key_heads(), 2, l2_bytes) * (sizes.heads / sizes.kv_heads);
    let blocks = sizes.seq.div_ceil(BLOCK_QUERIES) * sizes.batch_heads;
    let mut arguments: Vec<Argument> = [&q, &k, &v, &out, &lse].map(Tensor::argument).into();
    arguments.extend(
        [sizes.seq, sizes.heads, sizes.kv_heads, sizes.batch_heads, section]
            .map(|size| Argument::U32(size as u32)),
    );
    arguments.push(Argument::U32(op.heads.causal.into()));
    arguments.push(Argument::F32(scale_log2(&op.heads)));
    Ok(vec![Device::launch(function, blocks.max(1) as u32, THREADS, shared, arguments)])
}
