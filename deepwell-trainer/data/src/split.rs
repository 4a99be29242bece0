//! Selects the held-out documents.
//!
//! Documents are ranked by the blake3 hash of their name. In this order, documents are held out
//! until the held-out part has 5 % of the bytes and the requested number of tokens. A document that
//! would push the held-out part over half of all bytes stays in the training part. The choice
//! therefore depends only on names and sizes, and adding or removing a few files moves few other
//! files.

use serde::{Deserialize, Serialize};

use super::source::Document;

/// The two parts of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// The training data.
    Train,
    /// Data never seen in training.
    Heldout,
}

impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Split::Train => "training",
            Split::Heldout => "held-out",
        })
    }
}

/// Share of held-out data: 1 in this number.
pub(crate) const HELDOUT_ONE_IN: u64 = 20;

/// Method of splitting the data.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// By document: candidates for the held-out part in ranked order.
    Ranked(Vec<usize>),
    /// By name: the inputs given as held-out, or token files named as validation data, such as
    /// `fineweb_val_000000.bin`.
    Named(Vec<usize>),
    /// By position in the tokens, because the data cannot be split by document.
    Position,
}

/// Ranks the documents.
pub(crate) fn choose(documents: &[Document]) -> Choice {
    let is_given = documents.iter().any(|document| document.is_heldout);
    let is_named = |document: &Document| match is_given {
        true => document.is_heldout,
        false => is_named_heldout(document),
    };
    let named: Vec<usize> = (0..documents.len()).filter(|&i| is_named(&documents[i])).collect();
    if is_given || !named.is_empty() && named.len() < documents.len() {
        return Choice::Named(named);
    }
    let mut ranked: Vec<([u8; 32], usize)> = documents
        .iter()
        .enumerate()
        .map(|(i, document)| (*blake3::hash(document.split_key.as_bytes()).as_bytes(), i))
        .collect();
    ranked.sort_unstable();
    let ranked: Vec<usize> = ranked.into_iter().map(|(_, i)| i).collect();

    // Sizes alone decide whether whole documents can make up 5 % without exceeding half.
    let bytes_total = total(documents);
    let mut heldout = HeldoutBytes::new(bytes_total);
    for &i in &ranked {
        if heldout.has_share() {
            break;
        }
        heldout.take_if_it_fits(documents[i].bytes);
    }
    if heldout.has_share() { Choice::Ranked(ranked) } else { Choice::Position }
}

/// Bytes of all documents.
pub(crate) fn total(documents: &[Document]) -> u64 {
    documents.iter().map(|document| document.bytes).sum()
}

fn is_named_heldout(document: &Document) -> bool {
    let file = document.name.rsplit('/').next().unwrap_or_default();
    let stem = file.strip_suffix(".bin");
    stem.is_some_and(|stem| stem.split(['_', '-', '.']).any(|word| word == "val"))
}

/// Counts the bytes held out so far.
pub(crate) struct HeldoutBytes {
    taken: u64,
    total: u64,
}

impl HeldoutBytes {
    pub(crate) fn new(total: u64) -> Self {
        Self { taken: 0, total }
    }

    /// Whether at least one document and 5 % of the bytes are held out.
    pub(crate) fn has_share(&self) -> bool {
        self.taken > 0 && self.taken >= self.total / HELDOUT_ONE_IN
    }

    /// Holds out a document, unless less than half of the bytes would remain for training.
    pub(crate) fn take_if_it_fits(&mut self, bytes: u64) -> bool {
        let fits = self.taken + bytes <= self.total / 2;
        if fits {
            self.taken += bytes;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Format;

    fn documents(sizes: &[(&str, u64)]) -> Vec<Document> {
        sizes
            .iter()
            .map(|&(name, bytes)| Document {
                name: name.to_owned(),
                split_key: name.to_owned(),
                path: name.into(),
                format: Format::Text,
                compression: crate::compressed::Compression::None,
                records: 1,
                chats: 0,
                is_heldout: false,
                bytes,
                hash: blake3::hash(name.as_bytes()),
            })
            .collect()
    }

    #[test]
    fn choices() {
        let check = |sizes: &[(&str, u64)], expected: Choice| {
            assert_eq!(choose(&documents(sizes)), expected);
        };
        check(&[("one", 1000)], Choice::Position);
        check(&[("small", 1), ("large", 1000)], Choice::Position);
        check(
            &[("train_val.txt", 10), ("b", 10)],
            choose(&documents(&[("train_val.txt", 1), ("b", 1)])),
        );
        check(
            &[("tiny_train.bin", 900), ("tiny_val.bin", 1), ("interval.bin", 3)],
            Choice::Named(vec![1]),
        );
        check(&[("a_val.bin", 9)], Choice::Position);
    }

    #[test]
    fn the_rank_depends_on_the_names_alone() {
        let names: Vec<String> = (0..100).map(|i| format!("file {i}")).collect();
        let sizes: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 10)).collect();
        let Choice::Ranked(ranked) = choose(&documents(&sizes)) else { panic!("by document") };
        let ranked: Vec<&str> = ranked.into_iter().map(|i| sizes[i].0).collect();
        let mut reversed = sizes.clone();
        reversed.reverse();
        let Choice::Ranked(again) = choose(&documents(&reversed)) else { panic!("by document") };
        assert_eq!(ranked, again.into_iter().map(|i| reversed[i].0).collect::<Vec<_>>());
        // Pins the ranking: a change would silently alter every held-out part.
        assert_eq!(ranked[..3], PINNED);
    }
    const PINNED: [&str; 3] = ["file 44", "file 14", "file 46"];

    #[test]
    fn half_of_the_bytes_stay_for_training() {
        let mut heldout = HeldoutBytes::new(100);
        assert!(!heldout.take_if_it_fits(51));
        assert!(!heldout.has_share());
        assert!(heldout.take_if_it_fits(4));
        assert!(!heldout.has_share());
        assert!(heldout.take_if_it_fits(46));
        assert!(heldout.has_share());
        assert!(!heldout.take_if_it_fits(1));
    }
}
