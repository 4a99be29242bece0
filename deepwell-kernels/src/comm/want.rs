//! The request of a rank in a collective, for comparison and for error messages.

use std::fmt;

use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{DType, ProcessGroup};

use super::{CommError, Exchange};

/// The request of a rank. The requests of all ranks in a collective must be equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Want {
    pub(super) kind: CollectiveKind,
    pub(super) group: ProcessGroup,
    pub(super) dtype: DType,
    /// Bytes of the rank's input, or of the output if the input is empty.
    pub(super) bytes: usize,
}

impl Want {
    /// The request of a rank of a world of `world_size`, with an input and an output of so many
    /// bytes, if the request is valid.
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
