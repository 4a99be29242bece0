//! Programs of one call, or of several equal calls over different memory, for tests and benchmarks
//! of a kernel.

use deepwell_ir::{
    Access, Accumulate, Arena, Body, BodyId, ByteRange, Call, Cost, DType, HostInterface,
    Invocation, KernelCatalog, KernelChoice, KernelRequest, MemoryKind, Mode, NoKernel, NodeId, Op,
    Operand, OperandType, Phase, Program, Tag, Target, Value, ValueId,
};

/// Alignment of operands, as in the arena of a lowered program.
const ALIGNMENT_BYTES: usize = 64;

/// An op on operands of known sizes, outside of any model.
///
/// ```
/// use deepwell_ir::{DType, ops};
/// use deepwell_kernels::{CpuCatalog, SingleCall, cpu_target};
///
/// let types = [(DType::F32, vec![4, 8]), (DType::F32, vec![4, 8])];
/// let add = SingleCall::new(ops::Add {}, &types, &[(DType::F32, vec![4, 8])]);
/// let target = cpu_target(1);
/// let choice = add.select(&CpuCatalog, &target)?.choice;
/// let program = add.program(choice, target, 2);
/// assert_eq!((program.calls.len(), program.values.len()), (2, 6));
/// assert_eq!(program.calls[0].cost.bytes(), 3 * 4 * 8 * 4);
/// # Ok::<(), deepwell_ir::NoKernel>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SingleCall {
    /// The op to compute.
    pub op: Op,
    /// Inputs, then outputs.
    pub operands: Vec<OperandType>,
    /// Access of each operand.
    pub access: Vec<Access>,
    /// Number of inputs among the operands.
    pub input_count: usize,
    /// When accumulator outputs add to the existing contents.
    pub accumulate: Accumulate,
    /// Sequences of the program.
    pub batch: usize,
    /// Tokens per sequence of the program.
    pub seq: usize,
    /// Bytes left free before and after each operand.
    pub gap_bytes: usize,
}

impl SingleCall {
    /// An op with read-only inputs and write-only outputs.
    pub fn new(
        op: impl Into<Op>,
        inputs: &[(DType, Vec<usize>)],
        outputs: &[(DType, Vec<usize>)],
    ) -> SingleCall {
        let operands = inputs
            .iter()
            .chain(outputs)
            .map(|(dtype, shape)| OperandType { dtype: *dtype, shape: shape.clone() })
            .collect();
        let mut access = vec![Access::Read; inputs.len()];
        access.resize(inputs.len() + outputs.len(), Access::Write);
        SingleCall {
            op: op.into(),
            operands,
            access,
            input_count: inputs.len(),
            accumulate: Accumulate::Never,
            batch: 1,
            seq: 1,
            gap_bytes: 0,
        }
    }

    /// Extracts a call of a lowered program.
    pub fn of(program: &Program, call: &Call) -> SingleCall {
        let operand = |operand: &Operand| {
            let value = program.value(operand.value);
            OperandType { dtype: value.dtype, shape: value.shape.clone() }
        };
        SingleCall {
            op: call.op.clone(),
            operands: call.operands.iter().map(operand).collect(),
            access: call.operands.iter().map(|operand| operand.access).collect(),
            input_count: call.input_count,
            accumulate: call.accumulate,
            batch: program.batch,
            seq: program.seq,
            gap_bytes: 0,
        }
    }

    /// The request for a catalog.
    pub fn request(&self) -> KernelRequest<'_> {
        KernelRequest { op: &self.op, operands: &self.operands, input_count: self.input_count }
    }

    /// Returns the kernel that a catalog chooses.
    ///
    /// # Errors
    /// [`NoKernel`] with the reason of each rejection.
    pub fn select(
        &self,
        catalog: &dyn KernelCatalog,
        target: &Target,
    ) -> Result<deepwell_ir::Selection, NoKernel> {
        catalog.select(&self.request(), target)
    }

    /// Bytes of operand `index`.
    pub fn operand_bytes(&self, index: usize) -> usize {
        self.operands[index].storage_bytes().unwrap_or(usize::MAX)
    }

    /// Bytes of all operands.
    pub fn bytes(&self) -> usize {
        (0..self.operands.len()).map(|index| self.operand_bytes(index)).sum()
    }

    /// FLOPs of the op, with each operand read or written once.
    pub fn cost(&self) -> Cost {
        let shapes: Vec<Vec<usize>> =
            self.operands.iter().map(|operand| operand.shape.clone()).collect();
        let rule = self.op.rule();
        let mut cost = Cost {
            flops: rule.flops(&shapes),
            bytes_on_link: rule.bytes_on_link(&self.operands),
            ..Cost::default()
        };
        for (index, access) in self.access.iter().enumerate() {
            let bytes = self.operand_bytes(index) as u64;
            if *access != Access::Write {
                cost.bytes_read += bytes;
            }
            if *access != Access::Read {
                cost.bytes_written += bytes;
            }
        }
        cost
    }

    /// Builds a program of `copies` such calls with separate operands and a shared workspace.
    /// Operand `i` of copy `c` is value `c · operands + i`.
    pub fn program(&self, choice: KernelChoice, target: Target, copies: usize) -> Program {
        let mut offset = self.gap_bytes;
        let mut allocate = |bytes: usize| {
            let range = ByteRange { offset, bytes };
            offset = (range.end() + self.gap_bytes).next_multiple_of(ALIGNMENT_BYTES);
            range
        };
        let mut values = Vec::with_capacity(copies * self.operands.len());
        for _ in 0..copies {
            for (index, operand) in self.operands.iter().enumerate() {
                let name = format!("v{}", values.len());
                let shape = operand.shape.clone();
                let range = allocate(self.operand_bytes(index));
                let memory = MemoryKind::Activations;
                values.push(Value::new(name, operand.dtype, shape, memory, range));
            }
        }
        let workspace = allocate(choice.workspace_bytes);
        let dtypes: Vec<DType> = self.operands.iter().map(|operand| operand.dtype).collect();
        let (unit, cost) = (self.op.rule().unit(&dtypes), self.cost());
        let call = |copy: usize| Call {
            name: self.op.name().to_string(),
            op: self.op.clone(),
            choice: choice.clone(),
            operands: (0..self.operands.len())
                .map(|index| Operand {
                    value: ValueId((copy * self.operands.len() + index) as u32),
                    access: self.access[index],
                })
                .collect(),
            input_count: self.input_count,
            accumulate: self.accumulate,
            last_only: false,
            alone_only: false,
            accumulator_bytes: 0,
            workspace,
            phase: Phase::Forward,
            tag: Tag::Head,
            layer: None,
            source: NodeId(0),
            recomputes: false,
            unit,
            peak_share: 1.0,
            cost,
            stream: 0,
            waits: Vec::new(),
            records: None,
            rejected: Vec::new(),
        };
        Program {
            name: self.op.name().to_string(),
            mode: Mode::Train,
            rank: target.ranks.rank,
            target,
            batch: self.batch,
            seq: self.seq,
            micro_batches: 1,
            slots: 1,
            calls: (0..copies).map(call).collect(),
            bodies: vec![Body { phase: Phase::Forward, chunk: 0, calls: 0..copies }],
            schedule: vec![Invocation { body: BodyId(0), micro_batch: 0, slot: 0 }],
            values,
            arena: Arena { bytes: offset, ..Arena::default() },
            host: HostInterface::default(),
            parameters: Vec::new(),
            precision: Vec::new(),
            shards: Vec::new(),
            unstored: Vec::new(),
            handover: None,
            fixed_overhead_bytes: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops;

    use super::*;

    #[test]
    fn copies_share_nothing_but_the_scratch() {
        let shape = |rows: usize| vec![rows, 3];
        let mut call = SingleCall::new(
            ops::Add {},
            &[(DType::Bf16, shape(5)), (DType::Bf16, shape(5))],
            &[(DType::Bf16, shape(5))],
        );
        call.gap_bytes = 256;
        let choice = KernelChoice { kernel: "any".to_string(), tile: None, workspace_bytes: 1000 };
        let program = call.program(choice, Target::cpu(1, Vec::new()), 3);
        let mut ranges: Vec<ByteRange> = program.values.iter().map(|value| value.range).collect();
        ranges.push(program.calls[2].workspace);
        assert_eq!(ranges[0].offset, 256);
        for pair in ranges.windows(2) {
            assert!(pair[0].end() + 256 <= pair[1].offset, "{pair:?}");
            assert_eq!(pair[1].offset % ALIGNMENT_BYTES, 0);
        }
        assert!(program.arena.bytes >= ranges[9].end() + 256);
        let of_last: Vec<u32> =
            program.calls[2].operands.iter().map(|operand| operand.value.0).collect();
        assert_eq!(of_last, [6, 7, 8]);
        let cost = program.calls[1].cost;
        assert_eq!((cost.bytes_read, cost.bytes_written), (60, 30));
        assert_eq!(SingleCall::of(&program, &program.calls[1]).operands, call.operands);
    }
}
