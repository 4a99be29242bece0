//! Detects token files among the inputs without reading whole files.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use super::skip::Skipped;
use super::source::Found;
use super::{bin, source};

/// Whether the inputs are token files, so that no tokenizer is needed: token files and text cannot
/// be mixed.
pub fn are_token_files(inputs: &[PathBuf]) -> bool {
    let candidates = source::list(inputs, &[], &mut Skipped::default()).unwrap_or_default();
    candidates.iter().any(|candidate| {
        let is_bin = candidate.path.extension().is_some_and(|extension| extension == "bin");
        if !is_bin || candidate.found != Found::InFolder {
            return is_bin;
        }
        let mut start = [0; 4];
        let read = File::open(&candidate.path).and_then(|mut file| file.read_exact(&mut start));
        read.is_ok() && bin::has_magic(&start)
    })
}
