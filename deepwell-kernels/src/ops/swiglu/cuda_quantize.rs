//! `swiglu_quantize.cu`: the gated activation or its backward, with block quantization of the
//! results.

use crate::cuda::launch::row_quantize::{self, Pipe};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::predict::roofline;

const FILE: &str = "swiglu_quantize";

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
        prepare: |call, device| row_quantize::prepare(call, device, FILE, "swiglu", None),
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
            let pipe = Pipe::of_gradients("sm90_swiglu_backward_quantize");
            row_quantize::prepare(call, device, FILE, "swiglu_backward", Some(pipe))
        },
    },
];
