//! `sm120_nvfp4_grouped_gemm.cu`: the GEMMs of groups of rows on tensor cores that apply scales of
//! blocks in `mma.sync`, with NVFP4 operands that have a tensor scale for each group.

use deepwell_ir::GemmKind;
use deepwell_precision::{QuantFormat, nvfp4, scale_tiles};

use super::bf16_grouped_gemm::row_tiles;
use super::cpu::{Sizes, layout};
use super::sm90_dequantized_nvfp4_grouped_gemm::reject;
use crate::KernelError;
use crate::ops::scaled_gemm::operand;
use crate::ops::scaled_gemm::sm120_nvfp4_gemm::{SHARED_BYTES, THREADS, WIDTH};
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::gemm::{TILE, tile_ctas};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{SM120_NVFP4, mma_sync_gemm};

/// Group sizes are multiples of this: a tile of scales has so many elements along the contraction.
const GROUP_ROWS: usize = scale_tiles::TILE_BLOCKS * nvfp4::BLOCK;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm120_nvfp4_grouped_gemm", &["scaled_grouped_gemm"], prepare)
        .architectures(&[Architecture::Sm120a])
        .family(QuantFormat::NVFP4)
        .reject(|request| reject(request, GROUP_ROWS))
        .predict(|request, target| mma_sync_gemm(request, target, SM120_NVFP4))];

/// Name of the kernel for rows of `k` elements.
fn kernel(kind: GemmKind, k: usize) -> String {
    let name = if kind == GemmKind::Wgrad { "wgrad" } else { "rows" };
    let by_byte = if k.is_multiple_of(WIDTH) { "" } else { "_scalar" };
    format!("sm120_nvfp4_grouped_gemm_{name}{by_byte}")
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let shape = |index: usize| call.input(index).shape;
    let Some((kind, [_, offsets], Sizes { rows, n, k })) = layout(&call.call.op, &shape) else {
        return Err(call.refuse("expected a grouped GEMM of quantized operands"));
    };
    let groups = call.input(offsets).elements() - 1;
    // The planes of both operands, then the offsets.
    let mut arguments: Vec<_> =
        (operand::A..=offsets).map(|index| call.input(index).argument()).collect();
    arguments.push(call.output(0).argument());
    let number = |number: usize| Argument::I32(number as i32);
    let (contraction, ctas) = match kind {
        GemmKind::Wgrad => {
            arguments.extend([n, k, rows].map(number));
            arguments.push(Argument::U32(call.accumulate().into()));
            (rows, groups as u32 * tile_ctas(n, k))
        }
        _ => {
            let (columns, contraction) = if kind == GemmKind::Fprop { (n, k) } else { (k, n) };
            let row_tiles = row_tiles(rows, groups);
            arguments.push(Argument::U32(groups as u32));
            arguments.extend([rows, columns, contraction].map(number));
            arguments.push(Argument::U32(row_tiles as u32));
            (contraction, (row_tiles * columns.div_ceil(TILE)).max(1) as u32)
        }
    };
    let name = kernel(kind, contraction);
    let function = device.function("sm120_nvfp4_grouped_gemm", &name, SHARED_BYTES)?;
    Ok(vec![Device::launch(function, ctas, THREADS, SHARED_BYTES, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_vectors_only_where_rows_are_16_bytes() {
        for (kind, k, expected) in [
            (GemmKind::Fprop, 64, "sm120_nvfp4_grouped_gemm_rows"),
            (GemmKind::Dgrad, 48, "sm120_nvfp4_grouped_gemm_rows_scalar"),
            (GemmKind::Wgrad, 32, "sm120_nvfp4_grouped_gemm_wgrad"),
            (GemmKind::Wgrad, 200, "sm120_nvfp4_grouped_gemm_wgrad_scalar"),
        ] {
            assert_eq!(kernel(kind, k), expected, "{kind} {k}");
        }
    }
}
