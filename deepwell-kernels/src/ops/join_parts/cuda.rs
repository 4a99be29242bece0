//! `join_parts.cu`: contiguous parts of a matrix, placed side by side.

use deepwell_ir::{KernelRequest, Op, OperandType};

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::grid_of;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Bytes that a thread moves at a time.
const VECTOR_BYTES: usize = 16;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_join_parts", &["join_parts"], prepare).reject(reject)];

/// Bytes per row of a part.
fn part_bytes(x: &OperandType) -> Option<usize> {
    Some(x.storage_bytes()? / x.shape.first().copied()?.max(1))
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    match part_bytes(&request.operands[0]) {
        Some(bytes) if bytes.is_multiple_of(VECTOR_BYTES) => None,
        bytes => {
            let got = bytes.map_or("more than there are".to_string(), |bytes| bytes.to_string());
            Some(format!("moves rows of a multiple of {VECTOR_BYTES} bytes, got {got}"))
        }
    }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::JoinParts(op) = &call.call.op else { return Err(call.refuse("it joins nothing")) };
    let (x, joined) = (call.input(0), call.output(0));
    let rows = joined.shape[0];
    let units = x.bytes() / VECTOR_BYTES;
    let of_part = units / (op.parts * rows).max(1);
    let function = device.function("join_parts", "join_parts", 0)?;
    let ctas = grid_of(units, THREADS, device.sm_count());
    let sizes = [op.parts, rows, of_part].map(|size| Argument::U32(size as u32));
    let arguments = [x.argument(), joined.argument()].into_iter().chain(sizes).collect();
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}
