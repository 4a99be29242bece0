//! Updates within the backward pass: each parameter is updated as soon as its gradient is complete
//! and no later call of the pass reads the parameter, so that gradients live for a short time.
//!
//! The norm of all gradients is known only after the pass. Gradients are therefore clipped by the
//! norm of the step before, and a parameter whose own gradient is not finite keeps its weights.

use std::collections::HashMap;

use deepwell_ir::ops::{AdamW, AdamWCoefficients, NormOfSums, SumsOfSquares, WeightCopy};
use deepwell_ir::{DType, MemoryKind, Phase, ValueId};

use super::builder::{read, update, write};
use super::copies::UpdateCopies;
use super::lowering::Lowering;
use super::rank::{RankContext, parents};
use crate::{OptimizerSpec, PlanError};

impl RankContext<'_> {
    /// Whether parameters are updated in the backward pass.
    pub(super) fn updates_in_backward(&self) -> bool {
        self.plan.optimizer.in_backward
    }

    /// Refuses updates in the backward pass of plans for which the gradients are complete later.
    pub(super) fn check_updates_in_backward(&self) -> Result<(), PlanError> {
        if !self.updates_in_backward() {
            return Ok(());
        }
        let refuse = |expected: &str, got: String| {
            let what = "optimizer in the backward pass";
            Err(PlanError::Request { what, expected: expected.to_string(), got })
        };
        if self.plan.micro_batches != 1 {
            let got = format!("{} micro-batches", self.plan.micro_batches);
            return refuse("one micro-batch per step", got);
        }
        if self.plan.parallel.world_size() > 1 {
            return refuse("one rank", format!("{} ranks", self.plan.parallel.world_size()));
        }
        Ok(())
    }
}

impl Lowering<'_> {
    /// Finds the node after which each parameter is updated.
    pub(super) fn plan_updates_in_backward(&mut self) {
        if !self.rank.updates_in_backward() {
            return;
        }
        self.update_copies = UpdateCopies::plan(&self.rank, &self.parameters);
        let graph = self.rank.graph;
        let parameter_of: HashMap<_, _> =
            graph.parameters().enumerate().map(|(index, (id, _))| (id, index)).collect();
        let states = self.parameters.states.iter().enumerate();
        let parameter_of_gradient: HashMap<ValueId, usize> = states
            .filter(|(index, _)| !self.parameters.is_selection_bias[*index])
            .filter_map(|(index, state)| Some((state.gradient?, index)))
            .collect();
        let parents = parents(graph);
        // The last writer of the gradient, and the last reader of the parameter or of a copy.
        let (mut writers, mut readers) = (HashMap::new(), HashMap::new());
        let passes = [Phase::Backward, Phase::WeightGradients];
        let nodes = graph.nodes.iter().enumerate();
        for (at, node) in nodes.filter(|(_, node)| passes.contains(&node.phase)) {
            let written = node.outputs.iter().filter_map(|&id| self.build.value_if_made(id));
            let written = written.filter_map(|value| parameter_of_gradient.get(&value));
            writers.extend(written.map(|&parameter| (parameter, at)));
            let read = node.inputs.iter().map(|id| parents.get(id).unwrap_or(id));
            readers.extend(read.filter_map(|id| parameter_of.get(id)).map(|&index| (index, at)));
        }
        for (parameter, writer) in writers {
            let reader = readers.get(&parameter).copied().unwrap_or(writer);
            let after = self.updates.after.entry(writer.max(reader)).or_default();
            after.push(parameter);
        }
        self.updates.after.values_mut().for_each(|parameters| parameters.sort_unstable());
    }

    /// Updates the parameters whose gradients are complete after a node.
    pub(super) fn update_after(&mut self, at: usize) -> Result<(), PlanError> {
        let node = &self.rank.graph.nodes[at];
        for parameter in self.updates.after.remove(&at).unwrap_or_default() {
            self.update_parameter(parameter, (node.phase, node.layer))?;
        }
        Ok(())
    }

    fn update_parameter(
        &mut self,
        parameter: usize,
        pass: (Phase, Option<u32>),
    ) -> Result<(), PlanError> {
        let state = self.parameters.states[parameter].clone();
        let Some(gradient) = state.gradient else { return Ok(()) };
        let OptimizerSpec { beta1, beta2, eps, weight_decay, moments, .. } =
            self.rank.plan.optimizer;
        let mut add = |what: &str, dtype, count| {
            let name = format!("{what}.{}", state.name);
            self.build.add(name, dtype, vec![count], MemoryKind::Activations)
        };
        let sums = add("sums_of_squares", DType::U64, 1);
        let coefficients = add("adamw_coefficients", DType::F32, AdamWCoefficients::COUNT);
        self.updates.sums.push(sums);
        let name = format!("sums_of_squares.{}", state.name);
        let squares = SumsOfSquares {}.into();
        self.build.layer_call(pass, &name, squares, vec![read(gradient)], vec![write(sums)])?;

        let host = &self.build.host;
        let of_host = [host.grad_norm, host.schedule, host.counters].into_iter().flatten();
        let inputs = of_host.chain([sums]).map(read).collect();
        let op = AdamWCoefficients { beta1, beta2, eps, of_bucket: true };
        let name = format!("adamw_coefficients.{}", state.name);
        self.build.layer_call(pass, &name, op.into(), inputs, vec![write(coefficients)])?;

        let (mut copies, mut outputs) = (Vec::new(), Vec::new());
        for (kind, tensors) in self.update_copies.of(parameter) {
            copies.push(WeightCopy { parameter: 0, kind: kind.clone() });
            outputs.extend(tensors.iter().map(|&id| write(self.build.value(id))));
        }
        let updated = [Some(state.master.value()), state.first_moment, state.second_moment];
        let operands = [read(coefficients), read(gradient)].into_iter();
        let operands = operands.chain(updated.into_iter().flatten().map(update)).collect();
        let decay = if self.parameters.decays[parameter] { weight_decay } else { 0.0 };
        let bucket = parameter..parameter + 1;
        let op = AdamW { parameters: bucket, weight_decay: vec![decay], copies, moments };
        self.build.layer_call(pass, &format!("adamw.{}", state.name), op.into(), operands, outputs)
    }

    /// Computes the norm of all gradients from their sums of squares, for the next step.
    pub(super) fn norm_of_updates(&mut self) -> Result<(), PlanError> {
        let sums = std::mem::take(&mut self.updates.sums).into_iter().map(read).collect();
        let norm = self.build.host.grad_norm.map(write).into_iter().collect();
        self.build.optimizer_call("grad_norm", NormOfSums {}.into(), sums, norm)
    }
}
