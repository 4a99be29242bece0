//! An engine's state into a checkpoint and back.

mod fits;
mod of_stages;

use std::borrow::Cow;
use std::collections::HashSet;
use std::path::Path;
use std::thread::JoinHandle;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ckpt::{
    Checkpoint, CheckpointContents, CheckpointEntry, CkptDtype, SaveOptions, Section, TensorView,
};
use deepwell_ir::{
    ByteRange, DType, Link, MemoryKind, Part, Plane, PrecisionPolicy, Program, TensorId,
    TensorPrecision, Value as IrValue, ValueId,
};
use deepwell_kernels::HostBuffer;
use deepwell_precision::{Format, Guards, scale_tiles};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::audit::AuditReport;
use crate::engine::{Moment, Whole, is_gathered};
use crate::run_folder::RunIdentity;
use crate::{Engine, Settings, TrainError};

pub use self::fits::{Reads, reads};

/// Where a run stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    /// Steps done.
    pub step: u64,
    /// Guards after that step.
    pub guards: Guards,
    /// Number of the batch that the next step takes.
    pub next_batch: u64,
    /// What the audit of the first step found, where there was one.
    pub audit: Option<AuditReport>,
}

/// Type and shape of a value in a file. Elements of four bits stand in bytes, two in each.
fn stored(value: &IrValue) -> (CkptDtype, Vec<usize>) {
    let dtype = match value.dtype {
        DType::F32 => CkptDtype::F32,
        DType::Bf16 => CkptDtype::Bf16,
        DType::I32 => CkptDtype::I32,
        DType::U64 => CkptDtype::U64,
        // Scales without a sign are numbers of the format with one.
        DType::E4m3 | DType::Ue4m3 => CkptDtype::E4M3,
        DType::E8m0 => CkptDtype::E8M0,
        _ => CkptDtype::U8,
    };
    let mut shape = value.shape.clone();
    if let (CkptDtype::U8, Some(last)) = (dtype, shape.last_mut()) {
        *last = (*last * value.dtype.bits() as usize).div_ceil(8);
    }
    (dtype, shape)
}

/// A value that a checkpoint holds.
struct Kept {
    name: String,
    id: ValueId,
    section: Section,
    /// Shape of the tensor, where this rank has a slice of it: rank 0 collects those.
    whole: Option<Vec<usize>>,
}

/// Values that a checkpoint holds: master weights, moments, and the compute copies with their
/// scales. Moments that data-parallel ranks have slices of are not among them, nor copies of
/// weights that tensor-parallel ranks have slices of: they follow from the masters.
fn sections(program: &Program) -> Vec<Kept> {
    let mut sections = Vec::new();
    for state in &program.parameters {
        let moments = [
            (Moment::First, state.first_moment, Section::MomentFirst),
            (Moment::Second, state.second_moment, Section::MomentSecond),
        ];
        let is_part = state.split.is_some() || is_gathered(program, state);
        let whole = is_part.then(|| program.whole_shape(state));
        sections.push(Kept {
            name: state.name.clone(),
            id: state.master,
            section: Section::Master,
            whole: whole.clone(),
        });
        sections.extend(moments.into_iter().filter_map(|(moment, id, section)| {
            let whole = whole.clone();
            Some(Kept { name: moment.name_of(&state.name), id: id?, section, whole })
        }));
    }
    let is_master = |id| program.parameters.iter().any(|state| state.master == id);
    let tensor_of = |id: ValueId| program.value(id).tensor;
    let split = program.parameters.iter().filter(|state| state.split.is_some());
    let split: HashSet<TensorId> = split.filter_map(|state| tensor_of(state.master)).collect();
    let is_of_split = |link: Option<Link>| link.is_some_and(|link| split.contains(&link.of));
    for (index, value) in program.values.iter().enumerate() {
        let id = ValueId(index as u32);
        // Masters that are gathered among the copies are there already; what fills slices up is no
        // tensor.
        let is_copy = value.memory == MemoryKind::Weights && value.tensor.is_some();
        if is_copy && !is_master(id) && !is_of_split(value.link) {
            let section = match value.link.and_then(|link| link.plane()) {
                Some(Plane::Data) => Section::Quantized,
                Some(_) => Section::Scales,
                None => Section::Weights,
            };
            sections.push(Kept { name: value.name.clone(), id, section, whole: None });
        }
    }
    sections
}

/// Those that rank 0 has whole.
fn own_sections(engine: &Engine) -> impl Iterator<Item = Kept> + use<> {
    sections(engine.program()).into_iter().filter(|kept| kept.whole.is_none())
}

/// Pinned or plain host bytes that the first save takes where the host does not see the device's
/// memory: master weights, moments and copies once more.
pub fn host_bytes(engine: &Engine) -> usize {
    let program = engine.program();
    own_sections(engine).map(|kept| program.value(kept.id).range.bytes).sum()
}

/// Writes checkpoints: at once from memory that the host sees; else a copy is taken and written
/// by another thread while training goes on.
#[derive(Debug, Default)]
pub struct Writer {
    /// The copy, when no thread writes it.
    buffer: Option<HostBuffer>,
    /// Writes the last checkpoint and gives the copy back.
    thread: Option<JoinHandle<(HostBuffer, Result<(), TrainError>)>>,
}

impl Writer {
    /// Takes the host memory that [`Writer::save`] copies to, where it needs any: pinning it takes
    /// longer than a copy, so a run does it before its first step.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn reserve(&mut self, engine: &mut Engine) -> Result<(), TrainError> {
        let program = engine.program();
        let mut ranges = own_sections(engine).map(|kept| program.value(kept.id).range);
        if ranges.all(|range| engine.executor.backend().host_view(range).is_some()) {
            return Ok(());
        }
        self.wait()?;
        let bytes = host_bytes(engine);
        if self.buffer.as_ref().is_some_and(|buffer| buffer.as_slice().len() >= bytes) {
            return Ok(());
        }
        let backend = engine.executor.backend_mut();
        if let Some(small) = self.buffer.take() {
            backend.free_host_buffer(small)?;
        }
        self.buffer = Some(backend.host_buffer(bytes)?);
        Ok(())
    }

    /// Writes a checkpoint of the state after `position.step`, or begins to. All ranks come here:
    /// rank 0 writes, and those that have what it does not have send that to it.
    ///
    /// # Errors
    /// Non-finite state, or a disk that refuses; nothing is listed then. An error of the thread
    /// comes with the next call.
    pub fn save(
        &mut self,
        root: &Path,
        engine: &mut Engine,
        position: &Position,
        settings: &Settings,
        identity: &RunIdentity,
    ) -> Result<(), TrainError> {
        let parts = engine.collect_parts()?;
        let others = of_stages::collect(engine, &parts)?;
        if !engine.peers.is_first() {
            return Ok(());
        }
        let state = State::of(engine, position, settings, identity, parts, others)?;
        let ranges: Vec<ByteRange> = state.tensors.iter().map(|tensor| tensor.range).collect();
        let backend = engine.executor.backend();
        let views: Option<Vec<&[u8]>> =
            ranges.iter().map(|&range| backend.host_view(range)).collect();
        if let Some(views) = views {
            return state.write(root, views.into_iter(), settings.keep_last);
        }
        self.reserve(engine)?;
        let Some(mut buffer) = self.buffer.take() else { return Ok(()) };
        engine.executor.backend_mut().read_all(&ranges, &mut buffer)?;
        let (root, keep_last) = (root.to_path_buf(), settings.keep_last);
        let write = move || {
            let mut rest = buffer.as_slice();
            let data: Vec<&[u8]> = state
                .tensors
                .iter()
                .map(|tensor| {
                    let (data, behind) = rest.split_at(tensor.range.bytes);
                    rest = behind;
                    data
                })
                .collect();
            let written = state.write(&root, data.into_iter(), keep_last);
            (buffer, written)
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_string()).spawn(write);
        self.thread = Some(thread.map_err(TrainError::io(Path::new("a thread")))?);
        Ok(())
    }

    /// Waits until the last checkpoint is written and gives the memory back.
    ///
    /// # Errors
    /// What stopped the writing.
    pub fn finish(&mut self, engine: &mut Engine) -> Result<(), TrainError> {
        self.wait()?;
        let Some(buffer) = self.buffer.take() else { return Ok(()) };
        Ok(engine.executor.backend_mut().free_host_buffer(buffer)?)
    }

    fn wait(&mut self) -> Result<(), TrainError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let (buffer, written) = match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        self.buffer = Some(buffer);
        written
    }
}

/// A tensor of a checkpoint without its bytes.
#[derive(Clone, Debug)]
struct Described {
    name: String,
    dtype: CkptDtype,
    shape: Vec<usize>,
    section: Section,
    range: ByteRange,
    /// Whether the bytes are scales in tiles; `shape` is that of plain ones.
    in_tiles: bool,
}

impl Described {
    fn of(program: &Program, Kept { name, id, section, .. }: Kept) -> Described {
        let value = program.value(id);
        let plain = match section {
            Section::Scales => value.link.and_then(|link| plain_shape(program, link)),
            _ => None,
        };
        let (dtype, shape) = stored(value);
        Described {
            name,
            dtype,
            in_tiles: plain.is_some(),
            shape: plain.unwrap_or(shape),
            section,
            range: value.range,
        }
    }

    /// The tensor's bytes as files have them: scales plain, row-major.
    fn to_file<'a>(&self, data: &'a [u8]) -> Result<Cow<'a, [u8]>, TrainError> {
        let (true, &[rows, blocks]) = (self.in_tiles, &self.shape[..]) else {
            return Ok(Cow::Borrowed(data));
        };
        let mut plain = vec![0; rows * blocks];
        scale_tiles::from_tiles(data, rows, blocks, &mut plain)?;
        Ok(Cow::Owned(plain))
    }
}

/// Rows and scales of a row, of a plane of scales: the data beside it tells.
fn plain_shape(program: &Program, scales: Link) -> Option<Vec<usize>> {
    let Part::Plane { quantization, axis, plane: Plane::Scales, format } = scales.part else {
        return None;
    };
    let part = Part::Plane { quantization, axis, plane: Plane::Data, format };
    let data = Link { part, ..scales };
    let data = program.values.iter().find(|value| value.link == Some(data))?;
    let &[m, k] = &data.shape[..] else { return None };
    Some(vec![m, k.div_ceil(format.scale.stored_every())])
}

/// Everything of a checkpoint but the bytes of its tensors.
#[derive(Clone, Debug)]
struct State {
    step: u64,
    tensors: Vec<Described>,
    /// Names and shapes of what was collected of all ranks, with its bytes.
    parts: Vec<(String, Vec<usize>, Whole)>,
    /// What other stages of a pipeline have.
    others: Vec<(Described, Vec<u8>)>,
    plan: Value,
    policy: Value,
    guards: Value,
    data_position: Value,
    run: Value,
}

impl State {
    fn of(
        engine: &mut Engine,
        position: &Position,
        settings: &Settings,
        identity: &RunIdentity,
        parts: Vec<Whole>,
        others: Vec<(Described, Vec<u8>)>,
    ) -> Result<State, TrainError> {
        let (applied, skipped) = engine.applied_steps()?;
        let program = engine.program();
        let parts = parts.into_iter().map(|whole| {
            let state = &program.parameters[whole.parameter];
            let of_moment = |moment: Moment| moment.name_of(&state.name);
            let name = whole.moment.map_or_else(|| state.name.clone(), of_moment);
            (name, program.whole_shape(state), whole)
        });
        let parts = parts.collect();
        let described = |kept| Described::of(program, kept);
        Ok(State {
            step: position.step,
            tensors: own_sections(engine).map(described).collect(),
            parts,
            others,
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
                "version": env!("CARGO_PKG_VERSION"),
            }),
        })
    }

    fn write<'a>(
        &'a self,
        root: &Path,
        data: impl Iterator<Item = &'a [u8]>,
        keep_last: usize,
    ) -> Result<(), TrainError> {
        let data = self.tensors.iter().zip(data).map(|(tensor, data)| tensor.to_file(data));
        let data: Vec<Cow<'_, [u8]>> = data.collect::<Result<_, _>>()?;
        let others = self.others.iter().map(|(tensor, data)| tensor.to_file(data));
        let others: Vec<Cow<'_, [u8]>> = others.collect::<Result<_, _>>()?;
        let mut contents = CheckpointContents::new(self.step);
        contents.tensors = self
            .tensors
            .iter()
            .zip(&data)
            .map(|(tensor, data)| TensorView {
                name: &tensor.name,
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                data,
                section: tensor.section,
            })
            .collect();
        contents.tensors.extend(self.parts.iter().map(|(name, shape, whole)| TensorView {
            name,
            dtype: CkptDtype::F32,
            shape: shape.clone(),
            data: cast_slice(&whole.values),
            section: match whole.moment {
                None => Section::Master,
                Some(Moment::First) => Section::MomentFirst,
                Some(Moment::Second) => Section::MomentSecond,
            },
        }));
        let of_stages = self.others.iter().zip(&others).map(|((tensor, _), data)| TensorView {
            name: &tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            data,
            section: tensor.section,
        });
        contents.tensors.extend(of_stages);
        contents.plan = self.plan.clone();
        contents.policy = self.policy.clone();
        contents.guards = self.guards.clone();
        contents.data_position = self.data_position.clone();
        contents.run = self.run.clone();
        let options = SaveOptions { keep_last: Some(keep_last), ..SaveOptions::default() };
        let saved = deepwell_ckpt::save(root, &contents, &options)?;
        for warning in &saved.warnings {
            tracing::warn!("{warning}");
        }
        Ok(())
    }
}

fn to_json<T: serde::Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("settings, plans and guards are plain data")
}

/// Loads a checkpoint into an engine that was compiled for the same fingerprint.
///
/// # Errors
/// A damaged checkpoint, or one that does not fit the engine.
pub fn load(entry: &CheckpointEntry, engine: &mut Engine) -> Result<Position, TrainError> {
    let checkpoint = deepwell_ckpt::load(&entry.path)?;
    let run = checkpoint.run();
    let parts = Parts { path: &entry.path };
    let guards: Guards = parts.read("guards", checkpoint.guards())?;
    let layers = guards.in_fallback();
    if !layers.is_empty() {
        engine.fall_back(&layers, "in fallback when the checkpoint was written")?;
    }
    let plan: SavedPlan = parts.read("plan", checkpoint.plan())?;
    // Another policy is another precision, where that was accepted.
    let is_same_policy = plan.policy.clone().without_forced() == *engine.policy();
    if let Some(what) =
        other_format(&plan.precision, &engine.plan().precision).filter(|_| is_same_policy)
    {
        return Err(parts.refuse(what));
    }
    let mut buffer: Vec<u8> = Vec::new();
    for Kept { name, id, section, whole } in sections(engine.program()) {
        if !matches!(section, Section::Master | Section::MomentFirst | Section::MomentSecond) {
            continue;
        }
        let value = engine.program().value(id).clone();
        let (dtype, own) = stored(&value);
        let shape = whole.unwrap_or(own);
        checkpoint.expect(section, &name, dtype, &shape)?;
        buffer.clear();
        buffer.resize(shape.iter().product::<usize>() * size_of::<f32>(), 0);
        checkpoint.read_into(section, &name, &mut buffer)?;
        engine.write_part(id, &buffer)?;
    }
    load_slices(&checkpoint, engine)?;
    let counters = [&run["applied_steps"], &run["skipped_steps"]];
    let [applied, skipped] = counters.map(|count| parts.read("step counters", count));
    engine.set_applied_steps(applied?, skipped?)?;
    engine.refresh_weight_copies()?;
    engine.set_counts(parts.read("counts", &run["counts"])?);
    let audit = parts.read("audit", &run["audit"])?;
    let next_batch = parts.read("data_position", &checkpoint.data_position()["next_batch"])?;
    Ok(Position { step: checkpoint.step(), guards, next_batch, audit })
}

/// Reads the moments that ranks have slices of, whoever saved them, and keeps this rank's.
fn load_slices(checkpoint: &Checkpoint, engine: &mut Engine) -> Result<(), TrainError> {
    let program = engine.program();
    let sharded: Vec<(usize, String, Vec<usize>)> = program
        .shards
        .iter()
        .flat_map(|shard| &shard.parameters)
        .map(|&(index, _)| {
            let state = &program.parameters[index];
            (index, state.name.clone(), program.whole_shape(state))
        })
        .collect();
    let mut whole: Vec<f32> = Vec::new();
    for (index, parameter, shape) in sharded {
        for (moment, section) in
            [(Moment::First, Section::MomentFirst), (Moment::Second, Section::MomentSecond)]
        {
            let name = moment.name_of(&parameter);
            checkpoint.expect(section, &name, CkptDtype::F32, &shape)?;
            whole.clear();
            whole.resize(shape.iter().product(), 0.0);
            checkpoint.read_into(section, &name, cast_slice_mut(&mut whole))?;
            engine.write_moment(index, moment, &whole)?;
        }
    }
    Ok(())
}

/// What a resumed run asks of the plan that it began with. Its other fields are for people, and may
/// be those of another version.
#[derive(Deserialize)]
struct SavedPlan {
    policy: PrecisionPolicy,
    precision: Vec<TensorPrecision>,
}

/// Reads the JSON parts of a checkpoint.
struct Parts<'a> {
    path: &'a Path,
}

impl Parts<'_> {
    fn read<T: DeserializeOwned>(&self, name: &str, value: &Value) -> Result<T, TrainError> {
        serde_json::from_value(value.clone())
            .map_err(|error| self.refuse(format!("its part `{name}` is unreadable: {error}")))
    }

    fn refuse(&self, what: String) -> TrainError {
        let hint = "another version wrote it; finish the run with that one";
        TrainError::Resume { path: self.path.to_path_buf(), what, hint }
    }
}

/// The first tensor that has another format than when the checkpoint was written. The guards'
/// state says which layers are in fallback; this says that all tensors got what they had.
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
    use super::*;

    /// Plans had stages, and may get other keys.
    #[test]
    fn a_plan_of_another_version_is_read_for_what_a_resumed_run_asks() {
        let policy = to_json(&PrecisionPolicy::mxfp8());
        let precision = json!([{ "tensor": "w", "format": "mxfp8", "reason": "default" }]);
        let plan = json!({
            "policy": policy, "precision": precision, "zero_level": 0, "stages": [{}], "later": 1,
        });
        let parts = Parts { path: Path::new("checkpoint") };
        let saved: SavedPlan = parts.read("plan", &plan).unwrap();
        assert_eq!(saved.policy, PrecisionPolicy::mxfp8());
        assert_eq!(other_format(&saved.precision, &saved.precision), None);
        let mut now = saved.precision.clone();
        now[0].format = Format::Bf16;
        let what = other_format(&saved.precision, &now).unwrap();
        assert_eq!(what, "`w` was in mxfp8 when it was written, now `w` is in bf16");
        let error = parts.read::<SavedPlan>("plan", &json!({ "policy": policy })).err().unwrap();
        assert!(error.to_string().contains("missing field `precision`"), "{error}");
    }
}
