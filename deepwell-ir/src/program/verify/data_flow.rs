//! Contents of the transient part of the arena, followed in issue order.

use std::collections::BTreeMap;

use crate::{Access, ByteRange, Phase, Program};

/// Values with intact bytes, by offset. The ranges never overlap.
#[derive(Default)]
struct Whole {
    by_offset: BTreeMap<usize, (usize, usize)>,
}

impl Whole {
    fn holds(&self, range: ByteRange, value: usize) -> bool {
        range.bytes == 0 || self.by_offset.get(&range.offset) == Some(&(range.end(), value))
    }

    fn overwrite(&mut self, range: ByteRange) {
        while let Some((&offset, _)) = self
            .by_offset
            .range(..range.end())
            .next_back()
            .filter(|(_, (end, _))| range.bytes > 0 && *end > range.offset)
        {
            self.by_offset.remove(&offset);
        }
    }

    fn insert(&mut self, range: ByteRange, value: usize) {
        if range.bytes > 0 {
            self.by_offset.insert(range.offset, (range.end(), value));
        }
    }
}

/// Checks that every transient value is written before a call reads it, and not overwritten in
/// between. Bodies are in the order of a micro-batch, so one walk covers all micro-batches. The
/// body of weights also runs alone, so it starts with no contents.
pub(super) fn check(program: &Program) -> Result<(), String> {
    let mut whole = Whole::default();
    for body in &program.bodies {
        if body.phase == Phase::Weights {
            whole = Whole::default();
        }
        for call in &program.calls[body.calls.clone()] {
            for operand in &call.operands {
                let value = program.value(operand.value);
                if value.memory.is_persistent() || operand.access == Access::Write {
                    continue;
                }
                if !whole.holds(value.range, operand.value.index()) {
                    return Err(format!(
                        "call `{}` reads `{}`, which is not there (any more)",
                        call.name, value.name
                    ));
                }
            }
            let written = || call.operands.iter().filter(|operand| operand.access != Access::Read);
            for operand in written() {
                whole.overwrite(program.value(operand.value).range);
            }
            whole.overwrite(call.workspace);
            for operand in written() {
                let value = program.value(operand.value);
                if !value.memory.is_persistent() {
                    whole.insert(value.range, operand.value.index());
                }
            }
        }
    }
    Ok(())
}
