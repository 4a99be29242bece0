//! Steps that measure the error of quantized GEMMs.

use deepwell_ir::GemmKind;
use deepwell_plan::{Plan, lower_within};

use super::products::{Measuring, add_products};
use super::{Engine, PendingStep, ProductSums};
use crate::TrainError;

impl Engine {
    /// Whether steps can measure the error of quantized GEMMs.
    pub fn can_measure(&self) -> bool {
        self.measuring.is_some()
    }

    /// Lowers and loads the program that measures, for the plan of the training program.
    pub(super) fn load_measuring(&mut self) -> Result<(), TrainError> {
        let Some(plan) = self.plan.measured() else { return Ok(()) };
        let arena_bytes = self.executor.arena_bytes();
        let catalog = self.catalog.as_ref();
        let plan = Plan { policy: self.plan.policy.clone(), ..plan };
        let program = lower_within(&self.graph, &plan, arena_bytes, catalog, &self.target)?;
        let training = self.training.program().clone();
        self.measuring = Measuring::load(&mut self.executor, program, &training, &self.gemms)?;
        Ok(())
    }

    /// Exchanges the training program for the one that measures, and back.
    pub(super) fn exchange_measuring(&mut self) {
        let Some(measuring) = &mut self.measuring else { return };
        std::mem::swap(&mut self.training, &mut measuring.program);
        std::mem::swap(&mut self.statistics, &mut measuring.statistics);
        std::mem::swap(&mut self.loads, &mut measuring.loads);
        std::mem::swap(&mut self.per_step, &mut measuring.per_step);
        std::mem::swap(&mut self.products, &mut measuring.products);
    }

    /// Begins a step like [`Engine::start_step`] that also measures the error of its quantized
    /// GEMMs, if [`Engine::can_measure`].
    ///
    /// # Errors
    /// As [`Engine::start_step`].
    pub fn start_measured_step(
        &mut self,
        inputs: &[i32],
        targets: &[i32],
        learning_rate: f64,
        max_grad_norm: f64,
    ) -> Result<PendingStep, TrainError> {
        self.exchange_measuring();
        let pending = self.start_step(inputs, targets, learning_rate, max_grad_norm);
        self.exchange_measuring();
        pending
    }

    /// The products that the last finished step measured, over all ranks and in the same order on
    /// each.
    ///
    /// # Errors
    /// A rank has failed.
    pub fn products(&mut self) -> Result<Vec<ProductSums>, TrainError> {
        let own = self.steps.finished.products.clone();
        if self.peers.world_size() == 1 {
            return Ok(own);
        }
        let kinds = [GemmKind::Fprop, GemmKind::Dgrad, GemmKind::Wgrad];
        let code = |kind| kinds.iter().position(|&it| it == kind).unwrap_or_default() as u64;
        let words: Vec<u64> = own
            .iter()
            .flat_map(|it| [it.gemm as u64, code(it.kind), it.signal.to_bits(), it.error.to_bits()])
            .collect();
        let mut all = Vec::new();
        for words in self.peers.gather_any(&words)? {
            for words in words.chunks_exact(4) {
                let kind = kinds[words[1] as usize % kinds.len()];
                let [signal, error] = [words[2], words[3]].map(f64::from_bits);
                let sums = ProductSums { gemm: words[0] as usize, kind, signal, error };
                add_products(&mut all, sums);
            }
        }
        all.sort_by_key(|sums| (sums.gemm, code(sums.kind)));
        Ok(all)
    }
}
