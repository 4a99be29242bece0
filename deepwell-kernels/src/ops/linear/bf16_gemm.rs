//! `bf16_gemm.cu`: the three GEMMs of a linear layer, on `mma.sync`.

use deepwell_ir::{DType, KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::gemm::{LinearSizes, extents_fit, tile_ctas};
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

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_bf16_gemm", &["linear", "linear_dgrad", "linear_wgrad"], prepare)
        .reject(reject)
        .predict(|request, target| mma_sync_gemm(request, target, MMA_SYNC_BF16))];

/// Accepts BF16 operands with FP32 weight gradients, with extents that fit 32-bit indices.
pub(crate) fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let inputs: Vec<usize> = (0..request.input_count).collect();
    let output = request.operands[request.input_count].dtype;
    let expected = match request.op {
        Op::LinearWgrad(_) => DType::F32,
        _ => DType::Bf16,
    };
    all_bf16(request, &inputs)
        .or_else(|| (output != expected).then(|| format!("gives {expected}, not {output}")))
        .or_else(|| extents_fit(request, &[0, 1]))
}

/// Name of the kernel, and number of rows and columns of its result.
fn kernel(op: &Op, sizes: LinearSizes) -> (&'static str, usize, usize) {
    let LinearSizes { tokens, outputs, inputs } = sizes;
    // Vector kernels need whole 16-byte rows in all copied operands: x and w, dy and w, dy and x.
    let is_whole = |lengths: &[usize]| lengths.iter().all(|length| length.is_multiple_of(WIDTH));
    match op {
        Op::LinearDgrad(_) if is_whole(&[outputs, inputs]) => ("bf16_gemm_dgrad", tokens, inputs),
        Op::LinearDgrad(_) => ("bf16_gemm_dgrad_scalar", tokens, inputs),
        Op::LinearWgrad(_) if is_whole(&[outputs, inputs]) => ("bf16_gemm_wgrad", outputs, inputs),
        Op::LinearWgrad(_) => ("bf16_gemm_wgrad_scalar", outputs, inputs),
        _ if is_whole(&[inputs]) => ("bf16_gemm_linear", tokens, outputs),
        _ => ("bf16_gemm_linear_scalar", tokens, outputs),
    }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let op = &call.call.op;
    let first = call.input(0);
    let second = call.input(1);
    let result = call.output(0);
    let sizes = LinearSizes::new(op, &first.shape, &second.shape);
    let (name, rows, columns) = kernel(op, sizes);
    let function = device.function("bf16_gemm", name, SHARED_BYTES)?;

    let mut arguments = vec![first.argument(), second.argument()];
    if let Op::Linear(linear) = op {
        let bias = if linear.bias { call.input(2).pointer } else { DevicePtr(0) };
        arguments.push(Argument::Pointer(bias));
    }
    arguments.push(result.argument());
    arguments
        .extend([sizes.tokens, sizes.outputs, sizes.inputs].map(|size| Argument::I32(size as i32)));
    if let Op::LinearWgrad(_) = op {
        arguments.push(Argument::U32(call.accumulate().into()));
    }
    let ctas = tile_ctas(rows, columns);
    Ok(vec![Device::launch(function, ctas, THREADS, SHARED_BYTES, arguments)])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::{OperandType, ops};

    use super::*;

    fn request<'a>(op: &'a Op, operands: &'a [OperandType]) -> KernelRequest<'a> {
        KernelRequest { op, operands, input_count: operands.len() - 1 }
    }

    fn operand(dtype: DType, shape: [usize; 2]) -> OperandType {
        OperandType { dtype, shape: shape.to_vec() }
    }

    #[test]
    fn vectors_only_where_rows_allow_them() {
        let (linear, dgrad, wgrad): (Op, Op, Op) = (
            ops::Linear { bias: false }.into(),
            ops::LinearDgrad {}.into(),
            ops::LinearWgrad {}.into(),
        );
        // Tokens, outputs, inputs; `linear` never copies rows of y's width.
        for (op, tokens, outputs, inputs, expected) in [
            (&linear, 5, 7, 16, ("bf16_gemm_linear", 5, 7)),
            (&linear, 8, 8, 12, ("bf16_gemm_linear_scalar", 8, 8)),
            (&dgrad, 5, 8, 16, ("bf16_gemm_dgrad", 5, 16)),
            (&dgrad, 8, 7, 16, ("bf16_gemm_dgrad_scalar", 8, 16)),
            (&dgrad, 8, 8, 15, ("bf16_gemm_dgrad_scalar", 8, 15)),
            (&wgrad, 5, 8, 16, ("bf16_gemm_wgrad", 8, 16)),
            (&wgrad, 8, 9, 16, ("bf16_gemm_wgrad_scalar", 9, 16)),
            (&wgrad, 8, 8, 17, ("bf16_gemm_wgrad_scalar", 8, 17)),
        ] {
            let sizes = LinearSizes { tokens, outputs, inputs };
            assert_eq!(kernel(op, sizes), expected, "{} {sizes:?}", op.name());
        }
    }

    #[test]
    fn other_types_are_refused_with_the_reason() {
        let (linear, wgrad): (Op, Op) =
            (ops::Linear { bias: false }.into(), ops::LinearWgrad {}.into());
        let (bf16, f32) = (DType::Bf16, DType::F32);
        let huge = i32::MAX as usize;
        for (op, first, second, output, expected) in [
            (&linear, operand(bf16, [4, 8]), operand(bf16, [3, 8]), bf16, None),
            (
                &linear,
                operand(f32, [4, 8]),
                operand(f32, [3, 8]),
                f32,
                Some("takes bf16 operands, not f32"),
            ),
            (&wgrad, operand(bf16, [4, 8]), operand(bf16, [4, 3]), f32, None),
            (
                &wgrad,
                operand(bf16, [4, 8]),
                operand(bf16, [4, 3]),
                bf16,
                Some("gives f32, not bf16"),
            ),
            (
                &linear,
                operand(bf16, [huge, 8]),
                operand(bf16, [3, 8]),
                bf16,
                Some("takes extents up to 2147483519, not 2147483647"),
            ),
        ] {
            let operands = [first, second, operand(output, [0, 0])];
            let reason = reject(&request(op, &operands));
            assert_eq!(reason.as_deref(), expected, "{}", op.name());
        }
    }
}
