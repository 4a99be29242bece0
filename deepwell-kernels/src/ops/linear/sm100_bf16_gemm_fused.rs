//! `sm100_bf16_gemm_fused.cu`: BF16 GEMMs on tcgen05 with a fused epilogue.

use deepwell_ir::{KernelRequest, Op, Target};

use super::sm100_bf16_gemm::{ARCHITECTURES, Form, operand_maps, reject as reject_gemm};
use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::fused_gemm::{self, BF16_OPS, FusedGemm};
use crate::runtime::cuda::launch::gemm::LinearSizes;
use crate::runtime::cuda::launch::tcgen05::{GemmSizes, TileShape};
use crate::runtime::cuda::launch::tensor_maps::Operands;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, TileSelection};

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm100_bf16_gemm_fused", BF16_OPS, prepare)
        .epilogue(fused_gemm::epilogue)
        .architectures(ARCHITECTURES)
        .reject(reject)
        .predict(predict)
        .select_tile(select_tile)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    fused_gemm::reject(request, reject_gemm, sizes_of)
}

fn sizes_of(request: &KernelRequest<'_>) -> GemmSizes {
    let [first, second] = [0, 1].map(|index| &request.operands[index].shape);
    let gemm = request.op.leading();
    Form::new(gemm, LinearSizes::new(gemm, first, second)).sizes
}

fn select_tile(request: &KernelRequest<'_>, target: &Target) -> TileSelection {
    let cost = FusedGemm::of(request.op, request.input_count).map(|fused| fused.cost());
    let shapes = TileShape::alone(Operands::Bf16);
    TileShape::select(shapes, sizes_of(request), cost.unwrap_or_default(), target)
}

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let cost = FusedGemm::of(request.op, request.input_count).map(|fused| fused.cost());
    let shapes = TileShape::alone(Operands::Bf16);
    let sizes = sizes_of(request);
    TileShape::predicted_s(shapes, sizes, cost.unwrap_or_default(), request, target)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some(fused) = FusedGemm::of(&call.call.op, call.call.input_count) else {
        return Err(call.refuse("expected a GEMM and what follows it"));
    };
    let (a, b) = (call.input(0), call.input(1));
    let form = Form::new(fused.core, LinearSizes::new(fused.core, &a.shape, &b.shape));
    let bias = match fused.core {
        Op::Linear(linear) if linear.bias => call.input(2).pointer,
        _ => DevicePtr(0),
    };
    let sm_count = device.sm_count();
    let shape = TileShape::of_call(call, &TileShape::alone(Operands::Bf16))?;
    let name = format!("sm100_bf16_gemm_fused_{}_{}", form.name, shape.name());
    let function = device.function("sm100_bf16_gemm_fused", &name, shape.shared_bytes())?;
    let mut arguments =
        operand_maps(&form, shape, &a, &b, device)?.map(Argument::TensorMap).to_vec();
    arguments.extend(fused_gemm::arguments(call, &fused, device, bias, form.sizes)?);
    Ok(vec![shape.launch(function, form.sizes, sm_count, arguments)])
}
