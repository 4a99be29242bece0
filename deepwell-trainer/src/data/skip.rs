//! What was passed over while looking for text, and why.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

/// Why a file or folder is not part of the corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum SkipReason {
    /// Its name starts with a dot. A hidden folder counts once.
    Hidden,
    /// It holds a byte 0, so it is not text.
    Binary,
    /// It is not UTF-8, which the tokenizer needs.
    NotUtf8,
    /// It has no bytes.
    Empty,
    /// It is a pipe, a socket or a device.
    NotRegular,
    /// It is a symbolic link to a folder, which could lead in circles.
    LinkToFolder,
    /// It was reached twice, for example by its own name and by its folder.
    NamedTwice,
    /// A program wrote it (default corpus only).
    Generated,
    /// Its package already gave as much text as one package may (default corpus only).
    OverPackageLimit,
    /// Another file has the same content (default corpus only).
    Copy,
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SkipReason::Hidden => "hidden",
            SkipReason::Binary => "binary",
            SkipReason::NotUtf8 => "not UTF-8",
            SkipReason::Empty => "empty",
            SkipReason::NotRegular => "not a regular file",
            SkipReason::LinkToFolder => "link to a folder",
            SkipReason::NamedTwice => "named twice",
            SkipReason::Generated => "generated",
            SkipReason::OverPackageLimit => "over the limit of their package",
            SkipReason::Copy => "copy of another file",
        })
    }
}

/// How many files were passed over, by reason. Serializes as an object from reason to count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    counts: BTreeMap<SkipReason, u64>,
}

impl Skipped {
    pub(crate) fn add(&mut self, reason: SkipReason) {
        *self.counts.entry(reason).or_default() += 1;
    }

    /// How many were passed over for this reason.
    pub fn count(&self, reason: SkipReason) -> u64 {
        self.counts.get(&reason).copied().unwrap_or(0)
    }

    /// How many were passed over in all.
    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.counts.is_empty() {
            return f.write_str("nothing was skipped");
        }
        for (i, (reason, count)) in self.counts.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{count} {reason}")?;
        }
        Ok(())
    }
}

impl Serialize for Skipped {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer
            .collect_map(self.counts.iter().map(|(reason, count)| (reason.to_string(), count)))
    }
}
