//! Bodies of a program, and the order in which a step runs them.

use deepwell_ir::{BodyId, Invocation, Node, Phase};

use super::lowering::Lowering;
use crate::PlanError;

impl Lowering<'_> {
    /// Lowers the nodes of a phase to a body.
    pub(super) fn body(&mut self, phase: Phase) -> Result<(), PlanError> {
        self.nodes_of(phase, None)?;
        self.build.end_body(phase, 0);
        Ok(())
    }

    /// Lowers the nodes of a phase that belong to one of this rank's chunks of layers to a body.
    pub(super) fn body_of_chunk(&mut self, phase: Phase, chunk: u32) -> Result<(), PlanError> {
        self.nodes_of(phase, Some(chunk))?;
        self.build.end_body(phase, chunk);
        Ok(())
    }

    /// Lowers the nodes of a phase, or of one chunk in the phase, with the ZeRO all-gathers and
    /// reduce-scatters.
    fn nodes_of(&mut self, phase: Phase, chunk: Option<u32>) -> Result<(), PlanError> {
        let graph = self.rank.graph;
        self.begin_gathers(phase);
        let is_here = |(_, node): &(usize, &Node)| {
            let is_its = chunk.is_none_or(|chunk| self.rank.chunk_of(node) == chunk);
            node.phase == phase && is_its && !self.comes_with_gather(node)
        };
        let nodes: Vec<(usize, &Node)> = graph.nodes.iter().enumerate().filter(is_here).collect();
        let layers: Vec<_> = nodes.chunk_by(|(_, a), (_, b)| a.layer == b.layer).collect();
        for (at, nodes) in layers.iter().enumerate() {
            if self.rank.overlaps {
                // Prefetches the weights of the next layer, overlapped with this one.
                for (_, node) in layers[at..].iter().take(2).copied().flatten() {
                    self.prefetch_for(node, nodes[0].1.layer)?;
                }
                self.gather_planes(phase)?;
            }
            for &(at, node) in *nodes {
                self.gather_for(node)?;
                self.build.node(node)?;
                self.scatter_after(at)?;
                self.sum_after(at)?;
                self.update_after(at)?;
            }
        }
        Ok(())
    }

    /// One invocation for each pass of the schedule, then the bodies that run once in a step,
    /// unless a step skips all of their calls.
    pub(super) fn invocations(&self) -> Vec<Invocation> {
        let passes = self.rank.passes.passes.iter().filter_map(|pass| {
            let body = self.build.body_of(pass.phase, pass.chunk)?;
            Some(Invocation { body, micro_batch: pass.micro_batch, slot: pass.slot })
        });
        let last = [Phase::Optimizer, Phase::Weights];
        let last = last.into_iter().filter_map(|phase| self.build.body_of(phase, 0));
        let runs = |body: &BodyId| {
            let calls = &self.build.calls[self.build.bodies[body.index()].calls.clone()];
            calls.iter().any(|call| !call.alone_only)
        };
        let last = last.filter(runs);
        passes.chain(last.map(|body| Invocation { body, micro_batch: 0, slot: 0 })).collect()
    }
}
