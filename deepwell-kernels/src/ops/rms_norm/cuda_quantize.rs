//! `rms_norm_quantize.cu`: root-mean-square normalization with block quantization of the output.

use crate::runtime::cuda::launch::norm_quantize;
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_rms_norm_quantize",
    &["rms_norm", "add_rms_norm"],
    |call, device| norm_quantize::prepare(call, device, "rms_norm_quantize"),
)
.epilogue(norm_quantize::epilogue)
.reject(norm_quantize::reject)];
