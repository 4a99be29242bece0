//! `mxfp8_grouped_gemm.cu`: the three GEMMs of a layer for each group of rows on MXFP8 operands, at
//! any granularity, on `mma.sync`.

use deepwell_ir::{DType, GemmKind, KernelRequest, Op};

use super::bf16_grouped_gemm::row_tiles;
use super::cpu::{Sizes, layout};
use crate::KernelError;
use crate::ops::scaled_gemm::operand;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::gemm::{TILE, extents_fit, tile_ctas};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{MMA_SYNC_MXFP8, mma_sync_gemm};

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Three stages of two 16 KiB tiles and the scales of their rows.
const SHARED_BYTES: u32 = 3 * (2 * 16 * 1024 + 1024);
/// Elements of a 16-byte copy.
const WIDTH: usize = 16;
/// Elements per stored scale.
const BLOCK: usize = 32;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_mxfp8_grouped_gemm", &["scaled_grouped_gemm"], prepare)
        .reject(reject)
        .predict(|request, target| mma_sync_gemm(request, target, MMA_SYNC_MXFP8))];

pub(super) fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::ScaledGroupedGemm(op) = request.op else { return None };
    let data = request.operands[operand::A].dtype;
    if data != DType::E4m3 {
        return Some(format!("takes e4m3 operands with scales of e8m0, not {data}"));
    }
    let output = request.operands[request.input_count].dtype;
    let expected = if op.kind == GemmKind::Wgrad { DType::F32 } else { DType::Bf16 };
    if output != expected {
        return Some(format!("gives {expected}, not {output}"));
    }
    if !op.grouped.align.is_multiple_of(BLOCK) {
        let align = op.grouped.align;
        return Some(format!("takes groups of a multiple of {BLOCK} rows, not {align}"));
    }
    extents_fit(request, &[0, op.b_input()])
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let shape = |index: usize| call.input(index).shape;
    let Some((kind, [b, offsets], Sizes { rows, n, k })) = layout(&call.call.op, &shape) else {
        return Err(call.refuse("expected a grouped GEMM of quantized operands"));
    };
    let groups = call.input(offsets).elements() - 1;
    // Data and scales of each operand.
    let inputs = [0, 1, b, b + 1, offsets].map(|index| call.input(index));
    let mut arguments: Vec<_> = inputs.iter().map(|operand| operand.argument()).collect();
    arguments.push(call.output(0).argument());
    let number = |number: usize| Argument::I32(number as i32);
    let (entry, ctas) = match kind {
        GemmKind::Wgrad => {
            arguments.extend([n, k, rows].map(number));
            arguments.push(Argument::U32(call.accumulate().into()));
            ("mxfp8_grouped_gemm_wgrad", groups as u32 * tile_ctas(n, k))
        }
        _ => {
            let (columns, contraction) = if kind == GemmKind::Fprop { (n, k) } else { (k, n) };
            let row_tiles = row_tiles(rows, groups);
            arguments.push(Argument::U32(groups as u32));
            arguments.extend([rows, columns, contraction].map(number));
            arguments.push(Argument::U32(row_tiles as u32));
            let entry = match contraction.is_multiple_of(WIDTH) {
                true => "mxfp8_grouped_gemm_rows",
                false => "mxfp8_grouped_gemm_rows_scalar",
            };
            (entry, (row_tiles * columns.div_ceil(TILE)).max(1) as u32)
        }
    };
    let function = device.function("mxfp8_grouped_gemm", entry, SHARED_BYTES)?;
    Ok(vec![Device::launch(function, ctas, THREADS, SHARED_BYTES, arguments)])
}
