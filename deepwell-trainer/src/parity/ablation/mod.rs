//! Ablation of the loss gap: one class of quantized operands at a time, and all but one.
//!
//! For each seed the runs are: BF16, the whole policy, and for each class the policy with only this
//! class quantized and the policy with all other classes quantized, from the same weights on the
//! same batches. The cost of a class is the gap between BF16 and the policy with only this class.
//! The gain from leaving a class out is the gap of the whole policy less the gap of the policy
//! without this class. Both are means over seeds with 95 % intervals.
//!
//! A class may also be a part of NVFP4's recipe. All runs but BF16's are then in NVFP4: with this
//! part alone, and with all other parts.
//!
//! A GEMM with only one quantized operand runs in BF16 on the dequantized operand. Such runs are
//! slower than runs of the whole policy, and reproduce only its numerics.

mod classes;
mod page;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepwell_ir::PrecisionPolicy;
use serde::{Deserialize, Serialize};

pub use classes::AblateBy;
use classes::{Class, classes};

use super::runs::{FinishedRun, train_in_child};
use super::verdict::gap_at_end;
use super::{Estimate, folder};
use crate::console::say;
use crate::{ExitStatus, Settings, Start, TrainError};

/// Options of an ablation.
#[derive(Clone, Debug)]
pub struct AblationOptions {
    /// Settings of the runs, with the policy to ablate.
    pub settings: Settings,
    /// Folder of the report and the runs.
    pub out: PathBuf,
    /// Treatment of an earlier comparison in this folder.
    pub start: Start,
    /// Number of seeds, starting with the seed of the settings.
    pub seeds: u64,
    /// The classes.
    pub by: AblateBy,
    /// A glob over tensor names that restricts the ablation.
    pub tensors: Option<String>,
}

/// Cost of one class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassCost {
    /// Name of the class.
    pub class: String,
    /// Gap with nothing else quantized.
    pub alone: Estimate,
    /// Gap of the whole policy less the gap with everything else quantized.
    pub regained: Estimate,
}

/// `ablation.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AblationReport {
    /// Division of the policy into classes.
    pub by: AblateBy,
    /// Glob of the tensors, if restricted.
    pub tensors: Option<String>,
    /// Steps of each run.
    pub steps: u64,
    /// Device of the runs.
    pub device: String,
    /// Trained values.
    pub params: u64,
    /// Largest learning rate.
    pub learning_rate: Option<f64>,
    /// Gap of the whole policy.
    pub whole: Estimate,
    /// Each class, the costliest first.
    pub classes: Vec<ClassCost>,
}

/// The gaps of one seed.
struct SeedGaps {
    whole: f64,
    /// Gaps alone and left out, class by class.
    classes: Vec<(f64, f64)>,
}

/// Trains all runs and writes `ablation.json` and `ablation.html`.
///
/// # Errors
/// A run fails; its own message goes to standard error.
pub fn run(
    options: &AblationOptions,
    stop: &Arc<AtomicBool>,
) -> Result<(Option<AblationReport>, ExitStatus), TrainError> {
    let mut options = options.clone();
    options.settings.check()?;
    options.settings.resolve_precision(&deepwell_probe::probe())?;
    let graph = options.settings.model_source()?.capture(Some(options.settings.seq_len))?;
    options.settings.resolve_learning_rate(graph.parameter_count());
    let policy = options.settings.precision_policy()?;
    check_parts(&options, &policy)?;
    let classes = classes(&graph, &policy, options.by, options.tensors.as_deref())?;
    for class in &classes {
        for policy in [class.alone(&policy)?, class.left_out(&policy)?] {
            deepwell_ir::apply_precision(&graph, &policy)?;
        }
    }
    let _lock = folder::claim(&options.out, options.start)?;
    let runs = options.seeds * (2 + 2 * classes.len() as u64);
    say(format_args!("{runs} runs of {} steps", options.settings.steps));

    let mut gaps = Vec::new();
    let mut last = None;
    for seed in options.settings.seed..options.settings.seed + options.seeds {
        let Some((seed_gaps, run)) = one_seed(&options, &policy, &classes, seed, stop)? else {
            say("interrupted: `--resume` goes on");
            return Ok((None, ExitStatus::Interrupted));
        };
        gaps.push(seed_gaps);
        last = Some(run);
        // After each seed, so that intermediate results can be viewed.
        if let Some(run) = &last {
            write(&options, &report(&options, &classes, &gaps, run))?;
        }
    }
    let Some(run) = last else {
        return Err(TrainError::Setting {
            setting: "seeds",
            expected: "at least 1".to_string(),
            got: "0".to_string(),
            hint: Some("`--seeds 2`".to_string()),
        });
    };
    let report = report(&options, &classes, &gaps, &run);
    say(page::text(&report));
    say(format_args!("report: {}", options.out.join("ablation.html").display()));
    Ok((Some(report), ExitStatus::Success))
}

/// Checks that the policy has the parts of the recipe to ablate.
fn check_parts(options: &AblationOptions, policy: &PrecisionPolicy) -> Result<(), TrainError> {
    let parts = options.by.parts(policy);
    let setting = |setting, expected: String, got: String, hint: &str| {
        Err(TrainError::Setting { setting, expected, got, hint: Some(hint.to_string()) })
    };
    if let Some(glob) = options.tensors.as_ref().filter(|_| options.by.is_of_parts()) {
        let expected = "no tensors for parts of the recipe, which hold for the whole policy";
        return setting("ablate-tensors", expected.to_string(), glob.clone(), "leave it out");
    }
    let missing = parts.iter().find(|&&part| !policy.has_part(part));
    let has_none = options.by.is_of_parts() && parts.is_empty();
    match missing.map(ToString::to_string).or(has_none.then(|| "none".to_string())) {
        None => Ok(()),
        Some(part) => setting(
            "ablate",
            "a part of the recipe that the policy has".to_string(),
            part,
            "`--precision nvfp4` and `mxfp4` have a recipe, `mxfp8-hybrid` and `mxfp6` \
             `gradient-element`",
        ),
    }
}

/// Trains the runs of one seed; none if interrupted by the user. Also returns the whole policy's
/// run.
fn one_seed(
    options: &AblationOptions,
    policy: &PrecisionPolicy,
    classes: &[Class],
    seed: u64,
    stop: &AtomicBool,
) -> Result<Option<(SeedGaps, FinishedRun)>, TrainError> {
    let folder = options.out.join(folder::seed_folder(seed));
    let train = |name: &str, policy: &PrecisionPolicy| {
        train_one(options, &folder, seed, name, policy, stop)
    };
    let Some(bf16) = train("bf16", &PrecisionPolicy::bf16())? else { return Ok(None) };
    let Some(whole) = train("whole", policy)? else { return Ok(None) };
    let base = bf16.facts();
    let mut gaps = SeedGaps { whole: gap_at_end(&base, &whole.facts()), classes: Vec::new() };
    for class in classes {
        let name = format!("only-{}", class.folder);
        let Some(alone) = train(&name, &class.alone(policy)?)? else { return Ok(None) };
        let name = format!("without-{}", class.folder);
        let Some(left_out) = train(&name, &class.left_out(policy)?)? else { return Ok(None) };
        let gap = |run: &FinishedRun| gap_at_end(&base, &run.facts());
        gaps.classes.push((gap(&alone), gap(&left_out)));
    }
    Ok(Some((gaps, whole)))
}

/// Trains one run under a policy and writes the policy next to it; none if interrupted by the user.
fn train_one(
    options: &AblationOptions,
    folder: &Path,
    seed: u64,
    name: &str,
    policy: &PrecisionPolicy,
    stop: &AtomicBool,
) -> Result<Option<FinishedRun>, TrainError> {
    let out = folder.join(name);
    std::fs::create_dir_all(folder).map_err(TrainError::io(folder))?;
    let path = folder.join(format!("{name}.toml"));
    std::fs::write(&path, policy.to_toml()).map_err(TrainError::io(&path))?;
    let settings = Settings { seed, policy: Some(path), out, ..options.settings.clone() };
    let run = train_in_child(&format!("{seed} {name}"), &settings, options.start)?;
    let is_stopped = run.summary.fit.interrupted || stop.load(Ordering::Relaxed);
    Ok((!is_stopped).then_some(run))
}

fn report(
    options: &AblationOptions,
    classes: &[Class],
    gaps: &[SeedGaps],
    run: &FinishedRun,
) -> AblationReport {
    let over_seeds = |value: &dyn Fn(&SeedGaps) -> f64| {
        Estimate::of(&gaps.iter().map(value).collect::<Vec<f64>>())
    };
    let mut costs: Vec<ClassCost> = classes
        .iter()
        .enumerate()
        .map(|(index, class)| ClassCost {
            class: class.name.clone(),
            alone: over_seeds(&|gaps| gaps.classes[index].0),
            regained: over_seeds(&|gaps| gaps.whole - gaps.classes[index].1),
        })
        .collect();
    costs.sort_by(|a, b| b.alone.mean.total_cmp(&a.alone.mean));
    AblationReport {
        by: options.by,
        tensors: options.tensors.clone(),
        steps: options.settings.steps,
        device: run.summary.device.clone(),
        params: run.summary.params,
        learning_rate: run.summary.settings.learning_rate,
        whole: over_seeds(&|gaps| gaps.whole),
        classes: costs,
    }
}

fn write(options: &AblationOptions, report: &AblationReport) -> Result<(), TrainError> {
    let json = serde_json::to_string_pretty(report).expect("a report is plain data");
    for (name, text) in [("ablation.json", json), ("ablation.html", page::html(report))] {
        let path = options.out.join(name);
        std::fs::write(&path, text).map_err(TrainError::io(&path))?;
    }
    Ok(())
}
