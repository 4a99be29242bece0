//! `bf16_grouped_gemm.cu`: the three GEMMs of a layer for each group of rows, on `mma.sync`.

use deepwell_ir::{DType, GemmKind, KernelRequest};

use super::cpu::{Sizes, layout};
use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::gemm::{TILE, extents_fit, tile_ctas};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{MMA_SYNC_BF16, mma_sync_gemm};

/// Threads of a CTA, as in the source.
const THREADS: u32 = 128;
/// Three stages of two 16 KiB tiles.
const SHARED_BYTES: u32 = 3 * 2 * 16 * 1024;
/// Elements of a 16-byte copy.
const WIDTH: usize = 8;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_bf16_grouped_gemm",
    &["grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad"],
    prepare,
)
.reject(reject)
.predict(|request, target| mma_sync_gemm(request, target, MMA_SYNC_BF16))];

/// Accepts BF16 operands with extents that fit 32-bit indices. The op determines the result's
/// dtype.
fn reject(request: &KernelRequest<'_>) -> Option<String> {
    all_bf16(request, &[0, 1]).or_else(|| extents_fit(request, &[0, 1])).or_else(|| {
        let output = request.operands[request.input_count].dtype;
        let is_known = matches!(output, DType::Bf16 | DType::F32);
        (!is_known).then(|| format!("gives bf16 or f32, not {output}"))
    })
}

/// Largest possible number of row tiles for `rows` rows in `groups` groups, including rows after
/// the groups: each group is rounded up separately.
pub(super) fn row_tiles(rows: usize, groups: usize) -> usize {
    (rows + (groups + 1) * (TILE - 1)) / TILE
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let shape = |index: usize| call.input(index).shape;
    let Some((kind, [b, offsets], Sizes { rows, n, k })) = layout(&call.call.op, &shape) else {
        return Err(call.refuse("expected a grouped GEMM"));
    };
    let groups = call.input(offsets).elements() - 1;
    let operands = [call.input(0), call.input(b), call.input(offsets), call.output(0)];
    let mut arguments: Vec<_> = operands.iter().map(|operand| operand.argument()).collect();
    let number = |number: usize| Argument::I32(number as i32);
    // Vector kernels need whole 16-byte rows in all copied operands: x and w, dy and w, dy and x.
    let is_whole = |lengths: &[usize]| lengths.iter().all(|length| length.is_multiple_of(WIDTH));
    let (name, whole, ctas) = match kind {
        GemmKind::Wgrad => {
            arguments.extend([n, k].map(number));
            arguments.push(Argument::U32(call.accumulate().into()));
            ("wgrad", is_whole(&[n, k]), groups as u32 * tile_ctas(n, k))
        }
        _ => {
            let is_fprop = kind == GemmKind::Fprop;
            let (columns, contraction) = if is_fprop { (n, k) } else { (k, n) };
            let row_tiles = row_tiles(rows, groups);
            arguments.push(Argument::U32(groups as u32));
            arguments.extend([rows, columns, contraction].map(number));
            arguments.push(Argument::U32(row_tiles as u32));
            let ctas = (row_tiles * columns.div_ceil(TILE)).max(1) as u32;
            match is_fprop {
                true => ("fprop", is_whole(&[k]), ctas),
                false => ("dgrad", is_whole(&[n, k]), ctas),
            }
        }
    };
    let suffix = if whole { "" } else { "_scalar" };
    let entry = format!("bf16_grouped_gemm_{name}{suffix}");
    let function = device.function("bf16_grouped_gemm", &entry, SHARED_BYTES)?;
    Ok(vec![Device::launch(function, ctas, THREADS, SHARED_BYTES, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any distribution of rows over groups has enough tiles.
    #[test]
    fn there_are_tiles_for_every_spread() {
        for (lengths, rows) in [
            (vec![0; 3], 0),
            (vec![0; 3], 1),
            (vec![1, 1, 1], 4),
            (vec![129, 1, 257], 388),
            (vec![128, 0, 128], 256),
            (vec![0, 0, 300], 300),
        ] {
            let behind = rows - lengths.iter().sum::<usize>();
            let needed: usize = lengths.iter().chain([&behind]).map(|n| n.div_ceil(TILE)).sum();
            let most = row_tiles(rows, lengths.len());
            assert!(needed <= most, "{lengths:?}: {needed} of {most}");
        }
        // The worst case, and no more: each group has one row in excess of whole tiles.
        assert_eq!(row_tiles(4 * 129, 3), 8);
    }
}
