//! A collective or message of a rank: sends parts to the peers and receives theirs.

use std::sync::Arc;

use deepwell_ir::ops::Reduction;

use super::frame::{self, Digests, Frame, Outgoing};
use super::{Shared, State};
use crate::comm::want::Want;
use crate::comm::{CommError, reduce};

/// A rank in a collective or message.
pub(super) struct Meeting<'a> {
    shared: &'a Shared,
    pub(super) want: Want,
    digests: Digests,
    /// Place of this rank in the group.
    pub(super) place: usize,
}

impl Meeting<'_> {
    pub(super) fn of(shared: &Shared, want: Want) -> Meeting<'_> {
        let place = want.group.position_of(shared.rank).unwrap_or(0);
        Meeting { shared, digests: Digests::of(&want), want, place }
    }

    pub(super) fn cannot(&self, reason: String) -> CommError {
        self.shared.fail(CommError::Request { what: self.want.to_string(), reason })
    }

    /// Posts a message without waiting.
    pub(super) fn send(&self, to: usize, bytes: &[u8]) -> Result<(), CommError> {
        let to = self.want.group.ranks[to];
        let frame = frame::part(&self.want, self.digests, bytes);
        let mut state = self.shared.lock();
        if state.ended.contains(&to) {
            drop(state);
            let what = self.want.to_string();
            return Err(self.shared.fail(CommError::Ended { what, rank: to }));
        }
        self.shared.post(&mut state, [(to, frame)]);
        Ok(())
    }

    /// Waits for a frame from each place of `from`, and checks that all ranks agree.
    pub(super) fn receive(&self, from: &[usize]) -> Result<Vec<Frame>, CommError> {
        let Meeting { shared, want, digests, .. } = self;
        let from: Vec<u32> = from.iter().map(|&place| want.group.ranks[place]).collect();
        let is_there = |state: &State, rank: u32| {
            state.mail.get(&(rank, digests.channel)).is_some_and(|mail| !mail.is_empty())
        };
        let missing = |state: &State| {
            from.iter().copied().filter(|&rank| !is_there(state, rank)).collect::<Vec<_>>()
        };
        let frames = shared.wait(shared.timeout, want.to_string(), missing, |state| {
            if !missing(state).is_empty() {
                return None;
            }
            let take = |&rank| state.mail.get_mut(&(rank, digests.channel))?.pop_front();
            from.iter().map(take).collect::<Option<Vec<Frame>>>()
        })?;
        let differs = |(_, frame): &(u32, &Frame)| frame.digests.exchange != digests.exchange;
        match from.into_iter().zip(&frames).find(differs) {
            None => Ok(frames),
            Some((other, frame)) => Err(shared.fail(CommError::Mismatch {
                rank: shared.rank,
                got: want.to_string(),
                other,
                expected: frame.words(),
            })),
        }
    }

    /// Sends each other place its part, and receives a part from each, in the order of the group.
    pub(super) fn round<'b>(
        &self,
        to: impl Fn(usize) -> &'b [u8],
    ) -> Result<Vec<Frame>, CommError> {
        let ranks = &self.want.group.ranks;
        let others: Vec<usize> = (0..ranks.len()).filter(|&place| place != self.place).collect();
        let mut last: Option<(&[u8], Outgoing)> = None;
        let mut frames = Vec::with_capacity(others.len());
        for &place in &others {
            let bytes = to(place);
            let frame = match &last {
                Some((same, frame)) if std::ptr::eq(*same, bytes) => Arc::clone(frame),
                _ => frame::part(&self.want, self.digests, bytes),
            };
            last = Some((bytes, Arc::clone(&frame)));
            frames.push((ranks[place], frame));
        }
        drop(last);
        self.shared.post(&mut self.shared.lock(), frames);
        self.receive(&others)
    }

    /// The parts of all places, with `own` at this rank's place.
    pub(super) fn parts<'b>(&self, frames: &'b [Frame], own: &'b [u8]) -> Vec<&'b [u8]> {
        let mut parts: Vec<&[u8]> = frames.iter().map(Frame::bytes).collect();
        parts.insert(self.place, own);
        parts
    }

    /// All-reduce by slices: reduces this rank's slice of the elements, then gathers all slices.
    pub(super) fn reduce_slices(
        &self,
        reduction: Reduction,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let ranks = self.want.group.ranks.len();
        let element = self.want.dtype.bits().div_ceil(8) as usize;
        let begin = |place: usize| input.len() / element * place / ranks * element;
        let slice = |place: usize| begin(place)..begin(place + 1);
        let own = slice(self.place);
        let frames = self.round(|to| &input[slice(to)])?;
        let parts = self.parts(&frames, &input[own.clone()]);
        let made = reduce(reduction, self.want.dtype, &parts, &mut output[own.clone()]);
        made.map_err(|reason| self.cannot(reason))?;
        let frames = self.round(|_| &output[own.clone()])?;
        let others = (0..ranks).filter(|&place| place != self.place);
        for (place, frame) in others.zip(&frames) {
            output[slice(place)].copy_from_slice(frame.bytes());
        }
        Ok(())
    }
}
