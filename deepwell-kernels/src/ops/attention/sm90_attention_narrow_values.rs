//! `sm90_attention_narrow_values.cu`: attention on wgmma where values are narrower than keys.

use deepwell_ir::ops::AttentionHeads;
use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::{UNIT, reject_sizes};
use super::tensor_map_launch::{MapKernel, launch};
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

/// Widest keys and values.
const KEYS_MAX: usize = 192;
const VALUES_MAX: usize = 128;
/// Keys of at most this many elements are left to the portable kernel, whose tiles are no wider.
const NARROW_KEYS: usize = 128;

/// Consumer warpgroups, and queries of each.
const CONSUMERS: usize = 2;
const WAVE_QUERIES: usize = 64;
/// Keys of a block.
const BLOCK_KEYS: usize = 96;
const WARPGROUP: usize = 128;

const KERNEL: MapKernel = MapKernel {
    file: "sm90_attention_narrow_values",
    head_dim: KEYS_MAX,
    tile_queries: CONSUMERS * WAVE_QUERIES,
    rows: [CONSUMERS * WAVE_QUERIES, BLOCK_KEYS, WAVE_QUERIES],
    threads: ((1 + CONSUMERS) * WARPGROUP) as u32,
    shared_bytes: shared_bytes(),
};

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_attention_narrow_values", &["attention"], prepare)
        .architectures(&[Architecture::Sm90a])
        .reject(reject)
        .predict(predict)];

/// Dynamic shared memory: a tile of queries, two blocks of keys and of values, barriers. Blocks of
/// values have the size of blocks of keys.
const fn shared_bytes() -> u32 {
    let rows = CONSUMERS * WAVE_QUERIES + 2 * 2 * BLOCK_KEYS;
    (rows * KEYS_MAX * 2 + 1024 + 256) as u32
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::Attention(op) = request.op else { return Some("takes `attention`".to_string()) };
    let out = request.input_count;
    all_bf16(request, &[0, 1, 2, out])
        .or_else(|| reject_widths(&op.heads))
        .or_else(|| reject_sizes(&op.heads, &request.operands[out + 1].shape))
}

fn reject_widths(heads: &AttentionHeads) -> Option<String> {
    let (keys, values) = (heads.head_dim, heads.value_dim());
    let are_whole = keys.is_multiple_of(UNIT) && values.is_multiple_of(UNIT);
    let is_taken = are_whole
        && (NARROW_KEYS + 1..=KEYS_MAX).contains(&keys)
        && (1..=VALUES_MAX).contains(&values);
    (!is_taken).then(|| {
        format!(
            "takes keys of {} to {KEYS_MAX} elements and values of {UNIT} to {VALUES_MAX}, each a \
             multiple of {UNIT}, not of {keys} and {values}",
            NARROW_KEYS + UNIT
        )
    })
}

/// Share of the BF16 peak: what `sm90_attention` has, until a GPU has timed this kernel.
const SHARE: f64 = 0.5;

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    Rates::of(target).roofline_s(request, SHARE)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Attention(op) = &call.call.op else {
        return Err(call.refuse("expected `attention`"));
    };
    launch(call, device, &op.heads, &KERNEL)
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::Attention;
    use deepwell_ir::{DType, KernelCatalog, OperandType};

    use super::*;
    use crate::cuda::{CudaCatalog, cuda_target};

    #[test]
    fn tiles_fit_and_names_are_those_of_the_source() {
        let source = include_str!("sm90_attention_narrow_values.cu");
        let line = format!(
            "NARROW_VALUES(d{KEYS_MAX}, {KEYS_MAX}, {VALUES_MAX}, {CONSUMERS}, {BLOCK_KEYS}, 1)"
        );
        assert!(source.contains(&line), "{line}");
        assert_eq!(shared_bytes(), 197_888);
        assert!(shared_bytes() <= 227 << 10);
    }

    #[test]
    fn it_is_taken_for_wide_keys_with_narrow_values() {
        for (head_dim, value_dim, architecture, expected) in [
            (192, 128, Architecture::Sm90a, "cuda_sm90_attention_narrow_values"),
            (136, 8, Architecture::Sm90a, "cuda_sm90_attention_narrow_values"),
            (128, 64, Architecture::Sm90a, "cuda_attention"),
            (192, 192, Architecture::Sm90a, "cuda_sm90_attention"),
            (192, 128, Architecture::Sm100a, "cuda_attention"),
        ] {
            let heads = AttentionHeads {
                heads: 4,
                kv_heads: 2,
                head_dim,
                value_dim: Some(value_dim),
                scale: 0.1,
                causal: true,
                ..AttentionHeads::default()
            };
            let op = Attention { heads }.into();
            let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
            let bf16 = |heads, width| of(DType::Bf16, &[4096, heads * width]);
            let lse = of(DType::F32, &[2, 4, 2048]);
            let operands =
                [bf16(4, head_dim), bf16(2, head_dim), bf16(2, value_dim), bf16(4, value_dim), lse];
            let request = KernelRequest { op: &op, operands: &operands, input_count: 3 };
            let target = cuda_target(architecture, 132, &[]);
            let chosen = CudaCatalog.select(&request, &target).unwrap().choice.kernel;
            assert_eq!(chosen, expected, "{head_dim} {value_dim} {architecture:?}");
        }
    }

    #[test]
    fn other_widths_are_refused_with_a_reason() {
        for (head_dim, value_dim, is_taken) in [
            (192, 128, true),
            (136, 8, true),
            (192, 136, false),
            (200, 128, false),
            (128, 64, false),
            (192, 100, false),
            (188, 128, false),
        ] {
            let value_dim = Some(value_dim);
            let heads = AttentionHeads { head_dim, value_dim, ..AttentionHeads::default() };
            let expected = (!is_taken).then(|| {
                format!(
                    "takes keys of 136 to 192 elements and values of 8 to 128, each a multiple of \
                     8, not of {head_dim} and {}",
                    heads.value_dim()
                )
            });
            assert_eq!(reject_widths(&heads), expected);
        }
    }
}
