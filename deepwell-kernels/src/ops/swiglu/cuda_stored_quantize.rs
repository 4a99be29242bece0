//! `stored_swiglu_quantize.cu`: the gated activation or its backward from gate and up in MXFP8,
//! with block quantization of the results.

use super::cuda_stored::reject_format;
use crate::runtime::cuda::launch::row_quantize::{self, Pipe};
use crate::runtime::cuda::spec::CudaKernelSpec;

const FILE: &str = "stored_swiglu_quantize";

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_stored_swiglu_quantize", &["stored_swiglu"], |call, device| {
        row_quantize::prepare(call, device, FILE, "stored_swiglu", None)
    })
    .epilogue(row_quantize::epilogue)
    .reject(|request| {
        let shape = &request.operands[0].shape;
        reject_format(request).or_else(|| row_quantize::reject_rows(request, &[], shape))
    }),
    CudaKernelSpec::new(
        "cuda_stored_swiglu_backward_quantize",
        &["stored_swiglu_backward"],
        |call, device| {
            let pipe = Pipe::of_gradients("sm90_stored_swiglu_backward_quantize");
            row_quantize::prepare(call, device, FILE, "stored_swiglu_backward", Some(pipe))
        },
    )
    .epilogue(row_quantize::epilogue)
    .reject(|request| {
        let shape = &request.operands[0].shape;
        reject_format(request).or_else(|| row_quantize::reject_rows(request, &[0], shape))
    }),
];
