//! Origin and quality of a trained tokenizer, as a readable table and a machine-readable record.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use super::super::Skipped;
use super::super::summary::grouped;

/// Result of [`train`](super::train). `Display` prints a small table.
#[derive(Clone, Debug, Serialize)]
pub struct BpeSummary {
    /// The file.
    pub path: PathBuf,
    /// The inputs, as readable text.
    pub source: String,
    /// Skipped files, by reason.
    pub skipped: Skipped,
    /// Files of text in all.
    pub files: u64,
    /// Number of training files.
    pub files_train: u64,
    /// Number of training bytes.
    pub bytes_train: u64,
    /// Number of distinct words in the training text.
    pub distinct_words: u64,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// Requested size of the vocabulary.
    pub vocab_size_asked: u32,
    /// Minimum number of occurrences of a merged pair.
    pub min_frequency: u64,
    /// Number of merge rules.
    pub merges: u32,
    /// Name of the end-of-text token, token 0.
    pub end_of_text: String,
    /// Number of held-out files, used for the measurement only.
    pub files_heldout: u64,
    /// Held-out bytes; also the number of tokens at byte level.
    pub bytes_heldout: u64,
    /// Held-out tokens.
    pub tokens_heldout: u64,
    /// Held-out bytes per token, 1 at byte level; `None` without held-out text.
    pub bytes_per_token: Option<f64>,
    /// blake3 of the file, in hexadecimal.
    pub hash: String,
    /// Elapsed times.
    pub times: BpeTimes,
}

/// Wall time in seconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct BpeTimes {
    /// Finding and hashing the files.
    pub scan_s: f64,
    /// Counting words.
    pub count_s: f64,
    /// Learning merges.
    pub merge_s: f64,
    /// Seconds to tokenize the held-out text and write the file.
    pub measure_s: f64,
    /// Total seconds.
    pub total_s: f64,
}

impl fmt::Display for BpeSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, value: String| {
            writeln!(f, "  {name:<14}{value}")
        };
        let part = |bytes: u64, files: u64| {
            let plural = if files == 1 { "file" } else { "files" };
            let bytes = match bytes {
                0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
                _ => format!("{:.2} MB", bytes as f64 / 1e6),
            };
            format!("{bytes} of {} {plural}", grouped(files))
        };
        writeln!(f, "tokenizer `{}`", self.path.display())?;
        row(f, "source", self.source.clone())?;
        if self.skipped.total() > 0 {
            row(f, "skipped", self.skipped.to_string())?;
        }
        let words = grouped(self.distinct_words);
        let learned = part(self.bytes_train, self.files_train);
        row(f, "learned from", format!("{learned}, {words} different words"))?;
        let vocabulary = format!(
            "{}: `{}`, 256 bytes, {} merges",
            grouped(u64::from(self.vocab_size)),
            self.end_of_text,
            grouped(u64::from(self.merges))
        );
        row(f, "vocabulary", vocabulary)?;
        match self.bytes_per_token {
            Some(ratio) => {
                let heldout = part(self.bytes_heldout, self.files_heldout);
                let value = format!(
                    "{ratio:.3} bytes a token on {heldout}: {} tokens, {} at byte level",
                    grouped(self.tokens_heldout),
                    grouped(self.bytes_heldout)
                );
                row(f, "held-out", value)?;
            }
            None => row(f, "held-out", "nothing: there is too little text".to_owned())?,
        }
        let times = &self.times;
        let value = format!(
            "{:.1} s: {:.1} scanning, {:.1} counting, {:.1} merging, {:.1} measuring",
            times.total_s, times.scan_s, times.count_s, times.merge_s, times.measure_s
        );
        row(f, "time", value)?;
        row(f, "hash", self.hash.chars().take(16).collect())?;
        if self.vocab_size < self.vocab_size_asked {
            let value = format!(
                "{} tokens were asked for; no more pairs come {} or more times in the text",
                grouped(u64::from(self.vocab_size_asked)),
                self.min_frequency
            );
            row(f, "note", value)?;
        }
        Ok(())
    }
}
