//! Reorders a layer's nodes so that collectives overlap with compute.
//!
//! Collectives have their own stream, but the compute stream runs in order: a call waiting for a
//! collective delays all later calls. So the nodes of a layer are reordered. Nodes leading to a
//! collective come first, and a collective as soon as its operands are ready. If all remaining
//! leading nodes wait for a collective in flight, independent nodes go ahead: shared experts during
//! the dispatch of routed experts' rows, weight gradients during the sums of activation gradients.
//!
//! Each node keeps its operands and accumulations keep their order, so bits do not change. The
//! order of collectives is unchanged, so all ranks issue the same sequence.

use std::collections::HashMap;

use deepwell_ir::{Binding, Graph, Node, Op, OperandType, TensorId};

/// FLOPs that a device does while a link transfers one byte: an H200 in BF16 and NVLink, to a few
/// tens of percent. It decides how many nodes go ahead during a collective, not which nodes run.
const FLOPS_PER_BYTE: u64 = 1500;

/// The graph with the nodes of each layer of a pass reordered for overlap.
pub(super) fn order_for_overlap(graph: &Graph, binding: &Binding) -> Graph {
    let layers = graph.nodes.chunk_by(|a, b| (a.phase, a.layer) == (b.phase, b.layer));
    let nodes = layers.flat_map(|nodes| {
        let order = match nodes.first().and_then(|node| node.layer) {
            Some(_) if nodes.iter().any(is_collective) => Layer::new(graph, binding, nodes).order(),
            _ => (0..nodes.len()).collect(),
        };
        order.into_iter().map(|at| nodes[at].clone())
    });
    Graph { nodes: nodes.collect(), ..graph.clone() }
}

fn is_collective(node: &Node) -> bool {
    matches!(node.op, Op::Collective(_))
}

/// The nodes of a layer in a pass.
struct Layer<'a> {
    nodes: &'a [Node],
    /// The nodes that each node waits for.
    needs: Vec<Vec<usize>>,
    /// Whether a collective depends on the node.
    leads: Vec<bool>,
    flops: Vec<u64>,
    bytes_on_link: Vec<u64>,
}

impl<'a> Layer<'a> {
    fn new(graph: &Graph, binding: &Binding, nodes: &'a [Node]) -> Layer<'a> {
        let mut made: HashMap<TensorId, usize> = HashMap::new();
        let mut last_exchange = None;
        let mut needs = Vec::with_capacity(nodes.len());
        for (at, node) in nodes.iter().enumerate() {
            // A node that adds to an accumulator stays after the previous write.
            let operands = node.inputs.iter().chain(&node.outputs);
            let mut own: Vec<usize> = operands.filter_map(|id| made.get(id).copied()).collect();
            if is_collective(node) {
                own.extend(last_exchange.replace(at));
            }
            made.extend(node.outputs.iter().map(|&id| (id, at)));
            needs.push(own);
        }
        let mut leads: Vec<bool> = nodes.iter().map(is_collective).collect();
        for at in (0..nodes.len()).rev() {
            if leads[at] {
                needs[at].iter().for_each(|&other| leads[other] = true);
            }
        }
        let operands = |node: &Node| -> Vec<OperandType> {
            let ids = node.inputs.iter().chain(&node.outputs);
            let tensors = ids.map(|&id| graph.tensor(id));
            tensors
                .map(|it| OperandType { dtype: it.dtype, shape: it.shape.bind(binding) })
                .collect()
        };
        let cost = |node: &Node| {
            let (rule, operands) = (node.op.rule(), operands(node));
            let shapes: Vec<Vec<usize>> = operands.iter().map(|it| it.shape.clone()).collect();
            (rule.flops(&shapes), rule.bytes_on_link(&operands))
        };
        let (flops, bytes_on_link) = nodes.iter().map(cost).unzip();
        Layer { nodes, needs, leads, flops, bytes_on_link }
    }

    fn order(&self) -> Vec<usize> {
        let mut done = vec![false; self.nodes.len()];
        let mut order = Vec::with_capacity(self.nodes.len());
        // Collectives in flight, and FLOPs of equal duration.
        let mut under_way = vec![false; self.nodes.len()];
        let mut hidden_by: u64 = 0;
        while order.len() < self.nodes.len() {
            let is_ready = |at: &usize| !done[*at] && self.needs[*at].iter().all(|&it| done[it]);
            let waits = |at: usize| self.needs[at].iter().any(|&it| under_way[it]);
            let ready: Vec<usize> = (0..self.nodes.len()).filter(is_ready).collect();
            let free = |leads: bool| {
                let mut those = ready.iter().copied();
                those.find(|&at| self.leads[at] == leads && !waits(at))
            };
            let exchange = ready.iter().copied().find(|&at| is_collective(&self.nodes[at]));
            let ahead = || free(false).filter(|_| hidden_by > 0);
            let next = match exchange.or_else(|| free(true)).or_else(ahead) {
                Some(next) => next,
                None => {
                    // Only nodes that wait, or compute with no collective to hide: leading nodes
                    // first, then the others, in the original order.
                    under_way.fill(false);
                    hidden_by = 0;
                    match ready
                        .iter()
                        .copied()
                        .find(|&at| self.leads[at])
                        .or(ready.first().copied())
                    {
                        Some(next) => next,
                        // Unreachable: a graph in topological order always has a ready node.
                        None => return (0..self.nodes.len()).collect(),
                    }
                }
            };
            if is_collective(&self.nodes[next]) {
                under_way[next] = true;
                hidden_by += FLOPS_PER_BYTE * self.bytes_on_link[next];
            } else if !self.leads[next] {
                hidden_by = hidden_by.saturating_sub(self.flops[next]);
            }
            done[next] = true;
            order.push(next);
        }
        order
    }
}
