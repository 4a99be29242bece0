//! `quantize.cu` and `quantize_square.cu`: block quantization to MXFP8.

use deepwell_ir::{DType, KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, Launch};
use crate::runtime::cuda::launch::mx;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA of `quantize_square.cu`.
const SQUARE_THREADS: u32 = 256;
/// Largest extent of a grid's second axis, which has one CTA per matrix of a stack.
const MATRICES_MAX: usize = 65_535;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_quantize", &["quantize"], prepare).reject(reject)];

/// Number of matrices, and the shape of each.
fn matrices_of(shape: &[usize]) -> Option<(usize, [usize; 2])> {
    match *shape {
        [rows, columns] => Some((1, [rows, columns])),
        [matrices, rows, columns] => Some((matrices, [rows, columns])),
        _ => None,
    }
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::Quantize(quantize) = request.op else { return None };
    let source = &request.operands[0];
    if !matches!(source.dtype, DType::Bf16 | DType::F32) {
        return Some(format!("takes bf16 or f32, not {}", source.dtype));
    }
    let Some((matrices, shape)) = matrices_of(&source.shape) else {
        let dimensions = source.shape.len();
        return Some(format!("takes a matrix or a stack of them, not {dimensions} dimensions"));
    };
    if !(1..=MATRICES_MAX).contains(&matrices) {
        return Some(format!("takes 1 to {MATRICES_MAX} matrices, not {matrices}"));
    }
    mx::reject(quantize, &shape)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Quantize(quantize) = &call.call.op else {
        return Err(call.refuse("expected a quantization"));
    };
    let x = call.input(0);
    let Some((matrices, [rows, columns])) = matrices_of(&x.shape) else {
        return Err(call.refuse("expected a matrix or a stack of them"));
    };
    let flags = mx::flags(&quantize.format);
    let axis = quantize.axis.name();
    let is_whole = |size: usize| size > 0 && size.is_multiple_of(mx::TILE);
    let square =
        x.dtype == DType::F32 && is_whole(rows) && is_whole(columns) && flags == mx::SQUARE_OF_128;
    let (file, entry, threads, shared_bytes) = match x.dtype {
        _ if square => ("quantize_square", format!("quantize_square_{axis}"), SQUARE_THREADS, 0),
        DType::Bf16 => {
            let shared_bytes = mx::shared_bytes(rows, columns, flags);
            ("quantize", format!("quantize_bf16_{axis}"), mx::BF16_TILE_THREADS, shared_bytes)
        }
        _ => {
            let shared_bytes = 2 * mx::BF16_TILE_BYTES;
            ("quantize", format!("quantize_f32_{axis}"), 2 * mx::BF16_TILE_THREADS, shared_bytes)
        }
    };
    let function = device.function(file, &entry, shared_bytes)?;
    let mx::Outputs { places, statistics } = mx::outputs(call, quantize.axis, 0);
    let mut arguments = vec![x.argument()];
    arguments.extend(places);
    arguments.extend([Argument::U32(rows as u32), Argument::U32(columns as u32)]);
    if !square {
        arguments.push(Argument::U32(flags));
    }
    arguments.extend([mx::totals(device, 1)?, statistics]);
    Ok(vec![Step::Launch(Launch {
        function,
        grid: [mx::ctas(rows, columns), matrices as u32, 1],
        block: [threads, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes,
        programmatic: false,
        arguments,
    })])
}
