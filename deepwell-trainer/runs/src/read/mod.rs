//! Reading of a run's folder.
//!
//! A reader runs beside the writer: the last line may be cut, files may be missing, and files of
//! other versions have other keys. None of this is an error; [`Run::notes`] says what is missing.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::facts::Files;
use crate::line::Line;
use crate::run::{Event, Metric, Run, RunState};
use crate::{RunsError, find_runs};

/// Guard events kept of a run; later ones are only counted.
const EVENTS_MAX: usize = 10_000;

/// Reads all runs at and below `paths`, see [`find_runs`].
///
/// ```
/// # fn main() -> Result<(), deepwell_runs::RunsError> {
/// # let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("metrics.jsonl");
/// // The last line is still being written.
/// std::fs::write(&path, "{\"step\":1,\"loss\":5.5}\n{\"step\":2,\"lo").unwrap();
/// let runs = deepwell_runs::read_runs(&[folder.path().to_path_buf()])?;
/// assert_eq!(runs[0].curve(deepwell_runs::Metric::Loss), [(1.0, 5.5)]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`find_runs`]. A damaged file within a run is a note of the run.
pub fn read_runs(paths: &[PathBuf]) -> Result<Vec<Run>, RunsError> {
    let found = find_runs(paths)?;
    Ok(found.into_iter().map(|(name, folder)| read_run(name, &folder)).collect())
}

/// Reads one run.
pub fn read_run(name: String, folder: &Path) -> Run {
    let mut run = Run { name, folder: folder.to_path_buf(), ..Run::default() };
    let mut json = |file: &str, lack: &str| read_json(&folder.join(file), lack, &mut run.notes);
    let files = Files {
        record: json("run.json", "its settings and its identity are unknown"),
        facts: json("facts.json", ""),
        summary: json("summary.json", ""),
    };
    run.facts = files.facts();
    run.settings = files.settings();
    if files.facts.is_null() && files.summary.is_null() {
        run.notes.push(
            "neither facts.json nor summary.json is there: an earlier version began the run, or \
             it never reached its first step"
                .to_owned(),
        );
    }
    run.start_unix_s = run.facts.started.as_deref().and_then(unix_s);
    let mut log = Log::new(run.facts.tokens_per_step);
    read_lines(&mut run, &mut log);
    log.finish(&mut run);
    run.state = state(&run);
    run
}

/// Reads a JSON file; null if it is missing or damaged. `lack` is the loss without the file; if
/// empty, a missing file is no note.
fn read_json(path: &Path, lack: &str, notes: &mut Vec<String>) -> Value {
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            if !lack.is_empty() {
                notes.push(format!("{file} is missing: {lack}"));
            }
            return Value::Null;
        }
        Err(error) => {
            notes.push(format!("{file} cannot be read: {error}"));
            return Value::Null;
        }
    };
    serde_json::from_str(&text).unwrap_or_else(|error| {
        notes.push(format!("{file} is no JSON: {error}"));
        Value::Null
    })
}

/// Reads `metrics.jsonl` line by line.
fn read_lines(run: &mut Run, log: &mut Log) {
    let path = run.folder.join("metrics.jsonl");
    let file = match fs::File::open(&path) {
        Ok(file) => file,
        Err(error) => {
            run.notes.push(format!("metrics.jsonl cannot be read: {error}"));
            return;
        }
    };
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let (mut bytes, mut unread, mut first_unread) = (Vec::new(), 0u64, 0u64);
    for number in 1.. {
        bytes.clear();
        match reader.read_until(b'\n', &mut bytes) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => {
                run.notes.push(format!("metrics.jsonl, line {number}: {error}"));
                break;
            }
        }
        match serde_json::from_slice::<Line>(&bytes) {
            Ok(line) => log.add(line, run),
            // A writer was killed here, or has not finished the line.
            Err(_) if !bytes.ends_with(b"\n") => {
                run.notes.push(format!("line {number} of metrics.jsonl is cut; it is left out"));
            }
            Err(_) => {
                first_unread = if unread == 0 { number } else { first_unread };
                unread += 1;
            }
        }
    }
    if unread > 0 {
        run.notes.push(format!(
            "{unread} lines of metrics.jsonl could not be read and are left out, the first is \
             line {first_unread}"
        ));
    }
}

/// What is summed while lines are read.
struct Log {
    tokens_per_step: Option<f64>,
    /// Seconds of the last step with a known speed.
    step_s: Option<f64>,
    /// Points (step, seconds since 1970).
    clock: Vec<(f64, f64)>,
    /// Points (step, seconds of counted steps so far).
    counted: Vec<(f64, f64)>,
    events_dropped: usize,
}

impl Log {
    fn new(tokens_per_step: Option<f64>) -> Log {
        let (clock, counted) = (Vec::new(), Vec::new());
        Log { tokens_per_step, step_s: None, clock, counted, events_dropped: 0 }
    }

    fn add(&mut self, line: Line, run: &mut Run) {
        let step = line.step as f64;
        self.go_back(&line, run);
        run.step_last = run.step_last.max(line.step);
        if let Some(unix_s) = line.unix_s {
            // A clock that was set back gives no time before an earlier one.
            let before = self.clock.last().map_or(unix_s, |point| point.1);
            self.clock.push((step, unix_s.max(before)));
        }
        if let Some(speed) = line.tokens_per_s
            && let Some(tokens) = self.tokens_per_step
            && speed > 0.0
        {
            self.step_s = Some(tokens / speed);
            let so_far = self.counted.last().map_or(0.0, |point| point.1);
            let counted = if line.skipped { 0.0 } else { tokens / speed };
            self.counted.push((step, so_far + counted));
        }
        run.skipped_steps += u64::from(line.skipped);
        let values = [
            (Metric::Loss, line.loss),
            (Metric::ValLoss, line.val_loss.filter(|_| line.val_tokens != Some(0))),
            (Metric::GradNorm, line.grad_norm),
            (Metric::LearningRate, line.learning_rate),
            (Metric::TokensPerS, line.tokens_per_s),
            (Metric::SpeedOfLight, line.speed_of_light),
        ];
        for (metric, value) in values {
            push(run, metric, step, value);
        }
        add_experts(&line, run);
        let ratios = line.products.iter().filter_map(|it| it.ratio).filter(|it| *it > 0.0);
        let lowest = ratios.min_by(f64::total_cmp);
        push(run, Metric::SignalToError, step, lowest.map(|ratio| 10.0 * ratio.log10()));
        if let Some(guard) = line.guard {
            match run.events.len() {
                EVENTS_MAX.. => self.events_dropped += 1,
                _ => run.events.push(Event {
                    step: line.step,
                    kind: guard.kind_name(),
                    gemm: guard.gemm,
                    reason: guard.reason,
                }),
            }
        }
    }

    /// Drops values of steps that the run repeats. Writers drop such lines themselves; a file that
    /// was put together by hand may have them.
    fn go_back(&mut self, line: &Line, run: &mut Run) {
        let repeats = line.loss.is_some() || line.grad_norm.is_some();
        if !repeats || line.step > run.step_last || line.step == 0 {
            return;
        }
        let step = line.step as f64;
        if run.curve(Metric::GradNorm).last().is_none_or(|point| point.0 < step) {
            return;
        }
        run.notes.push(format!("the log goes back from step {} to {step}", run.step_last));
        let keep = |points: &mut Vec<(f64, f64)>| points.retain(|point| point.0 < step);
        run.curves.values_mut().for_each(keep);
        run.loads.values_mut().for_each(keep);
        run.events.retain(|event| event.step < line.step);
        keep(&mut self.clock);
        keep(&mut self.counted);
        run.step_last = line.step;
    }

    /// Computes what needs the whole log.
    fn finish(self, run: &mut Run) {
        run.step_time_s = self.counted.last().map_or(0.0, |point| point.1);
        if self.events_dropped > 0 {
            run.notes.push(format!("{} further guard events are left out", self.events_dropped));
        }
        if let (Some(first), Some(last)) = (self.clock.first(), self.clock.last()) {
            // The record is written in whole seconds, before the first line.
            let start = run.start_unix_s.map_or(first.1, |start| start.min(first.1));
            run.has_clock = true;
            run.start_unix_s = Some(start);
            run.end_unix_s = Some(last.1);
            run.times = self.clock.iter().map(|&(step, unix_s)| (step, unix_s - start)).collect();
            // Of a step with an evaluation the time of the step itself.
            run.times.dedup_by_key(|point| point.0);
            let goodput = self.counted.iter().filter_map(|&(step, counted_s)| {
                let at = run.times.partition_point(|point| point.0 < step);
                let wall_s = run.times.get(at)?.1;
                (wall_s > 0.0).then(|| (step, (counted_s / wall_s).min(1.0)))
            });
            let goodput = goodput.collect();
            run.curves.insert(Metric::Goodput, goodput);
        } else {
            run.times = self.counted;
        }
        run.curves.retain(|_, points| !points.is_empty());
    }
}

fn push(run: &mut Run, metric: Metric, step: f64, value: Option<f64>) {
    if let Some(value) = value {
        run.curves.entry(metric).or_default().push((step, value));
    }
}

/// The extremes over layers.
fn add_experts(line: &Line, run: &mut Run) {
    if line.experts.is_empty() {
        return;
    }
    let step = line.step as f64;
    let entropies = line.experts.iter().filter_map(|layer| layer.entropy);
    push(run, Metric::Entropy, step, entropies.min_by(f64::total_cmp));
    let largest = line.experts.iter().filter_map(|layer| layer.largest_over_mean);
    push(run, Metric::LargestLoad, step, largest.max_by(f64::total_cmp));
    let sum = |of: fn(&crate::line::ExpertLine) -> u64| line.experts.iter().map(of).sum::<u64>();
    push(run, Metric::DeadExperts, step, Some(sum(|layer| layer.dead) as f64));
    push(run, Metric::Dropped, step, Some(sum(|layer| layer.dropped) as f64));
    for layer in &line.experts {
        if let Some(value) = layer.largest_over_mean {
            run.loads.entry(layer.layer).or_default().push((step, value));
        }
    }
}

fn state(run: &Run) -> RunState {
    let done = run.step_last;
    match run.facts.steps {
        Some(steps) if done >= steps && steps > 0 => RunState::Finished,
        _ if is_held(&run.folder) => RunState::Running,
        Some(_) if run.facts.interrupted == Some(true) && run.facts.summary_step == Some(done) => {
            RunState::Interrupted
        }
        Some(_) => RunState::Ended,
        None => RunState::Unknown,
    }
}

/// Whether the process that the lock names runs on this machine. The lock itself stays untouched:
/// a reader that took the lock for a moment could stop a run that begins.
fn is_held(folder: &Path) -> bool {
    let text = fs::read_to_string(folder.join(".deepwell.lock")).unwrap_or_default();
    let holder: Value = serde_json::from_str(&text).unwrap_or_default();
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_here = holder["host"].as_str() == Some(host.trim());
    let pid = holder["pid"].as_u64();
    is_here && pid.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists())
}

/// Seconds since 1970 of a time such as `2026-01-31T23:59:59Z`.
fn unix_s(text: &str) -> Option<f64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let numbers = |text: &str, mark| -> Option<[i64; 3]> {
        let parts: Vec<i64> = text.split(mark).map(str::parse).collect::<Result<_, _>>().ok()?;
        parts.try_into().ok()
    };
    let ([year, month, day], [hour, minute, second]) = (numbers(date, '-')?, numbers(time, ':')?);
    // Days since 1 March of year 0; a year then ends with February.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    Some(((days - 719_468) * 86_400 + hour * 3600 + minute * 60 + second) as f64)
}

#[cfg(test)]
mod tests;
