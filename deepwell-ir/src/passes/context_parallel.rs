//! Splits each sequence over ranks (context parallelism): ring attention over the keys and values
//! of all ranks (Liu et al., arXiv 2310.01889).
//!
//! Rank `r` of `n` has chunks `r` and `2n - 1 - r` of the `2n` chunks of a sequence ([`Zigzag`]).
//! At step `i` the rank holds the keys and values of rank `r - i`, sends them to the next rank and
//! computes attention to them; the results of all steps are merged in step order. The backward pass
//! sends keys and values around the ring again, together with the sums of their gradients; each
//! rank adds its contribution in FP32. After the last step, one more shift returns the gradients to
//! the rank of the keys. The order of summation is therefore fixed, independent of timing.
//!
//! Windows are distances of positions, so a part with a window knows the places of both ranks. The
//! part of a rank's own keys has the sinks, which count once in each row.
//!
//! All other ops work token by token, so a graph of a shorter sequence describes them. This pass
//! changes only attention and rotary positions, after precision is applied.

use crate::ops::{
    Add, Attention, AttentionBackward, AttentionHeads, AttentionPart, AttentionPartBackward, Cast,
    Collective, CollectiveKind, KeySource, MergeAttention, PartPlaces, RopeBackward, RopeOfPart,
    Zigzag,
};
use crate::{DType, Graph, GroupId, IrError, Node, Op, TensorId};

/// Returns the graph of a rank with `part` of each sequence; places are ranks of `group`. Forward,
/// backward and recomputed nodes are changed alike.
///
/// # Errors
/// [`IrError::Invalid`] for an op that needs a whole sequence on one rank: attention that is not
/// causal or has documents, a position table, a router's auxiliary loss, a capacity.
pub fn context_parallel(graph: &Graph, (group, part): (GroupId, Zigzag)) -> Result<Graph, IrError> {
    let nodes = Vec::with_capacity(graph.nodes.len());
    let mut ring = Ring { graph: Graph { nodes, ..graph.clone() }, group, part };
    for node in &graph.nodes {
        ring.check(node)?;
        match &node.op {
            Op::Attention(op) => ring.forward(node, op)?,
            Op::AttentionBackward(op) => ring.backward(node, op)?,
            Op::Rope(rope) => {
                let op = RopeOfPart { rope: rope.clone(), back: false, part };
                ring.graph.nodes.push(Node { op: op.into(), ..node.clone() });
            }
            Op::RopeBackward(RopeBackward { forward }) => {
                let op = RopeOfPart { rope: forward.clone(), back: true, part };
                ring.graph.nodes.push(Node { op: op.into(), ..node.clone() });
            }
            _ => ring.graph.nodes.push(node.clone()),
        }
    }
    crate::verify(&ring.graph)?;
    Ok(ring.graph)
}

struct Ring {
    graph: Graph,
    group: GroupId,
    part: Zigzag,
}

/// The unsupported property of an attention op and what is expected, separated by `: `.
fn unsupported_heads(heads: &AttentionHeads) -> Option<&'static str> {
    if heads.documents {
        return Some("documents told apart: joined ones, as a rank has parts of two places");
    }
    (!heads.causal).then_some("no mask: causal attention")
}

impl Ring {
    fn check(&self, node: &Node) -> Result<(), IrError> {
        let what = match &node.op {
            Op::Attention(op) => unsupported_heads(&op.heads),
            Op::AttentionBackward(op) => unsupported_heads(&op.heads),
            Op::AddPositions(_)
            | Op::AddPositionsBackward(_)
            | Op::AddPositionsOfPart(_)
            | Op::AddPositionsOfPartBackward(_) => {
                Some("a table of positions: rotary positions, which a rank has of its own tokens")
            }
            Op::RouterLoss(_) | Op::RouterLossGrad(_) => {
                Some("a router's auxiliary loss: none, as it is over the tokens of one rank")
            }
            Op::Dispatch(op) if op.capacity_factor.is_some() => {
                Some("a capacity: none, as it is of the tokens of one rank")
            }
            Op::DispatchToRanks(op) if op.capacity_factor.is_some() => {
                Some("a capacity: none, as it is of the tokens of one rank")
            }
            _ => None,
        };
        let Some((got, expected)) = what.and_then(|what| what.split_once(": ")) else {
            return Ok(());
        };
        let ranks = self.part.ranks;
        Err(IrError::Invalid {
            graph: self.graph.name.clone(),
            stage: self.graph.stage,
            what: format!(
                "`{}` for {ranks} context-parallel ranks: expected {expected}, got {got}",
                node.name
            ),
        })
    }

    /// Origin of the keys and values held at a step.
    fn source(&self, step: usize) -> KeySource {
        match step {
            0 => KeySource::Own,
            step if step <= self.part.place => KeySource::Earlier,
            _ => KeySource::Later,
        }
    }

    /// Heads and places of the part of a step.
    fn part_of(&self, heads: &AttentionHeads, step: usize) -> (AttentionHeads, Option<PartPlaces>) {
        let Zigzag { place, ranks } = self.part;
        let keys = (place + ranks - step) % ranks;
        let places = heads.window.map(|_| PartPlaces { queries: self.part, keys });
        (AttentionHeads { sinks: heads.sinks && step == 0, ..heads.clone() }, places)
    }

    /// Adds a node like `like` and returns the outputs.
    fn push(
        &mut self,
        like: &Node,
        suffix: &str,
        op: impl Into<Op>,
        inputs: &[TensorId],
        given: Option<TensorId>,
    ) -> Result<Vec<TensorId>, IrError> {
        let name = format!("{}.{suffix}", like.name);
        let node = self.graph.node_beside(like, &name, op, inputs, given)?;
        let outputs = node.outputs.clone();
        self.graph.nodes.push(node);
        Ok(outputs)
    }

    /// Sends a tensor to the next rank and receives the tensor of the previous rank.
    fn shift(
        &mut self,
        like: &Node,
        suffix: &str,
        tensor: TensorId,
        given: Option<TensorId>,
    ) -> Result<TensorId, IrError> {
        let ranks = self.part.ranks as u32;
        // A single rank keeps its tensor.
        let op = Collective::new(CollectiveKind::Shift { by: 1 % ranks }, self.group, ranks);
        Ok(self.push(like, suffix, op, &[tensor], given)?[0])
    }

    fn shift_both(
        &mut self,
        node: &Node,
        keys: [TensorId; 2],
        step: usize,
    ) -> Result<[TensorId; 2], IrError> {
        let [k, v] = keys;
        Ok([
            self.shift(node, &format!("k.shift.{step}"), k, None)?,
            self.shift(node, &format!("v.shift.{step}"), v, None)?,
        ])
    }

    fn forward(&mut self, node: &Node, op: &Attention) -> Result<(), IrError> {
        let (q, mut keys) = (node.inputs[0], [node.inputs[1], node.inputs[2]]);
        let mut parts = Vec::with_capacity(2 * self.part.ranks);
        for step in 0..self.part.ranks {
            let is_last = step + 1 == self.part.ranks;
            // Shift before attention, so that both can overlap.
            let next = if is_last { keys } else { self.shift_both(node, keys, step)? };
            let (heads, places) = self.part_of(&op.heads, step);
            let sinks = heads.sinks.then(|| node.inputs[3]);
            let inputs: Vec<TensorId> = [q, keys[0], keys[1]].into_iter().chain(sinks).collect();
            let part = AttentionPart { heads, keys: self.source(step), places };
            parts.extend(self.push(node, &format!("part.{step}"), part, &inputs, None)?);
            keys = next;
        }
        let dtype = self.graph.tensor(node.outputs[0]).dtype;
        let merge = MergeAttention { heads: op.heads.heads, dtype };
        self.graph.nodes.push(Node { op: merge.into(), inputs: parts, ..node.clone() });
        Ok(())
    }

    fn backward(&mut self, node: &Node, op: &AttentionBackward) -> Result<(), IrError> {
        let mut inputs = node.inputs[..6].to_vec();
        let mut of_queries: Option<TensorId> = None;
        let mut of_keys: Option<[TensorId; 2]> = None;
        for step in 0..self.part.ranks {
            let is_last = step + 1 == self.part.ranks;
            let keys = [inputs[2], inputs[3]];
            let next = if is_last { keys } else { self.shift_both(node, keys, step)? };
            let made = self.backward_part(node, op, step, &inputs)?;
            (inputs[2], inputs[3]) = (next[0], next[1]);
            of_queries = Some(match of_queries {
                None => made[0],
                Some(sum) if is_last => self.finish_sum(node, [sum, made[0]])?,
                Some(sum) => self.sum(node, &format!("dq.sum.{step}"), [sum, made[0]])?,
            });
            // Partial sums of earlier ranks arrive with the keys and values.
            let mut sums = match of_keys {
                None => [made[1], made[2]],
                Some([dk, dv]) => [
                    self.sum(node, &format!("dk.sum.{step}"), [dk, made[1]])?,
                    self.sum(node, &format!("dv.sum.{step}"), [dv, made[2]])?,
                ],
            };
            for (at, (what, sum)) in ["dk", "dv"].into_iter().zip(&mut sums).enumerate() {
                // The shift after the last step returns the sums to the rank of the keys.
                let own = node.outputs[at + 1];
                let is_given = is_last && self.graph.tensor(own).dtype == DType::F32;
                let suffix = format!("{what}.shift.{step}");
                *sum = self.shift(node, &suffix, *sum, is_given.then_some(own))?;
                if is_last && !is_given {
                    let to = self.graph.tensor(own).dtype;
                    self.push(node, &format!("{what}.cast"), Cast { to }, &[*sum], Some(own))?;
                }
            }
            of_keys = Some(sums);
        }
        Ok(())
    }

    /// Adds the part of a step; returns its gradients of queries, keys and values.
    fn backward_part(
        &mut self,
        node: &Node,
        op: &AttentionBackward,
        step: usize,
        inputs: &[TensorId],
    ) -> Result<Vec<TensorId>, IrError> {
        let (heads, places) = self.part_of(&op.heads, step);
        let part = AttentionPartBackward { heads, keys: self.source(step), places };
        let without_sinks = AttentionHeads { sinks: false, ..part.heads.clone() };
        let without_sinks = AttentionPartBackward { heads: without_sinks, ..part.clone() };
        let name = format!("{}.part.{step}", node.name);
        let mut made = self.graph.node_beside(node, &name, without_sinks, inputs, None)?;
        let gradients = made.outputs.clone();
        if part.heads.sinks {
            // The gradient of the sinks is a tensor of the graph.
            made.inputs.push(node.inputs[6]);
            made.outputs.push(node.outputs[3]);
            made.op = part.into();
        }
        self.graph.nodes.push(made);
        Ok(gradients)
    }

    fn sum(
        &mut self,
        node: &Node,
        suffix: &str,
        terms: [TensorId; 2],
    ) -> Result<TensorId, IrError> {
        Ok(self.push(node, suffix, Add {}, &terms, None)?[0])
    }

    /// Sum of the last two terms of the query gradient, cast to the output type.
    fn finish_sum(&mut self, node: &Node, terms: [TensorId; 2]) -> Result<TensorId, IrError> {
        let own = node.outputs[0];
        let to = self.graph.tensor(own).dtype;
        if to == DType::F32 {
            return Ok(self.push(node, "dq.sum", Add {}, &terms, Some(own))?[0]);
        }
        let sum = self.sum(node, "dq.sum", terms)?;
        Ok(self.push(node, "dq.cast", Cast { to }, &[sum], Some(own))?[0])
    }
}
