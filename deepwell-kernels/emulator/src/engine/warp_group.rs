//! What the four warps of a warp group must do alike.

use std::collections::VecDeque;

use crate::error::Fault;

/// The `wgmma`s of the warp groups of a block, in the order in which their warps came to them.
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
}

const RULE: &str = "wgmma-warp-group";

impl WarpGroups {
    /// A warp runs the `wgmma` at `pc`.
    pub(crate) fn product(&mut self, warp: u32, pc: u32) -> Result<(), Fault> {
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

    /// All warps of the block have ended.
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
    fn warps_drift_apart_but_run_the_same() {
        let mut groups = WarpGroups::default();
        for warp in [0, 2, 3] {
            groups.product(warp, 7).unwrap();
            groups.product(warp, 9).unwrap();
        }
        assert_eq!(groups.check_exit().unwrap_err().rule, RULE);
        groups.product(1, 7).unwrap();
        assert_eq!(groups.product(1, 8).unwrap_err().rule, RULE);
        groups.product(1, 9).unwrap();
        groups.check_exit().unwrap();
    }
}
