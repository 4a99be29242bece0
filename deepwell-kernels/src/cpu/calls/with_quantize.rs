//! An op and the quantization of its outputs as one call: one kernel after the other, with what
//! the call does not store in its scratch.

use deepwell_ir::ops::WithQuantize;
use deepwell_ir::{ALIGNMENT_BYTES, ByteRange, Call, MemoryKind, Op, OpError, OperandType, Value};

use super::{KernelError, Operands, Run, run_of};

/// Where outputs of the producer lie that the call does not store: at the start of its scratch,
/// with the producer's own scratch behind them.
pub(crate) struct Scratch {
    /// All outputs of the producer alone.
    pub(crate) outputs: Vec<OperandType>,
    /// Place of each of them within the scratch; none for those that the call stores.
    ranges: Vec<Option<ByteRange>>,
    /// Where the producer's own scratch begins.
    pub(crate) bytes: usize,
}

impl Scratch {
    pub(crate) fn new(op: &WithQuantize, inputs: &[OperandType]) -> Result<Scratch, OpError> {
        let outputs = op.producer.outputs_of(inputs)?;
        let mut bytes = 0;
        let ranges = outputs
            .iter()
            .enumerate()
            .map(|(index, output)| {
                if op.keeps(index) {
                    return None;
                }
                let elements: usize = output.shape.iter().product();
                let range =
                    ByteRange { offset: bytes, bytes: elements * output.dtype.size_bytes() };
                bytes += range.bytes.next_multiple_of(ALIGNMENT_BYTES);
                Some(range)
            })
            .collect();
        Ok(Scratch { outputs, ranges, bytes })
    }

    /// The outputs that the call does not store, as values in its scratch.
    fn values(&self, call: &Call) -> Vec<Option<Value>> {
        let value = |(output, range): (&OperandType, &Option<ByteRange>)| {
            let ByteRange { offset, bytes } = (*range)?;
            Some(Value {
                name: call.name.clone(),
                dtype: output.dtype,
                shape: output.shape.clone(),
                memory: MemoryKind::Workspace,
                range: ByteRange { offset: call.workspace.offset + offset, bytes },
                slot_stride_bytes: 0,
            })
        };
        self.outputs.iter().zip(&self.ranges).map(value).collect()
    }
}

pub(crate) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::WithQuantize(op) = op else { return Err(operands.unknown_kernel()) };
    let call = operands.call;
    let refused = |what: String| KernelError::Run { call: call.name.clone(), what };
    let (inputs, stored) = operands.values.split_at(operands.input_count);
    let input_types: Vec<OperandType> = inputs
        .iter()
        .map(|value| OperandType { dtype: value.dtype, shape: value.shape.clone() })
        .collect();
    let scratch = Scratch::new(op, &input_types).map_err(|error| refused(error.to_string()))?;
    let expected = (0..op.quantized.len())
        .map(|entry| op.positions_of_quantized(entry).end)
        .next_back()
        .unwrap_or(0);
    if stored.len() != expected {
        return Err(refused(format!("expected {expected} outputs, got {}", stored.len())));
    }
    if operands.workspace.bytes < scratch.bytes {
        return Err(refused(format!(
            "expected a workspace of at least {} bytes, got {}",
            scratch.bytes, operands.workspace.bytes
        )));
    }
    let unstored = scratch.values(call);
    let produced: Vec<&Value> = unstored
        .iter()
        .enumerate()
        .filter_map(|(output, value)| {
            value.as_ref().or_else(|| op.position_of_output(output).map(|at| stored[at]))
        })
        .collect();
    let start = operands.workspace.offset + scratch.bytes;
    let bytes = operands.workspace.bytes - scratch.bytes;
    let values = inputs.iter().copied().chain(produced.iter().copied()).collect();
    let rest = ByteRange { offset: start, bytes };
    let producer = Operands::new(operands.site(), values, inputs.len(), rest);
    let mut runs = vec![run_of(&op.producer, &producer)?];
    for (index, entry) in op.quantized.iter().enumerate() {
        let copies = &stored[op.positions_of_quantized(index)];
        let values = [produced[entry.output]].into_iter().chain(copies.iter().copied()).collect();
        let part = Operands::new(operands.site(), values, 1, ByteRange::default());
        runs.push(run_of(&Op::Quantize(entry.quantize.clone()), &part)?);
    }
    Ok(Box::new(move |arena| runs.iter().try_for_each(|run| run(arena))))
}
