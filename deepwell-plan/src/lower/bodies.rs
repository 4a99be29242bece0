//! Bodies of a program, and the order in which a step runs them.

use deepwell_ir::{Body, BodyId, Invocation, Phase};

use super::Lowering;
use crate::PlanError;

impl Lowering<'_> {
    /// Lowers the nodes of a phase to a body.
    pub(super) fn body(&mut self, phase: Phase) -> Result<(), PlanError> {
        self.nodes_of(phase, None)?;
        self.end_body(phase, 0);
        Ok(())
    }

    /// Lowers the nodes of a phase that belong to one of this rank's chunks of layers to a body.
    pub(super) fn body_of_chunk(&mut self, phase: Phase, chunk: u32) -> Result<(), PlanError> {
        self.nodes_of(phase, Some(chunk))?;
        self.end_body(phase, chunk);
        Ok(())
    }

    /// Lowers the nodes of a phase, or of one chunk in it, with the collectives that bring what
    /// ZeRO has in slices and take it away.
    fn nodes_of(&mut self, phase: Phase, chunk: Option<u32>) -> Result<(), PlanError> {
        let graph = self.graph;
        self.begin_passing(phase);
        for (at, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.phase == phase) {
            let is_elsewhere = chunk.is_some_and(|chunk| self.chunk_of(node) != chunk);
            if is_elsewhere || self.comes_with_gather(node) {
                continue;
            }
            self.gather_for(node)?;
            self.node(node)?;
            self.scatter_behind(at)?;
        }
        Ok(())
    }

    /// Makes the calls since the last body a body of their own, if there are any.
    pub(super) fn end_body(&mut self, phase: Phase, chunk: u32) {
        let begin = self.bodies.last().map_or(0, |body| body.calls.end);
        if begin < self.calls.len() {
            self.bodies.push(Body { phase, chunk, calls: begin..self.calls.len() });
        }
    }

    /// The passes of the schedule as runs of bodies, then the bodies that run once in a step.
    pub(super) fn invocations(&self) -> Vec<Invocation> {
        let body_of = |phase: Phase, chunk: u32| {
            let is_it = |body: &Body| (body.phase, body.chunk) == (phase, chunk);
            Some(BodyId(self.bodies.iter().position(is_it)? as u32))
        };
        let passes = self.passes.passes.iter().filter_map(|pass| {
            let body = body_of(pass.phase, pass.chunk)?;
            Some(Invocation { body, micro_batch: pass.micro_batch, slot: pass.slot })
        });
        let last = [Phase::Optimizer, Phase::Weights];
        let last = last.into_iter().filter_map(|phase| body_of(phase, 0));
        passes.chain(last.map(|body| Invocation { body, micro_batch: 0, slot: 0 })).collect()
    }
}
