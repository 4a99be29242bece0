//! `mxfp8_gemm.cu`: MXFP8 GEMMs at any granularity, on `mma.sync`.

use deepwell_ir::{DType, KernelRequest, Op};

use super::operand;
use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::gemm::{extents_fit, tile_ctas};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{MMA_SYNC_MXFP8, mma_sync_gemm};

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Three stages of two 16 KiB tiles and the scales of their rows.
const SHARED_BYTES: u32 = 3 * (2 * 16 * 1024 + 1024);
/// Elements of a 16-byte copy.
const WIDTH: usize = 16;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_mxfp8_gemm", &["scaled_gemm"], prepare)
        .reject(reject)
        .predict(|request, target| mma_sync_gemm(request, target, MMA_SYNC_MXFP8))];

/// Reason for refusing a GEMM in this kernel or in `sm120_mxfp8_gemm`.
pub(crate) fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let output = request.operands[request.input_count].dtype;
    if !matches!(output, DType::Bf16 | DType::F32) {
        return Some(format!("gives bf16 or f32, not {output}"));
    }
    if let Some(bias) = request.operands[operand::BIAS..request.input_count].first()
        && bias.dtype != output
    {
        return Some(format!("adds a bias of the result's type, {output}, not {}", bias.dtype));
    }
    extents_fit(request, &[0, 2])
}

/// Name of the kernel of `<stem>.cu` for a result of `output` and a contraction of `k`.
fn kernel(stem: &str, output: DType, k: usize) -> String {
    let element = if output == DType::Bf16 { "bf16" } else { "f32" };
    let by_code = if k.is_multiple_of(WIDTH) { "" } else { "_scalar" };
    format!("{stem}_{element}{by_code}")
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    prepare_from("mxfp8_gemm", call, device)
}

/// Launches a kernel of `<stem>.cu`. All kernels built from `epilogue/mxfp8_gemm.cuh` share the
/// names after the stem, the parameters and the grid.
pub(crate) fn prepare_from(
    stem: &'static str,
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let (a, b, out) = (call.input(operand::A), call.input(operand::B), call.output(0));
    let (rows, columns, k) = (a.shape[0], b.shape[0], a.shape[1]);
    let has_bias = matches!(&call.call.op, Op::ScaledGemm(op) if op.bias);
    let bias = if has_bias { call.input(operand::BIAS).pointer } else { DevicePtr(0) };
    let function = device.function(stem, &kernel(stem, out.dtype, k), SHARED_BYTES)?;
    let arguments = vec![
        a.argument(),
        call.input(operand::A_SCALES).argument(),
        b.argument(),
        call.input(operand::B_SCALES).argument(),
        Argument::Pointer(bias),
        out.argument(),
        Argument::I32(rows as i32),
        Argument::I32(columns as i32),
        Argument::I32(k as i32),
        Argument::U32(call.accumulate().into()),
    ];
    let ctas = tile_ctas(rows, columns);
    Ok(vec![Device::launch(function, ctas, THREADS, SHARED_BYTES, arguments)])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::{GemmKind, OperandType, ops};
    use deepwell_precision::QuantFormat;

    use super::*;

    #[test]
    fn whole_vectors_only_where_the_contraction_allows_them() {
        for (stem, output, k, expected) in [
            ("mxfp8_gemm", DType::Bf16, 0, "mxfp8_gemm_bf16"),
            ("mxfp8_gemm", DType::Bf16, 48, "mxfp8_gemm_bf16"),
            ("mxfp8_gemm", DType::Bf16, 40, "mxfp8_gemm_bf16_scalar"),
            ("mxfp8_gemm", DType::F32, 32, "mxfp8_gemm_f32"),
            ("sm120_mxfp8_gemm", DType::F32, 32, "sm120_mxfp8_gemm_f32"),
            ("sm120_mxfp8_gemm", DType::F32, 33, "sm120_mxfp8_gemm_f32_scalar"),
        ] {
            assert_eq!(kernel(stem, output, k), expected, "{output} {k}");
        }
    }

    #[test]
    fn a_bias_has_the_type_of_the_result() {
        let operand = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
        let spec = QuantFormat::MXFP8;
        for (bias, output, expected) in [
            (None, DType::Bf16, None),
            (None, DType::F32, None),
            (Some(DType::Bf16), DType::Bf16, None),
            (Some(DType::F32), DType::F32, None),
            (
                Some(DType::Bf16),
                DType::F32,
                Some("adds a bias of the result's type, f32, not bf16"),
            ),
        ] {
            let kind = GemmKind::Fprop;
            let op: Op =
                ops::ScaledGemm { kind, output, bias: bias.is_some(), a: spec, b: spec }.into();
            let mut operands = vec![
                operand(DType::E4m3, &[4, 64]),
                operand(DType::E8m0, &[1, 1, 512]),
                operand(DType::E4m3, &[3, 64]),
                operand(DType::E8m0, &[1, 1, 512]),
            ];
            operands.extend(bias.map(|dtype| operand(dtype, &[3])));
            let input_count = operands.len();
            operands.push(operand(output, &[4, 3]));
            let request = KernelRequest { op: &op, operands: &operands, input_count };
            assert_eq!(reject(&request).as_deref(), expected, "{bias:?} {output}");
        }
    }
}
