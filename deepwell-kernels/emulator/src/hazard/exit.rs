//! Checks at the end of CTAs.

use super::cell::Record;
use super::clock::{ALL_LANES, Kind};
use super::operations::OperationInfo;
use super::threads::Warp;
use super::{HazardKind, Place, Tracker, Unit, WarpId};

/// Warp, lanes, step and unit of an access.
type Actor = (WarpId, u32, u32, Unit);

impl Tracker {
    /// Reports operations of an ended cluster whose completion no thread has observed. Also reports
    /// uses of a CTA's shared memory by other CTAs that no thread of the CTA has observed, because
    /// the CTA may have ended before the use.
    pub(super) fn check_unfinished(&mut self, cluster: u32) {
        if !self.warns() {
            return;
        }
        for (actor, write, rank) in self.unfinished_operations(cluster) {
            self.report_unfinished(
                actor,
                write,
                None,
                rank,
                match actor.3 {
                    Unit::BulkStore => {
                        "the thread that commits the last group waits for it \
                     (`cp.async.bulk.wait_group.read 0`) before it exits"
                    }
                    _ => "some thread of the CTA waits for the mbarrier before the CTA ends",
                },
            );
        }
        if self.ctas > 1 {
            for (actor, write, place, rank) in self.foreign_uses(cluster) {
                self.report_unfinished(actor, write, Some(place), rank, FOREIGN_REMEDY);
            }
        }
    }

    fn report_unfinished(
        &mut self,
        actor: Actor,
        write: bool,
        place: Option<Place>,
        rank: u32,
        remedy: &str,
    ) {
        let (cluster, _) = self.cta(actor.0);
        let end = (self.warp(cluster, rank, 0), ALL_LANES, u32::MAX, Unit::Thread);
        let kind = HazardKind::UnfinishedAtExit;
        self.report_pair(kind, (actor, write), (end, false), place, || remedy.to_owned());
    }

    fn unfinished_operations(&self, cluster: u32) -> Vec<(Actor, bool, u32)> {
        let of = &self.clusters[cluster as usize];
        let own = of.first_warp..of.first_warp + self.ctas * self.warps_per_cta;
        (self.operations[of.first_operation..].iter())
            .filter(|info| own.contains(&info.warp.0) && self.is_unfinished(info, cluster))
            .map(|info| {
                let actor = (info.warp, info.lanes, info.step, info.unit);
                (actor, info.unit != Unit::BulkStore, self.cta(info.warp).1)
            })
            .collect()
    }

    fn is_unfinished(&self, info: &OperationInfo, cluster: u32) -> bool {
        match info.unit {
            Unit::BulkStore => {
                !self.warps[info.warp.0 as usize].has_waited(Kind::BulkRead, info.lanes, info.value)
            }
            Unit::BulkLoad | Unit::StoreAsync | Unit::LaunchControl => {
                let barriers = &self.clusters[cluster as usize].barriers;
                info.value == 0
                    || barriers.values().any(|barrier| {
                        barrier.agents.contains(&info.agent)
                            && barrier.observed < u64::from(info.value)
                    })
            }
            _ => false,
        }
    }

    fn foreign_uses(&self, cluster: u32) -> Vec<(Actor, bool, Place, u32)> {
        let of = &self.clusters[cluster as usize];
        let mut found = Vec::new();
        for (rank, shared) in (0..).zip(&of.shared) {
            for (offset, cell) in shared.cells() {
                for (record, write) in cell.records() {
                    let actor = self.record_actor(record);
                    if self.cta(actor.0).1 != rank && !self.cta_knows(rank, cluster, record) {
                        found.push((actor, write, Place::Shared { rank, offset }, rank));
                    }
                }
            }
        }
        for ((rank, offset), barrier) in &of.barriers {
            for arrival in &barrier.foreign {
                let thread = arrival.thread;
                let agent = self.agent(thread.warp, arrival.kind);
                // The completion of an operation does not imply that the arrival was counted.
                let known = arrival.kind == Kind::Generic
                    && self.warps_of(cluster, *rank).iter().any(|warp| {
                        let knows = |state: &super::knowledge::State| {
                            state.known.generic.knows(agent, thread.lanes, arrival.value)
                        };
                        warp.groups.iter().any(|(_, state)| knows(state))
                    });
                if !known {
                    let actor = (thread.warp, thread.lanes, thread.step, Unit::Thread);
                    let place = Place::Shared { rank: *rank, offset: *offset };
                    found.push((actor, true, place, *rank));
                }
            }
        }
        found.sort_by_key(|(actor, _, place, _)| (actor.2, *place));
        found
    }

    /// Whether any thread of a CTA knows that the access of a record has completed.
    fn cta_knows(&self, rank: u32, cluster: u32, record: &Record) -> bool {
        let (agent, lanes, value) = match record.operation() {
            Some(operation) => {
                let info = &self.operations[operation as usize];
                let kind = match info.unit {
                    Unit::TensorMma | Unit::TensorCopy => Kind::Tensor,
                    Unit::CopyAsync => Kind::CopyAsync,
                    Unit::BulkStore => Kind::BulkRead,
                    _ => return info.value > 0 && self.any_knows(rank, cluster, info),
                };
                (self.agent(info.warp, kind), info.lanes, info.value)
            }
            None => {
                let warp = WarpId(record.warp().unwrap_or(0));
                (self.agent(warp, Kind::Generic), record.all_lanes(), record.tick)
            }
        };
        self.warps_of(cluster, rank).iter().any(|warp| {
            warp.groups.iter().any(|(_, state)| state.known.generic.knows(agent, lanes, value))
        })
    }

    fn any_knows(&self, rank: u32, cluster: u32, info: &OperationInfo) -> bool {
        self.warps_of(cluster, rank).iter().any(|warp| {
            let knows = |state: &super::knowledge::State| {
                state.known.generic.knows(info.agent, ALL_LANES, info.value)
            };
            warp.groups.iter().any(|(_, state)| knows(state))
        })
    }

    fn warps_of(&self, cluster: u32, rank: u32) -> &[Warp] {
        let first = self.warp(cluster, rank, 0).0 as usize;
        &self.warps[first..first + self.warps_per_cta as usize]
    }
}

const FOREIGN_REMEDY: &str = "a wait of the CTA for what the other CTA does to its shared \
    memory, or a `barrier.cluster.arrive` and `.wait` of all CTAs, before it ends";
