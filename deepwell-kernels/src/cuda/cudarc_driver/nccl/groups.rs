//! Communicators of process groups: the first rank of each group creates an id, and the host
//! communicator distributes the id.

use deepwell_ir::ops::{CollectiveKind, Reduction};
use deepwell_ir::{DType, ProcessGroup};

use super::{NcclHost, NcclId, NcclRank, host_group, init, lock};
use crate::runtime::cuda::driver::{DriverError, DriverResult};
use crate::{Comm, CommError, Exchange};

/// Bytes of the warm-up collectives: enough that the library sets up the connections of large
/// collectives.
const WARM_UP_BYTES: usize = 1 << 20;

/// Groups and ids, as distributed to all ranks.
type Ids = Vec<(ProcessGroup, NcclId)>;

impl NcclRank {
    /// Creates a communicator for each of this rank's groups. All ranks of the world call this
    /// function at the same time, whatever their groups. Each group then runs warm-up collectives,
    /// so that broken connections show here and the library allocates its memory here. A group of a
    /// single rank gets no communicator, which would take hundreds of megabytes.
    ///
    /// # Errors
    /// Ranks that have failed, have other groups or do not arrive in time.
    pub fn join(&self, groups: &[ProcessGroup]) -> DriverResult<()> {
        let mut host = self.host()?;
        let of_comm = |error: CommError| DriverError::new("NCCL", error);
        let mut new_ids = Ids::new();
        let groups = || groups.iter().filter(|group| group.ranks.len() > 1);
        for group in groups().filter(|group| group.ranks.first() == Some(&self.shared.rank)) {
            new_ids.push((group.clone(), NcclId::new()?));
        }
        let told = gather(&mut host, &encode(&new_ids)).map_err(of_comm)?;
        let ids: Ids = told.iter().flat_map(|bytes| decode(bytes)).collect();
        // The same order on all ranks, otherwise two groups could deadlock.
        let mut groups: Vec<&ProcessGroup> = groups().collect();
        groups.sort_by(|a, b| (&a.ranks, &a.name).cmp(&(&b.ranks, &b.name)));
        for group in groups {
            self.connect_group(group, &ids)?;
            let (exchange, mut sum) = (sum_among(group), [0; 8]);
            host.exchange(&exchange, &1u64.to_le_bytes(), &mut sum).map_err(of_comm)?;
            let sum = u64::from_le_bytes(sum);
            if sum != group.ranks.len() as u64 {
                let reason = format!(
                    "expected a sum of {} among group `{}`, got {sum}",
                    group.ranks.len(),
                    group.name
                );
                return Err(DriverError::new("NCCL", reason));
            }
            warm_up(&mut host, group).map_err(of_comm)?;
        }
        Ok(())
    }

    fn connect_group(&self, group: &ProcessGroup, ids: &Ids) -> DriverResult<()> {
        let shared = &self.shared;
        let position = group.position_of(shared.rank);
        let id = ids.iter().find(|(known, _)| known == group).map(|(_, id)| *id);
        let (Some(position), Some(id)) = (position, id) else {
            let reason = format!(
                "expected a group that rank {:?} has too, got `{}` of {:?} on rank {}",
                group.ranks.first(),
                group.name,
                group.ranks,
                shared.rank
            );
            return Err(DriverError::new("NCCL", reason));
        };
        let (library, context) = (shared.library, &shared.context);
        let rank_and_size = (position as u32, group.ranks.len() as u32);
        let failure = || shared.failed();
        let limit = shared.limits.connect;
        let handle = init(library, context, id, rank_and_size, None, limit, &failure)?;
        lock(&shared.communicators).push((group.clone(), handle));
        Ok(())
    }
}

/// Runs an all-gather, a reduce-scatter and an all-reduce, and for pipeline and context groups
/// sends between neighbours. The library connects two ranks for a kind of collective, and allocates
/// memory for it, at the first use: here rather than during the capture of a body, where each rank
/// would wait for other ranks to capture theirs. All-to-alls are in the same body on every rank, so
/// NCCL connects them while that body is captured.
fn warm_up(host: &mut NcclHost, group: &ProcessGroup) -> Result<(), CommError> {
    let ranks = group.ranks.len();
    let part = vec![0; WARM_UP_BYTES];
    let mut whole = vec![0; WARM_UP_BYTES * ranks];
    let mut exchange = |kind, input: &[u8], output: &mut [u8]| {
        host.exchange(&Exchange { kind, group: group.clone(), dtype: DType::F32 }, input, output)
    };
    exchange(CollectiveKind::AllGather, &part, &mut whole)?;
    let reduction = Reduction::Sum;
    let mut sums = vec![0; WARM_UP_BYTES];
    exchange(CollectiveKind::ReduceScatter { reduction }, &whole, &mut sums)?;
    exchange(CollectiveKind::AllReduce { reduction }, &part, &mut sums)?;
    match group.name.as_str() {
        ProcessGroup::PIPELINE | ProcessGroup::CONTEXT => host.meet_neighbors(group),
        _ => Ok(()),
    }
}

fn sum_among(group: &ProcessGroup) -> Exchange {
    let kind = CollectiveKind::AllReduce { reduction: Reduction::Sum };
    Exchange { kind, group: group.clone(), dtype: DType::U64 }
}

/// Gathers byte strings of different lengths from all ranks.
fn gather(host: &mut NcclHost, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
    let ranks = host.world_size() as usize;
    let mut of = |bytes: &[u8]| {
        let group = host_group(ranks as u32);
        let exchange = Exchange { kind: CollectiveKind::AllGather, group, dtype: DType::E8m0 };
        let mut all = vec![0; bytes.len() * ranks];
        host.exchange(&exchange, bytes, &mut all).map(|()| all)
    };
    let lengths: Vec<usize> = of(&(own.len() as u64).to_le_bytes())?
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| u64::from_le_bytes(bytes) as usize)
        .collect();
    let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
    let mut padded = own.to_vec();
    padded.resize(longest, 0);
    let all = of(&padded)?;
    let of_rank = all.chunks_exact(longest).zip(lengths);
    Ok(of_rank.map(|(bytes, length)| bytes[..length].to_vec()).collect())
}

/// Encoding per group: length of the name, name, number of ranks, ranks (all numbers u32,
/// little-endian), id.
fn encode(ids: &Ids) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (group, id) in ids {
        bytes.extend((group.name.len() as u32).to_le_bytes());
        bytes.extend(group.name.as_bytes());
        bytes.extend((group.ranks.len() as u32).to_le_bytes());
        bytes.extend(group.ranks.iter().flat_map(|rank| rank.to_le_bytes()));
        bytes.extend(id.to_bytes());
    }
    bytes
}

/// Decodes the result of [`encode`], up to the first incomplete group.
fn decode(mut bytes: &[u8]) -> Ids {
    let mut take = |count: usize| bytes.split_off(..count);
    let mut next = || {
        let number = |bytes: &[u8]| bytes.try_into().ok().map(u32::from_le_bytes);
        let name = number(take(4)?)? as usize;
        let name = String::from_utf8_lossy(take(name)?).into_owned();
        let ranks = number(take(4)?)? as usize;
        let ranks = take(ranks.checked_mul(4)?)?.chunks_exact(4).filter_map(number).collect();
        let id = NcclId::from_bytes(take(NcclId::BYTES)?.try_into().ok()?);
        Some((ProcessGroup { name, ranks }, id))
    };
    std::iter::from_fn(&mut next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_as_they_were_written() {
        let id = |byte| NcclId::from_bytes([byte; NcclId::BYTES]);
        let group = |name: &str, ranks: &[u32]| ProcessGroup {
            name: name.to_string(),
            ranks: ranks.to_vec(),
        };
        let ids = vec![(group("data", &[0, 2]), id(7)), (group("", &[]), id(9))];
        let read = decode(&encode(&ids));
        assert!(read == ids);
        // Truncated groups are dropped.
        let bytes = encode(&ids);
        for length in 0..bytes.len() {
            assert!(decode(&bytes[..length]).len() < 2);
        }
        assert!(decode(&[0xff; 64]).is_empty());
    }
}
