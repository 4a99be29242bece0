//! `swiglu_quantize.cu`: the gated activation or its backward, and the block quantization of the
//! results.

use crate::cuda::launch::row_quantize;
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::predict::roofline;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec {
        name: "cuda_swiglu_quantize",
        ops: &["swiglu"],
        epilogue: row_quantize::epilogue,
        architectures: &Architecture::ALL,
        library: None,
        reject: row_quantize::reject,
        predict: roofline,
        workspace_bytes: no_workspace,
        select_tile: None,
        prepare: |call, device| row_quantize::prepare(call, device, "swiglu_quantize", "swiglu"),
    },
    CudaKernelSpec {
        name: "cuda_swiglu_backward_quantize",
        ops: &["swiglu_backward"],
        epilogue: row_quantize::epilogue,
        architectures: &Architecture::ALL,
        library: None,
        reject: row_quantize::reject,
        predict: roofline,
        workspace_bytes: no_workspace,
        select_tile: None,
        prepare: |call, device| {
            row_quantize::prepare(call, device, "swiglu_quantize", "swiglu_backward")
        },
    },
];
