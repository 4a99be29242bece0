//! Names of special registers.

use super::SpecialRegister;
use super::types::Type;

/// Returns the special register of a name such as `%tid.x`, and its declared type.
pub(super) fn special_register(name: &str) -> Option<(SpecialRegister, Type)> {
    use SpecialRegister as S;
    let name = name.strip_prefix('%')?;
    if let Some((base, axis)) = name.split_once('.') {
        let axis = ["x", "y", "z", "w"].iter().position(|known| *known == axis)? as u8;
        let register = match base {
            "tid" => S::ThreadIndex(axis),
            "ntid" => S::CtaSize(axis),
            "ctaid" => S::CtaIndex(axis),
            "nctaid" => S::GridSize(axis),
            "clusterid" => S::ClusterIndex(axis),
            "nclusterid" => S::ClusterCount(axis),
            "cluster_ctaid" => S::CtaInCluster(axis),
            "cluster_nctaid" => S::ClusterSize(axis),
            _ => return None,
        };
        return Some((register, Type::U32));
    }
    let numbered = |prefix: &str| name.strip_prefix(prefix)?.parse::<u8>().ok();
    Some(match name {
        "cluster_ctarank" => (S::CtaRank, Type::U32),
        "cluster_nctarank" => (S::ClusterCtas, Type::U32),
        "is_explicit_cluster" => (S::IsExplicitCluster, Type::Predicate),
        "laneid" => (S::Lane, Type::U32),
        "warpid" => (S::Warp, Type::U32),
        "nwarpid" => (S::WarpCount, Type::U32),
        "smid" => (S::SmId, Type::U32),
        "nsmid" => (S::SmCount, Type::U32),
        "gridid" => (S::GridId, Type::U64),
        "lanemask_eq" => (S::LaneMaskEqual, Type::U32),
        "lanemask_le" => (S::LaneMaskLessEqual, Type::U32),
        "lanemask_lt" => (S::LaneMaskLess, Type::U32),
        "lanemask_ge" => (S::LaneMaskGreaterEqual, Type::U32),
        "lanemask_gt" => (S::LaneMaskGreater, Type::U32),
        "clock" | "clock_lo" => (S::Clock, Type::U32),
        "clock_hi" => (S::ClockHigh, Type::U32),
        "clock64" => (S::Clock64, Type::U64),
        "globaltimer" => (S::GlobalTimer, Type::U64),
        "globaltimer_lo" => (S::GlobalTimerLow, Type::U32),
        "globaltimer_hi" => (S::GlobalTimerHigh, Type::U32),
        "total_smem_size" => (S::TotalSharedBytes, Type::U32),
        "aggr_smem_size" => (S::AggregateSharedBytes, Type::U32),
        "dynamic_smem_size" => (S::DynamicSharedBytes, Type::U32),
        _ if name.starts_with("reserved_smem_offset") => (S::ReservedShared, Type::U32),
        _ => {
            if let Some(number) = numbered("envreg") {
                (S::Environment(number), Type::U32)
            } else if let Some(number) = numbered("pm") {
                (S::PerformanceMonitor(number), Type::U32)
            } else {
                return None;
            }
        }
    })
}
