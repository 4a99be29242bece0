//! What a data set is made of, as a table for people and a record for programs.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use super::Skipped;

/// What a data set is made of. `Display` prints a small table.
#[derive(Clone, Debug, Serialize)]
pub struct DatasetSummary {
    /// The inputs, for people.
    pub source: String,
    /// Files in all.
    pub files: u64,
    /// Files of the training part (1 if one file was split by position).
    pub files_train: u64,
    /// Files of the held-out part (1 if one file was split by position).
    pub files_heldout: u64,
    /// Bytes of text, or of tokens without file headers.
    pub bytes: u64,
    /// Tokens of the training part.
    pub tokens_train: u64,
    /// Tokens of the held-out part.
    pub tokens_heldout: u64,
    /// Every token is below this.
    pub vocab_size: u64,
    /// Which tokenizer, for people.
    pub tokenizer: String,
    /// Files that were passed over, by reason.
    pub skipped: Skipped,
    /// What the user should know, each a sentence without its full stop.
    pub notes: Vec<String>,
    /// blake3 of all names and contents, in hexadecimal.
    pub content_hash: String,
    /// Folder of the token cache.
    pub cache_dir: PathBuf,
    /// True if the tokens were in the cache already.
    pub is_from_cache: bool,
}

impl fmt::Display for DatasetSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, value: String| {
            writeln!(f, "  {name:<10}{value}")
        };
        writeln!(f, "data")?;
        row(f, "source", self.source.clone())?;
        let megabytes = self.bytes as f64 / 1e6;
        row(f, "files", format!("{}, {megabytes:.2} MB", grouped(self.files)))?;
        for (name, tokens, files) in [
            ("training", self.tokens_train, self.files_train),
            ("held-out", self.tokens_heldout, self.files_heldout),
        ] {
            let plural = if files == 1 { "file" } else { "files" };
            let value = format!("{} tokens of {} {plural}", grouped(tokens), grouped(files));
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
pub(crate) fn grouped(number: u64) -> String {
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
    use crate::data::SkipReason;

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
        skipped.add(SkipReason::Binary);
        skipped.add(SkipReason::Hidden);
        skipped.add(SkipReason::Binary);
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
          skipped   1 hidden, 2 binary
          hash      0123456789abcdef
          cache     `cache`, written
          note      a note
        ");
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["skipped"], serde_json::json!({"hidden": 1, "binary": 2}));
        assert_eq!(json["tokens_heldout"], 98_304);
    }
}
