//! Everything of a checkpoint except its tensors.

use deepwell_ckpt::CheckpointContents;
use deepwell_precision::Guards;
use serde_json::{Value, json};

use crate::audit::AuditReport;
use crate::run_folder::RunIdentity;
use crate::{Engine, Settings, TrainError};

/// Progress of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    /// Steps done.
    pub step: u64,
    /// Guards after `step`.
    pub guards: Guards,
    /// Number of the batch of the next step.
    pub next_batch: u64,
    /// Findings of the audit of the first step, if the step was audited.
    pub audit: Option<AuditReport>,
}

/// Everything of a checkpoint except its tensors; written by rank 0 for all ranks.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) step: u64,
    plan: Value,
    policy: Value,
    guards: Value,
    data_position: Value,
    run: Value,
}

impl State {
    pub(super) fn of(
        engine: &mut Engine,
        position: &Position,
        settings: &Settings,
        identity: &RunIdentity,
    ) -> Result<State, TrainError> {
        let (applied, skipped) = engine.applied_steps()?;
        let last_norm = engine.last_norm()?;
        Ok(State {
            step: position.step,
            plan: to_json(engine.plan()),
            policy: to_json(&engine.plan().policy),
            guards: to_json(&position.guards),
            data_position: json!({ "next_batch": position.next_batch }),
            run: json!({
                "id": identity.id,
                "fingerprint": identity.fingerprint,
                "counts": engine.counts(),
                "audit": position.audit,
                "settings": to_json(settings),
                "applied_steps": applied,
                "skipped_steps": skipped,
                "grad_norm_bits": last_norm.to_bits(),
                "version": env!("CARGO_PKG_VERSION"),
            }),
        })
    }

    pub(super) fn contents(&self) -> CheckpointContents<'static> {
        CheckpointContents {
            plan: self.plan.clone(),
            policy: self.policy.clone(),
            guards: self.guards.clone(),
            data_position: self.data_position.clone(),
            run: self.run.clone(),
            ..CheckpointContents::new(self.step)
        }
    }
}

pub(super) fn to_json<T: serde::Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("settings, plans and guards are plain data")
}
