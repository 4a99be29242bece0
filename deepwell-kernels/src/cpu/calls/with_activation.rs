//! A product and a function of its elements as one call: one kernel after the other, with a
//! product that the call does not store at the start of its scratch.

use deepwell_ir::ops::WithActivation;
use deepwell_ir::{ALIGNMENT_BYTES, ByteRange, KernelRequest, MemoryKind, Op, OperandType, Value};

use super::{KernelError, Operands, Run, run_of};

/// Bytes of scratch for a product that is not stored, which is as large as the `result`.
fn scratch_bytes(op: &WithActivation, result: &OperandType) -> usize {
    let elements: usize = result.shape.iter().product();
    let bytes = elements * result.dtype.size_bytes();
    if op.keep { 0 } else { bytes.next_multiple_of(ALIGNMENT_BYTES) }
}

/// Scratch of the whole, given that of the product alone.
pub(crate) fn workspace_bytes(
    request: &KernelRequest<'_>,
    op: &WithActivation,
    of_product: impl FnOnce(&KernelRequest<'_>) -> usize,
) -> usize {
    let Some(result) = request.operands.last() else { return 0 };
    let count = op.product_input_count(request.input_count);
    let mut operands = request.operands[..count].to_vec();
    operands.push(result.clone());
    let product = KernelRequest { op: &op.product, operands: &operands, input_count: count };
    scratch_bytes(op, result) + of_product(&product)
}

pub(crate) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::WithActivation(op) = op else { return Err(operands.unknown_kernel()) };
    let call = operands.call;
    let refused = |what: String| KernelError::Run { call: call.name.clone(), what };
    let (inputs, outputs) = operands.values.split_at(operands.input_count);
    let &[.., result] = outputs else {
        return Err(refused("expected an output, got none".to_string()));
    };
    let (expected, got) = (op.output_count(), outputs.len());
    if got != expected {
        return Err(refused(format!("expected {expected} outputs, got {got}")));
    }
    let result_type = OperandType { dtype: result.dtype, shape: result.shape.clone() };
    let bytes = scratch_bytes(op, &result_type);
    let workspace = operands.workspace;
    if workspace.bytes < bytes {
        let got = workspace.bytes;
        return Err(refused(format!("expected a workspace of at least {bytes} bytes, got {got}")));
    }
    let in_scratch = Value {
        memory: MemoryKind::Workspace,
        range: ByteRange { offset: workspace.offset, bytes: result.range.bytes },
        slot_stride_bytes: 0,
        ..result.clone()
    };
    let product = if op.keep { outputs[0] } else { &in_scratch };
    let (of_product, others) = inputs.split_at(op.product_input_count(inputs.len()));
    let part = |inputs: Vec<&Value>, output: &Value, op| {
        let input_count = inputs.len();
        let values = inputs.into_iter().chain([output]).collect();
        let rest = ByteRange { offset: workspace.offset + bytes, bytes: workspace.bytes - bytes };
        run_of(op, &Operands::new(operands.site(), values, input_count, rest))
    };
    let multiply = part(of_product.to_vec(), product, &op.product)?;
    let of_elements = [product].into_iter().chain(others.iter().copied()).collect();
    let activate = part(of_elements, result, &op.activation)?;
    Ok(Box::new(move |arena| {
        multiply(arena)?;
        activate(arena)
    }))
}
