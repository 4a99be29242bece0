//! Some calls of a lowered program as a separate program, which can run repeatedly.

use deepwell_ir::{
    ALIGNMENT_BYTES, Access, Arena, Body, BodyId, ByteRange, Call, HostInterface, Invocation,
    Phase, Program, ValueId,
};

/// Calls of a step whose values have separate addresses, so that a second run reads the same
/// inputs.
pub(super) struct LayerProgram {
    /// The calls in one body, in order.
    pub(super) program: Program,
    /// Values that a call reads before any call writes them.
    pub(super) given: Vec<ValueId>,
}

impl LayerProgram {
    /// Selects the `wanted` calls of `step`.
    pub(super) fn of(step: &Program, wanted: impl Fn(&Call) -> bool) -> LayerProgram {
        let mut calls: Vec<Call> = step.calls.iter().filter(|call| wanted(call)).cloned().collect();
        let mut is_used = vec![false; step.values.len()];
        let mut is_written = vec![false; step.values.len()];
        let mut given = Vec::new();
        for call in &calls {
            for operand in &call.operands {
                let index = operand.value.index();
                // An accumulating output is overwritten in the only run of a step.
                if operand.access == Access::Read && !is_written[index] && !is_used[index] {
                    given.push(operand.value);
                }
                is_used[index] = true;
            }
            for operand in call.outputs() {
                is_written[operand.value.index()] = true;
            }
        }
        let mut end = 0usize;
        let mut allocate = |bytes: usize| {
            let range = ByteRange { offset: end, bytes };
            end = range.end().next_multiple_of(ALIGNMENT_BYTES);
            range
        };
        let mut values = step.values.clone();
        for (value, is_used) in values.iter_mut().zip(is_used) {
            value.slot_stride_bytes = 0;
            value.range = if is_used { allocate(value.range.bytes) } else { ByteRange::default() };
        }
        let scratch_bytes = calls.iter().map(|call| call.workspace.bytes).max().unwrap_or(0);
        let scratch = allocate(scratch_bytes);
        for call in &mut calls {
            call.workspace = ByteRange { bytes: call.workspace.bytes, ..scratch };
        }
        let bodies = vec![Body { phase: Phase::Forward, chunk: 0, calls: 0..calls.len() }];
        let program = Program {
            calls,
            values,
            bodies,
            schedule: vec![Invocation { body: BodyId(0), micro_batch: 0, slot: 0 }],
            slots: 1,
            arena: Arena { bytes: end, ..Arena::default() },
            host: HostInterface::default(),
            parameters: Vec::new(),
            precision: Vec::new(),
            shards: Vec::new(),
            unstored: Vec::new(),
            handover: None,
            ..step.clone()
        };
        LayerProgram { program, given }
    }
}
