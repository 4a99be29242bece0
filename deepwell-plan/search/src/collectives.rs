//! Times of collectives, predicted with the constants of NCCL's tuner.
//!
//! For each algorithm and protocol NCCL computes `latency + bytes / bandwidth` and runs the
//! fastest. The constants are from NCCL's tuner (`src/graph/tuning.cc`, `topo.h`), so the predicted
//! times are NCCL's own estimates.
//!
//! ```
//! use deepwell_search::collectives::{Collective, Fabric, Generation};
//!
//! let fabric = Fabric::new(Generation::Hopper, 8, 50.0);
//! let all_reduce = fabric.time(Collective::AllReduce, 1e9, 8, 8);
//! assert!(all_reduce.seconds > 1e9 / 450e9 && all_reduce.seconds < 1e9 / 100e9);
//! ```

use serde::{Deserialize, Serialize};

/// GPU generations distinguished by the tuner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Generation {
    /// A100: 12 links of NVLink 3.
    Ampere,
    /// H100, H200: 18 links of NVLink 4.
    Hopper,
    /// B200, B300 and their Grace systems: 18 links of NVLink 5.
    Blackwell,
}

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Collective {
    /// Each rank gets the sum over all ranks.
    AllReduce,
    /// Each rank gets the parts of all ranks.
    AllGather,
    /// Each rank gets one part of the sum.
    ReduceScatter,
    /// Each rank gets a part from every rank.
    AllToAll,
}

/// NCCL's algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Algorithm {
    /// A ring through all ranks.
    Ring,
    /// Two binary trees over nodes.
    Tree,
    /// Reductions in the NVSwitch.
    Nvls,
    /// Sends and receives between all pairs.
    Pairs,
}

/// NCCL's protocol: the signal of arrived data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    /// A flag with each 4 bytes.
    Ll,
    /// A flag for each 128 bytes.
    Ll128,
    /// Fences.
    Simple,
}

/// Predicted time of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CollectiveTime {
    /// Seconds.
    pub seconds: f64,
    /// The fastest algorithm.
    pub algorithm: Algorithm,
    /// The algorithm's protocol.
    pub protocol: Protocol,
}

/// GPUs and the two networks connecting them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fabric {
    /// Generation of the GPUs.
    pub generation: Generation,
    /// GPUs per NVLink domain.
    pub domain_gpus: usize,
    /// GB/s of the network in one direction, per GPU.
    pub nic_gbps: f64,
    /// Available share of the generation's NVLink bandwidth, 1 for all links.
    #[serde(default = "whole")]
    pub nvlink_share: f64,
    /// Whether collectives within a domain use the rates measured in Deepwell's runs, without
    /// NVLink SHARP, instead of the tuner's rates.
    #[serde(default)]
    pub measured: bool,
}

fn whole() -> f64 {
    1.0
}

/// Constants of one generation in GB/s; arrays are for one, two, and four or more nodes.
struct Constants {
    links: f64,
    link_gbps: f64,
    ll_max: [f64; 3],
    ring_ll128_channel: f64,
    tree_ll128_channel: [f64; 3],
    tree_channel: [f64; 3],
    nvls_efficiency: Option<f64>,
    channels: f64,
}

/// Base latencies in microseconds for LL, LL128, Simple.
const RING_BASE_US: [f64; 3] = [6.6, 14.0, 8.4];
const TREE_BASE_US: [f64; 3] = [6.8, 14.0, 8.4];
/// Latencies of one step over NVLink, and over the network.
const RING_NVLINK_US: [f64; 3] = [0.6, 1.9, 3.4];
const TREE_NVLINK_US: [f64; 3] = [0.6, 1.25, 4.0];
const RING_NET_US: [f64; 3] = [2.7, 4.0, 14.0];
const TREE_NET_US: [f64; 3] = [5.0, 8.5, 14.0];
const NVLS_US: f64 = 25.0;
/// GB/s of an H100's NVLinks in the tuner. Two H100s reached 326 (all-reduce), 269 (all-gather),
/// 255 (reduce-scatter) and 311 (all-to-all) with messages of 1 GiB
/// (`benchmarks/ranks_h100_2026-11-27.md`).
const TUNER_GBPS: f64 = 18.0 * 20.6;

const PROTOCOLS: [Protocol; 3] = [Protocol::Ll, Protocol::Ll128, Protocol::Simple];

impl Generation {
    const fn constants(self) -> Constants {
        match self {
            Generation::Ampere => Constants {
                links: 12.0,
                link_gbps: 20.0,
                ll_max: [87.7, 22.5, 19.0],
                ring_ll128_channel: 20.0,
                tree_ll128_channel: [20.0; 3],
                tree_channel: [24.0, 23.6, 17.8],
                nvls_efficiency: None,
                channels: 24.0,
            },
            Generation::Hopper => Constants {
                links: 18.0,
                link_gbps: 20.6,
                ll_max: [141.0, 45.0, 35.0],
                ring_ll128_channel: 36.7,
                tree_ll128_channel: [36.7, 36.7, 29.0],
                tree_channel: [38.7, 41.4, 36.0],
                nvls_efficiency: Some(0.85),
                channels: 18.0,
            },
            Generation::Blackwell => Constants {
                links: 18.0,
                link_gbps: 40.1,
                ll_max: [282.0, 90.0, 70.0],
                ring_ll128_channel: 40.0,
                tree_ll128_channel: [55.6, 31.67, 20.0],
                tree_channel: [70.0, 42.8, 24.0],
                nvls_efficiency: Some(0.74),
                channels: 18.0,
            },
        }
    }

    /// GB/s of all NVLinks of a GPU in one direction, as counted by NCCL.
    pub fn nvlink_gbps(self) -> f64 {
        let constants = self.constants();
        constants.links * constants.link_gbps
    }
}

impl Fabric {
    /// A fabric with all NVLinks of the generation.
    pub const fn new(generation: Generation, domain_gpus: usize, nic_gbps: f64) -> Fabric {
        Fabric { generation, domain_gpus, nic_gbps, nvlink_share: 1.0, measured: false }
    }

    /// GB/s of all NVLinks of a GPU in one direction, as counted by NCCL.
    pub fn nvlink_gbps(&self) -> f64 {
        self.nvlink_share * self.generation.nvlink_gbps()
    }

    /// Time of a collective over `ranks` ranks, `local` of them per NVLink domain. `bytes` is the
    /// size of the whole buffer: the sum, the gathered buffer, or all bytes sent by one rank.
    pub fn time(
        &self,
        collective: Collective,
        bytes: f64,
        ranks: usize,
        local: usize,
    ) -> CollectiveTime {
        let local = local.clamp(1, ranks.max(1));
        let nodes = ranks.max(1).div_ceil(local);
        let none =
            CollectiveTime { seconds: 0.0, algorithm: Algorithm::Ring, protocol: Protocol::Simple };
        if ranks <= 1 || bytes <= 0.0 {
            return none;
        }
        if collective == Collective::AllToAll {
            return self.all_to_all(bytes, ranks, local);
        }
        let mut best = CollectiveTime { seconds: f64::INFINITY, ..none };
        for (index, protocol) in PROTOCOLS.into_iter().enumerate() {
            let mut consider = |algorithm, seconds: f64| {
                if seconds < best.seconds {
                    best = CollectiveTime { seconds, algorithm, protocol };
                }
            };
            let ring = self.ring(collective, bytes, ranks, local, nodes, index);
            consider(Algorithm::Ring, ring);
            if collective == Collective::AllReduce {
                consider(Algorithm::Tree, self.tree(bytes, local, nodes, index));
                if protocol == Protocol::Simple {
                    let nvls = self.nvls(bytes, local, nodes);
                    consider(Algorithm::Nvls, nvls.unwrap_or(f64::INFINITY));
                }
            }
        }
        best
    }

    /// Seconds of sending `bytes` from one rank to another.
    pub fn send(&self, bytes: f64, within_domain: bool) -> f64 {
        let (gbps, hop_us) = if within_domain {
            (self.nvlink_gbps(), RING_NVLINK_US[2])
        } else {
            (self.nic_gbps, RING_NET_US[2])
        };
        (RING_BASE_US[2] + hop_us) * 1e-6 + bytes / (gbps * 1e9)
    }

    /// GB/s of a ring's bottleneck: NVLink, or the NICs of the ranks of one domain.
    fn ring_gbps(&self, local: usize, nodes: usize) -> f64 {
        let nvlink = self.nvlink_gbps();
        let network = self.nic_gbps * local as f64;
        match (local, nodes) {
            (_, 1) => nvlink,
            (1, _) => network,
            _ => nvlink.min(network),
        }
    }

    /// Share of the tuner's NVLink rate reached by a collective within a domain.
    fn reached_share(&self, collective: Collective, nodes: usize) -> f64 {
        if !self.measured || nodes > 1 {
            return 1.0;
        }
        match collective {
            Collective::AllReduce => 326.0 / TUNER_GBPS,
            Collective::AllGather => 269.0 / TUNER_GBPS,
            Collective::ReduceScatter => 255.0 / TUNER_GBPS,
            Collective::AllToAll => 311.0 / TUNER_GBPS,
        }
    }

    fn ring(
        &self,
        collective: Collective,
        bytes: f64,
        ranks: usize,
        local: usize,
        nodes: usize,
        protocol: usize,
    ) -> f64 {
        let constants = self.generation.constants();
        let gbps = self.ring_gbps(local, nodes) * self.reached_share(collective, nodes);
        let size = size_class(nodes);
        let bus = match protocol {
            0 => (gbps * 0.5).min(constants.ll_max[size]),
            1 => (gbps * 0.92).min(constants.channels * constants.ring_ll128_channel),
            _ => gbps,
        };
        let passes = if collective == Collective::AllReduce { 2.0 } else { 1.0 };
        let steps = passes * (ranks - 1) as f64;
        let net_steps = if nodes > 1 { passes * nodes as f64 } else { 0.0 }.min(steps);
        let latency_us = RING_BASE_US[protocol]
            + (steps - net_steps) * RING_NVLINK_US[protocol]
            + net_steps * RING_NET_US[protocol];
        latency_us * 1e-6 + bytes * steps / ranks as f64 / (bus * 1e9)
    }

    fn tree(&self, bytes: f64, local: usize, nodes: usize, protocol: usize) -> f64 {
        let constants = self.generation.constants();
        let gbps = self.ring_gbps(local, nodes);
        let size = size_class(nodes);
        let channels = constants.channels;
        let bus = match protocol {
            0 => (gbps / 3.8).min(constants.ll_max[size]),
            1 => {
                let share = if nodes == 1 { 7.0 / 9.0 } else { 120.0 / 128.0 };
                (gbps * share).min(channels * constants.tree_ll128_channel[size])
            }
            _ => (gbps * 0.92).min(channels * constants.tree_channel[size]),
        };
        let depth = (nodes as f64).log2().floor();
        let latency_us = TREE_BASE_US[protocol]
            + 2.0 * ((local - 1) as f64 * TREE_NVLINK_US[protocol] + depth * TREE_NET_US[protocol]);
        latency_us * 1e-6 + bytes / (bus * 0.5 * 1e9)
    }

    /// NVLink SHARP: each byte goes up once and down once, in both directions at the same time.
    fn nvls(&self, bytes: f64, local: usize, nodes: usize) -> Option<f64> {
        let efficiency = self.generation.constants().nvls_efficiency?;
        if nodes > 1 || local < 3 || self.measured {
            return None;
        }
        let gbps = self.nvlink_gbps() * efficiency;
        Some(NVLS_US * 1e-6 + bytes / (gbps * 1e9))
    }

    fn all_to_all(&self, bytes: f64, ranks: usize, local: usize) -> CollectiveTime {
        let share = |count: usize| bytes * count as f64 / ranks as f64 / 1e9;
        let nodes = ranks.div_ceil(local);
        let reached = self.reached_share(Collective::AllToAll, nodes);
        let inside = share(local - 1) / (reached * self.nvlink_gbps());
        let outside = share(ranks - local) / self.nic_gbps.max(f64::MIN_POSITIVE);
        let hop_us = if ranks > local { RING_NET_US[2] } else { RING_NVLINK_US[2] };
        let seconds = (RING_BASE_US[2] + hop_us) * 1e-6 + inside.max(outside);
        CollectiveTime { seconds, algorithm: Algorithm::Pairs, protocol: Protocol::Simple }
    }
}

/// Index of the arrays for one, two, and four or more nodes.
fn size_class(nodes: usize) -> usize {
    match nodes {
        0 | 1 => 0,
        2 | 3 => 1,
        _ => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fabric(generation: Generation) -> Fabric {
        Fabric::new(generation, 8, 25.0)
    }

    #[test]
    fn algorithms_by_size() {
        let check = |generation, bytes: f64, ranks, local, algorithm, protocol| {
            let found = fabric(generation).time(Collective::AllReduce, bytes, ranks, local);
            assert_eq!((found.algorithm, found.protocol), (algorithm, protocol), "{bytes}");
        };
        use Generation::{Ampere, Hopper};
        check(Ampere, 1e3, 8, 8, Algorithm::Ring, Protocol::Ll);
        check(Ampere, 1e9, 8, 8, Algorithm::Ring, Protocol::Simple);
        check(Hopper, 1e9, 8, 8, Algorithm::Nvls, Protocol::Simple);
        check(Ampere, 1e4, 128, 8, Algorithm::Tree, Protocol::Ll);
    }

    #[test]
    fn large_messages_take_bytes_over_bandwidth() {
        // Bus bandwidth in GB/s: bytes x 2 (n - 1) / n over time.
        let check = |generation, ranks: usize, local: usize, expected: f64| {
            let time = fabric(generation).time(Collective::AllReduce, 8e9, ranks, local).seconds;
            let bus = 8e9 * 2.0 * (ranks - 1) as f64 / ranks as f64 / time / 1e9;
            assert!((bus / expected - 1.0).abs() < 0.02, "{bus} {expected}");
        };
        check(Generation::Ampere, 8, 8, 240.0);
        check(Generation::Ampere, 64, 8, 200.0);
        check(Generation::Ampere, 8, 1, 25.0);
    }

    #[test]
    fn nobody_to_talk_to_costs_nothing() {
        let fabric = fabric(Generation::Hopper);
        assert_eq!(fabric.time(Collective::AllGather, 1e9, 1, 1).seconds, 0.0);
        assert_eq!(fabric.time(Collective::AllToAll, 0.0, 8, 8).seconds, 0.0);
    }
}
