//! `sm100_attention.cu`: softmax attention with grouped query heads, on tcgen05.

use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::{UNIT, reject_sizes, reject_values};
use super::tensor_map_launch::{BOX_ELEMENTS, MapKernel, launch};
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 512;
/// Queries of half a tile, and keys of a block.
const ROWS: usize = 128;
/// Queries of a tile.
const TILE_QUERIES: usize = 2 * ROWS;
/// Rows of results that a warp stores.
const RESULT_ROWS: usize = 32;
/// Tile numbers in shared memory.
const TILE_SLOTS: usize = 2;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm100_attention", &["attention"], prepare)
        .architectures(&[Architecture::Sm100a, Architecture::Sm103a])
        .reject(reject)
        .predict(predict)];

/// Sizes of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Largest number of elements of a head.
    head_dim: usize,
    /// Blocks of keys or values that fit into shared memory.
    stages: usize,
}

/// Kernels for narrower heads come first.
const SHAPES: [Shape; 3] = [
    Shape { head_dim: 64, stages: 8 },
    Shape { head_dim: 96, stages: 4 },
    Shape { head_dim: 128, stages: 4 },
];

impl Shape {
    /// The first kernel that supports heads of `head_dim` elements.
    fn of(head_dim: usize) -> Option<Shape> {
        SHAPES.into_iter().find(|shape| head_dim <= shape.head_dim)
    }

    /// Dynamic shared memory: two halves of queries, blocks of keys and values, results, a factor
    /// for each query, barriers and the numbers beside them, and alignment.
    fn shared_bytes(self) -> u32 {
        let row_bytes = self.head_dim.next_multiple_of(BOX_ELEMENTS) * 2;
        let barriers = 8 * 2 + 2 * self.stages + 2 * TILE_SLOTS;
        let beside = TILE_QUERIES * 4 + barriers * 8 + TILE_SLOTS * 4 + 8;
        (1024 + (2 + self.stages + 1) * ROWS * row_bytes + beside) as u32
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

/// Share of the BF16 peak. Not measured, for want of such a GPU.
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
        file: "sm100_attention",
        head_dim: shape.head_dim,
        tile_queries: TILE_QUERIES,
        rows: [ROWS, ROWS, RESULT_ROWS],
        threads: THREADS,
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
        let source = include_str!("sm100_attention.cu");
        for (head_dim, line, shared_bytes) in [
            (8, "SM100_ATTENTION(d64, 64, 8)", 182_576),
            (64, "SM100_ATTENTION(d64, 64, 8)", 182_576),
            (72, "SM100_ATTENTION(d96, 96, 4)", 231_664),
            (128, "SM100_ATTENTION(d128, 128, 4)", 231_664),
        ] {
            let shape = Shape::of(head_dim).unwrap();
            assert_eq!(shape.shared_bytes(), shared_bytes);
            assert!(shared_bytes <= 227 << 10);
            let Shape { head_dim, stages } = shape;
            assert_eq!(format!("SM100_ATTENTION(d{head_dim}, {head_dim}, {stages})"), line);
            assert!(source.contains(line), "{line}");
        }
        assert_eq!(Shape::of(136), None);
    }

    #[test]
    fn what_the_kernel_does_not_take_is_said() {
        let widths = "takes heads of 8 to 128 elements, a multiple of 8, not of";
        for (head_dim, value_dim, expected) in [
            (64, None, None),
            (128, None, None),
            (100, None, Some(format!("{widths} 100"))),
            (136, None, Some(format!("{widths} 136"))),
            (64, Some(32), Some("takes values as wide as keys, not 32 beside 64".to_string())),
        ] {
            let heads = AttentionHeads {
                heads: 2,
                kv_heads: 1,
                head_dim,
                value_dim,
                scale: 0.125,
                causal: true,
                ..AttentionHeads::default()
            };
            let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
            let query = of(DType::Bf16, &[10, 2 * head_dim]);
            let key = of(DType::Bf16, &[10, head_dim]);
            let operands = [&query, &key, &key, &query, &of(DType::F32, &[2, 2, 5])];
            let operands = operands.map(Clone::clone);
            let op = Attention { heads }.into();
            let request = KernelRequest { op: &op, operands: &operands, input_count: 3 };
            assert_eq!(reject(&request), expected, "{head_dim} {value_dim:?}");
        }
    }

    #[test]
    fn it_is_taken_for_what_it_takes() {
        const OWN: &str = "cuda_sm100_attention";
        const PORTABLE: &str = "cuda_attention";
        let plain = AttentionHeads {
            heads: 4,
            kv_heads: 2,
            head_dim: 128,
            scale: 0.1,
            causal: true,
            ..AttentionHeads::default()
        };
        let of_width = |head_dim| AttentionHeads { head_dim, ..plain.clone() };
        for (heads, expected) in [
            (of_width(64), OWN),
            (of_width(96), OWN),
            (of_width(128), OWN),
            (AttentionHeads { causal: false, ..plain.clone() }, OWN),
            (AttentionHeads { window: Some(128), ..plain.clone() }, OWN),
            (AttentionHeads { sinks: true, ..plain.clone() }, OWN),
            (AttentionHeads { documents: true, ..plain.clone() }, OWN),
            (AttentionHeads { value_dim: Some(128), head_dim: 192, ..plain.clone() }, PORTABLE),
        ] {
            for architecture in [Architecture::Sm100a, Architecture::Sm103a] {
                let chosen = chosen(&heads, architecture);
                assert_eq!(chosen, expected, "{heads:?} on {architecture:?}");
            }
        }
        assert_eq!(chosen(&plain, Architecture::Sm120a), PORTABLE);
    }

    /// The kernel for two sequences of 512 tokens.
    fn chosen(heads: &AttentionHeads, architecture: Architecture) -> String {
        let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
        let rows = |count, width| of(DType::Bf16, &[1024, count * width]);
        let (queries, values) = (heads.heads, heads.value_dim());
        let mut operands = vec![
            rows(queries, heads.head_dim),
            rows(heads.kv_heads, heads.head_dim),
            rows(heads.kv_heads, values),
        ];
        if heads.sinks {
            operands.push(of(DType::F32, &[queries]));
        }
        if heads.documents {
            operands.push(of(DType::I32, &[1024, 2]));
        }
        let input_count = operands.len();
        operands.push(rows(queries, values));
        operands.push(of(DType::F32, &[2, queries, 512]));
        let op = Attention { heads: heads.clone() }.into();
        let request = KernelRequest { op: &op, operands: &operands, input_count };
        let target = cuda_target(architecture, 148, &[]);
        CudaCatalog.select(&request, &target).unwrap().choice.kernel
    }
}
