//! What calls on rows of experts cost where tokens choose evenly. Buffers have room for any choice,
//! and kernels compute the rows that have a pair: of the others they only write the zeros.

use std::collections::HashMap;

use deepwell_ir::ops::RowsOf;
use deepwell_ir::{Access, Cost, Op, Operand, ValueId};

use super::Lowering;
use crate::dryrun::ExpertRoom;

/// The buffers of rows of a program's layers so far.
#[derive(Debug, Default)]
pub(super) struct ExpertRows {
    /// By what dispatches say of them, which every call on such rows reads.
    buffers: HashMap<ValueId, Buffer>,
    /// Rows that a rank sends, and with an even choice receives.
    sent: u64,
}

#[derive(Clone, Copy, Debug)]
struct Buffer {
    rows: usize,
    /// Those that may have a pair: all but what alignment adds.
    pairs: u64,
    /// Those that have one where tokens choose evenly.
    even: u64,
}

impl Lowering<'_> {
    /// Notes the buffer that a dispatch fills.
    pub(super) fn note_expert_rows(&mut self, op: &Op, operands: &[Operand], inputs: usize) {
        let shape = |operand: usize| self.values[operands[operand].value.index()].shape.clone();
        let Some(ExpertRoom { most, even }) = ExpertRoom::of_call(op, shape) else { return };
        let (pairs, even) = match op {
            Op::Dispatch(op) => {
                let is_sent = matches!(op.rows_of, RowsOf::Sent { .. });
                let even = if is_sent { self.expert_rows.sent } else { even };
                (op.grouped.pairs_of(most as usize) as u64, even)
            }
            _ => {
                self.expert_rows.sent = even;
                (most, even)
            }
        };
        let buffer = Buffer { rows: most as usize, pairs, even: even.min(pairs) };
        let outputs = operands[inputs..].iter().map(|output| (output.value, buffer));
        self.expert_rows.buffers.extend(outputs);
    }

    /// The share of `cost` that an even choice of tokens leaves of a call.
    pub(super) fn of_even_rows(&self, cost: Cost, operands: &[Operand]) -> Cost {
        let read = operands.iter().filter(|operand| operand.access == Access::Read);
        let mut buffers = read.filter_map(|it| self.expert_rows.buffers.get(&it.value));
        let Some(&Buffer { rows, pairs, even }) = buffers.next() else { return cost };
        let idle =
            |of: u64| (u128::from(of) * u128::from(pairs - even) / u128::from(pairs.max(1))) as u64;
        let is_read = |operand: &&Operand| operand.access != Access::Write;
        let values = operands.iter().filter(is_read).map(|it| &self.values[it.value.index()]);
        // Columnwise data have the rows along their second axis.
        let of_rows = values.filter(|value| value.shape.iter().take(2).any(|&size| size == rows));
        let unread: u64 = of_rows.map(|value| idle(value.range.bytes as u64)).sum();
        Cost {
            flops: cost.flops - idle(cost.flops),
            bytes_read: cost.bytes_read.saturating_sub(unread),
            ..cost
        }
    }
}
