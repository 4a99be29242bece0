//! Settings that follow a plan.

use std::fmt::Debug;

use super::layer::SettingsLayer;
use crate::plan_file::PlanFile;
use crate::{Device, Settings, TrainError};

impl PlanFile {
    /// Applies the plan to the settings that are not `given`.
    ///
    /// # Errors
    /// [`TrainError::Setting`] for the first given setting that differs from the plan.
    pub fn apply(&self, settings: &mut Settings, given: &SettingsLayer) -> Result<(), TrainError> {
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
        take(given, "model", &mut s.model, self.model.clone())?;
        take(given, "device", &mut s.device, device)?;
        take(given, "ranks", &mut s.ranks, parallel.world_size())?;
        take(given, "zero", &mut s.zero, parallel.zero)?;
        take(given, "tensor", &mut s.tensor, parallel.tensor)?;
        take(given, "context", &mut s.context, parallel.context)?;
        take(given, "pipeline", &mut s.pipeline, parallel.pipeline)?;
        take(given, "chunks", &mut s.chunks, parallel.chunks)?;
        let schedule = parallel.schedule;
        take(given, "pipeline_schedule", &mut s.pipeline_schedule, schedule)?;
        take(given, "pp_layers", &mut s.pp_layers, stages)?;
        take(given, "expert", &mut s.expert, parallel.expert)?;
        take(given, "seq_len", &mut s.seq_len, plan.seq)?;
        take(given, "batch_size", &mut s.batch_size, batch)?;
        take(given, "micro_batch", &mut s.micro_batch, Some(plan.micro_batch))?;
        take(given, "recompute", &mut s.recompute, Some(plan.recompute))?;
        let saved = plan.saved_activations;
        take(given, "saved_activations", &mut s.saved_activations, saved)?;
        let (factor, planned) = (&mut s.router.capacity_factor, plan.capacity_factor);
        take(given, "router.capacity_factor", factor, planned)?;
        take(given, "optimizer", &mut s.optimizer, plan.optimizer.clone())?;
        if s.policy.is_some() || s.precision != Settings::default().precision {
            let got = s.policy.as_ref().map_or(s.precision.clone(), |it| it.display().to_string());
            return Err(contradiction("precision", &got, &"the policy"));
        }
        Ok(())
    }
}

/// Sets a setting to the planned value.
fn take<T: PartialEq + Debug>(
    given: &SettingsLayer,
    name: &'static str,
    setting: &mut T,
    planned: T,
) -> Result<(), TrainError> {
    if given.has(name) && *setting != planned {
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
