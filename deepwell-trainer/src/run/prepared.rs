//! A run with its model, plan, data and folder, before anything is compiled.

use std::sync::Arc;

use super::options::{RunOptions, open_data};
use super::planned::Planned;
use crate::data::{Dataset, Tokenizer};
use crate::fit::Batches;
use crate::memory_sampler;
use crate::progress::Progress;
use crate::run_folder::{RunFolder, Start};
use crate::world::{Lowered, Member};
use crate::{AutoPrecision, ChosenTokenizer, CompileOptions, ModelSource, Settings, TrainError};

/// What the caller asked for.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    /// One rank of several processes.
    pub(super) member: Option<&'a Arc<Member>>,
    pub(super) settings: &'a Settings,
    pub(super) options: RunOptions,
}

impl Request<'_> {
    /// Whether this process has rank 0, which writes the files of the run.
    pub(super) fn is_first(&self) -> bool {
        self.member.is_none_or(|member| member.is_first())
    }

    /// Whether the run resumes.
    pub(super) fn goes_on(&self) -> bool {
        matches!(self.options.start, Start::Resume | Start::ResumeChanged)
    }

    fn check(&self) -> Result<(), TrainError> {
        let settings = self.settings;
        let has_other_ranks =
            self.goes_on() && settings.plan.is_none() && !settings.degrees_fit_ranks();
        if has_other_ranks { settings.check_values() } else { settings.check() }
    }
}

/// The parts of a run that every later stage reads.
pub(super) struct Run<'a> {
    pub(super) request: Request<'a>,
    /// The settings with all that was left to the plan, the model or the ranks.
    pub(super) settings: Settings,
    pub(super) model: ModelSource,
    /// The tokenizer of texts.
    pub(super) tokenizer: Tokenizer,
    pub(super) dataset: Dataset,
    /// The output folder, on rank 0.
    pub(super) folder: Option<RunFolder>,
    /// The choice of `--precision auto`; none without a choice.
    pub(super) auto_precision: Option<AutoPrecision>,
    /// Origin of the initial weights.
    pub(super) weights_origin: String,
}

/// A run that can be compiled.
pub(super) struct Prepared<'a> {
    pub(super) run: Run<'a>,
    pub(super) lowered: Lowered,
    pub(super) compile_options: CompileOptions,
    /// Memory held since planning.
    pub(super) planning_bytes: u64,
}

impl<'a> Prepared<'a> {
    /// Reads the model and the data of a run, plans it, and claims its folder.
    ///
    /// # Errors
    /// Settings, model, data and ranks do not fit each other, a step does not fit into memory, or
    /// the folder has results of another run.
    pub(super) fn of(
        request: Request<'a>,
        progress: &mut dyn Progress,
    ) -> Result<Prepared<'a>, TrainError> {
        request.check()?;
        let member = request.member;
        // An existing folder is claimed before any long work; a new folder is created only once
        // settings and data are known to be valid.
        let (out, start) = (request.settings.out.clone(), request.options.start);
        let claim = || RunFolder::claim(&out, start);
        let claimed = if request.is_first() && out.exists() { Some(claim()?) } else { None };
        let hardware = deepwell_probe::probe();
        let mut settings = request.settings.clone();
        if let Some(member) = member {
            member.take_device(&mut settings, &hardware);
            member.wait_for_first()?;
        }
        let (model, tokenizer) = open_model(&mut settings, progress)?;
        // Report errors of the model, its ranks, the batch or memory before reading data.
        let held_before = memory_sampler::held_bytes(settings.device);
        let goes_on = request.goes_on();
        let Planned { settings, lowered, compile_options, auto_precision } =
            Planned::of(settings, &model, &hardware, claimed.as_ref(), goes_on, progress)?;
        let held_after = memory_sampler::held_bytes(settings.device);
        let planning_bytes = held_after.unwrap_or(0).saturating_sub(held_before.unwrap_or(0));
        let weights_origin = model.weights_origin(settings.seed);
        progress.note(&format!("weights  {weights_origin}"));
        let dataset = open_data_of(&model, &settings, tokenizer.clone(), progress)?;
        let document_end = settings.documents.end(settings.tokenizer.is_some(), &dataset)?;
        let compile_options = CompileOptions { document_end, ..compile_options };
        // Ranks of several processes may yet have less memory, and smaller micro-batches.
        let rows = if member.is_some() { 1 } else { lowered.rows() };
        Batches::new(&settings, dataset.tokens(), rows, document_end)?;
        let folder = match request.is_first() {
            true => Some(claimed.map_or_else(claim, Ok)?),
            false => None,
        };
        let run = Run {
            request,
            settings,
            model,
            tokenizer,
            dataset,
            folder,
            auto_precision,
            weights_origin,
        };
        Ok(Prepared { run, lowered, compile_options, planning_bytes })
    }
}

/// Opens the model and a tokenizer: the model's own unless another one is set.
fn open_model(
    settings: &mut Settings,
    progress: &mut dyn Progress,
) -> Result<(ModelSource, Tokenizer), TrainError> {
    let model = settings.model_source()?;
    model.check_trainable(settings.train_frozen)?;
    for remark in &model.notes().remarks {
        progress.note(&format!("note: {remark}"));
    }
    let ChosenTokenizer { tokenizer, note, .. } = settings.resolve_tokenizer(&model)?;
    if let Some(note) = note {
        progress.note(&format!("note: {note}"));
    }
    Ok((model, tokenizer))
}

/// Opens the data, and checks that the model has an embedding for every token.
fn open_data_of(
    model: &ModelSource,
    settings: &Settings,
    tokenizer: Tokenizer,
    progress: &mut dyn Progress,
) -> Result<Dataset, TrainError> {
    let dataset = open_data(settings, tokenizer, progress)?;
    dataset.tokens().check_vocab(model.vocab_size() as u64)?;
    if let Some(note) = model.note_on_vocabulary(dataset.vocab_size()) {
        progress.note(&format!("note: {note}"));
    }
    let summary = dataset.summary();
    let tokens_per_step = (settings.batch_size * settings.seq_len) as u64;
    let epochs = summary.epochs(settings.steps, tokens_per_step);
    progress.note(&format!("{summary}  {:<10}{epochs}", "run"));
    Ok(dataset)
}
