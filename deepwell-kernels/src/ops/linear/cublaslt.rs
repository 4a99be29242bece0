//! The three GEMMs of a linear layer on cuBLASLt; fprop and dgrad also with an added residual.

use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::runtime::cuda::architecture::CUBLASLT;
use crate::runtime::cuda::blas::Matmul;
use crate::runtime::cuda::launch::gemm::{
    LIBRARY_ALIGNMENT_BYTES, LIBRARY_SCRATCH_BYTES, added_to, align_for_library, matrix, not_empty,
};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::epilogue::EpilogueSet;
use crate::runtime::predict::{CUBLASLT_BF16, Rates};

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    SPEC,
    SPEC.name("cublaslt_linear_residual")
        .ops(&["linear", "linear_dgrad"])
        .epilogue(|_| EpilogueSet::RESIDUAL),
];

const SPEC: CudaKernelSpec =
    CudaKernelSpec::new("cublaslt_linear", &["linear", "linear_dgrad", "linear_wgrad"], prepare)
        .library(CUBLASLT)
        .reject(reject)
        .predict(|request, target| Rates::of(target).roofline_s(request, CUBLASLT_BF16))
        .workspace_bytes(workspace_bytes);

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let inputs: Vec<usize> = (0..request.input_count).collect();
    all_bf16(request, &inputs).or_else(|| not_empty(request, &inputs))
}

fn workspace_bytes(_: &KernelRequest<'_>, _: &Target) -> usize {
    LIBRARY_SCRATCH_BYTES + LIBRARY_ALIGNMENT_BYTES
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let op = call.call.op.leading();
    let (first, second) = (call.input(0), call.input(1));
    // x wᵀ, dy w, dyᵀ x.
    let (a_transposed, b_transposed) = match op {
        Op::LinearDgrad(_) => (false, false),
        Op::LinearWgrad(_) => (true, false),
        _ => (false, true),
    };
    let out = matrix(&call.output(0));
    let matmul = Matmul {
        a: matrix(&first),
        a_transposed,
        b: matrix(&second),
        b_transposed,
        out,
        added: added_to(call, &out),
        bias: match op {
            Op::Linear(linear) if linear.bias => Some(call.input(2).pointer),
            _ => None,
        },
        scales: None,
        workspace: align_for_library(call.workspace().0),
        workspace_bytes: LIBRARY_SCRATCH_BYTES,
    };
    Ok(vec![device.matmul(&matmul)?])
}
