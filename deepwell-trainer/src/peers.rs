//! Communication between ranks on the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{DType, ProcessGroup};
use deepwell_kernels::{Comm, Exchange};

use crate::TrainError;

/// The other ranks of a run, as seen by one rank.
pub struct Peers {
    comm: Option<Box<dyn Comm>>,
    /// Number of collective operations that this rank has begun.
    begun: Arc<AtomicU64>,
}

impl Peers {
    /// A single rank, without others.
    pub fn none() -> Peers {
        Peers { comm: None, begun: Arc::default() }
    }

    /// The other ranks of a communicator.
    pub fn of(comm: Box<dyn Comm>) -> Peers {
        Peers { comm: Some(comm), begun: Arc::default() }
    }

    /// Counts this rank's collective operations in `begun`, to detect a stuck rank.
    #[must_use]
    pub fn counting_in(self, begun: Arc<AtomicU64>) -> Peers {
        Peers { begun, ..self }
    }

    /// Counts a collective operation of this rank.
    pub(crate) fn has_begun(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
    }

    /// Total time of this rank in collectives; none if unknown.
    pub fn waited(&self) -> Option<Duration> {
        self.comm.as_ref().and_then(|comm| comm.waited())
    }

    /// This rank, counted from 0.
    pub fn rank(&self) -> usize {
        self.comm.as_ref().map_or(0, |comm| comm.rank() as usize)
    }

    /// Number of ranks, including this one.
    pub fn world_size(&self) -> usize {
        self.comm.as_ref().map_or(1, |comm| comm.world_size() as usize)
    }

    /// Whether this is the rank that prints for all.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// All-gathers words, in the order of the ranks. All ranks give the same number of words.
    ///
    /// # Errors
    /// Ranks have failed, or issue another call.
    pub fn gather(&mut self, words: &[u64]) -> Result<Vec<Vec<u64>>, TrainError> {
        self.has_begun();
        let Some(comm) = &mut self.comm else { return Ok(vec![words.to_vec()]) };
        let ranks = comm.world_size();
        if words.is_empty() {
            return Ok(vec![Vec::new(); ranks as usize]);
        }
        let exchange = among_hosts(ranks, DType::U64);
        let mut all = vec![0u64; words.len() * ranks as usize];
        comm.exchange(&exchange, bytemuck::cast_slice(words), bytemuck::cast_slice_mut(&mut all))?;
        Ok(all.chunks_exact(words.len()).map(<[u64]>::to_vec).collect())
    }

    /// All-gathers words, in the order of the ranks; the number of words may differ between ranks.
    ///
    /// # Errors
    /// As [`Peers::gather`].
    pub fn gather_any(&mut self, words: &[u64]) -> Result<Vec<Vec<u64>>, TrainError> {
        let counts = self.gather(&[words.len() as u64])?;
        let counts: Vec<usize> = counts.iter().flatten().map(|&count| count as usize).collect();
        let most = counts.iter().copied().max().unwrap_or(0);
        let mut filled = words.to_vec();
        filled.resize(most, 0);
        let mut all = self.gather(&filled)?;
        all.iter_mut().zip(counts).for_each(|(words, count)| words.truncate(count));
        Ok(all)
    }

    /// Checks that all ranks of a class have the same words.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first rank that differs from an earlier rank.
    pub fn expect_equal<C: PartialEq>(
        &mut self,
        what: &'static str,
        words: &[u64],
        class: impl Fn(usize) -> C,
    ) -> Result<(), TrainError> {
        let all = self.gather(words)?;
        let first_alike = |rank: usize| (0..rank).find(|&other| class(other) == class(rank));
        let differs = |rank: usize| {
            let first = first_alike(rank).filter(|&first| all[first] != all[rank])?;
            Some((first, rank))
        };
        match (0..all.len()).find_map(differs) {
            None => Ok(()),
            Some((first, rank)) => Err(TrainError::Setting {
                setting: what,
                expected: "the same on all ranks".to_string(),
                got: format!("another on rank {rank} than on rank {first}"),
                hint: Some("start every rank with the same command and version".to_string()),
            }),
        }
    }
}

/// Returns an all-gather through host memory among all ranks.
fn among_hosts(ranks: u32, dtype: DType) -> Exchange {
    let group = ProcessGroup { name: ProcessGroup::HOST.to_string(), ranks: (0..ranks).collect() };
    Exchange { kind: CollectiveKind::AllGather, group, dtype }
}
