//! Fields in which two fingerprints differ.

use std::fmt;

use deepwell_ckpt::json_differences;
use deepwell_plan::schedule::PipelineSchedule;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A field that differs between two runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Name of the field: `optimizer.beta1`.
    pub field: String,
    /// Value of the run; none if the run lacks the field.
    pub was: Option<Value>,
    /// Current value.
    pub now: Option<Value>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [was, now] = [&self.was, &self.now].map(|value| short(value.as_ref()));
        write!(f, "{}: the run has {was}, now {now}", self.field)
    }
}

impl Difference {
    /// Whether the field describes the parallelism.
    pub(crate) fn is_of_ranks(&self) -> bool {
        without_ranks(&self.field).is_some()
    }

    /// Whether the field follows from the parallelism: the micro-batch of a rank, and the kernels
    /// for its tensors.
    pub(crate) fn follows_ranks(&self) -> bool {
        self.field == "micro_batch" || self.is_of_kernels()
    }

    /// Whether the field lists kernels.
    pub(crate) fn is_of_kernels(&self) -> bool {
        self.field.starts_with("kernels.")
    }
}

/// Value of a field on a single rank, if the field describes the parallelism. Fingerprints leave
/// such values out.
fn without_ranks(field: &str) -> Option<Value> {
    match field.split(['.', '[']).next().unwrap_or_default() {
        "data_ranks" | "context_ranks" | "tensor_ranks" | "expert_ranks" | "pipeline_ranks"
        | "pipeline_chunks" => Some(1.into()),
        "pipeline_schedule" => Some(to_value(&PipelineSchedule::OneFOneB)),
        "pipeline_layers" => Some(Value::Array(Vec::new())),
        "zero" => Some(0.into()),
        _ => None,
    }
}

/// Returns the fields in which a run's saved fingerprint differs from another fingerprint.
pub fn differences(was: &Value, now: &Value) -> Vec<Difference> {
    let found = json_differences(was, now).into_iter();
    let known = |field: &str, value: Option<Value>| value.or_else(|| without_ranks(field));
    found
        .map(|place| Difference {
            was: known(&place.path, place.a),
            now: known(&place.path, place.b),
            field: place.path,
        })
        .collect()
}

/// A value for a message: of hashes the first digits.
pub(crate) fn short(value: Option<&Value>) -> String {
    const HASH_DIGITS: usize = 64;
    match value {
        None => "nothing".to_string(),
        Some(Value::String(text))
            if text.len() == HASH_DIGITS && text.bytes().all(|b| b.is_ascii_hexdigit()) =>
        {
            text[..12].to_string()
        }
        Some(value) => value.to_string(),
    }
}

/// Converts through text, which keeps the short digits of an `f32`.
pub(super) fn to_value(data: &impl Serialize) -> Value {
    let text = serde_json::to_string(data).expect("settings, plans and policies are plain data");
    serde_json::from_str(&text).expect("it was just written")
}
