//! Vector clocks: the events known to have happened.
//!
//! A clock holds one number for each *agent*: a warp's loads and stores, its copies, its
//! tensor-core operations, or the phases of an mbarrier (see [`Kind`]). Events of an agent are
//! numbered; an event is known if its number is at most the clock's. Agents of a cluster share a
//! page, and clocks share pages copy-on-write, so that copying a clock costs two reference counts.
//!
//! Some events belong to a few lanes of a warp only. A page therefore has, in addition to one
//! number per agent for all lanes, a short list of numbers for lane masks.

use std::sync::Arc;

/// All lanes of a warp.
pub(super) const ALL_LANES: u32 = u32::MAX;

/// Kinds of events of a warp; each kind is an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Loads and stores; numbers are ticks of the warp's clock.
    Generic,
    /// Completion of `cp.async`.
    CopyAsync,
    /// Completed reads of bulk-group copies.
    BulkRead,
    /// Completed writes of bulk-group copies.
    BulkWrite,
    /// Completion of `tcgen05.mma`, `cp`, `shift`.
    Tensor,
    /// Issue of `tcgen05.mma`, `cp`, `shift`; the same unit executes later ones in order.
    TensorIssue,
    /// Completion of `tcgen05.ld`.
    TensorLoad,
    /// Completion of `tcgen05.st`.
    TensorStore,
    /// Completion of `wgmma`.
    WarpGroup,
    /// `mbarrier.init`.
    BarrierInit,
    /// Strong writes and atomic operations. A thread that reads from one knows the access itself,
    /// even without a fence before it; numbers are ticks, as for [`Kind::Generic`].
    Strong,
    /// Completion of `tcgen05.ld` per lane, because `tcgen05.wait` applies to each thread
    /// separately.
    TensorLoadLanes,
    /// Completion of `tcgen05.st` per lane.
    TensorStoreLanes,
}

pub(super) const KINDS: usize = 13;

pub(super) const ALL_KINDS: [Kind; KINDS] = [
    Kind::Generic,
    Kind::CopyAsync,
    Kind::BulkRead,
    Kind::BulkWrite,
    Kind::Tensor,
    Kind::TensorIssue,
    Kind::TensorLoad,
    Kind::TensorStore,
    Kind::WarpGroup,
    Kind::BarrierInit,
    Kind::Strong,
    Kind::TensorLoadLanes,
    Kind::TensorStoreLanes,
];

/// Bits of an agent's number within a cluster.
const LOCAL_BITS: u32 = 14;

/// An agent of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Agent(pub u32);

impl Agent {
    pub(super) fn new(cluster: u32, local: u32) -> Agent {
        debug_assert!(local < 1 << LOCAL_BITS);
        Agent(cluster << LOCAL_BITS | local)
    }

    pub(super) fn cluster(self) -> u32 {
        self.0 >> LOCAL_BITS
    }

    fn local(self) -> usize {
        (self.0 & ((1 << LOCAL_BITS) - 1)) as usize
    }
}

/// A number that applies to some lanes only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Partial {
    local: u32,
    lanes: u32,
    value: u32,
}

/// Numbers of the agents of one cluster.
#[derive(Clone, Debug, Default)]
struct Page {
    values: Vec<u32>,
    partial: Vec<Partial>,
}

impl Page {
    #[inline]
    fn uniform(&self, local: usize) -> u32 {
        self.values.get(local).copied().unwrap_or(0)
    }

    fn knows(&self, local: usize, lanes: u32, value: u32) -> bool {
        if self.uniform(local) >= value {
            return true;
        }
        let covered = (self.partial.iter())
            .filter(|entry| entry.local as usize == local && entry.value >= value)
            .fold(0, |mask, entry| mask | entry.lanes);
        lanes & !covered == 0
    }

    fn raise(&mut self, local: usize, lanes: u32, value: u32) {
        if self.uniform(local) >= value {
            return;
        }
        if lanes != ALL_LANES {
            self.raise_partial(local, lanes, value);
            return;
        }
        if self.values.len() <= local {
            self.values.resize(local + 1, 0);
        }
        self.values[local] = value;
        self.partial.retain(|entry| entry.local as usize != local || entry.value > value);
    }

    fn raise_partial(&mut self, local: usize, lanes: u32, value: u32) {
        let mut added = Partial { local: local as u32, lanes, value };
        self.partial.retain_mut(|entry| {
            if entry.local != added.local {
                return true;
            }
            if entry.value <= value {
                entry.lanes &= !lanes;
            } else {
                added.lanes &= !entry.lanes;
            }
            if entry.value == value {
                added.lanes |= entry.lanes;
                return false;
            }
            entry.lanes != 0
        });
        if added.lanes == 0 {
            return;
        }
        self.partial.push(added);
        // Lane masks of one agent are disjoint, so that together they may cover the warp.
        let of_agent = || self.partial.iter().filter(|entry| entry.local as usize == local);
        if of_agent().fold(0, |mask, entry| mask | entry.lanes) == ALL_LANES {
            let least = of_agent().map(|entry| entry.value).min().unwrap_or(0);
            self.raise(local, ALL_LANES, least);
        }
    }

    fn within(&self, other: &Page) -> bool {
        let common = self.values.len().min(other.values.len());
        let values = self.values[..common].iter().zip(&other.values[..common]).all(|(a, b)| a <= b)
            && self.values[common..].iter().all(|value| *value == 0);
        values
            && (self.partial.iter())
                .all(|entry| other.knows(entry.local as usize, entry.lanes, entry.value))
    }

    fn join(&mut self, other: &Page) {
        if self.values.len() < other.values.len() {
            self.values.resize(other.values.len(), 0);
        }
        for (value, known) in self.values.iter_mut().zip(&other.values) {
            *value = (*value).max(*known);
        }
        if !self.partial.is_empty() {
            let values = &self.values;
            self.partial.retain(|entry| {
                values.get(entry.local as usize).is_none_or(|value| *value < entry.value)
            });
        }
        for entry in &other.partial {
            self.raise(entry.local as usize, entry.lanes, entry.value);
        }
    }
}

/// A cluster and its page.
type OfCluster = (u32, Arc<Page>);

/// The known events.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock {
    first: Option<OfCluster>,
    /// Pages of other clusters, in order.
    rest: Option<Arc<Vec<OfCluster>>>,
}

impl Clock {
    /// Whether the events of `agent` up to `value` in these lanes are known.
    #[inline]
    pub(super) fn knows(&self, agent: Agent, lanes: u32, value: u32) -> bool {
        self.page(agent.cluster()).is_some_and(|page| page.knows(agent.local(), lanes, value))
    }

    /// Adds the events of `agent` up to `value` in these lanes.
    pub(super) fn raise(&mut self, agent: Agent, lanes: u32, value: u32) {
        if value == 0 || self.knows(agent, lanes, value) {
            return;
        }
        Arc::make_mut(self.page_mut(agent.cluster())).raise(agent.local(), lanes, value);
    }

    /// Adds all events that `other` knows.
    pub(super) fn join(&mut self, other: &Clock) {
        for (cluster, page) in other.pages() {
            let mine = self.page_mut(*cluster);
            if Arc::ptr_eq(mine, page) || page.within(mine) {
                continue;
            }
            if mine.within(page) {
                *mine = page.clone();
            } else {
                Arc::make_mut(mine).join(page);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    fn pages(&self) -> impl Iterator<Item = &OfCluster> {
        self.first.iter().chain(self.rest.iter().flat_map(|rest| rest.iter()))
    }

    #[inline]
    fn page(&self, cluster: u32) -> Option<&Page> {
        match &self.first {
            Some((first, page)) if *first == cluster => Some(page),
            _ => {
                let rest = self.rest.as_ref()?;
                let at = rest.binary_search_by_key(&cluster, |entry| entry.0).ok()?;
                Some(&rest[at].1)
            }
        }
    }

    fn page_mut(&mut self, cluster: u32) -> &mut Arc<Page> {
        let first = self.first.get_or_insert_with(|| (cluster, Arc::default()));
        if first.0 == cluster {
            return &mut first.1;
        }
        let rest = Arc::make_mut(self.rest.get_or_insert_with(Arc::default));
        let at = match rest.binary_search_by_key(&cluster, |entry| entry.0) {
            Ok(at) => at,
            Err(at) => {
                rest.insert(at, (cluster, Arc::default()));
                at
            }
        };
        &mut rest[at].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_that_together_are_the_warp_are_all_lanes() {
        let agent = Agent::new(0, 3);
        let mut clock = Clock::default();
        clock.raise(agent, 1, 5);
        assert!(clock.knows(agent, 1, 5));
        assert!(!clock.knows(agent, 3, 5));
        clock.raise(agent, ALL_LANES & !1, 4);
        assert!(clock.knows(agent, ALL_LANES, 4));
        assert!(clock.knows(agent, 1, 5));
        assert!(!clock.knows(agent, 2, 5));
        clock.raise(agent, ALL_LANES, 6);
        assert!(clock.knows(agent, ALL_LANES, 6));
    }

    #[test]
    fn joining_keeps_the_greater_number_of_each_agent() {
        let (a, b, far) = (Agent::new(0, 0), Agent::new(0, 70), Agent::new(9, 2));
        let mut left = Clock::default();
        left.raise(a, ALL_LANES, 3);
        left.raise(b, 0xff, 2);
        let mut right = Clock::default();
        right.raise(far, ALL_LANES, 1);
        right.raise(a, ALL_LANES, 2);
        right.raise(b, 0x1, 7);
        left.join(&right);
        assert!(left.knows(a, ALL_LANES, 3) && left.knows(far, ALL_LANES, 1));
        assert!(left.knows(b, 0xff, 2) && left.knows(b, 1, 7) && !left.knows(b, 3, 7));
        assert!(!right.knows(a, ALL_LANES, 3));
        right.join(&left);
        assert!(right.knows(a, ALL_LANES, 3) && right.knows(b, 1, 7));
    }
}
