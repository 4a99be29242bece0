//! What the four warps of a warp group must do alike.

use std::collections::VecDeque;

use crate::error::Fault;

/// The `wgmma`s of the warp groups of a CTA, in the order in which their warps came to them.
#[derive(Clone, Debug, Default)]
pub(crate) struct WarpGroups {
    groups: Vec<Group>,
}

#[derive(Clone, Debug, Default)]
struct Group {
    /// Instructions that some warps have run and others have not.
    ahead: VecDeque<u32>,
    /// Those before.
    passed: u64,
    /// How many each warp has run.
    ran: [u64; 4],
    /// How many of each warp are complete.
    done: [u64; 4],
    /// How many each warp had run at its commits, as far back as waits may ask.
    committed: [VecDeque<u64>; 4],
}

const RULE: &str = "wgmma-warp-group";

impl WarpGroups {
    /// A warp runs the `wgmma` at `pc`.
    pub(crate) fn wgmma(&mut self, warp: u32, pc: u32) -> Result<(), Fault> {
        let (group, member) = ((warp / 4) as usize, (warp % 4) as usize);
        if self.groups.len() <= group {
            self.groups.resize_with(group + 1, Group::default);
        }
        let group = &mut self.groups[group];
        let at = (group.ran[member] - group.passed) as usize;
        match group.ahead.get(at) {
            None => group.ahead.push_back(pc),
            Some(other) if *other == pc => {}
            Some(_) => {
                return Err(Fault::new(
                    RULE,
                    format!(
                        "`wgmma` number {} of warp {warp} is another instruction than that of its \
                         warp group: all four warps must run the same",
                        group.ran[member] + 1
                    ),
                ));
            }
        }
        group.ran[member] += 1;
        while group.ran.iter().all(|ran| *ran > group.passed) {
            group.ahead.pop_front();
            group.passed += 1;
        }
        Ok(())
    }

    /// The first pending `wgmma` of a warp is complete.
    pub(crate) fn completed(&mut self, warp: u32) {
        if let Some(group) = self.groups.get_mut((warp / 4) as usize) {
            group.done[(warp % 4) as usize] += 1;
        }
    }

    /// A warp runs `wgmma.commit_group`.
    pub(crate) fn committed(&mut self, warp: u32) {
        if let Some(group) = self.groups.get_mut((warp / 4) as usize) {
            let member = (warp % 4) as usize;
            group.committed[member].push_back(group.ran[member]);
        }
    }

    /// `wgmma.wait_group pending` of a warp: how many `wgmma`s of each warp of its group must be
    /// complete. They are one operation of the group, and complete for all or for none.
    pub(crate) fn awaited(&self, warp: u32, pending: u32) -> u64 {
        let group = self.groups.get((warp / 4) as usize);
        let committed = group.map(|group| &group.committed[(warp % 4) as usize]);
        let end = committed.and_then(|ends| ends.iter().rev().nth(pending as usize));
        end.copied().unwrap_or(0)
    }

    /// Whether so many are complete in all warps of a warp's group.
    pub(crate) fn are_complete(&self, warp: u32, count: u64) -> bool {
        let group = self.groups.get((warp / 4) as usize);
        count == 0 || group.is_some_and(|group| group.done.iter().all(|done| *done >= count))
    }

    /// A wait is over: earlier groups are not asked for again.
    pub(crate) fn waited(&mut self, warp: u32, pending: u32) {
        if let Some(group) = self.groups.get_mut((warp / 4) as usize) {
            let ends = &mut group.committed[(warp % 4) as usize];
            ends.drain(..ends.len().saturating_sub(pending as usize));
        }
    }

    /// All warps of the CTA have ended.
    pub(crate) fn check_exit(&self) -> Result<(), Fault> {
        let uneven = self.groups.iter().find(|group| !group.ahead.is_empty());
        uneven.map_or(Ok(()), |group| {
            Err(Fault::new(
                RULE,
                format!(
                    "the warps of a warp group ran {:?} `wgmma`s: all four must run the same",
                    group.ran
                ),
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wgmmas_complete_for_the_whole_group() {
        let mut groups = WarpGroups::default();
        for warp in 0..4 {
            groups.wgmma(warp, 7).unwrap();
            groups.committed(warp);
            groups.wgmma(warp, 9).unwrap();
            groups.committed(warp);
        }
        assert_eq!((groups.awaited(2, 0), groups.awaited(2, 1), groups.awaited(2, 2)), (2, 1, 0));
        assert!(groups.are_complete(2, 0));
        (1..4).for_each(|warp| groups.completed(warp));
        assert!(!groups.are_complete(2, 1));
        groups.completed(0);
        assert!(groups.are_complete(2, 1) && !groups.are_complete(2, 2));
        groups.waited(2, 1);
        assert_eq!((groups.awaited(2, 0), groups.awaited(2, 1)), (2, 0));
    }

    #[test]
    fn warps_drift_apart_but_run_the_same() {
        let mut groups = WarpGroups::default();
        for warp in [0, 2, 3] {
            groups.wgmma(warp, 7).unwrap();
            groups.wgmma(warp, 9).unwrap();
        }
        assert_eq!(groups.check_exit().unwrap_err().rule, RULE);
        groups.wgmma(1, 7).unwrap();
        assert_eq!(groups.wgmma(1, 8).unwrap_err().rule, RULE);
        groups.wgmma(1, 9).unwrap();
        groups.check_exit().unwrap();
    }
}
