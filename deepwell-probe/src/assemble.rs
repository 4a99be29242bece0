//! From what the driver said to GPUs and links.

use crate::{Cpu, Endpoint, Link, LinkKind};

/// Hops between memory nodes, each pair once.
pub(crate) fn numa_links(cpu: &Cpu) -> Vec<Link> {
    let mut links = Vec::new();
    for (place, node) in cpu.numa_nodes.iter().enumerate() {
        for (other_place, other) in cpu.numa_nodes.iter().enumerate().skip(place + 1) {
            if let Some(&distance) = node.distances.get(other_place) {
                links.push(Link {
                    a: Endpoint::Numa(node.index),
                    b: Endpoint::Numa(other.index),
                    kind: LinkKind::NumaHop { distance },
                    gbps: None,
                });
            }
        }
    }
    links
}
