//! `bias_grad.cu`: sums of columns.

use deepwell_ir::{DType, KernelRequest, Target};

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Columns of a CTA.
const COLUMNS: usize = 256;
/// Elements of a 16-byte load.
const WIDTH: usize = 8;
/// CTAs that fill a large GPU. The number determines the order of summation, and so is the same for
/// all devices.
const CTAS_WANTED: usize = 1024;
/// Largest number of runs of rows that the last CTA can add quickly.
const SPLITS_MAX: usize = 64;
/// Smallest number of rows per run: four per warp.
const ROWS_PER_SPLIT_MIN: usize = 32;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_bias_grad", &["bias_grad"], prepare)
        .reject(reject)
        .workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let is_f32 = request.operands[0].dtype == DType::F32;
    if is_f32 { None } else { all_bf16(request, &[0]) }
}

/// Column tiles and runs of rows, both at least one.
fn tiles_and_splits(shape: &[usize]) -> (usize, usize) {
    let (rows, columns) = (shape[0], shape[1]);
    let tiles = columns.div_ceil(COLUMNS).max(1);
    let splits = (CTAS_WANTED / tiles).min(SPLITS_MAX).min(rows.div_ceil(ROWS_PER_SPLIT_MIN));
    (tiles, splits.max(1))
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    match tiles_and_splits(&request.operands[0].shape) {
        (_, 1) => 0,
        (tiles, splits) => splits * tiles * COLUMNS * size_of::<f32>(),
    }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (dy, db) = (call.input(0), call.output(0));
    let (rows, columns) = (dy.shape[0], dy.shape[1]);
    let (tiles, splits) = tiles_and_splits(&dy.shape);
    let entry = match dy.dtype {
        DType::F32 => "bias_grad_f32",
        _ if columns.is_multiple_of(WIDTH) => "bias_grad_vector",
        _ => "bias_grad_scalar",
    };
    let function = device.function("bias_grad", entry, 0)?;
    let arguments = vec![
        dy.argument(),
        db.argument(),
        Argument::Pointer(call.workspace().0),
        Argument::Pointer(device.arrival_counters(tiles)?),
        Argument::U64(rows as u64),
        Argument::U32(columns as u32),
        Argument::U32(splits as u32),
        Argument::U32(call.accumulate().into()),
    ];
    Ok(vec![Device::launch(function, (tiles * splits) as u32, THREADS, 0, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_rows_are_neither_short_nor_too_many() {
        for (shape, expected) in [
            ([16_384, 2048], (8, 64)),
            ([16_384, 8192], (32, 32)),
            ([16_384, 1], (1, 64)),
            ([2048, 128_256], (501, 2)),
            ([8, 1 << 20], (4096, 1)),
            ([33, 300], (2, 2)),
            ([32, 300], (2, 1)),
            ([0, 5], (1, 1)),
            ([5, 0], (1, 1)),
        ] {
            assert_eq!(tiles_and_splits(&shape), expected, "{shape:?}");
        }
    }
}
