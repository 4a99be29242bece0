//! Requests of `clusterlaunchcontrol`.

use super::access::live_rank;
use super::asynchronous::submit;
use super::cluster::ClusterState;
use super::copy::{Copy, pending};
use super::warp::Warp;
use super::world::World;
use crate::error::Fault;
use crate::hazard::Unit;
use crate::launch::Completion;

/// In lazy mode, one of so many requests fails although clusters are left.
const SPURIOUS_FAILURES: usize = 8;
/// Each byte of an answer without a canceled cluster.
const FAILED_ANSWER: u8 = 0xA5;
/// Upper half of the second word of a response that canceled a cluster.
pub(super) const CANCELED: u64 = 1;

/// Answer, mbarrier, and whether all CTAs of the cluster get the answer.
type Cancel = ((u32, u32), (u32, u32), bool);

/// Executes `clusterlaunchcontrol.try_cancel` of one lane.
pub(super) fn try_cancel(
    warp: &Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    lane: usize,
    (target, barrier, multicast): Cancel,
) -> Result<(), Fault> {
    if !target.1.is_multiple_of(16) {
        return Err(Fault::new(
            "launch-control-alignment",
            format!("an answer of `try_cancel` at {:#x}: expected a multiple of 16", target.1),
        ));
    }
    if cluster.ctas[warp.rank as usize].launch_control_failed {
        return Err(Fault::new(
            "launch-control-after-failure",
            "`clusterlaunchcontrol.try_cancel` of a CTA that has seen an answer without a \
             canceled cluster: the ISA leaves this undefined",
        ));
    }
    // An answer without a cluster has arbitrary bytes but for the flag. Hardware may answer so
    // although clusters are left, for example for a kernel of higher priority; they start later.
    let mut bytes = [FAILED_ANSWER; 16];
    let lazy = matches!(world.settings.completion, Completion::Lazy { .. });
    let refused = lazy && world.random.below(SPURIOUS_FAILURES) == 0;
    if world.next_cluster < world.cluster_count && !refused {
        bytes = [0; 16];
        let position = world.shape.cluster_position(world.next_cluster);
        let first = world.shape.cta_position(position, 0);
        world.next_cluster += 1;
        for (axis, at) in first.iter().enumerate() {
            bytes[axis * 4..axis * 4 + 4].copy_from_slice(&at.to_le_bytes());
        }
        bytes[12] = CANCELED as u8;
    }
    let ranks = if multicast { (0..cluster.ctas.len() as u32).collect() } else { vec![target.0] };
    for rank in ranks {
        live_rank(cluster, warp.rank, rank)?;
        let tracked = world.issued(warp, cluster, 1 << lane, Unit::LaunchControl);
        let copy = Copy::Answer { target: (rank, target.1), bytes };
        let barrier = Some((if multicast { rank } else { barrier.0 }, barrier.1));
        submit(pending(warp, lane, barrier, copy, tracked), cluster, world)?;
    }
    Ok(())
}
