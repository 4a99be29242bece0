//! Degrees of parallelism after a change of the world size.
//!
//! A resumed run keeps its degrees if they divide the new number of ranks; only the data-parallel
//! degree changes. Otherwise new degrees are chosen by the least predicted step time. The number of
//! sequences per step stays the same.

use deepwell_ir::Graph;
use deepwell_plan::Parallel;
use deepwell_probe::Hardware;

use crate::world::Lowered;
use crate::{CompileOptions, Settings, TrainError};

impl Settings {
    /// Whether the degrees match the ranks and divide the sequences of a step. A resumed run whose
    /// degrees do not, chooses others.
    pub fn degrees_fit_ranks(&self) -> bool {
        let parallel = self.parallel();
        let is_whole = parallel.world_size() == self.ranks;
        is_whole
            && parallel.check().is_ok()
            && self.batch_size.is_multiple_of(parallel.batch_ranks())
    }
}

/// Returns the largest divisor of a micro-batch of `given` sequences that the ranks of the settings
/// can run: it divides the sequences of each rank, and an interleaved schedule gets a multiple of
/// its stages in micro-batches. None if no divisor fits.
pub(crate) fn micro_batch(settings: &Settings, given: usize) -> Option<usize> {
    let parallel = settings.parallel();
    let rows = settings.batch_size / parallel.batch_ranks().max(1);
    let fits = |part: &usize| {
        let is_part = given.is_multiple_of(*part) && rows.is_multiple_of(*part);
        let has_turns = parallel.chunks == 1 || (rows / part).is_multiple_of(parallel.pipeline);
        is_part && has_turns
    };
    (1..=given.min(rows)).rev().find(fits)
}

fn divisors(of: usize) -> impl DoubleEndedIterator<Item = usize> {
    (1..=of).filter(move |it| of.is_multiple_of(*it))
}

/// The settings with all degrees that match their ranks, least model-parallel first: [`choose`]
/// prefers an earlier candidate unless a later one is faster.
pub(crate) fn candidates(settings: &Settings) -> Vec<Settings> {
    let ranks = settings.ranks;
    // Largest degrees of expert and context parallelism first: the loop keeps the first that fits.
    let most_first = |degree: usize| divisors(degree.max(1)).rev().collect::<Vec<_>>();
    let experts = most_first(settings.expert);
    let contexts = most_first(settings.context);
    let both = |&context: &usize| experts.iter().map(move |&expert| (context, expert));
    let beside: Vec<(usize, usize)> = contexts.iter().flat_map(both).collect();
    let mut candidates = Vec::new();
    for split in divisors(ranks) {
        for tensor in divisors(split) {
            for &(context, expert) in &beside {
                let pipeline = split / tensor;
                let other = Settings {
                    tensor,
                    context,
                    pipeline,
                    expert,
                    chunks: 1,
                    pipeline_schedule: Default::default(),
                    pp_layers: None,
                    ..settings.clone()
                };
                if other.degrees_fit_ranks() {
                    candidates.push(other);
                    break;
                }
            }
        }
    }
    candidates
}

/// Returns settings with degrees for their ranks, and a note for the user.
///
/// # Errors
/// No degrees let the ranks share the model.
pub(crate) fn choose(
    settings: &Settings,
    graph: &Graph,
    hardware: &Hardware,
    options: &dyn Fn(&Settings) -> CompileOptions,
) -> Result<(Settings, String), TrainError> {
    let mut best: Option<(f64, Settings)> = None;
    let mut refused = Vec::new();
    let candidates = candidates(settings);
    for candidate in &candidates {
        let lowered = Lowered::of(graph.clone(), hardware.clone(), &options(candidate));
        match lowered.map(|it| it.step_s()) {
            Ok(time_s) if best.as_ref().is_none_or(|(least_s, _)| time_s < *least_s) => {
                best = Some((time_s, candidate.clone()));
            }
            Ok(_) => {}
            Err(error) => refused.push(format!("{}: {error}", candidate.parallel())),
        }
    }
    let (ranks, sequences) = (settings.ranks, settings.batch_size);
    let Some((time_s, chosen)) = best else {
        return Err(TrainError::Setting {
            setting: "ranks",
            expected: format!(
                "as many as can share the model and the {sequences} sequences of a step"
            ),
            got: match refused.is_empty() {
                true => ranks.to_string(),
                false => format!("{ranks} ({})", refused.join("; ")),
            },
            hint: Some("go on with other `--devices`".to_string()),
        });
    };
    let former = Parallel { data: 1, ..settings.parallel() }.to_string();
    let former = former.strip_prefix("data 1, ").unwrap_or("data-parallel ranks");
    let told = format!(
        "note: {ranks} ranks cannot go on as {former} with {sequences} sequences of a step: they \
         are {} now, which takes least of the {} ways there are ({:.3} ms predicted)",
        chosen.parallel(),
        candidates.len() - refused.len(),
        time_s * 1e3
    );
    Ok((chosen, told))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn degrees_that_make_up_the_ranks() {
        let check = |ranks, batch_size, tensor, expected: &[&str]| {
            let settings = Settings { ranks, batch_size, tensor, ..Settings::default() };
            let options: Vec<String> =
                candidates(&settings).iter().map(|it| it.parallel().to_string()).collect();
            assert_eq!(options, expected, "{ranks} ranks, {batch_size} sequences");
            assert_eq!(
                settings.degrees_fit_ranks(),
                ranks % tensor == 0 && batch_size % (ranks / tensor) == 0
            );
        };
        check(1, 4, 2, &["data 1"]);
        check(2, 4, 2, &["data 2", "data 1, pipeline 2", "data 1, tensor 2"]);
        check(3, 12, 2, &["data 3", "data 1, pipeline 3", "data 1, tensor 3"]);
        // Three ranks cannot split four sequences, except as pipeline stages or tensor slices.
        check(3, 4, 2, &["data 1, pipeline 3", "data 1, tensor 3"]);
        // Context-parallel ranks stay if the degree divides the ranks.
        let joined = |settings: Settings| {
            let options: Vec<String> =
                candidates(&settings).iter().map(|it| it.parallel().to_string()).collect();
            options.join("; ")
        };
        let contexts = |ranks, context| {
            joined(Settings { ranks, batch_size: 12, context, ..Settings::default() })
        };
        assert_eq!(contexts(3, 2), "data 3; data 1, pipeline 3; data 1, tensor 3");
        assert_eq!(contexts(2, 2), "data 2, context 2; data 1, pipeline 2; data 1, tensor 2");
        assert_eq!(contexts(2, 4), "data 2, context 2; data 1, pipeline 2; data 1, tensor 2");
        // So do expert-parallel ranks.
        let experts = |ranks, expert| {
            joined(Settings { ranks, batch_size: 12, expert, ..Settings::default() })
        };
        assert_eq!(experts(1, 4), "data 1");
        assert_eq!(
            experts(2, 4),
            "data 2, expert 2; data 1, pipeline 2; data 1, tensor 2, expert 2"
        );
        assert_eq!(experts(3, 4), "data 3; data 1, pipeline 3; data 1, tensor 3");
        check(
            4,
            6,
            1,
            &[
                "data 2, pipeline 2",
                "data 2, tensor 2",
                "data 1, pipeline 4",
                "data 1, tensor 2, pipeline 2",
                "data 1, tensor 4",
            ],
        );
    }

    #[test]
    fn micro_batches_become_what_fits_the_ranks() {
        let check = |[ranks, pipeline, chunks]: [usize; 3], given, expected| {
            let settings =
                Settings { ranks, pipeline, chunks, batch_size: 8, ..Settings::default() };
            assert_eq!(micro_batch(&settings, given), expected, "{ranks} {pipeline} {chunks}");
        };
        check([1, 1, 1], 8, Some(8));
        check([2, 1, 1], 8, Some(4));
        check([4, 1, 1], 4, Some(2));
        check([1, 1, 1], 6, Some(2));
        check([1, 1, 1], 3, Some(1));
        check([2, 2, 1], 8, Some(8));
        // Interleaved stages take turns.
        check([2, 2, 2], 8, Some(4));
        check([8, 2, 2], 8, Some(1));
        check([16, 2, 2], 8, None);
    }
}
