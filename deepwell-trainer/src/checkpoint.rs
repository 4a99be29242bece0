//! Saves an engine's state to a checkpoint and loads it back.
//!
//! A rank's state is a list of holdings: rectangles of named tensors. A checkpoint contains the
//! holdings of all ranks, each element once. A rank of another plan reads the rectangles that it
//! needs.

mod fits;
mod holdings;
mod state;
mod writer;

use std::path::Path;

use deepwell_ckpt::{CheckpointEntry, CkptDtype};
use deepwell_ir::{PrecisionPolicy, TensorPrecision};
use deepwell_precision::{Format, Guards};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use self::holdings::{Holding, holdings};
use crate::{Engine, Gemm, TrainError};

pub use self::fits::{Reads, reads};
pub use self::state::Position;
pub use self::writer::{Writer, host_bytes};

/// Loads a checkpoint into an engine that was compiled for the same fingerprint.
///
/// `note` receives messages for the user.
///
/// # Errors
/// The checkpoint is damaged, or does not fit the engine.
pub fn load(
    entry: &CheckpointEntry,
    engine: &mut Engine,
    note: &mut dyn FnMut(&str),
) -> Result<Position, TrainError> {
    let checkpoint = deepwell_ckpt::load(&entry.path)?;
    let run = checkpoint.run();
    let reader = SectionReader { path: &entry.path };
    let guards: Guards = reader.read("guards", checkpoint.guards())?;
    let guards = over_gemms(guards, engine.gemms(), note);
    let moved = guards.moved();
    if !moved.is_empty() {
        engine.set_precision(&moved, "in fallback when the checkpoint was written", false)?;
    }
    let plan: SavedPlan = reader.read("plan", checkpoint.plan())?;
    // A changed policy changes the precision; resuming with such a change was accepted.
    let is_same_policy = plan.policy.clone().without_forced() == *engine.policy();
    if let Some(what) =
        other_format(&plan.precision, &engine.plan().precision).filter(|_| is_same_policy)
    {
        return Err(reader.refuse(what));
    }
    // Holdings of moments in blocks are written into what is there.
    engine.clear_moments()?;
    let mut buffer: Vec<u8> = Vec::new();
    for holding in holdings(engine.program(), engine.plan().parallel, engine.rank()) {
        let Holding { name, section, region, whole, range, .. } = &holding;
        // Copies follow from the masters.
        if !holding.is_state() {
            continue;
        }
        checkpoint.expect(*section, name, CkptDtype::F32, whole)?;
        buffer.clear();
        buffer.resize(holding.file_bytes(), 0);
        checkpoint.read_region(*section, name, region, &mut buffer)?;
        let backend = engine.executor.backend_mut();
        let bytes = holding.to_arena(&buffer, |before| Ok(backend.read(*range, before)?))?;
        backend.write(*range, &bytes)?;
    }
    let counters = [&run["applied_steps"], &run["skipped_steps"]];
    let [applied, skipped] = counters.map(|count| reader.read("step counters", count));
    engine.set_applied_steps(applied?, skipped?)?;
    // Earlier versions did not save it.
    let norm_bits: Option<u32> = reader.read("gradient norm", &run["grad_norm_bits"])?;
    if let Some(bits) = norm_bits {
        engine.set_last_norm(f32::from_bits(bits))?;
    }
    engine.refresh_weight_copies()?;
    engine.set_counts(reader.read("counts", &run["counts"])?);
    let audit = reader.read("audit", &run["audit"])?;
    let next_batch = reader.read("data_position", &checkpoint.data_position()["next_batch"])?;
    Ok(Position { step: checkpoint.step(), guards, next_batch, audit })
}

/// Returns guards over the GEMMs of a model. Earlier versions had guards over layers, in order: the
/// GEMMs of a layer in fallback start in fallback.
fn over_gemms(saved: Guards, gemms: &[Gemm], note: &mut dyn FnMut(&str)) -> Guards {
    let is_same = saved.names().eq(gemms.iter().map(|gemm| &*gemm.weight));
    if is_same {
        return saved;
    }
    let of_gemm = |gemm: &Gemm| (gemm.weight.clone(), gemm.layer.map(|layer| layer as usize));
    let guards = saved.regrouped(gemms.iter().map(of_gemm));
    note(&format!(
        "the checkpoint has guards over layers: the GEMMs of each go on as their layer stood, {} \
         of {} in bf16; their histories begin anew",
        guards.in_fallback().len(),
        gemms.len()
    ));
    guards
}

/// The fields of the original plan that a resumed run needs. The other fields are informational and
/// may differ between versions.
#[derive(Deserialize)]
struct SavedPlan {
    policy: PrecisionPolicy,
    precision: Vec<TensorPrecision>,
}

/// Reads the JSON parts of a checkpoint.
struct SectionReader<'a> {
    path: &'a Path,
}

impl SectionReader<'_> {
    fn read<T: DeserializeOwned>(&self, name: &str, value: &Value) -> Result<T, TrainError> {
        serde_json::from_value(value.clone())
            .map_err(|error| self.refuse(format!("its part `{name}` is unreadable: {error}")))
    }

    fn refuse(&self, what: String) -> TrainError {
        let hint = "another version wrote it; finish the run with that one";
        TrainError::Resume { path: self.path.to_path_buf(), what, hint }
    }
}

/// Describes the first tensor whose format has changed since the checkpoint was written. The
/// guards' state names the GEMMs in fallback; the formats of all tensors have to agree with it.
fn other_format(saved: &[TensorPrecision], now: &[TensorPrecision]) -> Option<String> {
    let formats = |tensors: &[TensorPrecision]| -> Vec<(String, Format)> {
        tensors.iter().map(|tensor| (tensor.tensor.clone(), tensor.format)).collect()
    };
    let (saved, now) = (formats(saved), formats(now));
    let (was, is) = saved.iter().zip(&now).find(|(was, is)| was != is)?;
    Some(format!("`{}` was in {} when it was written, now `{}` is in {}", was.0, was.1, is.0, is.1))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::state::to_json;
    use super::*;

    /// Older plans have stages, and later plans may have more keys.
    #[test]
    fn a_plan_of_another_version_is_read_for_what_a_resumed_run_asks() {
        let policy = to_json(&PrecisionPolicy::mxfp8());
        let precision = json!([{ "tensor": "w", "format": "mxfp8", "reason": "default" }]);
        let plan = json!({
            "policy": policy, "precision": precision, "zero_level": 0, "stages": [{}], "later": 1,
        });
        let reader = SectionReader { path: Path::new("checkpoint") };
        let saved: SavedPlan = reader.read("plan", &plan).unwrap();
        assert_eq!(saved.policy, PrecisionPolicy::mxfp8());
        assert_eq!(other_format(&saved.precision, &saved.precision), None);
        let mut now = saved.precision.clone();
        now[0].format = Format::Bf16;
        let what = other_format(&saved.precision, &now).unwrap();
        assert_eq!(what, "`w` was in mxfp8 when it was written, now `w` is in bf16");
        let error = reader.read::<SavedPlan>("plan", &json!({ "policy": policy })).err().unwrap();
        assert!(error.to_string().contains("missing field `precision`"), "{error}");
    }
}
