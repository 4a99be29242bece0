//! `expert_swiglu_quantize.cu`: the gated activation of experts or its backward, and block
//! quantization of the results.

use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::activation;
use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::mx::TILE;
use crate::runtime::cuda::launch::row_lanes::THREADS;
use crate::runtime::cuda::launch::row_quantize::{self, Pipe, Rows, Tiles};
use crate::runtime::cuda::launch::support::grid_of;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

const FILE: &str = "expert_swiglu_quantize";
/// Index of the backward's result that is the gradient of the gates.
const DGATES: usize = 2;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_expert_swiglu_quantize", &["expert_swiglu"], prepare_forward)
        .epilogue(row_quantize::epilogue)
        .reject(|request| row_quantize::reject_rows(request, &[0, 1], &request.operands[0].shape)),
    CudaKernelSpec::new(
        "cuda_expert_swiglu_backward_quantize",
        &["expert_swiglu_backward"],
        prepare_backward,
    )
    .epilogue(row_quantize::epilogue)
    .reject(|request| row_quantize::reject_rows(request, &[0, 1, 2], &request.operands[0].shape))
    .workspace_bytes(workspace_bytes),
];

/// Partial sums of the gates' gradients: one per row and tile.
fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let shape = &request.operands[0].shape;
    shape[1].div_ceil(TILE) * shape[0] * size_of::<f32>()
}

fn prepare_forward(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::ExpertSwiGlu(op) = call.call.op.leading() else {
        return Err(call.refuse("expected `expert_swiglu` and its quantization"));
    };
    let (name, numbers) = activation(op.activation);
    let rows = Rows {
        shape: &call.input(0).shape,
        // All operands except the pairs' rows.
        inputs: [0, 1, 2, 4].map(|index| call.input(index).argument()).to_vec(),
        rest: numbers.to_vec(),
        tiles: Tiles::Walked,
        pipe: None,
    };
    Ok(vec![rows.launch(call, device, FILE, &format!("expert_swiglu{name}"))?])
}

fn prepare_backward(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let (Op::ExpertSwiGluBackward(op), Op::Fused(fused)) = (call.call.op.leading(), &call.call.op)
    else {
        return Err(call.refuse("expected `expert_swiglu_backward` and its quantization"));
    };
    let Some(position) = fused.position(DGATES) else {
        return Err(call.refuse("expected the gradient of the gates among the outputs"));
    };
    let (name, numbers) = activation(op.activation);
    let [dout, _, _, _, row_of_pairs, pairs] = [0, 1, 2, 3, 4, 5].map(|index| call.input(index));
    let (rows, columns) = (dout.shape[0], dout.shape[1]);
    let parts = Argument::Pointer(call.workspace().0);
    let gradients = Rows {
        shape: &dout.shape,
        inputs: [0, 1, 2, 3, 5].map(|index| call.input(index).argument()).to_vec(),
        rest: [&[parts][..], &numbers].concat(),
        tiles: Tiles::Walked,
        pipe: Some(Pipe::of_gradients("sm90_expert_swiglu_backward_quantize")),
    };
    let entry = format!("expert_swiglu{name}_backward");
    let of_matrices = gradients.launch(call, device, FILE, &entry)?;

    let dgates = call.output(position);
    let function = device.function(FILE, "expert_swiglu_dgates", 0)?;
    let mut arguments = vec![parts];
    arguments.extend([&row_of_pairs, &pairs, &dgates].map(|operand| operand.argument()));
    let sizes = [rows, columns.div_ceil(TILE), dgates.elements()];
    arguments.extend(sizes.map(|size| Argument::U32(size as u32)));
    let ctas = grid_of(rows.max(dgates.elements()), THREADS, device.sm_count());
    Ok(vec![of_matrices, Device::launch(function, ctas, THREADS, 0, arguments)])
}
