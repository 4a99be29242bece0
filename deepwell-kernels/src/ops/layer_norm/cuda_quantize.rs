//! `layer_norm_quantize.cu`: layer normalization with block quantization of the output.

use crate::runtime::cuda::launch::norm_quantize;
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_layer_norm_quantize",
    &["layer_norm", "add_layer_norm"],
    |call, device| norm_quantize::prepare(call, device, "layer_norm_quantize"),
)
.epilogue(norm_quantize::epilogue)
.reject(norm_quantize::reject)];
