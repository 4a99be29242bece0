//! `rms_norm_quantize.cu`: root-mean-square normalization with block quantization of the output.

use crate::cuda::launch::norm_quantize;
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::predict::roofline;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_rms_norm_quantize",
    ops: &["rms_norm", "add_rms_norm"],
    epilogue: norm_quantize::epilogue,
    architectures: &Architecture::ALL,
    library: None,
    reject: norm_quantize::reject,
    predict: roofline,
    workspace_bytes: no_workspace,
    select_tile: None,
    prepare: |call, device| norm_quantize::prepare(call, device, "rms_norm_quantize"),
}];
