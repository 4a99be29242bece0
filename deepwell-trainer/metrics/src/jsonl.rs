//! A file of JSON objects, one per line.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::MetricsError;

/// When buffered records are written. A written record survives a kill of the process; only
/// [`JsonlWriter::sync`] protects records against power loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushPolicy {
    /// After every record.
    EveryRecord,
    /// After this many records, on [`JsonlWriter::flush`] and on drop.
    EveryRecords(u64),
}

/// Result of [`JsonlWriter::truncate_after`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truncated {
    /// Number of lines kept.
    pub lines_kept: u64,
    /// Number of dropped lines of later steps.
    pub lines_dropped: u64,
    /// Whether the last line was incomplete, as left by a kill, and dropped.
    pub dropped_torn_line: bool,
    /// Highest step of the lines kept.
    pub step_max: Option<u64>,
}

/// Appends JSON objects to a file, one per line.
///
/// Finite f64 are written with the shortest digits that read back to the same bits, so equal lines
/// mean equal losses.
///
/// ```
/// use deepwell_metrics::{FlushPolicy, JsonlWriter};
/// # fn main() -> Result<(), deepwell_metrics::MetricsError> {
/// # let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("metrics.jsonl");
/// let mut metrics = JsonlWriter::append(&path, FlushPolicy::EveryRecord)?;
/// for step in 1..=3 {
///     metrics.write(&serde_json::json!({"step": step, "loss": 0.5 * step as f64}))?;
/// }
/// drop(metrics);
/// let truncated = JsonlWriter::truncate_after(&path, 2)?;
/// assert_eq!((truncated.lines_kept, truncated.lines_dropped), (2, 1));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct JsonlWriter {
    path: PathBuf,
    file: BufWriter<File>,
    policy: FlushPolicy,
    waiting: u64,
    line: Vec<u8>,
}

impl JsonlWriter {
    /// Creates a file, and replaces an existing one.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Write`].
    pub fn create(path: &Path, policy: FlushPolicy) -> Result<Self, MetricsError> {
        Self::open(path, policy, OpenOptions::new().write(true).create(true).truncate(true))
    }

    /// Appends to a file, or creates it.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Write`].
    pub fn append(path: &Path, policy: FlushPolicy) -> Result<Self, MetricsError> {
        Self::open(path, policy, OpenOptions::new().append(true).create(true))
    }

    fn open(
        path: &Path,
        policy: FlushPolicy,
        options: &mut OpenOptions,
    ) -> Result<Self, MetricsError> {
        let file = options.open(path).map_err(|source| write_error(path, source))?;
        let (file, line) = (BufWriter::new(file), Vec::new());
        Ok(Self { path: path.to_owned(), file, policy, waiting: 0, line })
    }

    /// Appends one record. A record must serialize as an object, so that [`Self::truncate_after`]
    /// can read its step.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Record`], [`MetricsError::Write`].
    pub fn write<T: Serialize>(&mut self, record: &T) -> Result<(), MetricsError> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, record)
            .map_err(|source| MetricsError::Record { path: self.path.clone(), source })?;
        self.line.push(b'\n');
        self.file.write_all(&self.line).map_err(|source| write_error(&self.path, source))?;
        self.waiting += 1;
        let limit = match self.policy {
            FlushPolicy::EveryRecord => 1,
            FlushPolicy::EveryRecords(count) => count.max(1),
        };
        if self.waiting >= limit { self.flush() } else { Ok(()) }
    }

    /// Hands all records to the operating system.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Write`].
    pub fn flush(&mut self) -> Result<(), MetricsError> {
        self.waiting = 0;
        self.file.flush().map_err(|source| write_error(&self.path, source))
    }

    /// Syncs all records to the disk. Call this before a checkpoint is completed, so that the file
    /// is never behind the checkpoint.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Write`].
    pub fn sync(&mut self) -> Result<(), MetricsError> {
        self.flush()?;
        self.file.get_ref().sync_data().map_err(|source| write_error(&self.path, source))
    }

    /// Drops every record whose `step` is above `step`, and an incomplete last line. Records
    /// without a `step` are kept. The file is replaced atomically; a missing file is not created.
    ///
    /// No [`JsonlWriter`] may have the file open: it would continue to write to the old file.
    ///
    /// # Errors
    ///
    /// [`MetricsError::BadLine`] for a line before the last one that is not an object;
    /// [`MetricsError::Read`], [`MetricsError::Write`].
    pub fn truncate_after(path: &Path, step: u64) -> Result<Truncated, MetricsError> {
        let read_error = |source| MetricsError::Read { path: path.to_owned(), source };
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Truncated::default());
            }
            Err(error) => return Err(read_error(error)),
        };
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let fail = |source| write_error(path, source);
        let aside = tempfile::NamedTempFile::with_prefix_in(".metrics-", folder).map_err(fail)?;
        let mut aside = BufWriter::new(aside);
        let mut lines = BufReader::new(file);
        let mut truncated = Truncated::default();
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if lines.read_until(b'\n', &mut line).map_err(read_error)? == 0 {
                break;
            }
            let is_complete = line.ends_with(b"\n");
            // A kill can cut a line, or (with a power loss) replace it by zeros.
            let is_last = lines.fill_buf().map_err(read_error)?.is_empty();
            match step_of(&line) {
                Some(line_step) if is_complete => {
                    if line_step.is_some_and(|line_step| line_step > step) {
                        truncated.lines_dropped += 1;
                    } else {
                        aside.write_all(&line).map_err(fail)?;
                        truncated.lines_kept += 1;
                        truncated.step_max = truncated.step_max.max(line_step);
                    }
                }
                _ if is_last => truncated.dropped_torn_line = true,
                _ => {
                    let start =
                        String::from_utf8_lossy(&line).trim_end().chars().take(40).collect();
                    return Err(MetricsError::BadLine {
                        path: path.to_owned(),
                        line: number,
                        start,
                    });
                }
            }
        }
        let aside = aside.into_inner().map_err(|error| fail(error.into_error()))?;
        aside.as_file().sync_all().map_err(fail)?;
        // A temporary file is private to its user; metrics should not be.
        let permissions = std::fs::metadata(path).map_err(read_error)?.permissions();
        aside.as_file().set_permissions(permissions).map_err(fail)?;
        aside.persist(path).map_err(|error| fail(error.error))?;
        if cfg!(unix) {
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(fail)?;
        }
        Ok(truncated)
    }
}

fn write_error(path: &Path, source: io::Error) -> MetricsError {
    MetricsError::Write { path: path.to_owned(), source }
}

/// Returns the `step` of a line, if any; `None` if the line is not an object.
fn step_of(line: &[u8]) -> Option<Option<u64>> {
    #[derive(serde::Deserialize)]
    struct Record {
        step: Option<Value>,
        #[serde(flatten)]
        _rest: std::collections::BTreeMap<String, IgnoredAny>,
    }
    let record: Record = serde_json::from_slice(line).ok()?;
    Some(record.step.and_then(|step| step.as_u64()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(content: &str, step: u64, expected: &str, truncated: (u64, u64, bool)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, content).unwrap();
        let found = JsonlWriter::truncate_after(&path, step).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
        let steps = expected.lines().filter_map(|line| step_of(line.as_bytes())?);
        assert_eq!(found.step_max, steps.max());
        let found = (found.lines_kept, found.lines_dropped, found.dropped_torn_line);
        assert_eq!(found, truncated);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn truncation() {
        let three = "{\"step\":1}\n{\"step\":2,\"loss\":\"NaN\"}\n{\"step\":3}\n";
        check(three, 3, three, (3, 0, false));
        check(three, 1, "{\"step\":1}\n", (1, 2, false));
        check(three, 0, "", (0, 3, false));
        check("", 9, "", (0, 0, false));
        check("{\"step\":1}\n{\"step\":2,\"lo", 5, "{\"step\":1}\n", (1, 0, true));
        check("{\"step\":1}\n{\"step\":2}", 5, "{\"step\":1}\n", (1, 0, true));
        check("{\"step\":1}\n\0\0\0\0", 5, "{\"step\":1}\n", (1, 0, true));
        check("{\"step\":1}\n\0\0\n", 5, "{\"step\":1}\n", (1, 0, true));
        // Evaluations of later steps are dropped, whatever their order; lines without a step are
        // kept.
        check(
            "{\"run\":\"a\"}\n{\"step\":9}\n{\"val_loss\":1.5,\"step\":2}\n",
            4,
            "{\"run\":\"a\"}\n{\"val_loss\":1.5,\"step\":2}\n",
            (2, 1, false),
        );
    }

    #[test]
    fn a_bad_line_in_the_middle_is_an_error_and_the_file_stays() {
        for bad in ["no json", "[1]", "{\"step\":1}{", ""] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("metrics.jsonl");
            let content = format!("{{\"step\":1}}\n{bad}\n{{\"step\":2}}\n");
            std::fs::write(&path, &content).unwrap();
            let error = JsonlWriter::truncate_after(&path, 1).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "`{}` line 2: expected a JSON object, got `{bad}`\nhint: the file was changed \
                     by something else; move it away to begin a new one",
                    path.display()
                )
            );
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
    }

    #[test]
    fn a_resumed_file_equals_one_that_was_never_cut() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &Path, steps: std::ops::RangeInclusive<u64>| {
            let mut writer = JsonlWriter::append(path, FlushPolicy::EveryRecord).unwrap();
            for step in steps {
                let loss = (step as f64).sqrt().recip();
                writer.write(&json!({"step": step, "loss": loss})).unwrap();
            }
            writer.sync().unwrap();
        };
        let whole = folder.path().join("whole");
        let resumed = folder.path().join("resumed");
        write(&whole, 1..=20);
        write(&resumed, 1..=13);
        JsonlWriter::truncate_after(&resumed, 8).unwrap();
        write(&resumed, 9..=20);
        assert_eq!(std::fs::read(&whole).unwrap(), std::fs::read(&resumed).unwrap());
    }

    #[test]
    fn the_policy_decides_when_records_show() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let lines = || std::fs::read_to_string(&path).unwrap().lines().count();
        let mut writer = JsonlWriter::create(&path, FlushPolicy::EveryRecords(3)).unwrap();
        let seen: Vec<usize> = (1..=7)
            .map(|step| {
                writer.write(&json!({"step": step})).unwrap();
                lines()
            })
            .collect();
        assert_eq!(seen, [0, 0, 3, 3, 3, 6, 6]);
        writer.flush().unwrap();
        assert_eq!(lines(), 7);
        let mut writer = JsonlWriter::create(&path, FlushPolicy::EveryRecord).unwrap();
        assert_eq!(lines(), 0, "`create` begins anew");
        writer.write(&json!({"step": 1})).unwrap();
        assert_eq!(lines(), 1);
    }

    #[test]
    fn a_missing_file_has_nothing_to_truncate() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        assert_eq!(JsonlWriter::truncate_after(&path, 3).unwrap(), Truncated::default());
        assert!(!path.exists());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_one_clear_error() {
        let full = Path::new("/dev/full");
        let mut writer = JsonlWriter::append(full, FlushPolicy::EveryRecord).unwrap();
        let error = writer.write(&json!({"step": 1})).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot write `/dev/full`: No space left on device (os error 28)"
        );
    }
}
