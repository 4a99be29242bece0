//! State shared by the ranks of a process: collectives in progress, messages, waiting ranks, and
//! the first failure, which fails all ranks.
//!
//! One lock guards everything. Every change of the state wakes the waiting ranks. A woken rank
//! stops waiting if its data has arrived, a rank has failed, a rank that it waits for has ended, or
//! the ranks deadlock. The only other way out is the timeout.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use deepwell_ir::ProcessGroup;

use crate::comm::CommError;
use crate::comm::want::Want;

/// The inputs of all ranks of a group, in its order.
#[derive(Debug)]
pub(super) struct GroupInputs {
    pub(super) inputs: Vec<Box<[u8]>>,
    /// The reduction of the inputs, once a rank has computed it.
    pub(super) reduced: OnceLock<Result<Vec<u8>, String>>,
}

/// A message from a rank to another.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) want: Want,
    pub(super) bytes: Box<[u8]>,
}

/// Key of a collective: the group, and the number of collectives of this group before it.
type CollectiveKey = (ProcessGroup, u64);

/// Sender, receiver and group.
type Route = (u32, u32, ProcessGroup);

#[derive(Debug)]
struct Round {
    want: Want,
    /// The rank that arrived first.
    first: u32,
    inputs: Vec<Option<Box<[u8]>>>,
    group_inputs: Option<Arc<GroupInputs>>,
    taken: usize,
}

impl Round {
    fn missing(&self) -> Vec<u32> {
        let members = self.want.group.ranks.iter().zip(&self.inputs);
        let absent = members.filter(|(_, input)| self.group_inputs.is_none() && input.is_none());
        absent.map(|(&rank, _)| rank).collect()
    }
}

/// The collective or message awaited by a rank.
#[derive(Clone, Debug)]
enum Waiting {
    Round(CollectiveKey),
    Message(Route),
}

#[derive(Debug, Default)]
struct State {
    failure: Option<(u32, CommError)>,
    rounds: HashMap<CollectiveKey, Round>,
    /// Number of collectives entered so far, by rank and group.
    counts: HashMap<(u32, ProcessGroup), u64>,
    mail: HashMap<Route, VecDeque<Message>>,
    waiting: HashMap<u32, (Waiting, String)>,
    ended: Vec<u32>,
}

impl State {
    /// The ranks that a rank waits for.
    fn missing(&self, rank: u32) -> Vec<u32> {
        match self.waiting.get(&rank) {
            None => Vec::new(),
            Some((Waiting::Round(place), _)) => {
                self.rounds.get(place).map_or_else(Vec::new, Round::missing)
            }
            Some((Waiting::Message(way), _)) => match self.mail.get(way).map(VecDeque::len) {
                None | Some(0) => vec![way.0],
                Some(_) => Vec::new(),
            },
        }
    }

    /// The ranks holding up `rank`: ranks not waiting themselves, but awaited by `rank` directly or
    /// through a chain of waiting ranks.
    fn culprits(&self, rank: u32) -> Vec<u32> {
        let mut culprits = Vec::new();
        let mut seen = vec![rank];
        let mut next = self.missing(rank);
        while let Some(other) = next.pop() {
            if seen.contains(&other) {
                continue;
            }
            seen.push(other);
            match self.waiting.contains_key(&other) {
                true => next.extend(self.missing(other)),
                false => culprits.push(other),
            }
        }
        culprits.sort_unstable();
        culprits
    }

    /// The path from `rank` to a rank waiting for `rank`, if the waiting ranks form a cycle.
    fn circle(&self, rank: u32) -> Option<Vec<u32>> {
        let mut paths = vec![vec![rank]];
        let mut seen = vec![rank];
        while let Some(path) = paths.pop() {
            for next in path.last().map_or_else(Vec::new, |&last| self.missing(last)) {
                if next == rank {
                    return Some(path);
                }
                if !seen.contains(&next) {
                    seen.push(next);
                    paths.push([path.as_slice(), &[next]].concat());
                }
            }
        }
        None
    }

    /// The error of a waiting `rank`, if the wait can never end.
    fn dead_end(&self, rank: u32) -> Option<CommError> {
        let what = |rank: u32| self.waiting.get(&rank).map_or("", |(_, what)| what).to_string();
        let missing = self.missing(rank);
        if let Some(&ended) = missing.iter().find(|rank| self.ended.contains(rank)) {
            return Some(CommError::Ended { what: what(rank), rank: ended });
        }
        let circle = self.circle(rank)?;
        let nexts = circle.iter().cycle().skip(1);
        let chain = circle
            .iter()
            .zip(nexts)
            .map(|(&rank, next)| format!("rank {rank} in {} for rank {next}", what(rank)));
        Some(CommError::Deadlock { chain: chain.collect() })
    }

    fn check(&self) -> Result<(), CommError> {
        match &self.failure {
            None => Ok(()),
            Some((rank, error)) => {
                Err(CommError::Failed { rank: *rank, reason: error.to_string() })
            }
        }
    }
}

/// The ranks of a process.
#[derive(Debug)]
pub(super) struct World {
    size: u32,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

impl World {
    pub(super) fn new(size: u32, timeout: Duration) -> World {
        World { size, timeout, state: Mutex::default(), changed: Condvar::new() }
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state consistent, so a panic while the lock is held is
        // harmless.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an error of `rank` as the failure of all ranks, and returns the error.
    pub(super) fn fail(&self, rank: u32, error: CommError) -> CommError {
        self.fail_in(&mut self.lock(), rank, error)
    }

    fn fail_in(&self, state: &mut State, rank: u32, error: CommError) -> CommError {
        state.failure.get_or_insert_with(|| (rank, error.clone()));
        self.changed.notify_all();
        error
    }

    pub(super) fn abort(&self, rank: u32, reason: &str) {
        let what = format!("rank {rank}");
        self.fail(rank, CommError::Request { what, reason: reason.to_string() });
    }

    pub(super) fn failure(&self) -> Option<(u32, CommError)> {
        self.lock().failure.clone()
    }

    pub(super) fn leave(&self, rank: u32) {
        self.lock().ended.push(rank);
        self.changed.notify_all();
    }

    /// Deposits `input` for the group's next collective, and waits for the inputs of all ranks.
    pub(super) fn meet(
        &self,
        rank: u32,
        want: &Want,
        input: &[u8],
    ) -> Result<Arc<GroupInputs>, CommError> {
        let mut state = self.lock();
        state.check()?;
        let group = &want.group;
        let count = state.counts.entry((rank, group.clone())).or_default();
        let key = (group.clone(), *count);
        *count += 1;
        let round = state.rounds.entry(key.clone()).or_insert_with(|| Round {
            want: want.clone(),
            first: rank,
            inputs: vec![None; group.ranks.len()],
            group_inputs: None,
            taken: 0,
        });
        if round.want != *want {
            let error = CommError::Mismatch {
                rank,
                got: want.to_string(),
                other: round.first,
                expected: round.want.to_string(),
            };
            return Err(self.fail_in(&mut state, rank, error));
        }
        let position = group.position_of(rank).unwrap_or(0);
        round.inputs[position] = Some(input.into());
        if round.inputs.iter().all(Option::is_some) {
            let inputs = round.inputs.iter_mut().filter_map(Option::take).collect();
            round.group_inputs = Some(Arc::new(GroupInputs { inputs, reduced: OnceLock::new() }));
            self.changed.notify_all();
        }
        let waiting = (Waiting::Round(key.clone()), want.to_string());
        self.wait(state, rank, waiting, |state| {
            let round = state.rounds.get_mut(&key)?;
            let group_inputs = round.group_inputs.clone()?;
            round.taken += 1;
            if round.taken == round.inputs.len() {
                state.rounds.remove(&key);
            }
            Some(group_inputs)
        })
    }

    pub(super) fn send(&self, rank: u32, to: u32, message: Message) -> Result<(), CommError> {
        let mut state = self.lock();
        state.check()?;
        if state.ended.contains(&to) {
            let error = CommError::Ended { what: message.want.to_string(), rank: to };
            return Err(self.fail_in(&mut state, rank, error));
        }
        let way = (rank, to, message.want.group.clone());
        state.mail.entry(way).or_default().push_back(message);
        self.changed.notify_all();
        Ok(())
    }

    pub(super) fn receive(
        &self,
        rank: u32,
        from: u32,
        want: &Want,
    ) -> Result<Box<[u8]>, CommError> {
        let state = self.lock();
        state.check()?;
        let way = (from, rank, want.group.clone());
        let waiting = (Waiting::Message(way.clone()), want.to_string());
        let message = self.wait(state, rank, waiting, |state| {
            state.mail.get_mut(&way).and_then(VecDeque::pop_front)
        })?;
        if (message.want.dtype, message.want.bytes) != (want.dtype, want.bytes) {
            let got = want.to_string();
            let expected = message.want.to_string();
            let error = CommError::Mismatch { rank, got, other: from, expected };
            return Err(self.fail(rank, error));
        }
        Ok(message.bytes)
    }

    /// Waits until `take` returns a value, or until that has become impossible.
    fn wait<T>(
        &self,
        mut state: MutexGuard<'_, State>,
        rank: u32,
        waiting: (Waiting, String),
        mut take: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, CommError> {
        let begin = Instant::now();
        let what = waiting.1.clone();
        state.waiting.insert(rank, waiting);
        let result = loop {
            // Data that has arrived is taken even after a failure.
            if let Some(taken) = take(&mut state) {
                break Ok(taken);
            }
            if let Err(error) = state.check() {
                break Err(error);
            }
            if let Some(error) = state.dead_end(rank) {
                break Err(self.fail_in(&mut state, rank, error));
            }
            let waited = begin.elapsed();
            let Some(rest) = self.timeout.checked_sub(waited).filter(|rest| !rest.is_zero()) else {
                let missing = state.culprits(rank);
                let waited = self.timeout;
                let error = CommError::Timeout { what, waited, missing };
                break Err(self.fail_in(&mut state, rank, error));
            };
            let woken = self.changed.wait_timeout(state, rest);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        };
        state.waiting.remove(&rank);
        result
    }
}
