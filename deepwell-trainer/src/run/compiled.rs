//! A run with programs on all ranks and initial weights.

use super::facts::MachineFacts;
use super::memory_table::{checkpoint_bytes, memory_table};
use super::prepared::{Prepared, Run};
use crate::fingerprint::{HashedWeights, Sources, WeightsHash};
use crate::memory_sampler::MemorySampler;
use crate::progress::Progress;
use crate::settings_unused::{self, RunFacts};
use crate::{Device, ModelSource, Settings, TrainError, World};

/// A run that is ready to train.
pub(super) struct Compiled<'a> {
    pub(super) run: Run<'a>,
    pub(super) world: World,
    pub(super) machine: MachineFacts,
    /// Hashes of tokenizer and loaded weights.
    pub(super) sources: Sources,
    /// Host bytes of each rank in this process for copies of checkpoints.
    pub(super) copy_bytes: Vec<u64>,
    pub(super) sampler: Option<MemorySampler>,
}

impl<'a> Compiled<'a> {
    /// Compiles the programs of all ranks in this process, and writes the initial weights.
    ///
    /// # Errors
    /// A device, a kernel or weights are missing, here or on another rank.
    pub(super) fn of(
        prepared: Prepared<'a>,
        progress: &mut dyn Progress,
    ) -> Result<Compiled<'a>, TrainError> {
        let Prepared { mut run, lowered, compile_options, planning_bytes } = prepared;
        let member = run.request.member;
        let machine = MachineFacts::of(lowered.hardware(), &run.settings);
        // Start the pool's threads before taking the baseline.
        rayon::broadcast(|_| ());
        // Memory left over from planning counts as memory of compilation.
        let sampler = MemorySampler::start(run.settings.device);
        let sampler = sampler.map(|it| it.with_bytes(planning_bytes));
        if member.is_some_and(|member| member.world_size() > 1)
            && matches!(run.settings.device, Device::Cuda(_))
            && std::env::var_os("NCCL_ALGO").is_none()
        {
            progress.note(
                "note: switches of NVLink add in any order; `NCCL_ALGO=^NVLS` on all ranks gives \
                 two runs the same bits",
            );
        }
        let mut world = match member {
            None => World::of_lowered(lowered, &compile_options)?,
            Some(member) => {
                // The ranks agree on a memory limit and a micro-batch, and plan with both.
                let (graph, hardware) = lowered.into_inputs();
                World::join(member, graph, hardware, &compile_options)?
            }
        };
        if run.request.options.ends_stuck_process {
            world.end_process_when_stuck();
        }
        let weights = write_masters(&mut world, &mut run.model, &run.settings)?;
        let sources = Sources { tokenizer: Some(run.dataset.tokenizer_hash()), weights };
        let copy_bytes = checkpoint_bytes(&mut world, &run.settings)?;
        progress.note(&memory_table(&world, &copy_bytes));
        warn(&run, &world, progress);
        Ok(Compiled { run, world, machine, sources, copy_bytes, sampler })
    }
}

/// Warns about precision that falls back, and about settings without effect.
fn warn(run: &Run<'_>, world: &World, progress: &mut dyn Progress) {
    for fallback in world.first().precision_fallbacks() {
        progress.note(&format!("warning: {fallback}"));
    }
    let tensors = &world.first().program().precision;
    let facts = RunFacts {
        quantizes: tensors.iter().any(|tensor| tensor.format.is_quantized()),
        has_frozen: run.model.has_frozen(),
        has_records: run.dataset.has_records(),
    };
    for unused in settings_unused::without_effect(run.request.settings, facts) {
        progress.note(&format!("warning: {unused}"));
    }
}

/// Writes the initial weights of every rank, without their copies. Returns the hash of loaded
/// weights.
fn write_masters(
    world: &mut World,
    model: &mut ModelSource,
    settings: &Settings,
) -> Result<Option<String>, TrainError> {
    let (mut hash, mut any_loaded) = (WeightsHash::default(), false);
    for engine in world.engines_mut() {
        engine.initialize_masters(settings.seed)?;
        let mut hashed = HashedWeights::new(engine).without_copies().behind(hash);
        any_loaded |= model.load_weights(&mut hashed)?;
        hash = hashed.into_hash();
        if let Some(seed) = settings.perturb_weights_seed {
            engine.perturb_masters(seed)?;
        }
    }
    if any_loaded && world.local_size() < world.size() {
        let parameters = world.first().graph().parameters();
        let names: Vec<String> = parameters.map(|(_, tensor)| tensor.name.clone()).collect();
        let rank_hash = hash.words(&names);
        let of_ranks = world.on_all(|engine| engine.peers.gather(&rank_hash))?;
        of_ranks.iter().flatten().for_each(|words| hash.add_words(&names, words));
    }
    Ok(any_loaded.then(|| hash.hash()))
}
