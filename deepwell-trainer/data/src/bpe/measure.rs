//! Measures a tokenizer on held-out text.

use rayon::prelude::*;

use super::super::{DataError, Progress, Stage, Tokenizer};
use super::corpus_splits::{CorpusSlice, Extent};

/// Enough to know bytes per token to three digits, and a few seconds at most.
const MEASURED_BYTES_MAX: u64 = 16 << 20;

/// Result of tokenizing a held-out text.
pub(super) struct Measured {
    pub(super) extent: Extent,
    pub(super) tokens: u64,
}

/// Tokenizes `heldout`, or its first [`MEASURED_BYTES_MAX`] bytes, and decodes the tokens, which
/// must give the same text.
pub(super) fn measure(
    heldout: &CorpusSlice<'_>,
    tokenizer: &Tokenizer,
    progress: &mut dyn FnMut(Progress),
) -> Result<Measured, DataError> {
    let slice = heldout.up_to(MEASURED_BYTES_MAX);
    let bytes_total = slice.bytes();
    let (mut tokens, mut bytes_done) = (0, 0);
    let extent = slice.read(&mut |group| {
        progress(Progress { stage: Stage::Tokenize, bytes_done, bytes_total });
        let counts: Vec<Result<u64, DataError>> = group
            .par_iter()
            .map(|piece| {
                let name = &piece.document.name;
                let tokens = tokenizer.encode(name, &piece.data)?;
                if tokenizer.decode(name, &tokens)? != piece.data {
                    return Err(DataError::RoundTrip { name: name.clone() });
                }
                Ok(tokens.len() as u64)
            })
            .collect();
        for count in counts {
            tokens += count?;
        }
        bytes_done += group.iter().map(|piece| piece.data.len() as u64).sum::<u64>();
        Ok(())
    })?;
    progress(Progress { stage: Stage::Tokenize, bytes_done, bytes_total });
    Ok(Measured { extent, tokens })
}
