//! The completed runs of one seed.

use super::options::RunKind;
use super::report::PairReport;
use super::runs::FinishedRun;
use super::verdict::{Pair, gap_at_end};

/// The completed runs of one seed.
pub(crate) struct SeedRuns {
    pub(crate) seed: u64,
    pub(crate) bf16: FinishedRun,
    pub(crate) low_precision: Option<FinishedRun>,
    pub(crate) control: Option<FinishedRun>,
}

impl SeedRuns {
    /// All runs of the seed.
    pub(super) fn all(&self) -> impl Iterator<Item = (RunKind, &FinishedRun)> {
        let low_precision = (RunKind::LowPrecision, self.low_precision.as_ref());
        let rest = [low_precision, (RunKind::Control, self.control.as_ref())];
        let rest = rest.into_iter().filter_map(|(kind, run)| Some((kind, run?)));
        std::iter::once((RunKind::Bf16, &self.bf16)).chain(rest)
    }

    pub(super) fn pair(&self) -> Option<Pair> {
        let low_precision = self.low_precision.as_ref()?.facts();
        let control = self.control.as_ref().map(FinishedRun::facts);
        Some(Pair { bf16: self.bf16.facts(), low_precision, control })
    }

    pub(super) fn report(&self) -> PairReport {
        let gap = |run: &FinishedRun| gap_at_end(&self.bf16.facts(), &run.facts());
        PairReport {
            seed: self.seed,
            bf16: self.bf16.report(),
            low_precision: self.low_precision.as_ref().map(FinishedRun::report),
            control: self.control.as_ref().map(FinishedRun::report),
            gap_rel: self.low_precision.as_ref().map(gap),
            control_gap_rel: self.control.as_ref().map(gap),
        }
    }
}
