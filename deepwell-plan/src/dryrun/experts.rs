//! How many rows a layer's experts may have on a rank, and how many they have where tokens choose
//! evenly.

use std::fmt;

use deepwell_ir::ops::{RowsOf, capacity};
use deepwell_ir::{Call, Dim, Op, Program};
use serde::{Deserialize, Serialize};

/// Rows of the layer with most of them, in a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertRoom {
    /// Those that there is room for, however tokens choose: of `n` ranks with `T` tokens each, of
    /// which one wants `K` experts, `n · T · min(K, experts here)` and what rounds groups up. With
    /// a capacity factor at most the rows of full experts.
    pub most: u64,
    /// Pairs of token and expert with a row under balanced routing.
    pub even: u64,
}

impl ExpertRoom {
    pub(super) fn of(program: &Program) -> Option<ExpertRoom> {
        let value = |call: &Call, operand: usize| program.value(call.operands[operand].value);
        let rows = program.calls.iter().filter_map(|call| {
            let room = ExpertRoom::of_call(&call.op, |operand| value(call, operand).shape.clone())?;
            match &call.op {
                // What ranks sent, they have counted.
                Op::Dispatch(op) if matches!(op.rows_of, RowsOf::Sent { .. }) => {
                    Some(ExpertRoom { even: 0, ..room })
                }
                // It sends as many as it is sent.
                Op::DispatchToRanks(_) => Some(ExpertRoom { most: 0, ..room }),
                _ => Some(room),
            }
        });
        rows.reduce(|a, b| ExpertRoom { most: a.most.max(b.most), even: a.even.max(b.even) })
    }

    /// Rows of the buffer that a dispatch fills, from the shapes of its operands; none for another
    /// op. Of rows that other ranks sent, all that they may send count as even.
    pub(crate) fn of_call(op: &Op, shape: impl Fn(usize) -> Vec<usize>) -> Option<ExpertRoom> {
        let rows = |operand| shape(operand).iter().product::<usize>() as u64;
        // Pairs of `own` of the experts, each with an even share or full.
        let even = |factor: Option<f64>, [experts, own]: [usize; 2]| -> u64 {
            let chosen = shape(0);
            let pairs = chosen.iter().product::<usize>() * own / experts.max(1);
            let [tokens, top_k] = [0, 1].map(|axis| chosen.get(axis).copied().unwrap_or(1));
            let of_expert = |factor| capacity(factor, experts, Dim::fixed(tokens), top_k);
            let most = factor.and_then(|factor| of_expert(factor).as_fixed());
            most.map_or(pairs, |most| pairs.min(most * own)) as u64
        };
        match op {
            Op::Dispatch(op) => {
                let most = rows(4);
                let even = match op.rows_of {
                    RowsOf::Sent { .. } => most,
                    _ => even(op.capacity_factor, [op.experts(), op.grouped.groups]),
                };
                Some(ExpertRoom { most, even: even.min(most) })
            }
            Op::DispatchToRanks(op) => {
                let most = rows(3);
                let even = even(op.capacity_factor, [op.experts; 2]);
                Some(ExpertRoom { most, even: even.min(most) })
            }
            _ => None,
        }
    }
}

impl fmt::Display for ExpertRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExpertRoom { most, even } = self;
        f.pad(&most.to_string())?;
        write!(f, " rows of a layer have room, {even} where tokens choose evenly")
    }
}
