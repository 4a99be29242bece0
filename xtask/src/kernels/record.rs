//! Writes the table of SASS without faults.

use std::path::Path;

use anyhow::Result;

use super::compile::Job;
use super::manifest::Manifest;
use super::proofs::{Proofs, SassProofs, write};

/// Writes the table anew: entries of `jobs` whose SASS in `manifest` has no fault. An entry
/// stays if its SASS was not compiled and its PTX is the same, or if its PTX was not compiled and
/// its source is the same.
pub(super) fn record<'a>(
    proofs: &SassProofs,
    root: &Path,
    jobs: impl Iterator<Item = &'a Job<'a>>,
    manifest: &Manifest,
    out: &Path,
) -> Result<()> {
    let mut recorded = Proofs::default();
    for job in jobs {
        let is_of_job = |stem: &str, architecture: Option<&str>| {
            stem == job.source.stem && architecture == Some(job.architecture)
        };
        let compiled = manifest
            .compiled
            .iter()
            .find(|compiled| is_of_job(&compiled.stem, Some(&compiled.architecture)));
        let mut failed = manifest.failed.iter();
        let has_failed = failed.any(|f| is_of_job(&f.stem, f.architecture.as_deref()));
        let (name, source) = (job.name(), job.source_digest());
        let digest = match (compiled, has_failed) {
            (_, true) => None,
            (Some(compiled), _) => {
                let is_right =
                    |digest: &String| compiled.cubin.is_some() || proofs.has(&name, digest);
                job.sass_digest(out).filter(is_right)
            }
            (None, _) => proofs.spared(&name, &source).cloned(),
        };
        if let Some(digest) = digest {
            recorded.add(&name, digest, source);
        }
    }
    write(root, &recorded)
}
