//! Consistency of the four warps of a warp group.

use std::collections::VecDeque;

use crate::error::Fault;

/// The `wgmma`s of the warp groups of a CTA, in execution order.
#[derive(Clone, Debug, Default)]
pub(crate) struct WarpGroups {
    groups: Vec<Group>,
}

#[derive(Clone, Debug, Default)]
struct Group {
    /// Instructions executed by some warps but not by all.
    ahead: VecDeque<u32>,
    /// Number of instructions executed by all warps.
    passed: u64,
    /// Number of instructions executed by each warp.
    ran: [u64; 4],
    /// Number of completed instructions of each warp.
    done: [u64; 4],
    /// Instructions executed by each warp at its commits, as far back as a wait may refer.
    committed: [VecDeque<u64>; 4],
}

const RULE: &str = "wgmma-warp-group";

impl WarpGroups {
    /// Records that a warp executes the `wgmma` at `pc`.
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

    /// Records the completion of a warp's first pending `wgmma`.
    pub(crate) fn completed(&mut self, warp: u32) {
        if let Some(group) = self.groups.get_mut((warp / 4) as usize) {
            group.done[(warp % 4) as usize] += 1;
        }
    }

    /// Records a `wgmma.commit_group` of a warp.
    pub(crate) fn committed(&mut self, warp: u32) {
        if let Some(group) = self.groups.get_mut((warp / 4) as usize) {
            let member = (warp % 4) as usize;
            group.committed[member].push_back(group.ran[member]);
        }
    }

    /// Returns the number of `wgmma`s that must be complete in each warp of the group for a
    /// `wgmma.wait_group pending`. A `wgmma` is one operation of the warp group and completes for
    /// all four warps together.
    pub(crate) fn awaited(&self, warp: u32, pending: u32) -> u64 {
        let group = self.groups.get((warp / 4) as usize);
        let committed = group.map(|group| &group.committed[(warp % 4) as usize]);
        let end = committed.and_then(|ends| ends.iter().rev().nth(pending as usize));
        end.copied().unwrap_or(0)
    }

    /// Whether `count` `wgmma`s are complete in all warps of a warp's group.
    pub(crate) fn are_complete(&self, warp: u32, count: u64) -> bool {
        let group = self.groups.get((warp / 4) as usize);
        count == 0 || group.is_some_and(|group| group.done.iter().all(|done| *done >= count))
    }

    /// Records the end of a wait; earlier groups are not needed any more.
    pub(crate) fn waited(&mut self, warp: u32, pending: u32) {
        if let Some(group) = self.groups.get_mut((warp / 4) as usize) {
            let ends = &mut group.committed[(warp % 4) as usize];
            ends.drain(..ends.len().saturating_sub(pending as usize));
        }
    }

    /// Checks, at the end of the CTA, that all warps executed the same `wgmma`s.
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
