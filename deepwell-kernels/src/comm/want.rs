//! What a rank comes to an exchange for, as ranks compare it and say it.

use std::fmt;

use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{DType, ProcessGroup};

use super::{CommError, Exchange};

/// What a rank came for. Ranks that meet want the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Want {
    pub(super) kind: CollectiveKind,
    pub(super) group: ProcessGroup,
    pub(super) dtype: DType,
    /// Of a rank's input; of its output where it has none.
    pub(super) bytes: usize,
}

impl Want {
    /// What a rank of a world of so many wants, with an input and an output of so many bytes, if
    /// it can be had.
    pub(super) fn of(
        exchange: &Exchange,
        (rank, world_size): (u32, u32),
        input: usize,
        output: usize,
    ) -> Result<Want, CommError> {
        let Exchange { kind, group, dtype } = exchange;
        let bytes = if input == 0 { output } else { input };
        let want = Want { kind: kind.clone(), group: group.clone(), dtype: *dtype, bytes };
        match exchange.check((rank, world_size), input, output) {
            Ok(()) => Ok(want),
            Err(reason) => Err(CommError::Request { what: want.to_string(), reason }),
        }
    }
}

impl fmt::Display for Want {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            CollectiveKind::AllReduce { reduction } => format!("all_reduce {}", reduction.name()),
            CollectiveKind::ReduceScatter { reduction } => {
                format!("reduce_scatter {}", reduction.name())
            }
            CollectiveKind::AllGather => "all_gather".to_string(),
            CollectiveKind::AllToAll => "all_to_all".to_string(),
            CollectiveKind::Broadcast { root } => format!("broadcast from place {root}"),
            CollectiveKind::Shift { by } => format!("shift by {by}"),
            CollectiveKind::Send { to } => format!("send to place {to}"),
            CollectiveKind::Recv { from, .. } => format!("recv from place {from}"),
        };
        let elements = self.bytes * 8 / self.dtype.bits() as usize;
        write!(f, "{kind} of {elements} {} in group `{}`", self.dtype, self.group.name)
    }
}
