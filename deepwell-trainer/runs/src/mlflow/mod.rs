//! Export to MLflow's file store.
//!
//! ```text
//! STORE/EXPERIMENT/meta.yaml             name and id of the experiment
//! STORE/EXPERIMENT/RUN/meta.yaml         name, times and status of the run
//! STORE/EXPERIMENT/RUN/metrics/NAME      lines "milliseconds value step"
//! STORE/EXPERIMENT/RUN/params/KEY        the settings
//! STORE/EXPERIMENT/RUN/tags/KEY
//! STORE/EXPERIMENT/RUN/artifacts/        report.html and the JSON files of the run
//! ```
//!
//! An experiment is found by its name. A run of MLflow has the id of its Deepwell run, so that it
//! is exported once. Its folder is written aside and renamed: complete or absent.

mod yaml;

use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Serialize;

use self::yaml::{quoted, value_of};
use crate::RunsError;
use crate::run::{Metric, Run, RunState};

/// Longest value of a parameter in MLflow's file store, in bytes.
const PARAM_MAX: usize = 6000;
/// Files of a run that become artifacts.
const ARTIFACTS: [&str; 4] = ["report.html", "run.json", "facts.json", "summary.json"];

/// Result of the export of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Exported {
    /// Name of the run.
    pub run: String,
    /// Id of the run in MLflow.
    pub id: String,
    /// The folder of the run in the store.
    pub folder: PathBuf,
    /// Number of metrics.
    pub metrics: usize,
    /// Number of points of all metrics together.
    pub points: usize,
    /// Number of parameters.
    pub params: usize,
}

/// Writes runs to the experiment `experiment` of the file store in the folder `store`.
///
/// # Errors
/// [`RunsError::Exported`] before anything is written if the store has one of the runs;
/// [`RunsError::Store`] for a damaged experiment; errors of reading and writing.
pub fn export(runs: &[Run], store: &Path, experiment: &str) -> Result<Vec<Exported>, RunsError> {
    fs::create_dir_all(store).map_err(RunsError::write(store))?;
    let store = fs::canonicalize(store).map_err(RunsError::read(store))?;
    let id = experiment_id(&store, experiment)?;
    let folder = store.join(&id);
    let ids: Vec<String> = runs.iter().map(run_id).collect();
    if let Some(there) = ids.iter().map(|id| folder.join(id)).find(|path| path.exists()) {
        return Err(RunsError::Exported { path: there });
    }
    write_experiment(&folder, &id, experiment, runs)?;
    runs.iter().zip(&ids).map(|(run, run_id)| write_run(run, &folder, &id, run_id)).collect()
}

/// The id of the experiment with this name; an unused id for a new name.
fn experiment_id(store: &Path, name: &str) -> Result<String, RunsError> {
    let mut taken = Vec::new();
    for entry in fs::read_dir(store).map_err(RunsError::read(store))? {
        let path = entry.map_err(RunsError::read(store))?.path();
        let meta = path.join("meta.yaml");
        let text = match fs::read_to_string(&meta) {
            Ok(text) => text,
            // Of other folders, as of models.
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                continue;
            }
            Err(error) => return Err(RunsError::read(meta)(error)),
        };
        let value = |key: &str| value_of(&text, key);
        let (Some(id), Some(own)) = (value("experiment_id"), value("name")) else {
            let got = "a meta.yaml without `experiment_id` and `name`".to_owned();
            return Err(RunsError::Store { path: meta, got });
        };
        if own == name {
            return Ok(id);
        }
        taken.push(id);
    }
    // As MLflow's own ids: 18 digits, here by the name, so that two exports agree.
    let mut number = hash(name.as_bytes()) % 900_000_000_000_000_000 + 100_000_000_000_000_000;
    while taken.contains(&number.to_string()) {
        number += 1;
    }
    Ok(number.to_string())
}

/// FNV-1a of 64 bits.
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The run's own id; of a run without a record a hash of its folder.
fn run_id(run: &Run) -> String {
    let is_id = |id: &&String| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    run.facts.id.as_ref().filter(is_id).cloned().unwrap_or_else(|| {
        let path = run.folder.to_string_lossy();
        let reversed: Vec<u8> = path.bytes().rev().collect();
        format!("{:016x}{:016x}", hash(path.as_bytes()), hash(&reversed))
    })
}

fn write_experiment(folder: &Path, id: &str, name: &str, runs: &[Run]) -> Result<(), RunsError> {
    let meta = folder.join("meta.yaml");
    if meta.exists() {
        return Ok(());
    }
    let times = runs.iter().filter_map(|run| run.start_unix_s);
    let time = millis(times.min_by(f64::total_cmp).unwrap_or(0.0));
    let text = format!(
        "artifact_location: {}\ncreation_time: {time}\nexperiment_id: {}\n\
         last_update_time: {time}\nlifecycle_stage: active\nname: {}\n",
        quoted(&file_uri(folder)),
        quoted(id),
        quoted(name)
    );
    fs::create_dir_all(folder).map_err(RunsError::write(folder))?;
    fs::write(&meta, text).map_err(RunsError::write(meta))
}

fn write_run(
    run: &Run,
    experiment: &Path,
    experiment_id: &str,
    id: &str,
) -> Result<Exported, RunsError> {
    let folder = experiment.join(id);
    let mut builder = tempfile::Builder::new();
    builder.prefix(".deepwell-");
    // A temporary folder is private to its user; the result gets the usual permissions.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    let aside = builder.tempdir_in(experiment).map_err(RunsError::write(experiment))?;
    let root = aside.path();
    let mut exported = Exported {
        run: run.name.clone(),
        id: id.to_owned(),
        folder: folder.clone(),
        metrics: 0,
        points: 0,
        params: 0,
    };
    for name in ["metrics", "params", "tags", "artifacts"] {
        fs::create_dir_all(root.join(name)).map_err(RunsError::write(root.join(name)))?;
    }
    for metric in Metric::ALL {
        let points = run.curve(metric);
        if !points.is_empty() {
            write(&root.join("metrics").join(metric.name()), &metric_lines(run, points))?;
            exported.metrics += 1;
            exported.points += points.len();
        }
    }
    for (key, value) in params(run) {
        write(&root.join("params").join(&key), &one_line(&value))?;
        exported.params += 1;
    }
    for (key, value) in tags(run) {
        write(&root.join("tags").join(key), &one_line(&value))?;
    }
    for name in ARTIFACTS {
        let from = run.folder.join(name);
        if from.is_file() {
            let to = root.join("artifacts").join(name);
            fs::copy(&from, &to).map_err(RunsError::write(to))?;
        }
    }
    write(&root.join("meta.yaml"), &run_meta(run, &folder, experiment_id, id))?;
    fs::rename(root, &folder).map_err(RunsError::write(&folder))?;
    Ok(exported)
}

/// Writes a file, and the folders above it: a slash in the name of a metric is a folder.
fn write(path: &Path, text: &str) -> Result<(), RunsError> {
    let above = path.parent().unwrap_or(path);
    fs::create_dir_all(above).map_err(RunsError::write(above))?;
    fs::write(path, text).map_err(RunsError::write(path))
}

/// Lines `milliseconds value step`.
fn metric_lines(run: &Run, points: &[(f64, f64)]) -> String {
    let mut text = String::new();
    let start = run.start_unix_s.unwrap_or(0.0);
    let mut at = 0;
    for &(step, value) in points {
        // Both lists rise.
        while at + 1 < run.times.len() && run.times[at + 1].0 <= step {
            at += 1;
        }
        let seconds = run.times.get(at).map_or(0.0, |point| point.1);
        // Python reads `NaN`, `inf` and `-inf`, as Rust writes them.
        let _ = writeln!(text, "{} {value} {step}", millis(start + seconds));
    }
    text
}

fn millis(seconds: f64) -> u64 {
    (seconds * 1e3).round().max(0.0) as u64
}

/// The settings, with keys of characters that MLflow accepts.
fn params(run: &Run) -> Vec<(String, String)> {
    let accepted = |c: char| if c.is_ascii_alphanumeric() || "_-. ".contains(c) { c } else { '_' };
    let param = |(key, value): (&String, &String)| {
        let mut value = value.clone();
        while value.len() > PARAM_MAX {
            value.pop();
        }
        (key.chars().map(accepted).collect(), value)
    };
    run.settings.iter().map(param).collect()
}

fn tags(run: &Run) -> Vec<(&'static str, String)> {
    let facts = &run.facts;
    let mut tags = vec![
        ("mlflow.runName", run.name.clone()),
        ("mlflow.source.name", "deepwell train".to_owned()),
        ("mlflow.source.type", "LOCAL".to_owned()),
        ("deepwell.folder", run.folder.display().to_string()),
        ("deepwell.state", run.state.name().to_owned()),
    ];
    let optional = [
        ("deepwell.version", facts.version.clone()),
        ("deepwell.hardware", facts.machine.clone()),
        ("deepwell.mfu", run.utilization().map(|share| share.to_string())),
        ("deepwell.goodput", run.goodput().map(|share| share.to_string())),
        ("deepwell.peak_bytes_measured", facts.peak_bytes_measured.map(|it| it.to_string())),
    ];
    tags.extend(optional.into_iter().filter_map(|(key, value)| Some((key, value?))));
    tags
}

/// MLflow reads one line of a parameter or a tag.
fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

fn run_meta(run: &Run, folder: &Path, experiment_id: &str, id: &str) -> String {
    // RunStatus of MLflow: 1 running, 3 finished, 4 failed, 5 killed.
    let status = match run.state {
        RunState::Running => 1,
        RunState::Finished => 3,
        RunState::Interrupted => 5,
        RunState::Ended | RunState::Unknown => 4,
    };
    let start = run.start_unix_s.unwrap_or(0.0);
    let wall_s = run.times.last().map_or(0.0, |point| point.1);
    let end = match run.state {
        RunState::Running => "null".to_owned(),
        _ => millis(run.end_unix_s.unwrap_or(start + wall_s)).to_string(),
    };
    let artifacts = quoted(&file_uri(&folder.join("artifacts")));
    format!(
        "artifact_uri: {artifacts}\nend_time: {end}\nentry_point_name: ''\nexperiment_id: {}\n\
         lifecycle_stage: active\nrun_id: {id}\nrun_name: {}\nrun_uuid: {id}\nsource_name: ''\n\
         source_type: 4\nsource_version: ''\nstart_time: {}\nstatus: {status}\ntags: []\n\
         user_id: deepwell\n",
        quoted(experiment_id),
        quoted(&run.name),
        millis(start)
    )
}

/// The path as a `file:` address.
fn file_uri(path: &Path) -> String {
    let mut uri = String::from("file://");
    for byte in path.to_string_lossy().bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'/' | b'-' | b'.' | b'_' | b'~' => {
                uri.push(char::from(byte));
            }
            _ => {
                let _ = write!(uri, "%{byte:02X}");
            }
        }
    }
    uri
}

#[cfg(test)]
mod tests;
