//! `layer_norm_quantize.cu`: layer normalization with block quantization of the output.

use crate::cuda::launch::norm_quantize;
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::predict::roofline;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_layer_norm_quantize",
    ops: &["layer_norm", "add_layer_norm"],
    epilogue: norm_quantize::epilogue,
    architectures: &Architecture::ALL,
    library: None,
    reject: norm_quantize::reject,
    predict: roofline,
    workspace_bytes: no_workspace,
    select_tile: None,
    prepare: |call, device| norm_quantize::prepare(call, device, "layer_norm_quantize"),
}];
