//! How many rows a layer's experts may have on a rank, and how many they have where tokens choose
//! evenly.

use deepwell_ir::ops::RowsOf;
use deepwell_ir::{Call, Op, Program};
use serde::{Deserialize, Serialize};

/// Rows of the layer with most of them, in a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertRoom {
    /// Those that there is room for, however tokens choose: of `n` ranks with `T` tokens each, of
    /// which one wants `K` experts, `n · T · min(K, experts here)` and what rounds groups up.
    pub most: u64,
    /// Pairs of token and expert where every expert of the layer is chosen as often.
    pub even: u64,
}

impl ExpertRoom {
    pub(super) fn of(program: &Program) -> Option<ExpertRoom> {
        let elements = |call: &Call, operand: usize| -> u64 {
            program.value(call.operands[operand].value).elements() as u64
        };
        let rows = program.calls.iter().filter_map(|call| match &call.op {
            Op::Dispatch(op) => {
                let (experts, own) = (op.experts() as u64, op.grouped.groups as u64);
                let here = elements(call, 0) * own / experts.max(1);
                // What ranks sent, they have counted.
                let even = if matches!(op.rows_of, RowsOf::Sent { .. }) { 0 } else { here };
                Some(ExpertRoom { most: elements(call, 4), even })
            }
            // It sends as many as it is sent.
            Op::DispatchToRanks(_) => Some(ExpertRoom { most: 0, even: elements(call, 0) }),
            _ => None,
        });
        rows.reduce(|a, b| ExpertRoom { most: a.most.max(b.most), even: a.even.max(b.even) })
    }
}
