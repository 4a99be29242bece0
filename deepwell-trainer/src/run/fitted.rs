//! A run that has trained.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytemuck::cast_slice;
use deepwell_ir::Ranks;

use super::compiled::Compiled;
use super::facts::RunFacts;
use super::prepared::Run;
use crate::data::TokenCache;
use crate::export::{self, ModelFiles, TokensOf};
use crate::fingerprint::{Fingerprint, Sources};
use crate::fit::Fit;
use crate::fit_report::FitReport;
use crate::memory_sampler::MemorySampler;
use crate::profile::RankProfiles;
use crate::progress::Progress;
use crate::run_folder::Opened;
use crate::{Engine, Settings, TrainError, World};

/// A run after its last step.
pub(super) struct Fitted<'a> {
    pub(super) run: Run<'a>,
    pub(super) world: World,
    pub(super) fit: FitReport,
    /// Host bytes of each rank in this process for copies of checkpoints.
    pub(super) copy_bytes: Vec<u64>,
    pub(super) peak_bytes_measured: Option<u64>,
}

impl<'a> Fitted<'a> {
    /// Trains to the last step, or until `stop`. Rank 0 writes metrics, events and checkpoints, and
    /// the profile if one was asked for.
    ///
    /// # Errors
    /// The run fails, here or on another rank.
    pub(super) fn of(
        compiled: Compiled<'a>,
        stop: &AtomicBool,
        progress: &mut dyn Progress,
    ) -> Result<Fitted<'a>, TrainError> {
        let Compiled { run, mut world, machine, sources, copy_bytes, sampler } = compiled;
        let opened = open(&run, &mut world, &sources, progress)?;
        if run.folder.is_some() {
            RunFacts::of(&run, &world, &machine).write()?;
        }
        let (settings, tokens) = (&run.settings, run.dataset.tokens());
        let fit = match &run.folder {
            None => fit(&mut world, settings, tokens, &opened, stop, progress)?,
            Some(folder) => {
                let progress = &mut folder.watching(progress);
                let fit = fit(&mut world, settings, tokens, &opened, stop, progress)?;
                folder.has_trained();
                fit
            }
        };
        if run.request.options.profile && !fit.interrupted {
            profile(&run, &mut world, progress)?;
        }
        let peak_bytes_measured = sampler.as_ref().map(MemorySampler::peak_over_baseline_bytes);
        Ok(Fitted { run, world, fit, copy_bytes, peak_bytes_measured })
    }
}

/// Opens the run's folder for a start or a resumption, and agrees with all ranks on the start.
fn open(
    run: &Run<'_>,
    world: &mut World,
    sources: &Sources,
    progress: &mut dyn Progress,
) -> Result<Opened, TrainError> {
    let (settings, dataset) = (&run.settings, &run.dataset);
    let fingerprint = Fingerprint::of(world.first(), settings, dataset.tokens(), sources);
    let opened = match &run.folder {
        Some(folder) => {
            let file = settings.tokenizer.as_deref();
            let tokens = TokensOf::run(file, &run.tokenizer, dataset.has_token_files());
            let kept = settings.out.join(export::KEPT);
            // A resumed run has these files; nothing is changed before the folder is known to hold
            // this run.
            if !run.request.goes_on() || !kept.exists() {
                folder.puts(&kept);
                ModelFiles::of(&run.model, tokens)?.keep(&kept)?;
            }
            Some(folder.begin(&fingerprint, progress)?)
        }
        None => None,
    };
    agree(world, opened, &fingerprint, settings)
}

/// Profiles one more step on all ranks; rank 0 writes and prints the result.
fn profile(
    run: &Run<'_>,
    world: &mut World,
    progress: &mut dyn Progress,
) -> Result<(), TrainError> {
    let profiles = world.on_all(RankProfiles::of)?;
    if let Some(profile) = profiles.first().filter(|_| run.request.is_first()) {
        profile.write(&run.settings.out)?;
        let out = run.settings.out.display();
        progress.note(&format!("profile, also in {out}\n{profile}"));
    }
    Ok(())
}

/// Returns the start of the run on every rank, as opened by rank 0. Ranks in separate processes
/// have computed their fingerprints separately; the fingerprints must be equal.
fn agree(
    world: &mut World,
    opened: Option<Opened>,
    fingerprint: &Fingerprint,
    settings: &Settings,
) -> Result<Opened, TrainError> {
    if world.local_size() == world.size()
        && let Some(opened) = opened
    {
        return Ok(opened);
    }
    let from = opened.as_ref().and_then(|opened| opened.from.as_ref()).map(|entry| entry.step);
    let value = fingerprint.to_value();
    let hash = blake3::hash(value.to_string().as_bytes());
    let agreed = world.on_all(|engine| {
        engine.peers.expect_equal("run", cast_slice(hash.as_bytes()), |_| ())?;
        let all = engine.peers.gather(&[from.map_or(0, |step| step + 1)])?;
        Ok(all[0][0].checked_sub(1))
    })?;
    match opened {
        Some(opened) => Ok(opened),
        None => Opened::following(&settings.out, agreed.into_iter().flatten().next(), value),
    }
}

/// Trains on all ranks; rank 0 writes files and reports progress.
fn fit(
    world: &mut World,
    settings: &Settings,
    tokens: &Arc<TokenCache>,
    opened: &Opened,
    stop: &AtomicBool,
    progress: &mut dyn Progress,
) -> Result<FitReport, TrainError> {
    let train = |engine: &mut Engine, progress: &mut dyn Progress| {
        // Within a class, only the rank and its GPU may differ.
        let mut program = engine.program().for_rank(Ranks::default());
        program.target.gpu = None;
        let program = blake3::hash(program.to_json().as_bytes());
        let parallel = engine.plan().parallel;
        let words = cast_slice(program.as_bytes());
        engine.peers.expect_equal("program", words, |rank| parallel.class(rank))?;
        engine.refresh_weight_copies()?;
        Fit::begin(engine, settings, tokens, opened.clone(), progress)?.run_to_end(stop)
    };
    let reports =
        world.with_first(|engine| train(engine, progress), |engine| train(engine, &mut ()))?;
    Ok(reports.into_iter().next().expect("a world has a rank 0"))
}
