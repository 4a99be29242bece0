//! What a rank tells the others, and hears of them, on the host.

use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{DType, ProcessGroup, Shape};
use deepwell_kernels::{Comm, Exchange};

use crate::TrainError;

/// The other ranks of a run, as one of them sees them.
pub struct Peers {
    comm: Option<Box<dyn Comm>>,
}

impl Peers {
    /// No others.
    pub fn none() -> Peers {
        Peers { comm: None }
    }

    /// Those at the other ends of a communicator.
    pub fn of(comm: Box<dyn Comm>) -> Peers {
        Peers { comm: Some(comm) }
    }

    /// Which rank this is, counted from 0.
    pub fn rank(&self) -> usize {
        self.comm.as_ref().map_or(0, |comm| comm.rank() as usize)
    }

    /// How many ranks there are, this one counted.
    pub fn world_size(&self) -> usize {
        self.comm.as_ref().map_or(1, |comm| comm.world_size() as usize)
    }

    /// Whether this is the rank that speaks for all.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// The words of every rank, in the order of the ranks. All of them give equally many.
    ///
    /// # Errors
    /// Ranks that have failed, or do something else.
    pub fn gather(&mut self, words: &[u64]) -> Result<Vec<Vec<u64>>, TrainError> {
        let Some(comm) = &mut self.comm else { return Ok(vec![words.to_vec()]) };
        let ranks = comm.world_size();
        if words.is_empty() {
            return Ok(vec![Vec::new(); ranks as usize]);
        }
        let group = ProcessGroup { name: "host".to_string(), ranks: (0..ranks).collect() };
        let exchange = Exchange { kind: CollectiveKind::AllGather, group, dtype: DType::U64 };
        let mut all = vec![0u64; words.len() * ranks as usize];
        comm.exchange(&exchange, bytemuck::cast_slice(words), bytemuck::cast_slice_mut(&mut all))?;
        Ok(all.chunks_exact(words.len()).map(<[u64]>::to_vec).collect())
    }

    /// The numbers of every rank, on rank 0; nothing on the others. All of them give equally many.
    ///
    /// # Errors
    /// As [`Peers::gather`].
    pub fn collect(&mut self, own: &[f32]) -> Result<Vec<Vec<f32>>, TrainError> {
        let Some(comm) = &mut self.comm else { return Ok(vec![own.to_vec()]) };
        let ranks = comm.world_size();
        let group = ProcessGroup { name: "host".to_string(), ranks: (0..ranks).collect() };
        let exchange = |kind| Exchange { kind, group: group.clone(), dtype: DType::F32 };
        if comm.rank() > 0 {
            let send = exchange(CollectiveKind::Send { to: 0 });
            comm.exchange(&send, bytemuck::cast_slice(own), &mut [])?;
            return Ok(Vec::new());
        }
        let mut all = vec![own.to_vec()];
        for from in 1..ranks {
            let (shape, dtype) = (Shape::new([own.len()]), DType::F32);
            let mut theirs = vec![0f32; own.len()];
            let recv = exchange(CollectiveKind::Recv { from, shape, dtype });
            comm.exchange(&recv, &[], bytemuck::cast_slice_mut(&mut theirs))?;
            all.push(theirs);
        }
        Ok(all)
    }

    /// What rank 0 says, which the others pass over their own answer for.
    ///
    /// # Errors
    /// As [`Peers::gather`].
    pub fn as_first(&mut self, own: bool) -> Result<bool, TrainError> {
        let all = self.gather(&[u64::from(own)])?;
        Ok(all.first().is_some_and(|words| words == &[1]))
    }

    /// Checks that all ranks have the same words.
    ///
    /// # Errors
    /// [`TrainError::Setting`] naming the first rank that differs from rank 0.
    pub fn expect_equal(&mut self, what: &'static str, words: &[u64]) -> Result<(), TrainError> {
        let all = self.gather(words)?;
        match all.iter().position(|other| *other != all[0]) {
            None => Ok(()),
            Some(rank) => Err(TrainError::Setting {
                setting: what,
                expected: "the same on all ranks".to_string(),
                got: format!("another on rank {rank} than on rank 0"),
                hint: Some("start every rank with the same command and version".to_string()),
            }),
        }
    }
}
