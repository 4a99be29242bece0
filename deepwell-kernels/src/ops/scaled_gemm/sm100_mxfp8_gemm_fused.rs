//! `sm100_mxfp8_gemm_fused.cu`: MXFP8 GEMMs on tcgen05 with a fused epilogue.

use deepwell_ir::{KernelRequest, Op, Target};

use super::operand;
use super::sm100_mxfp8_gemm::{ARCHITECTURES, operand_maps, reject as reject_gemm, sizes_of};
use crate::KernelError;
use crate::runtime::cuda::driver::DevicePtr;
use crate::runtime::cuda::launch::fused_gemm::{self, FusedGemm, MX_OPS};
use crate::runtime::cuda::launch::tcgen05::TileShape;
use crate::runtime::cuda::launch::tensor_maps::Operands;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, TileSelection};

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm100_mxfp8_gemm_fused", MX_OPS, prepare)
        .epilogue(fused_gemm::epilogue)
        .architectures(ARCHITECTURES)
        .reject(reject)
        .predict(predict)
        .select_tile(select_tile)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    fused_gemm::reject(request, reject_gemm, sizes_of)
}

fn select_tile(request: &KernelRequest<'_>, target: &Target) -> TileSelection {
    let cost = FusedGemm::of(request.op, request.input_count).map(|fused| fused.cost());
    let shapes = TileShape::alone(Operands::Mx);
    TileShape::select(shapes, sizes_of(request), cost.unwrap_or_default(), target)
}

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let cost = FusedGemm::of(request.op, request.input_count).map(|fused| fused.cost());
    let (shapes, sizes) = (TileShape::alone(Operands::Mx), sizes_of(request));
    TileShape::predicted_s(shapes, sizes, cost.unwrap_or_default(), request, target)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let op = &call.call.op;
    let Some(fused) = FusedGemm::of(op, call.call.input_count) else {
        return Err(call.refuse("expected a GEMM and what follows it"));
    };
    let (a, b) = (call.input(operand::A), call.input(operand::B));
    let sizes = super::sm100_mxfp8_gemm::sizes(&a.shape, &b.shape);
    let has_bias = matches!(fused.core, Op::ScaledGemm(op) if op.bias);
    let bias = if has_bias { call.input(operand::BIAS).pointer } else { DevicePtr(0) };
    let sm_count = device.sm_count();
    let shape = TileShape::of_call(call, &TileShape::alone(Operands::Mx))?;
    let name = format!("sm100_mxfp8_gemm_fused_{}", shape.name());
    let function = device.function("sm100_mxfp8_gemm_fused", &name, shape.shared_bytes())?;
    let mut arguments = operand_maps(call, device, shape)?;
    arguments.extend(fused_gemm::arguments(call, &fused, device, bias, sizes)?);
    Ok(vec![shape.launch(function, sizes, sm_count, arguments)])
}
