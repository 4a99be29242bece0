//! Whether the routers of a mixture choose the same experts in BF16 and in low precision: the same
//! weights and tokens, forward once in each.

use std::sync::Arc;

use deepwell_ir::{Call, Instance, Op, PrecisionPolicy, Program};
use deepwell_kernels::{Backend, KernelError, Observer};
use deepwell_moe::{RouterTraining, with_router_training};
use serde::{Deserialize, Serialize};

use super::folder;
use super::options::{ParityOptions, RunKind};
use crate::data::{HeldoutWindows, TokenCache};
use crate::generate::{Forward, load_masters};
use crate::run_paths;
use crate::{ModelSource, TrainError};

/// Maximum number of tokens compared.
const TOKENS_MAX: u64 = 8192;

/// Agreement of the routing between BF16 and low precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoutingAgreement {
    /// Seed of the pair whose BF16 run provides the weights.
    pub seed: u64,
    /// Step of these weights.
    pub step: u64,
    /// Held-out tokens routed in each layer.
    pub tokens: u64,
    /// Number of equal choices over the number of choices, over all layers.
    pub share: f64,
    /// Each layer with a router.
    pub layers: Vec<LayerAgreement>,
}

/// The agreement in one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerAgreement {
    /// The layer, counted from 0.
    pub layer: u32,
    /// Number of experts.
    pub experts: usize,
    /// Number of tokens times top-k.
    pub choices: u64,
    /// Number of equal choices: for each token the experts chosen in both precisions, in any order.
    pub alike: u64,
    /// Number of tokens that choose the same experts.
    pub tokens_alike: u64,
}

impl LayerAgreement {
    /// Share of equal choices.
    pub fn share(&self) -> f64 {
        self.alike as f64 / self.choices.max(1) as f64
    }
}

/// Choices of one layer's router.
#[derive(Clone, Debug, PartialEq)]
struct LayerChoices {
    layer: u32,
    experts: usize,
    top_k: usize,
    /// `[tokens, top_k]`.
    chosen: Vec<i32>,
}

/// Records the choices of routers.
#[derive(Default)]
struct Choices {
    layers: Vec<LayerChoices>,
}

impl Observer for Choices {
    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        let (Op::Route(op), Some(layer)) = (call.op.leading(), call.layer) else { return Ok(()) };
        let Some(experts) = call.outputs().get(1) else { return Ok(()) };
        let range = program.value(experts.value).range_in(instance.slot);
        let mut bytes = vec![0; range.bytes];
        backend.read(range, &mut bytes)?;
        let chosen: Vec<i32> = bytemuck::pod_collect_to_vec(&bytes);
        match self.layers.iter_mut().find(|recorded| recorded.layer == layer) {
            Some(recorded) => recorded.chosen.extend(chosen),
            None => {
                let (experts, top_k) = (op.experts, op.top_k);
                self.layers.push(LayerChoices { layer, experts, top_k, chosen });
            }
        }
        Ok(())
    }
}

/// Compares the routing of the same tokens.
fn compare(bf16: &[LayerChoices], low_precision: &[LayerChoices]) -> Vec<LayerAgreement> {
    let of_layer = |(own, other): (&LayerChoices, &LayerChoices)| {
        let tokens = own.chosen.chunks(own.top_k).zip(other.chosen.chunks(own.top_k));
        let alike = |(own, other): (&[i32], &[i32])| {
            own.iter().filter(|expert| other.contains(expert)).count()
        };
        let alike: Vec<usize> = tokens.map(alike).collect();
        LayerAgreement {
            layer: own.layer,
            experts: own.experts,
            choices: own.chosen.len() as u64,
            alike: alike.iter().sum::<usize>() as u64,
            tokens_alike: alike.iter().filter(|&&count| count == own.top_k).count() as u64,
        }
    };
    bf16.iter().zip(low_precision).map(of_layer).collect()
}

/// Whether a model has routers.
pub(super) fn has_routers(model: &ModelSource) -> Result<bool, TrainError> {
    let graph = model.capture(None)?;
    Ok(graph.nodes.iter().any(|node| matches!(node.op, Op::Route(_))))
}

/// Computes the agreement on held-out windows, with the weights of the newest checkpoint of the
/// first pair's BF16 run. Tokens are routed window by window, because expert capacities apply to a
/// window.
///
/// # Errors
/// No checkpoint, or the whole model does not fit on the device.
pub(super) fn of_pair(
    options: &ParityOptions,
    model: &ModelSource,
    tokens: &Arc<TokenCache>,
) -> Result<RoutingAgreement, TrainError> {
    let settings = &options.settings;
    let seed = settings.seed;
    let run = options.out.join(folder::seed_folder(seed)).join(RunKind::Bf16.name());
    let root = run_paths::checkpoints(&run);
    let newest = deepwell_ckpt::latest(&root)?.ok_or_else(|| TrainError::Setting {
        setting: "checkpoint",
        expected: "one of the BF16 run".to_string(),
        got: format!("none in `{}`", root.display()),
        hint: None,
    })?;
    let checkpoint = deepwell_ckpt::load(&newest.path)?;
    let capacity_factor = settings.router.capacity_factor;
    let training = RouterTraining { capacity_factor, ..RouterTraining::default() };
    let graph = with_router_training(&model.capture(Some(settings.seq_len))?, &training)?;
    let wanted = settings.eval_tokens.min(TOKENS_MAX);
    let windows = HeldoutWindows::new(Arc::clone(tokens), 1, settings.seq_len, Some(wanted))?;
    let hardware = deepwell_probe::probe();
    let choices_in = |policy: &PrecisionPolicy| -> Result<Vec<LayerChoices>, TrainError> {
        let (window, device) = (settings.seq_len, settings.device);
        let mut forward = Forward::open(&graph, policy, window, device, &hardware)?;
        load_masters(&checkpoint, &mut forward)?;
        let (mut choices, mut batch) = (Choices::default(), windows.buffer());
        for index in 0..windows.len() {
            windows.fill(index, &mut batch);
            forward.run_observed(&batch.inputs, &mut choices)?;
        }
        Ok(choices.layers)
    };
    let bf16 = choices_in(&PrecisionPolicy::bf16())?;
    let layers = compare(&bf16, &choices_in(&settings.precision_policy()?)?);
    let sum = |count: fn(&LayerAgreement) -> u64| layers.iter().map(count).sum::<u64>();
    let share = sum(|layer| layer.alike) as f64 / sum(|layer| layer.choices).max(1) as f64;
    let (step, tokens) = (checkpoint.step(), windows.tokens());
    Ok(RoutingAgreement { seed, step, tokens, share, layers })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(layer: u32, top_k: usize, chosen: &[i32]) -> LayerChoices {
        LayerChoices { layer, experts: 8, top_k, chosen: chosen.to_vec() }
    }

    #[test]
    fn choices_are_compared_token_by_token() {
        for (top_k, bf16, other, alike, tokens_alike) in [
            // The same, in the same order and in another.
            (2, &[0, 1, 5, 7][..], &[0, 1, 5, 7][..], 4, 2),
            (2, &[0, 1, 5, 7], &[1, 0, 7, 5], 4, 2),
            // One expert of a token differs; both differ; the experts of two tokens are swapped.
            (2, &[0, 1, 5, 7], &[0, 2, 5, 7], 3, 1),
            (2, &[0, 1, 5, 7], &[2, 3, 5, 7], 2, 1),
            (2, &[0, 1, 5, 7], &[5, 7, 0, 1], 0, 0),
            (1, &[3, 4, 3], &[3, 3, 3], 2, 2),
            (1, &[], &[], 0, 0),
        ] {
            let got = compare(&[choices(3, top_k, bf16)], &[choices(3, top_k, other)]);
            let choices = bf16.len() as u64;
            let expected = LayerAgreement { layer: 3, experts: 8, choices, alike, tokens_alike };
            assert_eq!(got, [expected], "{bf16:?} {other:?}");
        }
        assert_eq!(compare(&[choices(0, 2, &[])], &[choices(0, 2, &[])])[0].share(), 0.0);
    }
}
