//! `sm120_mxfp8_gemm.cu`: MXFP8 GEMMs at any granularity, on tensor cores that apply scales of
//! blocks of 32.
//!
//! Accepts the same requests as [`super::mxfp8_gemm`], with the same launch. In memory there is one
//! scale per 32 elements of a row, even if 128 elements or squares share a scale.

use super::mxfp8_gemm::{prepare_from, reject};
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{SM120_MXFP8, mma_sync_gemm};

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm120_mxfp8_gemm", &["scaled_gemm"], prepare)
        .architectures(&[Architecture::Sm120a])
        .reject(reject)
        .predict(|request, target| mma_sync_gemm(request, target, SM120_MXFP8))];

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    prepare_from("sm120_mxfp8_gemm", call, device)
}

#[cfg(test)]
mod tests {
    use deepwell_ir::{DType, GemmKind, KernelCatalog, KernelRequest, Op, OperandType, ops};
    use deepwell_precision::{BlockShape, Granularity, QuantFormat};

    use crate::cuda::{Architecture, CudaCatalog, cuda_target};

    /// Every granularity is supported on one architecture; refusals there have a reason.
    #[test]
    fn block_scales_where_tensor_cores_have_them() {
        let square = QuantFormat::MXFP8.square();
        let wide = square.with_granularity(Granularity::G128);
        let (kernel, hopper) = ("cuda_sm120_mxfp8_gemm", "cuda_sm90_mxfp8_gemm");
        let elsewhere = |name| Some(format!("runs on blackwell-sm120, not on {name}"));
        let sm120 = Architecture::Sm120a;
        for (architecture, b, k, expected, refusal) in [
            (sm120, QuantFormat::MXFP8, 64usize, kernel, None),
            (sm120, square, 64, kernel, None),
            (sm120, wide, 256, kernel, None),
            (sm120, wide, 100, kernel, None),
            (sm120, QuantFormat::MXFP8, 0, kernel, None),
            (Architecture::Sm90a, wide, 256, hopper, elsewhere("hopper-sm90")),
        ] {
            let a = b.with_shape(BlockShape::Row);
            let (kind, output) = (GemmKind::Fprop, DType::Bf16);
            let op: Op = ops::ScaledGemm { kind, output, bias: false, a, b }.into();
            let operands = [
                (DType::E4m3, vec![4, k]),
                (DType::E8m0, vec![1, k.div_ceil(128), 512]),
                (DType::E4m3, vec![3, k]),
                (DType::E8m0, vec![1, k.div_ceil(128), 512]),
                (DType::Bf16, vec![4, 3]),
            ]
            .map(|(dtype, shape)| OperandType { dtype, shape });
            let request = KernelRequest { op: &op, operands: &operands, input_count: 4 };
            let selection =
                CudaCatalog.select(&request, &cuda_target(architecture, 132, &[])).unwrap();
            assert_eq!(selection.choice.kernel, expected, "{architecture:?} {b:?} {k}");
            let of_ours = selection.rejected.into_iter().find(|rejected| rejected.kernel == kernel);
            assert_eq!(of_ours.map(|rejected| rejected.reason), refusal, "{architecture:?}");
        }
    }
}
