//! `sm90_bf16_gemm.cu`: the three GEMMs of a linear layer, on wgmma. A result of few tiles over a
//! long contraction is computed by split-K; `sum_parts.cu` sums the parts.

use deepwell_ir::{GemmKind, KernelRequest, Op};

use super::sm90_bf16_tiles::{self, BOX_ROWS, Gemm};
use super::sm100_bf16_gemm::{Form, reject};
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{DevicePtr, TensorMap};
use crate::runtime::cuda::launch::gemm::LinearSizes;
use crate::runtime::cuda::launch::tcgen05::GemmSizes;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes, mn_major_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_sm90_bf16_gemm",
    &["linear", "linear_dgrad", "linear_wgrad"],
    prepare,
)
.architectures(&[Architecture::Sm90a])
.reject(reject)
.predict(|request, target| sm90_bf16_tiles::predicted_s(sizes_of(request), target))
.workspace_bytes(|request, target| sm90_bf16_tiles::workspace_bytes(sizes_of(request), target))
.select_tile(|request, target| sm90_bf16_tiles::select_tile(sizes_of(request), target))];

fn sizes_of(request: &KernelRequest<'_>) -> GemmSizes {
    let [first, second] = [0, 1].map(|index| &request.operands[index].shape);
    Form::new(request.op, LinearSizes::new(request.op, first, second)).sizes
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let op = &call.call.op;
    let (a, b) = (call.input(0), call.input(1));
    let form = Form::new(op, LinearSizes::new(op, &a.shape, &b.shape));
    let mut map = |tensor: &DeviceTensor, is_k_major: bool| -> Result<TensorMap, KernelError> {
        let boxes = match is_k_major {
            true => k_major_boxes(tensor, Operands::Bf16, BOX_ROWS),
            false => mn_major_boxes(tensor, Operands::Bf16),
        };
        device.tensor_map(&boxes)
    };
    let maps = [map(&a, form.a_k_major)?, map(&b, form.b_k_major)?];
    let bias = match op {
        Op::Linear(linear) if linear.bias => call.input(2).pointer,
        _ => DevicePtr(0),
    };
    let kind = match op {
        Op::LinearDgrad(_) => GemmKind::Dgrad,
        Op::LinearWgrad(_) => GemmKind::Wgrad,
        _ => GemmKind::Fprop,
    };
    let gemm = Gemm {
        kind,
        sizes: form.sizes,
        maps,
        tensor_scales: [DevicePtr(0); 2],
        bias,
        out: call.output(0),
        accumulate: call.accumulate(),
        workspace: call.workspace(),
    };
    gemm.steps(call, device)
}
