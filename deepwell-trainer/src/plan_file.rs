//! A plan file, as printed by `deepwell plan --json`, for a run that follows the plan.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use deepwell_ir::Graph;
use deepwell_plan::Plan;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::TrainError;

/// The path of a plan file, which is read once.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "PathBuf", into = "PathBuf")]
pub struct PlanLink {
    path: PathBuf,
    file: Arc<OnceLock<PlanFile>>,
}

impl From<PathBuf> for PlanLink {
    fn from(path: PathBuf) -> PlanLink {
        PlanLink { path, file: Arc::default() }
    }
}

impl From<PlanLink> for PathBuf {
    fn from(link: PlanLink) -> PathBuf {
        link.path
    }
}

impl PartialEq for PlanLink {
    fn eq(&self, other: &PlanLink) -> bool {
        self.path == other.path
    }
}

impl PlanLink {
    /// Returns the plan; the first call reads the file.
    ///
    /// # Errors
    /// As [`PlanFile::read`].
    pub fn file(&self) -> Result<&PlanFile, TrainError> {
        match self.file.get() {
            Some(file) => Ok(file),
            None => {
                let file = PlanFile::read(&self.path)?;
                Ok(self.file.get_or_init(|| file))
            }
        }
    }
}

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
