//! `sm90_attention.cu`: softmax attention with grouped query heads, on wgmma.

use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::{UNIT, reject_sizes, reject_values};
use super::tensor_map_launch::{BOX_ELEMENTS, MapKernel, launch};
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

/// Threads of a warpgroup.
const WARPGROUP: usize = 128;
/// Queries per consumer.
const WAVE_QUERIES: usize = 64;
/// Blocks of keys that fit into shared memory, and blocks of values.
const STAGES: usize = 2;
/// Shared memory for barriers and alignment.
const SHARED_BESIDE_TILES: usize = 1024 + 256;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_attention", &["attention"], prepare)
        .architectures(&[Architecture::Sm90a])
        .reject(reject)
        .predict(predict)];

/// Tile sizes of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Largest number of elements of a head.
    pub(super) head_dim: usize,
    /// Warpgroups that multiply.
    pub(super) consumers: usize,
    /// Keys of a block.
    pub(super) block_keys: usize,
    /// Tiles of queries that fit into shared memory.
    pub(super) slots: usize,
}

/// Kernels for narrower heads come first.
const SHAPES: [Shape; 4] = [
    Shape { head_dim: 64, consumers: 3, block_keys: 128, slots: 2 },
    Shape { head_dim: 96, consumers: 2, block_keys: 128, slots: 2 },
    Shape { head_dim: 128, consumers: 2, block_keys: 128, slots: 2 },
    Shape { head_dim: 256, consumers: 2, block_keys: 64, slots: 1 },
];

impl Shape {
    /// The first kernel that supports heads of `head_dim` elements.
    pub(super) fn of(head_dim: usize) -> Option<Shape> {
        SHAPES.into_iter().find(|shape| head_dim <= shape.head_dim)
    }

    /// Queries of a tile.
    pub(super) fn queries(self) -> usize {
        self.consumers * WAVE_QUERIES
    }

    pub(super) fn threads(self) -> u32 {
        ((1 + self.consumers) * WARPGROUP) as u32
    }

    /// Dynamic shared memory: tiles of queries, blocks of keys and of values, barriers.
    pub(super) fn shared_bytes(self) -> u32 {
        let rows = self.slots * self.queries() + 2 * STAGES * self.block_keys;
        let row_bytes = self.head_dim.next_multiple_of(BOX_ELEMENTS) * 2;
        (rows * row_bytes + SHARED_BESIDE_TILES) as u32
    }
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::Attention(op) = request.op else { return Some("takes `attention`".to_string()) };
    let out = request.input_count;
    reject_values(&op.heads)
        .or_else(|| all_bf16(request, &[0, 1, 2, out]))
        .or_else(|| reject_width(op.heads.head_dim))
        .or_else(|| reject_sizes(&op.heads, &request.operands[out + 1].shape))
}

fn reject_width(head_dim: usize) -> Option<String> {
    let is_whole = head_dim > 0 && head_dim.is_multiple_of(UNIT);
    let most = SHAPES[SHAPES.len() - 1].head_dim;
    (!is_whole || head_dim > most).then(|| {
        format!("takes heads of {UNIT} to {most} elements, a multiple of {UNIT}, not of {head_dim}")
    })
}

/// Share of the BF16 peak: 44 to 66 % on an H200 for sequences of 1024 and more
/// (`benchmarks/sm90_attention_2026-11-23.md`).
const SHARE: f64 = 0.5;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    Rates::of(target).roofline_s(request, SHARE)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Attention(op) = &call.call.op else {
        return Err(call.refuse("expected `attention`"));
    };
    let Some(shape) = Shape::of(op.heads.head_dim) else {
        return Err(call.refuse(format!("expected no heads of {}", op.heads.head_dim)));
    };
    let kernel = MapKernel {
        file: "sm90_attention",
        head_dim: shape.head_dim,
        tile_queries: shape.queries(),
        rows: [shape.queries(), shape.block_keys, WAVE_QUERIES],
        threads: shape.threads(),
        shared_bytes: shape.shared_bytes(),
    };
    launch(call, device, &op.heads, &kernel)
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{Attention, AttentionHeads};
    use deepwell_ir::{DType, KernelCatalog, OperandType};

    use super::*;
    use crate::cuda::{CudaCatalog, cuda_target};

    #[test]
    fn tiles_fit_and_names_are_those_of_the_source() {
        let source = include_str!("sm90_attention.cu");
        for (head_dim, line, threads, shared_bytes) in [
            (8, "SM90_ATTENTION(d64, 64, 3, 128, 2)", 512, 115_968),
            (64, "SM90_ATTENTION(d64, 64, 3, 128, 2)", 512, 115_968),
            (72, "SM90_ATTENTION(d96, 96, 2, 128, 2)", 384, 197_888),
            (128, "SM90_ATTENTION(d128, 128, 2, 128, 2)", 384, 197_888),
            (136, "SM90_ATTENTION(d256, 256, 2, 64, 1)", 384, 197_888),
        ] {
            let shape = Shape::of(head_dim).unwrap();
            assert_eq!((shape.threads(), shape.shared_bytes()), (threads, shared_bytes));
            assert!(shared_bytes <= 227 << 10);
            let Shape { head_dim, consumers, block_keys, slots } = shape;
            let of_shape = format!(
                "SM90_ATTENTION(d{head_dim}, {head_dim}, {consumers}, {block_keys}, {slots})"
            );
            assert_eq!(of_shape, line);
            assert!(source.contains(line), "{line}");
        }
        assert_eq!(Shape::of(264), None);
    }

    #[test]
    fn it_is_taken_where_it_runs() {
        let heads = AttentionHeads {
            heads: 4,
            kv_heads: 2,
            head_dim: 128,
            scale: 0.1,
            causal: true,
            ..AttentionHeads::default()
        };
        let op = Attention { heads }.into();
        let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
        for (architecture, expected) in [
            (Architecture::Sm90a, "cuda_sm90_attention"),
            (Architecture::Sm100a, "cuda_sm100_attention"),
            (Architecture::Sm103a, "cuda_sm100_attention"),
            (Architecture::Sm120a, "cuda_attention"),
        ] {
            for (batch, seq) in [(2, 512), (8, 2048)] {
                let (query, key) = ([batch * seq, 512], [batch * seq, 256]);
                let [query, key] = [query, key].map(|shape| of(DType::Bf16, &shape));
                let lse = of(DType::F32, &[batch, 4, seq]);
                let operands = [&query, &key, &key, &query, &lse].map(Clone::clone);
                let request = KernelRequest { op: &op, operands: &operands, input_count: 3 };
                let target = cuda_target(architecture, 132, &[]);
                let chosen = CudaCatalog.select(&request, &target).unwrap().choice.kernel;
                assert_eq!(chosen, expected, "{batch} {seq} {architecture:?}");
            }
        }
    }
}
