//! Exchanges between ranks, by whatever the backend is given for them.

use deepwell_ir::ops::Collective;
use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::cuda::catalog::COLLECTIVES;
use crate::cuda::comm::DeviceExchange;
use crate::cuda::driver::DevicePtr;
use crate::cuda::prepare::{CallView, Device, DeviceTensor, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::epilogue::no_epilogue;
use crate::predict::roofline;

pub(super) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_collective",
    ops: &Collective::NAMES,
    epilogue: no_epilogue,
    architectures: &Architecture::ALL,
    library: Some(COLLECTIVES),
    reject,
    predict: roofline,
    workspace_bytes: no_workspace,
    select_tile: None,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::Collective(op) = request.op else {
        return Some(format!("exchanges data, does not compute `{}`", request.op.name()));
    };
    let (inputs, outputs) = request.operands.split_at(request.input_count);
    op.check(inputs, outputs).err().map(|error| error.to_string())
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Collective(op) = &call.call.op else {
        return Err(call.refuse("it exchanges nothing"));
    };
    let ranks = &call.program.target.ranks;
    let dtype = call.operand(0).dtype;
    let exchange = crate::Exchange::of(op, ranks, dtype);
    let exchange = exchange.map_err(|error| call.refuse(error.to_string()))?;
    let place = |tensor: Option<DeviceTensor>| {
        tensor.map_or((DevicePtr(0), 0), |tensor| (tensor.pointer, tensor.bytes()))
    };
    let (input, input_bytes) = place((call.call.input_count > 0).then(|| call.input(0)));
    let (output, output_bytes) = place((call.output_count() > 0).then(|| call.output(0)));
    let exchange = DeviceExchange { exchange, input, input_bytes, output, output_bytes };
    let step = device.exchange(&exchange, (ranks.rank, ranks.world_size));
    Ok(vec![step.map_err(|error| call.refuse(error.to_string()))?])
}
