//! `latent_key_value.cu`: keys and values of latent attention, and their backward.

use deepwell_ir::ops::LatentKeyValue;
use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::row_lanes::{RowLanes, THREADS};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Largest number of heads of all tokens.
const ROWS_MAX: usize = i32::MAX as usize;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_latent_key_value", &["latent_key_value"], prepare).reject(reject),
    CudaKernelSpec::new("cuda_latent_key_value_backward", &["latent_key_value_backward"], prepare)
        .reject(reject),
];

fn shape_of(op: &Op) -> Option<(&LatentKeyValue, &'static str)> {
    match op {
        Op::LatentKeyValue(op) => Some((op, "latent_key_value")),
        Op::LatentKeyValueBackward(op) => Some((&op.forward, "latent_key_value_backward")),
        _ => None,
    }
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let (op, _) = shape_of(request.op)?;
    let tokens = request.operands[0].shape[0];
    if tokens.checked_mul(op.heads).is_none_or(|rows| rows > ROWS_MAX) {
        return Some(format!(
            "takes at most {ROWS_MAX} heads, not {} of {tokens} tokens",
            op.heads
        ));
    }
    all_bf16(request, &[0, 1, 2, 3])
}

/// Both kernels take four operands, tokens, heads and the columns of a head.
fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some((op, entry)) = shape_of(&call.call.op) else {
        return Err(call.refuse("expected keys and values of latent attention"));
    };
    let tokens = call.input(0).shape[0];
    let columns = [op.plain_dim, op.rope_dim, op.value_dim];
    let rows = tokens * op.heads;
    let RowLanes { ctas, lanes, suffix } = RowLanes::of_parts(rows, &columns, device.sm_count());
    let function = device.function("latent_key_value", &format!("{entry}{suffix}"), 0)?;
    let mut arguments: Vec<_> = [0, 1, 2, 3].map(|index| call.operand(index).argument()).to_vec();
    arguments.extend([tokens, op.heads].map(|size| Argument::U32(size as u32)));
    arguments.extend(columns.map(|size| Argument::U32(size as u32)));
    arguments.push(Argument::U32(lanes));
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
