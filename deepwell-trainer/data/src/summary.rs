//! Contents of a data set, as a readable table and a machine-readable record.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use super::Skipped;

/// Contents of a data set. `Display` prints a small table.
#[derive(Clone, Debug, Serialize)]
pub struct DatasetSummary {
    /// The inputs, as readable text.
    pub source: String,
    /// Files in all.
    pub files: u64,
    /// Files of the training part (1 for a single file split by position).
    pub files_train: u64,
    /// Files of the held-out part (1 for a single file split by position).
    pub files_heldout: u64,
    /// Documents of all files, where a file has several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records: Option<u64>,
    /// Number of these records that are conversations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversations: Option<u64>,
    /// Bytes of text, or of tokens without file headers.
    pub bytes: u64,
    /// Tokens of the training part.
    pub tokens_train: u64,
    /// Tokens of the held-out part.
    pub tokens_heldout: u64,
    /// Tokens of the training part that count in the loss: all tokens except in conversations.
    pub targets_train: u64,
    /// Tokens of the held-out part that count in the loss.
    pub targets_heldout: u64,
    /// Every token is below this.
    pub vocab_size: u64,
    /// Name of the tokenizer, as text.
    pub tokenizer: String,
    /// Skipped files, by reason.
    pub skipped: Skipped,
    /// Names of skipped files, by reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped_files: BTreeMap<String, Vec<String>>,
    /// Notes for the user, each a sentence without its full stop.
    pub notes: Vec<String>,
    /// blake3 of all names and contents, in hexadecimal.
    pub content_hash: String,
    /// Folder of the token cache.
    pub cache_dir: PathBuf,
    /// True if the tokens were in the cache already.
    pub is_from_cache: bool,
}

impl DatasetSummary {
    /// Text that says how often a run of `steps` steps of `tokens_per_step` tokens reads the
    /// training part.
    pub fn epochs(&self, steps: u64, tokens_per_step: u64) -> String {
        let tokens = steps.saturating_mul(tokens_per_step);
        let epochs = tokens as f64 / self.tokens_train.max(1) as f64;
        let digits = if epochs < 0.095 { 4 } else { 2 };
        format!("{} tokens in {steps} steps, {epochs:.digits$} epochs", grouped(tokens))
    }
}

impl fmt::Display for DatasetSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, value: String| {
            writeln!(f, "  {name:<10}{value}")
        };
        writeln!(f, "data")?;
        row(f, "source", self.source.clone())?;
        let megabytes = self.bytes as f64 / 1e6;
        let records = match (self.records, self.conversations) {
            (Some(all), Some(chats)) if all == chats => format!(", {} conversations", grouped(all)),
            (Some(all), Some(chats)) => {
                format!(", {} documents, of which {} conversations", grouped(all), grouped(chats))
            }
            (Some(all), None) => format!(", {} documents", grouped(all)),
            (None, _) => String::new(),
        };
        row(f, "files", format!("{}{records}, {megabytes:.2} MB", grouped(self.files)))?;
        let unit = if self.records.is_some() { "document" } else { "file" };
        for (name, tokens, targets, files) in [
            ("training", self.tokens_train, self.targets_train, self.files_train),
            ("held-out", self.tokens_heldout, self.targets_heldout, self.files_heldout),
        ] {
            let plural = if files == 1 { "" } else { "s" };
            let mut value =
                format!("{} tokens of {} {unit}{plural}", grouped(tokens), grouped(files));
            if targets < tokens {
                value += &format!(", {} of them targets", grouped(targets));
            }
            row(f, name, value)?;
        }
        row(f, "tokens", format!("{}, vocabulary {}", self.tokenizer, grouped(self.vocab_size)))?;
        if self.skipped.total() > 0 {
            row(f, "skipped", self.skipped.to_string())?;
        }
        row(f, "hash", self.content_hash.chars().take(16).collect())?;
        let state = if self.is_from_cache { "found" } else { "written" };
        row(f, "cache", format!("`{}`, {state}", self.cache_dir.display()))?;
        for note in &self.notes {
            row(f, "note", note.clone())?;
        }
        Ok(())
    }
}

/// A number with a comma after every third digit from the right.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SkipReason;

    #[test]
    fn grouping() {
        for (number, expected) in
            [(0, "0"), (999, "999"), (1000, "1,000"), (65_536, "65,536"), (1_234_567, "1,234,567")]
        {
            assert_eq!(grouped(number), expected);
        }
    }

    #[test]
    fn the_table_and_the_record_say_the_same() {
        let mut skipped = Skipped::default();
        for name in ["a", "b", "c", "d"] {
            skipped.add(SkipReason::Binary, name);
        }
        skipped.add(SkipReason::Hidden, ".git");
        let summary = DatasetSummary {
            source: "`text`".to_owned(),
            files: 1201,
            files_train: 1200,
            files_heldout: 1,
            bytes: 12_345_678,
            tokens_train: 11_000_000,
            tokens_heldout: 98_304,
            vocab_size: 256,
            tokenizer: "byte level".to_owned(),
            records: None,
            conversations: None,
            targets_train: 11_000_000,
            targets_heldout: 98_304,
            skipped_files: skipped.names(),
            skipped,
            notes: vec!["a note".to_owned()],
            content_hash: "0123456789abcdef0123".to_owned(),
            cache_dir: "cache".into(),
            is_from_cache: false,
        };
        insta::assert_snapshot!(summary.to_string(), @r"
        data
          source    `text`
          files     1,201, 12.35 MB
          training  11,000,000 tokens of 1,200 files
          held-out  98,304 tokens of 1 file
          tokens    byte level, vocabulary 256
          skipped   1 hidden (`.git`), 4 binary (`a`, `b`, `c`, …)
          hash      0123456789abcdef
          cache     `cache`, written
          note      a note
        ");
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["skipped"], serde_json::json!({"hidden": 1, "binary": 4}));
        assert_eq!(json["skipped_files"]["hidden"], serde_json::json!([".git"]));
        assert_eq!(json["tokens_heldout"], 98_304);
        assert_eq!(summary.epochs(100, 1024), "102,400 tokens in 100 steps, 0.0093 epochs");
        assert_eq!(summary.epochs(10_000, 4096), "40,960,000 tokens in 10000 steps, 3.72 epochs");
    }
}
