//! The groups of ranks, and their placement on nodes and NVLink domains.
//!
//! Ranks are numbered with tensor parallelism innermost, then context, data, pipeline:
//! `rank = ((stage · dp + data) · cp + context) · tp + tensor`. The experts' grid folds the ranks
//! of a stage again, `((replica) · ep + expert) · etp + tensor`.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Machines;
use crate::Strategy;

/// Most ranks listed for a group.
const LISTED_MAX: usize = 8;

/// All groups of a kind, equal in shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankGroup {
    /// Kind of parallelism: `tensor`, `context`, `data`, `pipeline`, `expert`, ...
    pub name: String,
    /// Ranks per group.
    pub size: usize,
    /// Number of groups.
    pub count: usize,
    /// Distance between consecutive ranks of a group.
    pub stride: usize,
    /// NVLink domains spanned by the group of rank 0.
    pub domains: usize,
    /// Nodes spanned by the group of rank 0.
    pub nodes: usize,
    /// Rails used by the ranks of the group.
    #[serde(default)]
    pub rails: usize,
}

impl RankGroup {
    /// Ranks of the group of rank 0.
    pub fn first(&self) -> impl Iterator<Item = usize> {
        let stride = self.stride;
        (0..self.size).map(move |at| at * stride)
    }
}

/// Coordinates of a rank in each grid, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlace {
    /// Pipeline stage.
    pub stage: usize,
    /// Place in the data-parallel group.
    pub data: usize,
    /// Place in the context-parallel group.
    pub context: usize,
    /// Place in the tensor-parallel group.
    pub tensor: usize,
    /// Place among ranks with the same experts.
    pub expert_data: usize,
    /// Place in the expert-parallel group.
    pub expert: usize,
    /// Place among the tensor-parallel ranks of one expert.
    pub expert_tensor: usize,
}

impl RankPlace {
    /// The place of `rank`.
    pub fn of(at: &Strategy, rank: usize) -> RankPlace {
        let within = rank % (at.tp * at.cp * at.dp);
        RankPlace {
            stage: rank / (at.tp * at.cp * at.dp),
            data: within / (at.tp * at.cp),
            context: within / at.tp % at.cp,
            tensor: within % at.tp,
            expert_data: within / (at.etp * at.ep),
            expert: within / at.etp % at.ep,
            expert_tensor: within % at.etp,
        }
    }
}

/// The groups of a strategy on its machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMap {
    /// Ranks per NVLink domain.
    pub domain_ranks: usize,
    /// Ranks per node.
    pub node_ranks: usize,
    /// Groups of more than one rank.
    pub groups: Vec<RankGroup>,
    /// Coordinates of each rank, for at most 64 ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<RankPlace>,
}

/// Most ranks listed individually by a map.
const PLACES_MAX: usize = 64;

impl RankMap {
    /// The map of a strategy.
    pub fn new(at: &Strategy, machines: &Machines) -> RankMap {
        let (domain, node) = (machines.fabric.domain_gpus.max(1), machines.node_gpus.max(1));
        let gpus = at.gpus();
        let kinds = [
            ("tensor", at.tp, 1),
            ("context", at.cp, at.tp),
            ("data", at.dp, at.tp * at.cp),
            ("optimizer", if at.zero > 0 { at.dp * at.cp } else { 1 }, at.tp),
            ("expert", at.ep, at.etp),
            ("expert tensor", at.etp, 1),
            ("expert data", if at.ep > 1 { at.expert_dp() } else { 1 }, at.etp * at.ep),
            ("pipeline", at.pp, at.tp * at.cp * at.dp),
        ];
        let group = |(name, size, stride): (&str, usize, usize)| {
            // Ranks are `stride` apart, and the ranks of a domain are contiguous.
            let reaches = |ranks: usize| {
                let per = (ranks / stride).max(1);
                size.div_ceil(per)
            };
            let mut rails: Vec<usize> =
                (0..size).map(|at| at * stride % node * machines.rails / node).collect();
            rails.sort_unstable();
            rails.dedup();
            RankGroup {
                name: name.to_string(),
                size,
                count: gpus / size,
                stride,
                domains: reaches(domain),
                nodes: reaches(node),
                rails: rails.len(),
            }
        };
        let is_group = |(name, size, _): &(&str, usize, usize)| {
            // Without context parallelism the optimizer group equals the data-parallel group.
            *size > 1 && !(*name == "optimizer" && at.cp == 1)
        };
        let places = if gpus <= PLACES_MAX { gpus } else { 0 };
        RankMap {
            domain_ranks: domain,
            node_ranks: node,
            groups: kinds.into_iter().filter(is_group).map(group).collect(),
            places: (0..places).map(|rank| RankPlace::of(at, rank)).collect(),
        }
    }
}

/// A coordinate of a rank.
type PlaceOf = fn(&RankPlace) -> usize;

impl fmt::Display for RankMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "groups of ranks   size  groups  lie in                        ranks of the first"
        )?;
        for group in &self.groups {
            let shown: Vec<String> =
                group.first().take(LISTED_MAX).map(|rank| rank.to_string()).collect();
            let more = if group.size > LISTED_MAX { " ..." } else { "" };
            let lies = match group.domains {
                1 => "1 NVLink domain".to_string(),
                domains => match group.rails {
                    0 => format!("{domains} NVLink domains"),
                    1 => format!("{domains} NVLink domains, 1 rail"),
                    rails => format!("{domains} NVLink domains, {rails} rails"),
                },
            };
            writeln!(
                f,
                "  {:<15} {:>4} {:>7}  {lies:<28}  {}{more}",
                group.name,
                group.size,
                group.count,
                shown.join(" ")
            )?;
        }
        if self.groups.is_empty() {
            writeln!(f, "  none: there is one rank")?;
        }
        // Columns are the dimensions of degree above one. If every column equals the rank, no table
        // is printed.
        if self.places.len() > 1 {
            let columns: [(&str, PlaceOf); 5] = [
                ("stage", |place| place.stage),
                ("data", |place| place.data),
                ("context", |place| place.context),
                ("tensor", |place| place.tensor),
                ("expert", |place| place.expert),
            ];
            let divided = |of: PlaceOf| self.places.iter().any(|p| of(p) > 0);
            let columns: Vec<_> = columns.into_iter().filter(|(_, of)| divided(*of)).collect();
            let is_own_number =
                |of: PlaceOf| self.places.iter().enumerate().all(|(rank, place)| of(place) == rank);
            if columns.iter().all(|(_, of)| is_own_number(*of)) {
                return Ok(());
            }
            write!(f, "rank  node  domain")?;
            for (name, _) in &columns {
                write!(f, "  {name:>7}")?;
            }
            writeln!(f)?;
            for (rank, place) in self.places.iter().enumerate() {
                let (node, domain) = (rank / self.node_ranks, rank / self.domain_ranks);
                write!(f, "{rank:>4} {node:>5} {domain:>7}")?;
                for (_, of) in &columns {
                    write!(f, "  {:>7}", of(place))?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu_model::GpuModel;

    /// Every group matches the coordinates of all ranks.
    #[test]
    fn groups_are_those_of_the_places() {
        let check = |at: Strategy| {
            let machines = Machines::of_gpus(GpuModel::h100(), at.gpus());
            let map = RankMap::new(&at, &machines);
            let all: Vec<RankPlace> = (0..at.gpus()).map(|rank| RankPlace::of(&at, rank)).collect();
            for group in &map.groups {
                // Ranks whose coordinates differ from rank 0 in this dimension only.
                let same = |place: &RankPlace| {
                    let zero = &all[0];
                    let attention = |but: fn(&mut RankPlace)| {
                        let (mut a, mut b) = (*place, *zero);
                        but(&mut a);
                        but(&mut b);
                        (a.stage, a.data, a.context, a.tensor)
                            == (b.stage, b.data, b.context, b.tensor)
                    };
                    let experts = |but: fn(&mut RankPlace)| {
                        let (mut a, mut b) = (*place, *zero);
                        but(&mut a);
                        but(&mut b);
                        (a.stage, a.expert_data, a.expert, a.expert_tensor)
                            == (b.stage, b.expert_data, b.expert, b.expert_tensor)
                    };
                    match group.name.as_str() {
                        "tensor" => attention(|p| p.tensor = 0),
                        "context" => attention(|p| p.context = 0),
                        "data" => attention(|p| p.data = 0),
                        "pipeline" => attention(|p| p.stage = 0),
                        "optimizer" => attention(|p| (p.data, p.context) = (0, 0)),
                        "expert" => experts(|p| p.expert = 0),
                        "expert tensor" => experts(|p| p.expert_tensor = 0),
                        "expert data" => experts(|p| p.expert_data = 0),
                        other => panic!("{other}"),
                    }
                };
                let ranks: Vec<usize> = (0..all.len()).filter(|&rank| same(&all[rank])).collect();
                assert_eq!(ranks, group.first().collect::<Vec<_>>(), "{at} {}", group.name);
                assert_eq!(group.count * group.size, at.gpus(), "{at} {}", group.name);
                let mut domains: Vec<usize> = ranks.iter().map(|rank| rank / 8).collect();
                domains.dedup();
                assert_eq!(domains.len(), group.domains, "{at} {}", group.name);
            }
        };
        let base = Strategy { zero: 1, ..Strategy::SINGLE };
        check(Strategy { dp: 8, ..base });
        check(Strategy { tp: 2, cp: 2, dp: 4, pp: 2, ..base });
        check(Strategy { tp: 4, dp: 8, ep: 8, etp: 1, pp: 4, ..base });
        check(Strategy { tp: 2, dp: 16, ep: 4, etp: 2, ..base });
    }
}
