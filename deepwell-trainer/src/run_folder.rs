//! The output folder of a run: lock, run record, and the rules for starting a run there.
//!
//! | in the folder | contents |
//! |---|---|
//! | `.deepwell.lock` | held by the only process that writes here, see [`crate::lock`] |
//! | `run.json` | a [`RunRecord`]: identity and fingerprint, written before the first step |
//! | `facts.json` | [`RunFacts`](crate::run::RunFacts): machine, sizes, predicted memory |
//! | the [results](RESULTS) | metrics, events, checkpoints, summary, profile |
//!
//! A folder holds one run. The checkpoints contain the run's identity, so checkpoints of another
//! run are never used. Results are deleted only on request, by [`Start::Overwrite`].

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use deepwell_ckpt::{CheckpointEntry, Listing};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::TrainError;
use crate::atomic_write::write_atomically;
use crate::clock::utc_now;
use crate::fingerprint::{Difference, Fingerprint, differences};
use crate::lock::OutputLock;
use crate::metrics::StepLine;
use crate::progress::Progress;
use crate::run_paths;

/// Name of the record in an output folder.
const RECORD: &str = "run.json";

/// Results of a run in its folder. The record is deleted last.
const RESULTS: [&str; 9] = [
    run_paths::PAGE,
    "summary.json",
    run_paths::FACTS,
    "profile.json",
    "trace.json",
    run_paths::CHECKPOINTS,
    "events",
    run_paths::METRICS,
    RECORD,
];

/// How a run starts in a folder that may have results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// At the first step; results of another run are an error.
    #[default]
    New,
    /// After the newest checkpoint of the folder's run, whose fingerprint must equal that of the
    /// settings; without a checkpoint at the first step. The ranks may differ, as after the loss of
    /// a rank: this changes the order of sums, and is recorded.
    Resume,
    /// Like `Resume`, with other settings; the changes are recorded.
    ResumeChanged,
    /// At the first step; results of another run are deleted.
    Overwrite,
}

/// `run.json`: identity of the run in a folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// 32 random hexadecimal digits from the start of the run, also stored in its checkpoints.
    pub id: String,
    /// Time of the start.
    pub started: String,
    /// The version of Deepwell at the start.
    pub version: String,
    /// The run's latest [`Fingerprint`].
    pub fingerprint: Value,
    /// Changes at resumptions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<RunChange>,
}

/// Changes at a resumption.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunChange {
    /// The last step before the change.
    pub after_step: u64,
    /// The changed fields.
    pub differences: Vec<Difference>,
}

/// An output folder owned by a run until this value is dropped.
#[derive(Debug)]
pub struct RunFolder {
    out: PathBuf,
    start: Start,
    former: Option<Former>,
    /// Folders created before the first step, other than results.
    put: Mutex<Vec<PathBuf>>,
    /// Whether the record has been written.
    has_begun: AtomicBool,
    /// Whether a step is complete, or none was left to do.
    has_trained: AtomicBool,
    lock: OutputLock,
}

/// Restores the folder if the run ends before its first step.
impl Drop for RunFolder {
    fn drop(&mut self) {
        if self.has_trained.load(Ordering::Relaxed) {
            return;
        }
        // Files that cannot be removed stay as results, which the next run reports.
        let has_begun = self.has_begun.load(Ordering::Relaxed);
        match &self.former {
            Some(former) if has_begun && self.out.join(RECORD).exists() => {
                let _ = self.write_record(&former.record);
            }
            Some(_) => {}
            None => {
                if has_begun {
                    let _ = delete_results(&self.out);
                }
                for path in self.put.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                    let _ = fs::remove_dir_all(path);
                }
                self.lock.remove_made();
            }
        }
    }
}

/// The existing run of a folder.
#[derive(Debug)]
struct Former {
    record: RunRecord,
    newest: Option<CheckpointEntry>,
    /// Fingerprint of the newest checkpoint, otherwise of the record.
    fingerprint: Value,
    /// Unreadable checkpoints, with their reasons.
    damaged: Vec<String>,
}

/// Start of a run in its folder.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Opened {
    /// Identity for the run's checkpoints.
    pub(crate) identity: RunIdentity,
    /// Checkpoint to resume from.
    pub(crate) from: Option<CheckpointEntry>,
}

/// Identity of a run in its checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct RunIdentity {
    /// See [`RunRecord::id`].
    pub id: String,
    /// The fingerprint of the following steps.
    pub fingerprint: Value,
}

impl Opened {
    /// The start of a rank whose folder was opened by another rank, from the checkpoint of a step.
    ///
    /// # Errors
    /// This rank does not see the checkpoint.
    pub(crate) fn following(
        out: &Path,
        step: Option<u64>,
        fingerprint: Value,
    ) -> Result<Opened, TrainError> {
        let identity = RunIdentity { id: String::new(), fingerprint };
        let Some(step) = step else { return Ok(Opened { identity, from: None }) };
        let Listing { complete, .. } = deepwell_ckpt::scan(&run_paths::checkpoints(out))?;
        match complete.into_iter().find(|entry| entry.step == step) {
            Some(entry) => Ok(Opened { identity, from: Some(entry) }),
            None => Err(TrainError::Resume {
                path: out.to_path_buf(),
                what: format!("rank 0 goes on after step {step}, whose checkpoint is not here"),
                hint: "let all ranks see one file system, and name the folder alike",
            }),
        }
    }
}

impl RunFolder {
    /// Claims a folder for a run, before any long work. Nothing in the folder is changed yet.
    ///
    /// # Errors
    /// [`TrainError::Locked`]; [`TrainError::Results`] unless the run resumes or may overwrite;
    /// [`TrainError::Resume`] for checkpoints of another run.
    pub fn claim(out: &Path, start: Start) -> Result<RunFolder, TrainError> {
        let lock = OutputLock::acquire(out)?;
        let found = match start {
            Start::New => refuse_results(out).map(|()| None),
            Start::Overwrite => Ok(None),
            Start::Resume | Start::ResumeChanged => former(out),
        };
        let former = found.inspect_err(|_| lock.remove_made())?;
        Ok(RunFolder {
            out: out.to_path_buf(),
            start,
            former,
            put: Mutex::default(),
            has_begun: AtomicBool::new(false),
            has_trained: AtomicBool::new(false),
            lock,
        })
    }

    /// Announces a new folder at `path`. A folder that did not exist before is removed if the run
    /// ends before its first step.
    pub(crate) fn puts(&self, path: &Path) {
        if !path.exists() {
            self.put.lock().unwrap_or_else(PoisonError::into_inner).push(path.to_path_buf());
        }
    }

    /// Records that a step is complete, or that none was left to do: the folder's contents stay.
    pub(crate) fn has_trained(&self) {
        self.has_trained.store(true, Ordering::Relaxed);
    }

    /// Wraps `progress` so that the folder learns of the first step.
    pub(crate) fn watching<'a>(&'a self, progress: &'a mut dyn Progress) -> Watched<'a> {
        Watched { folder: self, progress }
    }

    /// The micro-batch of the resumed run. Another micro-batch, which a planner may choose with
    /// less free memory, would sum the gradients in another order.
    pub(crate) fn micro_batch(&self) -> Option<usize> {
        let former = self.former.as_ref()?;
        Some(former.fingerprint["micro_batch"].as_u64()? as usize)
    }

    /// Starts the run, or returns the checkpoint to resume from.
    ///
    /// # Errors
    /// [`TrainError::OtherRun`] if a resumed run's fingerprint differs in more than its ranks; and
    /// errors of writing the record.
    pub(crate) fn begin(
        &self,
        fingerprint: &Fingerprint,
        progress: &mut dyn Progress,
    ) -> Result<Opened, TrainError> {
        let fingerprint = fingerprint.to_value();
        let Some(former) = &self.former else {
            match self.start {
                Start::Overwrite => delete_results(&self.out)?,
                _ => refuse_results(&self.out)?,
            }
            let id = random_id().map_err(TrainError::io("the system's random numbers"))?;
            let record = RunRecord {
                id: id.clone(),
                started: utc_now(),
                version: env!("CARGO_PKG_VERSION").to_string(),
                fingerprint: fingerprint.clone(),
                changes: Vec::new(),
            };
            self.has_begun.store(true, Ordering::Relaxed);
            self.write_record(&record)?;
            return Ok(Opened { identity: RunIdentity { id, fingerprint }, from: None });
        };
        for damaged in &former.damaged {
            progress.note(&format!("warning: passed over, as it is damaged: {damaged}"));
        }
        let mut record = former.record.clone();
        let changed = differences(&former.fingerprint, &fingerprint);
        if !changed.is_empty() {
            if self.start != Start::ResumeChanged && !are_other_ranks(&changed) {
                let path = former.newest.as_ref().map_or(&self.out, |entry| &entry.path).clone();
                return Err(TrainError::OtherRun { path, differences: changed });
            }
            if changed.iter().any(|difference| difference.field.starts_with("guards.")) {
                return Err(TrainError::Resume {
                    path: self.out.clone(),
                    what: "the guards' thresholds cannot change: what they have seen so far was \
                           judged by them"
                        .to_string(),
                    hint: "leave `[guards]` as `run.json` in the folder has it",
                });
            }
            let are_ranks = are_other_ranks(&changed);
            for difference in &changed {
                // A change of ranks changes kernels too: these are listed only in `run.json`.
                if !(are_ranks && difference.is_of_kernels()) {
                    progress.note(&format!("changed: {difference}"));
                }
            }
            let after_step = former.newest.as_ref().map_or(0, |entry| entry.step);
            record.changes.push(RunChange { after_step, differences: changed });
        }
        record.fingerprint = fingerprint.clone();
        if record != former.record || !self.out.join(RECORD).exists() {
            self.has_begun.store(true, Ordering::Relaxed);
            self.write_record(&record)?;
        }
        let identity = RunIdentity { id: record.id, fingerprint };
        Ok(Opened { identity, from: former.newest.clone() })
    }

    fn write_record(&self, record: &RunRecord) -> Result<(), TrainError> {
        let text = serde_json::to_string_pretty(record).expect("a record is plain data");
        write_atomically(&self.out.join(RECORD), &text)
    }
}

/// See [`RunFolder::watching`].
pub(crate) struct Watched<'a> {
    folder: &'a RunFolder,
    progress: &'a mut dyn Progress,
}

impl Progress for Watched<'_> {
    fn step(&mut self, line: &StepLine) {
        self.folder.has_trained();
        self.progress.step(line);
    }

    fn evaluation(&mut self, step: u64, val_loss: f64) {
        self.progress.evaluation(step, val_loss);
    }

    fn note(&mut self, text: &str) {
        self.progress.note(text);
    }
}

/// Whether the differences are only in the parallelism, and in fields that follow from it.
fn are_other_ranks(differences: &[Difference]) -> bool {
    let may_differ = |it: &Difference| it.is_of_ranks() || it.follows_ranks();
    differences.iter().any(Difference::is_of_ranks) && differences.iter().all(may_differ)
}

/// The results in a folder.
fn results(out: &Path) -> Vec<&'static str> {
    let is_there = |name: &&str| {
        let path = out.join(name);
        // An empty folder is no result.
        fs::read_dir(&path).map_or(path.exists(), |mut entries| entries.next().is_some())
    };
    RESULTS.into_iter().filter(is_there).collect()
}

fn refuse_results(out: &Path) -> Result<(), TrainError> {
    let found = results(out);
    if found.is_empty() {
        return Ok(());
    }
    // An unreadable record is treated like any other result.
    let run = read_record(out).ok().flatten();
    let run = run.map(|run| format!("{}, begun {}", run.id, run.started));
    let found = found.into_iter().map(str::to_string).collect();
    Err(TrainError::Results { folder: out.to_path_buf(), run, found })
}

fn delete_results(out: &Path) -> Result<(), TrainError> {
    for name in results(out) {
        let path = out.join(name);
        let deleted =
            if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        deleted.map_err(TrainError::io(&path))?;
    }
    Ok(())
}

fn read_record(out: &Path) -> Result<Option<RunRecord>, TrainError> {
    let path = out.join(RECORD);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(TrainError::io(&path))?,
    };
    serde_json::from_str(&text).map(Some).map_err(|error| TrainError::Resume {
        path,
        what: format!("it is not the record of a run: {error}"),
        hint: "move it away if its checkpoints are to be gone on from",
    })
}

/// Returns the run of a folder with its newest checkpoint; none for a folder without results.
fn former(out: &Path) -> Result<Option<Former>, TrainError> {
    let record = read_record(out)?;
    let Listing { mut complete, damaged } = deepwell_ckpt::scan(&run_paths::checkpoints(out))?;
    let damaged = damaged.into_iter();
    let damaged = damaged.map(|one| format!("`{}`: {}", one.path.display(), one.reason)).collect();
    let mut identities = Vec::with_capacity(complete.len());
    for entry in &complete {
        identities.push(identity_of(entry)?);
    }
    let Some(newest) = complete.pop() else {
        return match record {
            Some(record) => {
                let fingerprint = record.fingerprint.clone();
                Ok(Some(Former { record, newest: None, fingerprint, damaged }))
            }
            None => refuse_results(out).map(|()| None),
        };
    };
    let identity = identities[identities.len() - 1].clone();
    // Checkpoints copied to a new folder bring their run with them.
    let record = record.unwrap_or_else(|| RunRecord {
        id: identity.id.clone(),
        started: utc_now(),
        version: env!("CARGO_PKG_VERSION").to_string(),
        fingerprint: identity.fingerprint.clone(),
        changes: Vec::new(),
    });
    complete.push(newest.clone());
    for (entry, identity) in complete.iter().zip(&identities) {
        if identity.id != record.id {
            return Err(TrainError::Resume {
                path: entry.path.clone(),
                what: format!("it is of run {}, its folder of run {}", identity.id, record.id),
                hint: "move it to another folder: one folder holds one run",
            });
        }
    }
    let fingerprint = identity.fingerprint;
    Ok(Some(Former { record, newest: Some(newest), fingerprint, damaged }))
}

/// Reads the run's identity from a checkpoint.
fn identity_of(entry: &CheckpointEntry) -> Result<RunIdentity, TrainError> {
    let checkpoint = deepwell_ckpt::load(&entry.path)?;
    let run = checkpoint.run();
    match (run["id"].as_str(), &run["fingerprint"]) {
        (Some(id), fingerprint @ Value::Object(_)) => {
            Ok(RunIdentity { id: id.to_string(), fingerprint: fingerprint.clone() })
        }
        _ => Err(TrainError::Resume {
            path: entry.path.clone(),
            what: "it does not say which run it is of, so nothing could be checked".to_string(),
            hint: "an earlier version wrote it; finish the run with that one",
        }),
    }
}

fn random_id() -> io::Result<String> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
