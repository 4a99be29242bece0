//! Documents of a sequence: attention between them, and their bounds.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use deepwell_ir::ops::IGNORED_TARGET;
use serde::{Deserialize, Serialize};

use crate::TrainError;
use crate::data::Dataset;

/// Relation of the documents in a sequence.
///
/// A sequence is `seq_len` tokens of a stream of documents, each ended by the tokenizer's
/// end-of-text token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Documents {
    /// One text: a token attends to all earlier tokens, and the first token of a document is a
    /// target.
    #[default]
    Joined,
    /// Separate: attention does not cross into another document, learned positions restart in each
    /// document, and the first token of a document is not a target. In Megatron:
    /// `--reset-attention-mask --reset-position-ids --eod-mask-loss`.
    Masked,
}

impl fmt::Display for Documents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Documents::Joined => "joined",
            Documents::Masked => "masked",
        })
    }
}

impl FromStr for Documents {
    type Err = String;

    fn from_str(text: &str) -> Result<Documents, String> {
        match text {
            "joined" => Ok(Documents::Joined),
            "masked" => Ok(Documents::Masked),
            _ => Err(format!("expected `joined` or `masked`, got `{text}`")),
        }
    }
}

impl Documents {
    /// Returns the token that ends a document of `data`, if documents are masked.
    ///
    /// # Errors
    /// The data have no known end-of-document token.
    pub fn end(self, has_tokenizer: bool, data: &Dataset) -> Result<Option<i32>, TrainError> {
        if self == Documents::Joined {
            return Ok(None);
        }
        if data.ends_turns() {
            return Err(TrainError::Setting {
                setting: "documents",
                expected: "an end-of-text token that ends each document, and nothing within one"
                    .to_string(),
                got: "a chat template that ends each turn with it".to_string(),
                hint: Some("`--documents joined`".to_string()),
            });
        }
        let is_unknown = data.has_token_files() && !has_tokenizer;
        match data.separator().filter(|_| !is_unknown) {
            Some(end) => Ok(Some(end as i32)),
            None => Err(TrainError::Setting {
                setting: "documents",
                expected: "a tokenizer with an end-of-text token, which ends each document"
                    .to_string(),
                got: match is_unknown {
                    true => "token files without a tokenizer".to_string(),
                    false => "a tokenizer without one".to_string(),
                },
                hint: Some("`--tokenizer FILE`, or `--documents joined`".to_string()),
            }),
        }
    }
}

/// Start and end of each token's document in its sequence of `seq`, `[tokens, 2]`: a document ends
/// after each `end` token, and at the end of the sequence.
pub(crate) fn bounds(tokens: &[i32], seq: usize, end: i32) -> Vec<i32> {
    let mut bounds = vec![0; 2 * tokens.len()];
    for (tokens, bounds) in tokens.chunks(seq.max(1)).zip(bounds.chunks_mut(2 * seq.max(1))) {
        let mut begin = 0;
        for document in tokens.split_inclusive(|&token| token == end) {
            let behind = begin + document.len();
            for of_token in bounds[2 * begin..2 * behind].chunks_exact_mut(2) {
                of_token.copy_from_slice(&[begin as i32, behind as i32]);
            }
            begin = behind;
        }
    }
    bounds
}

/// Position of each token in its document, from [`bounds`] in sequences of `seq`.
pub(crate) fn positions(bounds: &[i32], seq: usize) -> Vec<i32> {
    let of_token = |(token, bounds): (usize, &[i32])| (token % seq) as i32 - bounds[0];
    bounds.chunks_exact(2).enumerate().map(of_token).collect()
}

/// Ignores the targets of `end` tokens, because they belong to the next document.
pub(crate) fn masked_targets<'a>(
    tokens: &[i32],
    targets: &'a [i32],
    end: Option<i32>,
) -> Cow<'a, [i32]> {
    let Some(end) = end.filter(|end| tokens.contains(end)) else { return Cow::Borrowed(targets) };
    let of = |(token, target): (&i32, &i32)| if *token == end { IGNORED_TARGET } else { *target };
    Cow::Owned(tokens.iter().zip(targets).map(of).collect())
}

/// Returns 1 over the number of counted targets.
pub(crate) fn loss_scale(targets: &[i32]) -> f32 {
    let counted = targets.iter().filter(|&&target| target != IGNORED_TARGET).count();
    1.0 / counted.max(1) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_end_behind_their_last_token_and_with_the_sequence() {
        for (tokens, seq, expected, places) in [
            (&[1, 2, 3, 4][..], 4, &[0, 4, 0, 4, 0, 4, 0, 4][..], &[0, 1, 2, 3][..]),
            (&[1, 0, 3, 4], 4, &[0, 2, 0, 2, 2, 4, 2, 4], &[0, 1, 0, 1]),
            // Empty documents, and a document that ends with the sequence.
            (&[0, 0, 3, 0], 4, &[0, 1, 1, 2, 2, 4, 2, 4], &[0, 0, 0, 1]),
            // No document continues in the next sequence.
            (&[1, 0, 3, 4], 2, &[0, 2, 0, 2, 0, 2, 0, 2], &[0, 1, 0, 1]),
            (&[5, 6, 0, 4], 2, &[0, 2, 0, 2, 0, 1, 1, 2], &[0, 1, 0, 0]),
            (&[], 2, &[], &[]),
        ] {
            let got = bounds(tokens, seq, 0);
            assert_eq!(got, expected, "{tokens:?} by {seq}");
            assert_eq!(positions(&got, seq), places, "{tokens:?} by {seq}");
        }
    }

    #[test]
    fn the_first_token_of_a_document_is_no_target() {
        let of = |end| masked_targets(&[1, 0, 3, 0], &[0, 3, 0, 7], end).into_owned();
        assert_eq!(of(Some(0)), [0, IGNORED_TARGET, 0, IGNORED_TARGET]);
        assert_eq!(of(Some(9)), [0, 3, 0, 7]);
        assert_eq!(of(None), [0, 3, 0, 7]);
    }
}
