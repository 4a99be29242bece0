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
        let exchange = among_hosts(ranks, DType::U64);
        let mut all = vec![0u64; words.len() * ranks as usize];
        comm.exchange(&exchange, bytemuck::cast_slice(words), bytemuck::cast_slice_mut(&mut all))?;
        Ok(all.chunks_exact(words.len()).map(<[u64]>::to_vec).collect())
    }

    /// The numbers of every rank, on rank 0; nothing on the others. All of them give equally many.
    ///
    /// They are gathered piece by piece, not sent: a library that connects two ranks for a message
    /// keeps the memory of that connection, hundreds of megabytes for each other rank.
    ///
    /// # Errors
    /// As [`Peers::gather`].
    pub fn collect(&mut self, own: &[f32]) -> Result<Vec<Vec<f32>>, TrainError> {
        /// Elements of a piece.
        const PIECE: usize = 1 << 20;
        let is_first = self.is_first();
        let Some(comm) = &mut self.comm else { return Ok(vec![own.to_vec()]) };
        let ranks = comm.world_size();
        let exchange = among_hosts(ranks, DType::F32);
        let mut all = vec![Vec::new(); if is_first { ranks as usize } else { 0 }];
        let mut gathered = vec![0f32; own.len().min(PIECE) * ranks as usize];
        for piece in own.chunks(PIECE) {
            let gathered = &mut gathered[..piece.len() * ranks as usize];
            let (input, output) = (bytemuck::cast_slice(piece), bytemuck::cast_slice_mut(gathered));
            comm.exchange(&exchange, input, output)?;
            for (all, theirs) in all.iter_mut().zip(gathered.chunks_exact(piece.len())) {
                all.extend_from_slice(theirs);
            }
        }
        Ok(all)
    }

    /// The numbers of some ranks, this one among them, on the first of them; nothing on the others.
    /// All of them give equally many.
    ///
    /// # Errors
    /// As [`Peers::gather`].
    pub fn collect_among(
        &mut self,
        ranks: &[u32],
        own: &[f32],
    ) -> Result<Vec<Vec<f32>>, TrainError> {
        let rank = self.rank() as u32;
        if let [first, ..] = ranks
            && *first != rank
        {
            self.send(*first, bytemuck::cast_slice(own))?;
            return Ok(Vec::new());
        }
        let mut all = vec![own.to_vec()];
        for &from in ranks.iter().filter(|&&from| from != rank) {
            let mut theirs = vec![0f32; own.len()];
            self.receive(from, bytemuck::cast_slice_mut(&mut theirs))?;
            all.push(theirs);
        }
        Ok(all)
    }

    /// Sends bytes to another rank, which receives as many.
    ///
    /// # Errors
    /// As [`Peers::gather`].
    pub fn send(&mut self, to: u32, bytes: &[u8]) -> Result<(), TrainError> {
        let Some(comm) = &mut self.comm else { return Ok(()) };
        let kind = CollectiveKind::Send { to };
        let exchange = Exchange { kind, ..among_hosts(comm.world_size(), DType::E4m3) };
        Ok(comm.exchange(&exchange, bytes, &mut [])?)
    }

    /// Receives bytes from another rank.
    ///
    /// # Errors
    /// As [`Peers::gather`].
    pub fn receive(&mut self, from: u32, bytes: &mut [u8]) -> Result<(), TrainError> {
        let Some(comm) = &mut self.comm else { return Ok(()) };
        let (shape, dtype) = (Shape::new([bytes.len()]), DType::E4m3);
        let kind = CollectiveKind::Recv { from, shape, dtype };
        let exchange = Exchange { kind, ..among_hosts(comm.world_size(), dtype) };
        Ok(comm.exchange(&exchange, &[], bytes)?)
    }

    /// Words of every rank, in the order of the ranks, of which each may give another number.
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

    /// What rank 0 says, which the others pass over their own answer for.
    ///
    /// # Errors
    /// As [`Peers::gather`].
    pub fn as_first(&mut self, own: bool) -> Result<bool, TrainError> {
        let all = self.gather(&[u64::from(own)])?;
        Ok(all.first().is_some_and(|words| words == &[1]))
    }

    /// Checks that all ranks of a class have the same words.
    ///
    /// # Errors
    /// [`TrainError::Setting`] naming the first rank that differs from an earlier one.
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

/// Everybody's elements to everybody.
fn among_hosts(ranks: u32, dtype: DType) -> Exchange {
    let group = ProcessGroup { name: ProcessGroup::HOST.to_string(), ranks: (0..ranks).collect() };
    Exchange { kind: CollectiveKind::AllGather, group, dtype }
}
