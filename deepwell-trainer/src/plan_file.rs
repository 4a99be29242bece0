//! A plan file, as printed by `deepwell plan --json`, for a run that follows the plan.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::Path;

use deepwell_ir::Graph;
use deepwell_plan::Plan;
use serde_json::Value;

use crate::{Device, Settings, TrainError};

/// A plan with its model.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanFile {
    /// The model's name in the plan.
    pub model: String,
    /// The plan of each rank.
    pub plan: Plan,
}

impl PlanFile {
    /// Reads the output of `deepwell plan MODEL --json`, for one machine or for a cluster, or of
    /// `deepwell replan`.
    ///
    /// # Errors
    /// The file cannot be read or is no plan, or the trainer does not support the plan for a
    /// cluster yet; the plan contains the reason.
    pub fn read(path: &Path) -> Result<PlanFile, TrainError> {
        let text = std::fs::read_to_string(path).map_err(TrainError::io(path))?;
        let file = path.display();
        let refuse = |got: String, hint: &str| TrainError::Setting {
            setting: "plan",
            expected: "what `deepwell plan MODEL --json` prints".to_string(),
            got: format!("{file}: {got}"),
            hint: Some(hint.to_string()),
        };
        let again = "`deepwell plan MODEL --json > plan.json` makes one";
        let value: Value =
            serde_json::from_str(&text).map_err(|error| refuse(error.to_string(), again))?;
        let Some(model) = value["model"].as_str() else {
            return Err(refuse("no `model`".to_string(), again));
        };
        // A plan for a cluster includes the plan of its ranks.
        let of_rank = match value.get("program") {
            None => &value["plan"],
            Some(Value::Null) => {
                let reason = value["plan"]["not_run_yet"].as_str().unwrap_or("it does not say why");
                let got = format!("a plan that the trainer does not run yet: {reason}");
                return Err(refuse(got, "`--pin` holds what is searched at what it runs"));
            }
            Some(program) => program,
        };
        let plan = serde_json::from_value(of_rank.clone())
            .map_err(|error| refuse(error.to_string(), again))?;
        Ok(PlanFile { model: model.to_string(), plan })
    }

    /// Applies the plan to the settings that still equal `base`; a setting that differs from `base`
    /// was set explicitly.
    ///
    /// # Errors
    /// [`TrainError::Setting`] for the first setting that differs from `base` and from the plan.
    pub fn apply(&self, settings: &mut Settings, base: &Settings) -> Result<(), TrainError> {
        let plan = &self.plan;
        let parallel = plan.parallel;
        let device: Device = plan.device.parse().map_err(|got| TrainError::Setting {
            setting: "plan",
            expected: "a device to train on".to_string(),
            got,
            hint: None,
        })?;
        let batch = plan.micro_batches * plan.micro_batch * parallel.batch_ranks();
        let stages = (!plan.stages.is_empty()).then(|| plan.stages.clone());
        // A plan does not select a GPU.
        let is_of_gpus = matches!((device, settings.device), (Device::Cuda(_), Device::Cuda(_)));
        let device = if is_of_gpus { settings.device } else { device };
        let s = settings;
        take("model", &mut s.model, &base.model, self.model.clone())?;
        take("device", &mut s.device, &base.device, device)?;
        take("ranks", &mut s.ranks, &base.ranks, parallel.world_size())?;
        take("zero", &mut s.zero, &base.zero, parallel.zero)?;
        take("tensor", &mut s.tensor, &base.tensor, parallel.tensor)?;
        take("context", &mut s.context, &base.context, parallel.context)?;
        take("pipeline", &mut s.pipeline, &base.pipeline, parallel.pipeline)?;
        take("chunks", &mut s.chunks, &base.chunks, parallel.chunks)?;
        let schedule = parallel.schedule;
        take("schedule", &mut s.pipeline_schedule, &base.pipeline_schedule, schedule)?;
        take("pp_layers", &mut s.pp_layers, &base.pp_layers, stages)?;
        take("expert", &mut s.expert, &base.expert, parallel.expert)?;
        take("seq_len", &mut s.seq_len, &base.seq_len, plan.seq)?;
        take("batch_size", &mut s.batch_size, &base.batch_size, batch)?;
        take("micro_batch", &mut s.micro_batch, &base.micro_batch, Some(plan.micro_batch))?;
        take("recompute", &mut s.recompute, &base.recompute, Some(plan.recompute))?;
        let (factor, planned) = (&mut s.router.capacity_factor, plan.capacity_factor);
        take("router.capacity_factor", factor, &base.router.capacity_factor, planned)?;
        take("optimizer", &mut s.optimizer, &base.optimizer, plan.optimizer.clone())?;
        if s.policy.is_some() || s.precision != Settings::default().precision {
            let got = s.policy.as_ref().map_or(s.precision.clone(), |it| it.display().to_string());
            return Err(contradiction("precision", &got, &"the policy"));
        }
        Ok(())
    }

    /// Checks that a model is the planned model.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with a parameter that only the plan or only the model has.
    pub fn check_model(&self, graph: &Graph) -> Result<(), TrainError> {
        let planned: BTreeSet<&str> =
            self.plan.precision.iter().map(|tensor| tensor.tensor.as_str()).collect();
        let there: BTreeSet<&str> = graph.parameters().map(|(_, it)| it.name.as_str()).collect();
        let Some(differs) = planned.symmetric_difference(&there).next() else { return Ok(()) };
        let whose = if planned.contains(differs) { "the plan" } else { "the model" };
        Err(TrainError::Setting {
            setting: "plan",
            expected: "one of this model".to_string(),
            got: format!("one of `{}`: only {whose} has `{differs}`", self.model),
            hint: Some("plan this model, or leave out `--model`".to_string()),
        })
    }
}

/// Replaces a default setting by the planned value.
fn take<T: PartialEq + Debug>(
    name: &'static str,
    setting: &mut T,
    default: &T,
    planned: T,
) -> Result<(), TrainError> {
    if setting != default && *setting != planned {
        return Err(contradiction(name, setting, &planned));
    }
    *setting = planned;
    Ok(())
}

fn contradiction(name: &'static str, got: &dyn Debug, planned: &dyn Debug) -> TrainError {
    TrainError::Setting {
        setting: name,
        expected: format!("{planned:?}, as the plan has it"),
        got: format!("{got:?}"),
        hint: Some("leave it to the plan, or make another plan".to_string()),
    }
}
