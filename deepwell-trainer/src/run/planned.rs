//! The part of a run that needs neither data nor a device: model, ranks, plan.

use std::time::Duration;

use deepwell_ir::mask_documents;
use deepwell_probe::Hardware;

use crate::progress::Progress;
use crate::run_folder::RunFolder;
use crate::world::Lowered;
use crate::{
    AutoPrecision, CompileOptions, Documents, ModelSource, Settings, TrainError, elastic,
    with_routers,
};

/// The model and the plan of a run, with consistent settings.
pub(super) struct Planned {
    /// With the degrees of parallelism of its ranks.
    pub(super) settings: Settings,
    pub(super) lowered: Lowered,
    /// Complete except for the end-of-document token, which depends on the data.
    pub(super) compile_options: CompileOptions,
    /// The choice of `--precision auto`; none without a choice.
    pub(super) auto_precision: Option<AutoPrecision>,
}

impl Planned {
    /// Decides degrees, learning rate and micro-batch of a run, which may resume in a `folder`.
    ///
    /// # Errors
    /// The model cannot be captured, the ranks cannot share the model or the batch, or a step does
    /// not fit into memory.
    pub(super) fn of(
        mut settings: Settings,
        model: &ModelSource,
        hardware: &Hardware,
        folder: Option<&RunFolder>,
        goes_on: bool,
        progress: &mut dyn Progress,
    ) -> Result<Planned, TrainError> {
        let graph = model.capture(Some(settings.seq_len))?;
        let graph = with_routers(&graph, &settings.router)?;
        if let Some(link) = &settings.plan {
            link.file()?.check_model(&graph)?;
        }
        let graph = match settings.documents {
            Documents::Joined => graph,
            Documents::Masked => mask_documents(&graph)?,
        };
        let (policy, auto_precision) = settings.resolve_policy(&graph, hardware)?;
        if let Some(chosen) = &auto_precision {
            progress.note(&format!("precision  auto: {chosen}"));
        }
        settings.resolve_learning_rate(graph.parameter_count());
        let options_of = move |settings: &Settings, micro_batch: Option<usize>| CompileOptions {
            optimizer: settings.optimizer.clone(),
            micro_batch: settings.micro_batch.or(micro_batch),
            recompute: settings.recompute,
            saved_activations: settings.saved_activations,
            memory_limit_bytes: settings.memory_limit_bytes,
            device: settings.device,
            allow_fallback: settings.allow_fallback,
            parallel: settings.parallel(),
            stage_layers: settings.pp_layers.clone(),
            rank_timeout: Duration::from_secs(settings.rank_timeout_s),
            ..CompileOptions::new(policy.clone(), settings.seq_len, settings.batch_size)
        };
        let follows_ranks = goes_on && settings.plan.is_none();
        if follows_ranks && !settings.degrees_fit_ranks() {
            // All ranks choose the same, whatever memory each has for larger micro-batches.
            let small = |settings: &Settings| {
                let settings = Settings { micro_batch: None, ..settings.clone() };
                options_of(&settings, Some(1))
            };
            let (chosen, told) = elastic::choose(&settings, &graph, hardware, &small)?;
            progress.note(&told);
            settings = chosen;
            settings.check()?;
        }
        if let Some(given) = settings.micro_batch.filter(|_| follows_ranks) {
            settings.micro_batch = elastic::micro_batch(&settings, given).or(Some(given));
            if let Some(now) = settings.micro_batch.filter(|&now| now != given) {
                progress.note(&format!(
                    "note: micro-batches of {given} sequences do not fit the ranks: they have \
                     {now} now"
                ));
            }
        }
        let former = folder.and_then(RunFolder::micro_batch);
        let former = former.and_then(|former| elastic::micro_batch(&settings, former));
        let compile_options = options_of(&settings, former);
        let lowered = Lowered::of(graph, hardware.clone(), &compile_options)?;
        Ok(Planned { settings, lowered, compile_options, auto_precision })
    }
}
