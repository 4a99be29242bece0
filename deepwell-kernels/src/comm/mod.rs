//! Collectives, sends and receives between ranks: an optional capability of backends.
//!
//! [`Comm`] works on host memory and is given to the CPU backend
//! ([`CpuBackend::with_comm`](crate::CpuBackend::with_comm)). [`InProcess`] implements [`Comm`] for
//! ranks that are threads of a process, [`ProcessComm`] for ranks that are processes, connected by
//! TCP or by MPI (feature `mpi`). On a GPU, the vendor's library works on device memory and on
//! streams: [`DeviceComm`](crate::cuda::DeviceComm), the counterpart of
//! [`Blas`](crate::cuda::Blas).

mod error;
mod in_process;
mod mailbox;
#[cfg(feature = "mpi")]
mod mpi;
mod parts;
mod process;
mod reduce;
mod tcp;
mod want;

use std::time::Duration;

use deepwell_ir::ops::{Collective, CollectiveKind};
use deepwell_ir::{DType, ProcessGroup, Ranks};

pub use error::CommError;
pub use in_process::{InProcess, Monitor};
#[cfg(feature = "mpi")]
pub use mpi::{connect_mpi, mpi_version};
pub use process::{ProcessComm, ProcessLimits, ProcessMonitor};
pub(crate) use reduce::reduce;
pub use tcp::{TcpDoor, TcpPeer, connect_tcp};

/// A collective, send or receive of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The kind. Places are indices into the group.
    pub kind: CollectiveKind,
    /// The participating ranks.
    pub group: ProcessGroup,
    /// Element type.
    pub dtype: DType,
}

impl Exchange {
    /// The exchange of a program's call.
    ///
    /// # Errors
    /// A group without this rank, or of another size.
    pub fn of(collective: &Collective, ranks: &Ranks, dtype: DType) -> Result<Exchange, CommError> {
        let group = ranks.group(collective.group).filter(|group| {
            group.ranks.len() == collective.ranks as usize
                && group.position_of(ranks.rank).is_some()
        });
        let group = group.ok_or_else(|| CommError::Request {
            what: format!("group {} of {} ranks", collective.group.0, collective.ranks),
            reason: format!("rank {} has the groups {:?}", ranks.rank, ranks.groups),
        })?;
        Ok(Exchange { kind: collective.kind.clone(), group: group.clone(), dtype })
    }

    /// Checks that `rank` of a world of `world_size` can take part with an input and an output of
    /// so many bytes.
    pub(crate) fn check(
        &self,
        (rank, world_size): (u32, u32),
        input: usize,
        output: usize,
    ) -> Result<(), String> {
        let Exchange { kind, group, dtype } = self;
        let Some(position) = group.position_of(rank) else {
            return Err(format!("expected a group with rank {rank}"));
        };
        if let Some(rank) = group.ranks.iter().find(|&&rank| rank >= world_size) {
            return Err(format!("expected ranks below {world_size}, got {rank}"));
        }
        let ranks = group.ranks.len();
        let peer = match *kind {
            CollectiveKind::Send { to } => Some(to as usize),
            CollectiveKind::Recv { from, .. } => Some(from as usize),
            CollectiveKind::Broadcast { root } if root as usize >= ranks => Some(root as usize),
            CollectiveKind::Shift { by } if by as usize >= ranks => Some(by as usize),
            _ => None,
        };
        if let Some(peer) = peer.filter(|&peer| peer >= ranks || peer == position) {
            return Err(format!("expected another place among {ranks}, got {peer}"));
        }
        let expected = match kind {
            CollectiveKind::AllReduce { .. }
            | CollectiveKind::Broadcast { .. }
            | CollectiveKind::Shift { .. } => input,
            CollectiveKind::ReduceScatter { .. } => input / ranks,
            CollectiveKind::AllGather => input * ranks,
            CollectiveKind::AllToAll => input,
            CollectiveKind::Send { .. } => 0,
            CollectiveKind::Recv { .. } => output,
        };
        if output != expected {
            return Err(format!("expected {expected} bytes of results, got {output}"));
        }
        // Elements of four bits are sent as whole bytes.
        let element = dtype.bits().div_ceil(8) as usize;
        let is_cut =
            matches!(kind, CollectiveKind::ReduceScatter { .. } | CollectiveKind::AllToAll);
        let unit = if is_cut { ranks * element } else { element };
        let bytes = if input == 0 { output } else { input };
        if !bytes.is_multiple_of(unit) {
            return Err(format!("expected bytes in units of {unit}"));
        }
        Ok(())
    }
}

/// Executes the collectives of a rank's program.
///
/// All ranks of a group issue the same collectives of that group in the same order. If ranks
/// disagree, or a rank ends or fails, every rank gets an error, immediately or at its next
/// collective. Every collective times out.
pub trait Comm: Send {
    /// The index of this rank.
    fn rank(&self) -> u32;

    /// The number of ranks.
    fn world_size(&self) -> u32;

    /// Takes part in a collective and waits until this rank's `output` is complete. Elements are in
    /// their memory format; `input` is unchanged. A send waits only until its input may be changed.
    ///
    /// # Errors
    /// Lengths that do not fit; ranks that disagree, have failed or do not arrive in time.
    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError>;

    /// Time spent in [`Comm::exchange`] so far, mostly waiting for peers; `None` if unknown.
    fn waited(&self) -> Option<Duration> {
        None
    }

    /// Fails every rank's current and later collectives with this rank's reason.
    fn abort(&mut self, reason: &str);
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::Reduction;

    use super::*;

    #[test]
    fn what_a_rank_can_take_part_in() {
        let check = |kind: CollectiveKind, dtype, bytes: (usize, usize), expected: &str| {
            let group = ProcessGroup { name: "data".to_string(), ranks: vec![0, 1] };
            let exchange = Exchange { kind, group, dtype };
            let got = exchange.check((1, 2), bytes.0, bytes.1);
            assert_eq!(got, if expected.is_empty() { Ok(()) } else { Err(expected.to_string()) });
        };
        let sum = CollectiveKind::AllReduce { reduction: Reduction::Sum };
        check(sum.clone(), DType::F32, (8, 8), "");
        check(sum.clone(), DType::F32, (8, 4), "expected 8 bytes of results, got 4");
        check(sum, DType::F32, (6, 6), "expected bytes in units of 4");
        // A byte holds two elements of four bits.
        check(CollectiveKind::AllGather, DType::E2m1, (3, 6), "");
        check(CollectiveKind::AllToAll, DType::E2m1, (4, 4), "");
        check(CollectiveKind::AllToAll, DType::E2m1, (3, 3), "expected bytes in units of 2");
        let peer = "expected another place among 2, got 1";
        check(CollectiveKind::Send { to: 1 }, DType::F32, (4, 0), peer);
        check(CollectiveKind::Send { to: 0 }, DType::F32, (4, 0), "");
        check(CollectiveKind::Shift { by: 1 }, DType::Bf16, (4, 4), "");
        check(
            CollectiveKind::Shift { by: 1 },
            DType::F32,
            (8, 4),
            "expected 8 bytes of results, got 4",
        );
        check(CollectiveKind::Shift { by: 0 }, DType::F32, (4, 4), "");
        let away = "expected another place among 2, got 2";
        check(CollectiveKind::Shift { by: 2 }, DType::F32, (4, 4), away);
    }
}
