//! Connections between the parts of a machine.

use std::fmt;

use petgraph::graphmap::UnGraphMap;
use serde::{Deserialize, Serialize};

use crate::Pcie;

/// A vertex of the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// A memory node of the processor, by [`NumaNode::index`](crate::NumaNode::index).
    Numa(u32),
    /// A GPU, by [`Gpu::index`](crate::Gpu::index).
    Gpu(u32),
    /// An NVSwitch, or several NVSwitches acting as a single switch; may be hidden from a virtual
    /// machine.
    Switch(u32),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Numa(index) => write!(formatter, "numa{index}"),
            Endpoint::Gpu(index) => write!(formatter, "gpu{index}"),
            Endpoint::Switch(index) => write!(formatter, "switch{index}"),
        }
    }
}

/// A connection of two endpoints, without a direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// One end.
    pub a: Endpoint,
    /// The other end.
    pub b: Endpoint,
    /// Kind of connection.
    pub kind: LinkKind,
    /// GB/s in each direction over all lanes or links, computed from hardware properties. `None` if
    /// only a measurement could tell (hops between memory nodes).
    pub gbps: Option<f64>,
}

impl Link {
    /// Several NVLinks; `gbps_each_way` is 0 if the speed is unknown. The sum is rounded to 1 MB/s,
    /// the driver's unit.
    pub(crate) fn nvlink(
        (a, b): (Endpoint, Endpoint),
        links: u32,
        gbps_each_way: f64,
        through_switch: bool,
    ) -> Link {
        let gbps = (f64::from(links) * gbps_each_way * 1000.0).round() / 1000.0;
        let kind = LinkKind::NvLink { links, gbps_each_way, through_switch };
        Link { a, b, kind, gbps: (gbps > 0.0).then_some(gbps) }
    }

    /// PCI Express.
    pub(crate) fn pcie((a, b): (Endpoint, Endpoint), pcie: Pcie, meet: PcieMeet) -> Link {
        let kind = LinkKind::Pcie { generation: pcie.generation, width: pcie.width, meet };
        Link { a, b, kind, gbps: Some(pcie.gbps) }
    }
}

/// Kind of connection between two endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkKind {
    /// NVLink.
    NvLink {
        /// Number of active links.
        links: u32,
        /// GB/s of one link in each direction.
        gbps_each_way: f64,
        /// Whether the links lead to an NVSwitch: then an end has these links once for all peers
        /// together, not once per peer.
        through_switch: bool,
    },
    /// PCI Express.
    Pcie {
        /// Generation of the slower end.
        generation: u32,
        /// Lanes of the narrower end.
        width: u32,
        /// Where the two connections meet.
        meet: PcieMeet,
    },
    /// NVLink-C2C, the coherent connection of a GPU to the processor of its superchip.
    ChipToChip,
    /// Interconnect of two memory nodes of the host.
    NumaHop {
        /// Access distance reported by the kernel; 10 is the node itself.
        distance: u32,
    },
}

/// Meeting point of two PCI Express endpoints, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PcieMeet {
    /// On the same board.
    Board,
    /// At one PCIe switch.
    Switch,
    /// Across several PCIe switches, below the host.
    Switches,
    /// At one host bridge.
    HostBridge,
    /// In one memory node, across host bridges.
    Node,
    /// Across memory nodes.
    System,
}

impl fmt::Display for PcieMeet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            PcieMeet::Board => "same board",
            PcieMeet::Switch => "one PCIe switch",
            PcieMeet::Switches => "PCIe switches",
            PcieMeet::HostBridge => "host bridge",
            PcieMeet::Node => "memory node",
            PcieMeet::System => "across memory nodes",
        })
    }
}

/// An edge of the fabric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FabricEdge {
    /// Kind of connection.
    pub kind: LinkKind,
    /// GB/s in each direction, `None` if only a measurement could tell.
    pub gbps: Option<f64>,
}

/// The machine as a graph: memory nodes, GPUs and switches joined by physical connections.
pub type Fabric = UnGraphMap<Endpoint, FabricEdge>;

/// Builds the fabric from links between pairs.
///
/// A pair joined through an NVSwitch becomes two edges to a switch vertex, one per end, so that the
/// bandwidth of an end, shared among peers, counts once. GPUs connected through switches, directly
/// or through further GPUs, share a vertex. A PCIe pair of GPUs that meets at the host has no edge
/// of its own: its route is over the memory nodes.
pub(crate) fn fabric(vertices: impl Iterator<Item = Endpoint>, links: &[Link]) -> Fabric {
    let mut fabric = Fabric::new();
    let mut gpus = Vec::new();
    for vertex in vertices {
        fabric.add_node(vertex);
        if matches!(vertex, Endpoint::Gpu(_)) {
            gpus.push(vertex);
        }
    }
    let mut switched = petgraph::unionfind::UnionFind::new(gpus.len());
    let place = |endpoint: Endpoint| gpus.iter().position(|gpu| *gpu == endpoint);
    for link in links {
        if let (LinkKind::NvLink { through_switch: true, .. }, Some(a), Some(b)) =
            (link.kind, place(link.a), place(link.b))
        {
            switched.union(a, b);
        }
    }
    let mut switch_roots: Vec<usize> = Vec::new();
    for link in links {
        let edge = FabricEdge { kind: link.kind, gbps: link.gbps };
        match link.kind {
            LinkKind::NvLink { through_switch: true, .. } => {
                for end in [link.a, link.b] {
                    let Some(root) = place(end).map(|index| switched.find(index)) else { continue };
                    let known = switch_roots.iter().position(|known| *known == root);
                    let number = known.unwrap_or_else(|| {
                        switch_roots.push(root);
                        switch_roots.len() - 1
                    });
                    let switch = Endpoint::Switch(number as u32);
                    // A peer with fewer links than this end limits the pair, so this end's edge is
                    // its widest pair.
                    let wider = fabric
                        .edge_weight(end, switch)
                        .is_none_or(|known| known.gbps.unwrap_or(0.0) < edge.gbps.unwrap_or(0.0));
                    if wider {
                        fabric.add_edge(end, switch, edge);
                    }
                }
            }
            LinkKind::Pcie { meet, .. }
                if meet >= PcieMeet::HostBridge
                    && matches!((link.a, link.b), (Endpoint::Gpu(_), Endpoint::Gpu(_))) => {}
            _ => {
                fabric.add_edge(link.a, link.b, edge);
            }
        }
    }
    fabric
}
