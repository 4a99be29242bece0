//! Degrees for the ranks that are left.
//!
//! A run that goes on with other ranks keeps its degrees where they divide them: data-parallel
//! ranks are then as many as there is room for. Where they do not, the degrees are chosen anew, the
//! ones whose step is predicted to take the least time. A step keeps its sequences.

use deepwell_ir::Graph;
use deepwell_plan::Parallel;
use deepwell_probe::Hardware;

use crate::{CompileOptions, Settings, TrainError, World};

/// Whether the ranks of the settings can have their degrees and share the sequences of a step.
pub(crate) fn fits(settings: &Settings) -> bool {
    let parallel = settings.parallel();
    let is_whole = parallel.world_size() == settings.ranks;
    is_whole
        && parallel.check().is_ok()
        && settings.batch_size.is_multiple_of(parallel.batch_ranks())
}

/// The settings with degrees that make up their ranks, least split first: another way is taken only
/// where it is faster.
pub(crate) fn candidates(settings: &Settings) -> Vec<Settings> {
    let ranks = settings.ranks;
    let divisors = |of: usize| (1..=of).filter(move |it| of.is_multiple_of(*it));
    let or_one = |degree: usize| if degree > 1 { vec![degree, 1] } else { vec![1] };
    let (experts, contexts) = (or_one(settings.expert), or_one(settings.context));
    let both = |&context: &usize| experts.iter().map(move |&expert| (context, expert));
    let beside: Vec<(usize, usize)> = contexts.iter().flat_map(both).collect();
    let mut found = Vec::new();
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
                if fits(&other) {
                    found.push(other);
                    break;
                }
            }
        }
    }
    found
}

/// Settings with degrees for their ranks, and what to tell users.
///
/// # Errors
/// Ranks that cannot share the model in any way.
pub(crate) fn choose(
    settings: &Settings,
    graph: &Graph,
    hardware: &Hardware,
    options: &dyn Fn(&Settings) -> Result<CompileOptions, TrainError>,
) -> Result<(Settings, String), TrainError> {
    let mut best: Option<(f64, Settings)> = None;
    let mut refused = Vec::new();
    let candidates = candidates(settings);
    for candidate in &candidates {
        let predicted =
            options(candidate).and_then(|it| World::predict(graph.clone(), hardware.clone(), &it));
        match predicted {
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
            let found: Vec<String> =
                candidates(&settings).iter().map(|it| it.parallel().to_string()).collect();
            assert_eq!(found, expected, "{ranks} ranks, {batch_size} sequences");
            assert_eq!(fits(&settings), ranks % tensor == 0 && batch_size % (ranks / tensor) == 0);
        };
        check(1, 4, 2, &["data 1"]);
        check(2, 4, 2, &["data 2", "data 1, pipeline 2", "data 1, tensor 2"]);
        check(3, 12, 2, &["data 3", "data 1, pipeline 3", "data 1, tensor 3"]);
        // Three ranks cannot share four sequences, but for one stage or slice each.
        check(3, 4, 2, &["data 1, pipeline 3", "data 1, tensor 3"]);
        // Those that split sequences do so where they make up the ranks.
        let contexts = |ranks| {
            let settings = Settings { ranks, batch_size: 12, context: 2, ..Settings::default() };
            let found: Vec<String> =
                candidates(&settings).iter().map(|it| it.parallel().to_string()).collect();
            found.join("; ")
        };
        assert_eq!(contexts(3), "data 3; data 1, pipeline 3; data 1, tensor 3");
        assert_eq!(contexts(2), "data 2, context 2; data 1, pipeline 2; data 1, tensor 2");
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
}
