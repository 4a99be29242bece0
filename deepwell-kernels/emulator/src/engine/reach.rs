//! Memory access of operations.

use super::access::live_rank;
use super::cluster::ClusterState;
use super::track::{Tracked, Who};
use super::world::World;
use crate::error::Fault;
use crate::hazard::Thread;
use crate::place::{Memory, Place};

/// All memory that a cluster can access, for one operation. Checks bounds, writes to mbarriers and
/// reads of unwritten bytes.
pub(crate) struct Reach<'a, 'w> {
    pub(crate) cluster: &'a mut ClusterState,
    pub(crate) world: &'a mut World<'w>,
    /// Rank of the executing CTA, whose shared memory stays accessible after its threads exit.
    own: u32,
    tracked: Tracked,
    /// Attribute access `i` to lane `i`, for accesses by threads.
    pub(crate) by_rows: bool,
    next_lane: u32,
}

impl<'a, 'w> Reach<'a, 'w> {
    /// Creates the view of an operation of CTA `own`.
    pub(crate) fn operation(
        cluster: &'a mut ClusterState,
        world: &'a mut World<'w>,
        own: u32,
        tracked: Tracked,
    ) -> Reach<'a, 'w> {
        Reach { cluster, world, own, tracked, by_rows: false, next_lane: 0 }
    }
}

impl Reach<'_, '_> {
    /// Returns the originator of the next access.
    fn next(&mut self) -> Tracked {
        if self.by_rows
            && let Who::Thread(thread) = self.tracked.who
        {
            let lane = self.next_lane % 32;
            self.next_lane += 1;
            return Tracked {
                who: Who::Thread(Thread { lanes: 1 << lane, ..thread }),
                ..self.tracked
            };
        }
        self.tracked
    }
}

impl Memory for Reach<'_, '_> {
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), Fault> {
        if bytes.is_empty() {
            return Ok(());
        }
        let tracked = self.next();
        self.world.operation_access(self.cluster, tracked, place, bytes.len(), false)?;
        let written = match place {
            Place::Global(address) => {
                bytes.copy_from_slice(self.world.global.slice(address, bytes.len())?);
                true
            }
            Place::Shared { rank, offset } => {
                let cta = live_rank(self.cluster, self.own, rank)?;
                let (found, written) = self.cluster.ctas[cta].shared.read(offset, bytes.len())?;
                bytes.copy_from_slice(found);
                written
            }
            Place::Tensor { rank, lane, column } => {
                let cta = live_rank(self.cluster, self.own, rank)?;
                let (found, written) =
                    self.cluster.ctas[cta].tensor.read(lane, column, bytes.len())?;
                bytes.copy_from_slice(found);
                written
            }
        };
        if !written {
            let pc = self.tracked.pc;
            self.world.note_unwritten(pc, || format!("{} bytes at {place}", bytes.len()));
        }
        Ok(())
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), Fault> {
        if bytes.is_empty() {
            return Ok(());
        }
        let tracked = self.next();
        self.world.operation_access(self.cluster, tracked, place, bytes.len(), true)?;
        match place {
            Place::Global(address) => {
                self.world.global.slice_mut(address, bytes.len())?.copy_from_slice(bytes);
            }
            Place::Shared { rank, offset } => {
                let cta = live_rank(self.cluster, self.own, rank)?;
                let target = self.cluster.ctas[cta].shared.write(offset, bytes.len())?;
                target.copy_from_slice(bytes);
            }
            Place::Tensor { rank, lane, column } => {
                let cta = live_rank(self.cluster, self.own, rank)?;
                let target = self.cluster.ctas[cta].tensor.write(lane, column, bytes.len())?;
                target.copy_from_slice(bytes);
            }
        }
        Ok(())
    }
}
