//! What a tokenizer was made of and what it does, as a table for people and a record for programs.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use super::super::Skipped;
use super::super::summary::grouped;

/// What [`train`](super::train) made. `Display` prints a small table.
#[derive(Clone, Debug, Serialize)]
pub struct BpeSummary {
    /// The file.
    pub path: PathBuf,
    /// The inputs, for people.
    pub source: String,
    /// Files that were passed over, by reason.
    pub skipped: Skipped,
    /// Files of text in all.
    pub files: u64,
    /// Files that were learned from.
    pub files_train: u64,
    /// Bytes that were learned from.
    pub bytes_train: u64,
    /// Different words among them.
    pub distinct_words: u64,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// Tokens that were asked for.
    pub vocab_size_asked: u32,
    /// How often a pair had to come to be merged.
    pub min_frequency: u64,
    /// Rules that make one token of two.
    pub merges: u32,
    /// Name of the token that ends a text; its number is 0.
    pub end_of_text: String,
    /// Files of the part that it was measured on and did not learn from.
    pub files_heldout: u64,
    /// Bytes of that part; as many tokens at byte level.
    pub bytes_heldout: u64,
    /// Tokens of that part.
    pub tokens_heldout: u64,
    /// Bytes of that part over its tokens, 1 at byte level; `None` if it is empty.
    pub bytes_per_token: Option<f64>,
    /// blake3 of the file, in hexadecimal.
    pub hash: String,
    /// Where the time went.
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
    /// Tokenizing the part that was kept aside, and writing the file.
    pub measure_s: f64,
    /// All of it.
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
