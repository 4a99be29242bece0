//! `adamw_single.cu`: one parameter, with its addresses as arguments of the launch.

use deepwell_ir::ops::{AdamW, CopyKind};

use super::cuda::{CHUNK_ELEMENTS, THREADS, parameter_operands};
use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::prepare::{CallView, Device, Step};

/// Whether the op updates one parameter, with moments in FP32 and without quantizing it.
pub(super) fn serves(op: &AdamW) -> bool {
    op.weight_decay.len() == 1
        && op.moments.is_fp32()
        && op.copies.iter().all(|copy| matches!(copy.kind, CopyKind::Cast(_)))
}

/// The launch of an op that [`serves`] accepts; none without elements.
pub(super) fn steps(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    op: &AdamW,
    coefficients: Argument,
) -> Result<Vec<Step>, KernelError> {
    let (addresses, elements) = parameter_operands(call, 0, op.moments)?;
    if elements == 0 {
        return Ok(Vec::new());
    }
    let chunks = elements.div_ceil(CHUNK_ELEMENTS);
    let Some(ctas) = u32::try_from(chunks).ok().filter(|&ctas| ctas <= i32::MAX as u32) else {
        return Err(call.refuse(format!(
            "expected at most {} elements, got {elements}",
            i32::MAX as usize * CHUNK_ELEMENTS
        )));
    };
    let copy = match op.copies.first() {
        Some(_) => call.operand(op.input_count()).pointer,
        None => DevicePtr(0),
    };
    let mut arguments: Vec<Argument> =
        addresses.into_iter().map(|address| Argument::Pointer(DevicePtr(address))).collect();
    arguments.extend([
        Argument::Pointer(copy),
        Argument::U64(elements as u64),
        Argument::F32(op.weight_decay[0]),
        coefficients,
    ]);
    let function = device.function("adamw_single", "adamw_single", 0)?;
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
