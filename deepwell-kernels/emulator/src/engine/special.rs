//! Special registers.

use super::cluster::ClusterState;
use super::warp::Warp;
use super::world::World;
use crate::decode::{Register, SpecialRegister};
use crate::memory::{SHARED_BASE, shared_address};

/// Nanoseconds per instruction of the machine in the timer registers.
const NANOSECONDS_PER_INSTRUCTION: u64 = 1;

/// Writes a special register to the lanes of `mask`.
pub(crate) fn read(
    warp: &mut Warp,
    cluster: &ClusterState,
    world: &World<'_>,
    destination: Register,
    register: SpecialRegister,
    mask: u32,
) {
    use SpecialRegister as S;
    let shape = &world.shape;
    let axis = |of: [u32; 3], axis: u8| of.get(axis as usize).copied().unwrap_or(0);
    let cta = &cluster.ctas[warp.rank as usize];
    let lane_value = |lane: u32| -> u64 {
        u64::from(match register {
            S::ThreadIndex(along) => {
                return warp.threads[lane as usize].get(along as usize).map_or(0, |at| *at as u64);
            }
            S::Lane => lane,
            S::LaneMaskEqual => 1 << lane,
            S::LaneMaskLess => (1 << lane) - 1,
            S::LaneMaskLessEqual => u32::MAX >> (31 - lane),
            S::LaneMaskGreaterEqual => u32::MAX << lane,
            S::LaneMaskGreater => !(u32::MAX >> (31 - lane)),
            _ => 0,
        })
    };
    let of_lane = matches!(
        register,
        S::ThreadIndex(_)
            | S::Lane
            | S::LaneMaskEqual
            | S::LaneMaskLess
            | S::LaneMaskLessEqual
            | S::LaneMaskGreaterEqual
            | S::LaneMaskGreater
    );
    if of_lane {
        let values = std::array::from_fn(|lane| lane_value(lane as u32));
        warp.registers.set_row64(destination, &values, mask);
        return;
    }
    let count = |extents: [u32; 3]| extents.iter().product::<u32>();
    let time = world.instructions * NANOSECONDS_PER_INSTRUCTION;
    let value = match register {
        S::CtaSize(along) => u64::from(axis(shape.block, along)),
        S::CtaIndex(along) => u64::from(axis(cta.position, along)),
        S::GridSize(along) => u64::from(axis(shape.grid, along)),
        S::ClusterIndex(along) => u64::from(axis(cluster.position, along)),
        S::ClusterCount(along) => u64::from(axis(shape.clusters(), along)),
        S::CtaInCluster(along) => {
            let inside = super::world::position(u64::from(warp.rank), shape.cluster);
            u64::from(axis(inside, along))
        }
        S::ClusterSize(along) => u64::from(axis(shape.cluster, along)),
        S::CtaRank => u64::from(warp.rank),
        S::ClusterCtas => u64::from(count(shape.cluster)),
        S::IsExplicitCluster => u64::from(shape.explicit_cluster),
        S::Warp => u64::from(warp.index),
        S::WarpCount => u64::from(shape.warps()),
        S::SmId => u64::from(cta.sm_id),
        S::SmCount => u64::from(world.settings.sm_count),
        S::Clock | S::Clock64 | S::GlobalTimer | S::GlobalTimerLow => time,
        S::ClockHigh | S::GlobalTimerHigh => time >> 32,
        S::TotalSharedBytes | S::AggregateSharedBytes => u64::from(shape.shared_bytes),
        S::DynamicSharedBytes => u64::from(shape.shared_dynamic_bytes),
        S::SharedVariable(offset) => u64::from(shared_address(warp.rank, SHARED_BASE + offset)),
        S::ParameterVariable(offset) => shape.parameters + u64::from(offset),
        S::ConstantVariable(offset) => shape.constants + u64::from(offset),
        _ => 0,
    };
    warp.registers.set_row64(destination, &[value; 32], mask);
}
