//! `swiglu_quantize.cu`: the gated activation or its backward, with block quantization of the
//! results.

use crate::runtime::cuda::launch::row_quantize::{self, Pipe};
use crate::runtime::cuda::spec::CudaKernelSpec;

const FILE: &str = "swiglu_quantize";

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_swiglu_quantize", &["swiglu"], |call, device| {
        row_quantize::prepare(call, device, FILE, "swiglu", None)
    })
    .epilogue(row_quantize::epilogue)
    .reject(row_quantize::reject),
    CudaKernelSpec::new("cuda_swiglu_backward_quantize", &["swiglu_backward"], |call, device| {
        let pipe = Pipe::of_gradients("sm90_swiglu_backward_quantize");
        row_quantize::prepare(call, device, FILE, "swiglu_backward", Some(pipe))
    })
    .epilogue(row_quantize::epilogue)
    .reject(row_quantize::reject),
];
