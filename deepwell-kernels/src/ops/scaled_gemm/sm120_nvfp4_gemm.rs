//! `sm120_nvfp4_gemm.cu`: NVFP4 GEMMs on tensor cores that apply scales of blocks in `mma.sync`.

use deepwell_ir::{DType, KernelRequest};
use deepwell_precision::QuantFormat;

use super::sm90_dequantized_nvfp4_gemm::{b_input, gemm_of, refuse_result};
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::gemm::{extents_fit, tile_ctas};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{SM120_NVFP4, mma_sync_gemm};

/// Threads of a CTA, as in the source.
pub(crate) const THREADS: u32 = 256;
/// Two stages of two 16 KiB tiles and four words of scales for each of their rows.
pub(crate) const SHARED_BYTES: u32 = 2 * (2 * 16 * 1024 + 256 * 16);
/// Elements of a 16-byte copy.
pub(crate) const WIDTH: usize = 32;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm120_nvfp4_gemm", &["scaled_gemm"], prepare)
        .architectures(&[Architecture::Sm120a])
        .family(QuantFormat::NVFP4)
        .reject(reject)
        .predict(|request, target| mma_sync_gemm(request, target, SM120_NVFP4))];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    refuse_result(request).or_else(|| extents_fit(request, &[0, b_input(request)]))
}

/// Name of the kernel for a result of `output` and a contraction of `k`.
fn kernel(output: DType, k: usize) -> String {
    let element = if output == DType::Bf16 { "bf16" } else { "f32" };
    let by_byte = if k.is_multiple_of(WIDTH) { "" } else { "_scalar" };
    format!("sm120_nvfp4_gemm_{element}{by_byte}")
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some(op) = gemm_of(&call.call.op) else {
        return Err(call.refuse(format!("expected scaled_gemm, got {}", call.call.op.name())));
    };
    let (a, b, out) = (call.input(0), call.input(op.b_input()), call.output(0));
    let (rows, columns, k) = (a.shape[0], b.shape[0], a.shape[1]);
    let function = device.function("sm120_nvfp4_gemm", &kernel(out.dtype, k), SHARED_BYTES)?;
    let mut arguments: Vec<Argument> =
        (0..op.plane_inputs()).map(|index| call.input(index).argument()).collect();
    let bias = if op.bias { call.input(op.plane_inputs()).pointer } else { DevicePtr(0) };
    arguments.extend([Argument::Pointer(bias), out.argument()]);
    arguments.extend([rows, columns, k].map(|size| Argument::I32(size as i32)));
    arguments.push(Argument::U32(call.accumulate().into()));
    let ctas = tile_ctas(rows, columns);
    Ok(vec![Device::launch(function, ctas, THREADS, SHARED_BYTES, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_vectors_only_where_rows_are_16_bytes() {
        for (output, k, expected) in [
            (DType::Bf16, 64, "sm120_nvfp4_gemm_bf16"),
            (DType::F32, 32, "sm120_nvfp4_gemm_f32"),
            (DType::Bf16, 48, "sm120_nvfp4_gemm_bf16_scalar"),
            (DType::F32, 33, "sm120_nvfp4_gemm_f32_scalar"),
        ] {
            assert_eq!(kernel(output, k), expected, "{output} {k}");
        }
    }
}
