//! Rows of a layer's experts on a rank: the capacity, and the count under balanced routing.

use std::fmt;

use deepwell_ir::ops::{RowsOf, capacity};
use deepwell_ir::{Call, Dim, Op, Program};
use serde::{Deserialize, Serialize};

/// Rows of the layer with the most expert rows, in a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertRoom {
    /// Capacity for any routing: with `n` ranks of `T` tokens each and `K` experts per token,
    /// `n · T · min(K, experts here)`, plus the padding of groups. A capacity factor limits the
    /// capacity to the rows of full experts.
    pub most: u64,
    /// Pairs of token and expert with a row under balanced routing.
    pub even: u64,
}

impl ExpertRoom {
    pub(super) fn of(program: &Program) -> Option<ExpertRoom> {
        let value = |call: &Call, operand: usize| program.value(call.operands[operand].value);
        // Pairs of `own` of the experts, with balanced routing or full experts.
        let even = |call: &Call, factor: Option<f64>, [experts, own]: [usize; 2]| -> u64 {
            let chosen = value(call, 0);
            let pairs = chosen.elements() * own / experts.max(1);
            let [tokens, top_k] = [0, 1].map(|axis| chosen.shape.get(axis).copied().unwrap_or(1));
            let of_expert = |factor| capacity(factor, experts, Dim::fixed(tokens), top_k);
            let most = factor.and_then(|factor| of_expert(factor).as_fixed());
            most.map_or(pairs, |most| pairs.min(most * own)) as u64
        };
        let rows = program.calls.iter().filter_map(|call| match &call.op {
            Op::Dispatch(op) => {
                let even = match op.rows_of {
                    // The sending ranks have already counted these rows.
                    RowsOf::Sent { .. } => 0,
                    _ => even(call, op.capacity_factor, [op.experts(), op.grouped.groups]),
                };
                Some(ExpertRoom { most: value(call, 4).elements() as u64, even })
            }
            // Under balanced routing a rank sends as many rows as it receives.
            Op::DispatchToRanks(op) => {
                let even = even(call, op.capacity_factor, [op.experts; 2]);
                Some(ExpertRoom { most: 0, even })
            }
            _ => None,
        });
        rows.reduce(|a, b| ExpertRoom { most: a.most.max(b.most), even: a.even.max(b.even) })
    }
}

impl fmt::Display for ExpertRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExpertRoom { most, even } = self;
        f.pad(&most.to_string())?;
        write!(f, " rows of a layer have room, {even} where tokens choose evenly")
    }
}
