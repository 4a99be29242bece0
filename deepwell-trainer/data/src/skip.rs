//! Skipped files, with reasons.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

/// Reason why a file or folder is not part of the corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum SkipReason {
    /// The name starts with a dot. A hidden folder counts once.
    Hidden,
    /// The file contains a zero byte, so it is not text.
    Binary,
    /// The file is not UTF-8, which the tokenizer needs.
    NotUtf8,
    /// The file is empty.
    Empty,
    /// A pipe, a socket or a device.
    NotRegular,
    /// A symbolic link to a folder, which could form a cycle.
    LinkToFolder,
    /// The file was reached twice, for example by name and in a folder.
    NamedTwice,
    /// The file is generated (default corpus only).
    Generated,
    /// The package has reached its limit of text (default corpus only).
    OverPackageLimit,
    /// Another file has the same content (default corpus only).
    Copy,
    /// A container of text, for example a zip archive.
    Container(&'static str),
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
            SkipReason::Container(format) => format,
        })
    }
}

/// The skipped files, by reason. Serializes as an object from reason to count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    names: BTreeMap<SkipReason, Vec<String>>,
}

/// Number of files named for each reason in printed output.
const NAMED_MAX: usize = 3;

impl Skipped {
    pub(crate) fn add(&mut self, reason: SkipReason, name: impl Into<String>) {
        self.names.entry(reason).or_default().push(name.into());
    }

    /// Number of files skipped for this reason.
    pub fn count(&self, reason: SkipReason) -> u64 {
        self.names.get(&reason).map_or(0, |names| names.len() as u64)
    }

    /// Number of all skipped files.
    pub fn total(&self) -> u64 {
        self.names.values().map(|names| names.len() as u64).sum()
    }

    /// All names by reason, sorted. Files excluded by the rules of the default corpus are only
    /// counted.
    pub fn names(&self) -> BTreeMap<String, Vec<String>> {
        let is_rule = |reason: &SkipReason| {
            use SkipReason::{Copy, Generated, OverPackageLimit};
            matches!(reason, Copy | Generated | OverPackageLimit)
        };
        let named = self.names.iter().filter(|(reason, _)| !is_rule(reason));
        let sorted = |(reason, names): (&SkipReason, &Vec<String>)| {
            let mut names = names.clone();
            names.sort_unstable();
            (reason.to_string(), names)
        };
        named.map(sorted).collect()
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.names.is_empty() {
            return f.write_str("nothing was skipped");
        }
        for (i, (reason, names)) in self.names.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            let mut sorted: Vec<&String> = names.iter().collect();
            sorted.sort_unstable();
            let shown: Vec<String> =
                sorted.iter().take(NAMED_MAX).map(|name| format!("`{name}`")).collect();
            let more = if names.len() > NAMED_MAX { ", …" } else { "" };
            write!(f, "{comma}{} {reason} ({}{more})", names.len(), shown.join(", "))?;
        }
        Ok(())
    }
}

impl Serialize for Skipped {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let counts = self.names.iter().map(|(reason, names)| (reason.to_string(), names.len()));
        serializer.collect_map(counts)
    }
}
