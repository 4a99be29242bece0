//! The order of a layer's nodes, so that exchanges have something to run beside.
//!
//! Exchanges have a stream of their own, but what computes runs in order: a call that reads what is
//! exchanged holds up all behind it. So a layer's nodes are put into another order. What leads to
//! an exchange goes first, an exchange as soon as it can, and where all that is left before the
//! next one waits for what is under way, nodes go ahead that do not: shared experts beside the rows
//! of routed ones, gradients of weights beside gradients of activations that are summed up.
//!
//! Each node computes what it did of the same operands, and what is added up keeps its order: bits
//! do not change. Exchanges keep theirs, so that ranks meet.

use std::collections::HashMap;

use deepwell_ir::{Binding, Graph, Node, Op, OperandType, TensorId};

/// FLOPs that a device does while a byte goes over a link: an H200 in BF16 beside NVLink, to a
/// few tens of percent. It says how much goes ahead beside one exchange, not what runs.
const FLOPS_PER_BYTE: u64 = 1500;

/// The graph with the nodes of each layer of a pass in such an order.
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

/// Nodes of a layer in a pass.
struct Layer<'a> {
    nodes: &'a [Node],
    /// Those that each waits for.
    needs: Vec<Vec<usize>>,
    /// Whether an exchange waits for it.
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
            // What adds to an accumulator stands behind what did before.
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
        // Exchanges that nothing has waited for, and FLOPs that would take as long.
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
                    // In the order that they had, behind what is under way.
                    under_way.fill(false);
                    hidden_by = 0;
                    match ready
                        .iter()
                        .copied()
                        .find(|&at| self.leads[at])
                        .or(ready.first().copied())
                    {
                        Some(next) => next,
                        // A graph in order has one that is ready.
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
