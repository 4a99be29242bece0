//! Strategies of the trainer, drawn at random.

use deepwell_ir::Graph;
use deepwell_ir::capture::ModelConfig;
use deepwell_moe::RouterTraining;
use deepwell_plan::schedule::PipelineSchedule;
use deepwell_plan::{ActivationRecompute, ModelShape, Strategy};
use deepwell_trainer::with_routers;

/// Numbers that look random and are the same on every machine (SplitMix64).
pub(crate) struct Draws(pub(crate) u64);

impl Draws {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn of<T: Copy>(&mut self, from: &[T]) -> T {
        from[(self.next() % from.len() as u64) as usize]
    }
}

/// Draws of each of so many models: `DEEPWELL_DRAWS` of all, or as many as a run of all tests has
/// time for.
pub(crate) fn count(models: usize) -> usize {
    let asked = std::env::var("DEEPWELL_DRAWS").ok();
    asked.and_then(|asked| asked.parse::<usize>().ok()).map_or(6, |all| all.div_ceil(models))
}

/// A strategy that the trainer knows, of a model with so many layers.
pub(crate) fn strategy(draws: &mut Draws, shape: &ModelShape) -> Strategy {
    loop {
        let pp = draws.of(&[1, 1, 2, 3, 4, 8, 16]);
        let vpp = if pp > 1 { draws.of(&[1, 1, 2, 3, 5, 8]) } else { 1 };
        let tp = draws.of(&[1, 1, 2, 4, 8]);
        let cp = draws.of(&[1, 1, 1, 2]);
        let dp = draws.of(&[1, 2, 4, 8, 64]);
        let ep = if shape.experts.is_some() { draws.of(&[1, 2, 4, 8]) } else { 1 };
        let schedule = draws.of(&[
            PipelineSchedule::OneFOneB,
            PipelineSchedule::OneFOneB,
            PipelineSchedule::ZbH1,
        ]);
        let at = Strategy {
            pp,
            vpp,
            schedule: if vpp > 1 || pp == 1 { PipelineSchedule::OneFOneB } else { schedule },
            tp,
            sp: tp > 1,
            cp,
            ep,
            dp,
            zero: if dp * cp > 1 { draws.of(&[0, 1, 1, 2, 3]) } else { 0 },
            micro_batch: draws.of(&[1, 1, 2, 4, 8]),
            micro_batches: pp * draws.of(&[1, 2, 8]),
            recompute: draws.of(&ActivationRecompute::ALL),
            ..Strategy::SINGLE
        };
        let heads = if shape.latent.is_some() { shape.heads } else { shape.kv_heads };
        let experts = shape.experts.map_or(1, |experts| experts.experts);
        let divides = heads.is_multiple_of(tp) && experts.is_multiple_of(ep);
        if at.parallel().is_ok() && divides && pp * vpp <= shape.layers {
            return at;
        }
    }
}

/// A model as the trainer captures it.
pub(crate) fn graph(model: &str, seq: usize) -> Graph {
    let graph = ModelConfig::preset(model).unwrap().capture(Some(seq)).unwrap();
    with_routers(&graph, &RouterTraining::default()).unwrap()
}
