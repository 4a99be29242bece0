//! Guards in a run: steps pass results to the guards, whose decisions change the precision of
//! GEMMs, as does the policy's repair.

use deepwell_ir::Phase;
use deepwell_precision::{GuardEvent, GuardEventKind, Guards, Observed};

use super::Fit;
use crate::product_charts::ProductRecord;
use crate::{Engine, OperandStats, ProductSums, Settings, StepOutcome, TrainError};

/// Guards over the GEMMs of an engine. The FLOPs of a weight's GEMMs are in proportion to its
/// elements.
pub(super) fn guards_of(engine: &Engine, settings: &Settings) -> Guards {
    let names = engine.gemms().iter().map(|gemm| gemm.weight.clone()).collect();
    let policy = &engine.plan().policy;
    let guards = Guards::new(settings.guards.clone(), names, policy.fallback());
    match policy.format().has_fewer_bits_than_mxfp8() {
        true => guards.with_mxfp8_stage(engine.gemm_elements()),
        false => guards,
    }
}

impl Fit<'_> {
    /// Switches the forward GEMMs to BF16 or back if the repair begins or ends with a step.
    pub(super) fn switch_repair(&mut self, step: u64) -> Result<(), TrainError> {
        let Some(repair) = self.engine.plan().policy.repair() else { return Ok(()) };
        let guards = &self.position.guards;
        let is_due = repair.is_due(step, self.settings.steps) || guards.is_repairing(step);
        if is_due == self.engine.is_repaired() {
            return Ok(());
        }
        let (forward, format) = (repair.forward, self.engine.plan().policy.format());
        self.progress.note(&match is_due {
            true => format!("from step {step} on, forward GEMMs run in {forward}: repair"),
            false => format!("from step {step} on, forward GEMMs run in {format} again"),
        });
        let reason = "in fallback when the repair began or ended";
        self.engine.set_precision(&guards.moved(), reason, is_due)
    }

    /// Passes the step's results to the guards and applies their decisions.
    pub(super) fn guard(
        &mut self,
        outcome: &StepOutcome,
        has_loss: bool,
    ) -> Result<(), TrainError> {
        let step = self.position.step;
        let statistics = self.engine.statistics_by_phase()?;
        let products = self.engine.products()?;
        let guards = &mut self.position.guards;
        for (phase, operand) in &statistics {
            let OperandStats { gemms, element, has_tensor_scale, stats, is_transformed } = operand;
            let operand = Observed {
                is_activation: *phase == Phase::Forward && !is_transformed,
                is_backward: *phase == Phase::Backward,
                element: *element,
                has_tensor_scale: *has_tensor_scale,
            };
            guards.observe_operand(step, gemms, stats, operand);
        }
        if let Some(log) = self.log.as_mut().filter(|_| !products.is_empty()) {
            log.products(step, ProductRecord::all(&products, self.engine.gemms()))?;
        }
        for ProductSums { gemm, kind, signal, error } in products {
            guards.observe_product(gemm, kind, signal, error);
        }
        if has_loss {
            guards.observe_loss(step, outcome.loss, outcome.grad_norm);
        }
        let events = guards.decide(step)?;
        let is_spike = |event: &GuardEvent| matches!(event.kind, GuardEventKind::LossSpike { .. });
        let repair = self.engine.plan().policy.repair().map_or(0, |repair| repair.spike_steps);
        if repair > 0 && events.iter().any(is_spike) {
            guards.repair_until(step + repair);
        }
        let switches = events.iter().any(|event| {
            matches!(
                event.kind,
                GuardEventKind::ToBf16 { .. }
                    | GuardEventKind::ToMxfp8 { .. }
                    | GuardEventKind::BackToLow { .. }
            )
        });
        for event in &events {
            self.progress.note(&format!(
                "guard at step {step}: {:?} {}: {}",
                event.kind, event.gemm, event.reason
            ));
            if let Some(log) = &mut self.log {
                log.guard(event)?;
            }
        }
        if switches {
            let reason = events.last().map_or("", |event| event.reason.as_str());
            let is_repaired = self.engine.is_repaired();
            self.engine.set_precision(&guards.moved(), reason, is_repaired)?;
        }
        Ok(())
    }
}
