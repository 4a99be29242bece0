//! Exchanges of data between ranks: an optional capability of backends.
//!
//! [`Comm`] works on host memory, and is what a backend for the processor is given
//! ([`CpuBackend::with_comm`](crate::CpuBackend::with_comm)). [`InProcess`] implements it for ranks
//! that are threads of one process. A device's library has device memory and streams of its own:
//! [`DeviceComm`](crate::cuda::DeviceComm), beside [`Blas`](crate::cuda::Blas).

mod error;
mod in_process;
mod reduce;

use deepwell_ir::ops::{Collective, CollectiveKind};
use deepwell_ir::{DType, ProcessGroup, Ranks};

pub use error::CommError;
pub use in_process::{InProcess, Monitor};
pub(crate) use reduce::reduce;

/// What one rank takes part in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// What is exchanged. Places are those in the group.
    pub kind: CollectiveKind,
    /// Among whom.
    pub group: ProcessGroup,
    /// Element type.
    pub dtype: DType,
}

impl Exchange {
    /// The exchange of a call of a program.
    ///
    /// # Errors
    /// A group that the rank is not in, or of another size.
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
}

/// What takes one rank through the collectives of its program.
///
/// All ranks of a group issue the same collectives of that group in the same order. Where they do
/// not, or one of them ends or fails, every rank gets an error: now, or at its next exchange. No
/// exchange waits for ever.
pub trait Comm: Send {
    /// Which rank this is.
    fn rank(&self) -> u32;

    /// How many ranks there are.
    fn world_size(&self) -> u32;

    /// Takes part in an exchange and waits until this rank's `output` is whole: elements as they
    /// lie in memory, those of `input` unchanged. A send waits only until its input may be
    /// changed.
    ///
    /// # Errors
    /// Lengths that do not fit, ranks that disagree, that do not come in time or have failed.
    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError>;

    /// Lets every rank's present and later exchanges fail with this rank's reason.
    fn abort(&mut self, reason: &str);
}
