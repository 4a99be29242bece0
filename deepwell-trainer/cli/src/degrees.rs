//! Flags for the degrees of parallelism.

use clap::Args;
use deepwell_plan::Parallel;
use deepwell_plan::schedule::PipelineSchedule;
use deepwell_trainer::TrainError;
use serde::Serialize;

/// How the ranks of `--devices` share a model. Serialized with the names of settings.
#[derive(Args, Clone, Debug, Default, Serialize)]
pub(crate) struct Degrees {
    /// Data-parallel ranks (with --cp, groups of ranks), which split the batch and sum gradients
    /// [default: all ranks that the other degrees leave]
    #[arg(long, value_name = "RANKS")]
    #[serde(skip)]
    pub(crate) dp: Option<usize>,
    /// ZeRO stage: 0 off, 1 shard optimizer state, 2 also gradients, 3 also weights [default: 0]
    #[arg(long, value_name = "STAGE")]
    pub(crate) zero: Option<u8>,
    /// Tensor-parallel ranks, which split each layer [default: 1]
    #[arg(long, value_name = "RANKS")]
    #[serde(rename = "tensor")]
    pub(crate) tp: Option<usize>,
    /// Context-parallel ranks, which split each sequence (ring attention); combines with all other
    /// degrees; not for models with position tables, expert capacities or router losses, nor for
    /// separate documents [default: 1]
    #[arg(long, value_name = "RANKS")]
    #[serde(rename = "context")]
    pub(crate) cp: Option<usize>,
    /// Pipeline stages, each with a part of the layers [default: 1]
    #[arg(long, value_name = "RANKS")]
    #[serde(rename = "pipeline")]
    pub(crate) pp: Option<usize>,
    /// Model chunks per pipeline stage; more than 1 for the interleaved schedule [default: 1, with
    /// --schedule interleaved 2]
    #[arg(long, value_name = "CHUNKS")]
    #[serde(skip)]
    pub(crate) vpp: Option<usize>,
    /// Pipeline schedule: 1f1b, interleaved, or zero-bubble (ZB-H1), which computes weight
    /// gradients while stages would wait; zero-bubble excludes --vpp above 1 [default: 1f1b, with
    /// --vpp interleaved]
    #[arg(long, value_name = "ORDER")]
    #[serde(skip)]
    pub(crate) schedule: Option<String>,
    /// Layers of each stage, such as 3,5; with --vpp layers of each chunk, first chunks of all
    /// stages first [default: balanced by FLOPs]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    pub(crate) pp_layers: Option<Vec<usize>>,
    /// Expert-parallel ranks, which split the experts; divides the ranks of a stage and combines
    /// with all other degrees [default: 1]
    #[arg(long, value_name = "RANKS")]
    #[serde(rename = "expert")]
    pub(crate) ep: Option<usize>,
}

impl Degrees {
    /// Returns the parallelism of `ranks` ranks with the requested degrees.
    ///
    /// # Errors
    /// As [`check_ranks`].
    pub(crate) fn of_ranks(&self, ranks: usize) -> Result<Parallel, TrainError> {
        let (chunks, schedule) = self.order()?;
        let pp = self.pp.or(self.pp_layers.as_ref().map(|it| it.len() / chunks.max(1)));
        let [tensor, pipeline, expert, context] =
            [self.tp, pp, self.ep, self.cp].map(|it| it.unwrap_or(1));
        let zero = self.zero.unwrap_or(0);
        let one = Parallel::default();
        let degrees = Parallel { zero, tensor, pipeline, chunks, expert, context, schedule, ..one };
        check_ranks(degrees, self.dp, ranks)
    }

    /// Returns the model chunks per stage, and the pipeline schedule.
    pub(crate) fn order(&self) -> Result<(usize, PipelineSchedule), TrainError> {
        let refuse = |setting, expected: &str, got: String| {
            let expected = expected.to_string();
            Err(TrainError::Setting { setting, expected, got, hint: None })
        };
        let whole = PipelineSchedule::OneFOneB;
        match (self.schedule.as_deref(), self.vpp) {
            (None, chunks) => Ok((chunks.unwrap_or(1), whole)),
            (Some("1f1b"), None | Some(1)) => Ok((1, whole)),
            (Some("1f1b"), Some(chunks)) => {
                refuse("vpp", "1 for 1f1b, as more are interleaved", chunks.to_string())
            }
            (Some("interleaved"), Some(1)) => {
                refuse("vpp", "at least 2 for an interleaved schedule", "1".to_string())
            }
            (Some("interleaved"), chunks) => Ok((chunks.unwrap_or(2), whole)),
            // `Parallel::check` rejects unsupported combinations.
            (Some("zero-bubble" | "zb-h1"), chunks) => {
                Ok((chunks.unwrap_or(1), PipelineSchedule::ZbH1))
            }
            (Some("zb-h2"), chunks) => Ok((chunks.unwrap_or(1), PipelineSchedule::ZbH2)),
            (Some(other), _) => {
                refuse("schedule", "1f1b, interleaved or zero-bubble", format!("`{other}`"))
            }
        }
    }
}

/// Returns `degrees` with the data-parallel ranks that make up `ranks` ranks: `dp` groups of
/// context-parallel ranks, or as many as the other degrees leave.
///
/// # Errors
/// [`TrainError::Setting`] for degrees that do not fit the ranks, and the errors of
/// [`Parallel::check`].
pub(crate) fn check_ranks(
    degrees: Parallel,
    dp: Option<usize>,
    ranks: usize,
) -> Result<Parallel, TrainError> {
    let Parallel { tensor, pipeline, context, schedule, .. } = degrees;
    // Reject schedules that are invalid with any number of ranks.
    Parallel { schedule, pipeline: 2, ..Parallel::default() }.check()?;
    let others = tensor.max(1) * pipeline.max(1) * context.max(1);
    if dp.is_none() && !ranks.is_multiple_of(others) {
        return Err(not_among(ranks, [("--tp", tensor), ("--pp", pipeline), ("--cp", context)]));
    }
    let data = dp.unwrap_or(ranks / others);
    let parallel = Parallel { data: data * context, ..degrees };
    parallel.check()?;
    if parallel.world_size() != ranks {
        return Err(TrainError::Setting {
            setting: "degrees",
            expected: format!("--tp x --pp x --cp x --dp to be the {ranks} ranks of `--devices`"),
            got: format!("{tensor} x {pipeline} x {context} x {data}"),
            hint: Some("`--devices cpu:4 --tp 2` has two of each".to_string()),
        });
    }
    Ok(parallel)
}

/// Error for degrees whose product does not divide the ranks.
fn not_among(ranks: usize, degrees: [(&str, usize); 3]) -> TrainError {
    let asked: Vec<(&str, usize)> = degrees.into_iter().filter(|(_, it)| *it > 1).collect();
    let flags: Vec<&str> = asked.iter().map(|(flag, _)| *flag).collect();
    let values: Vec<String> = asked.iter().map(|(_, degree)| degree.to_string()).collect();
    let product: usize = asked.iter().map(|(_, degree)| degree).product();
    TrainError::Setting {
        setting: "degrees",
        expected: format!(
            "{} to divide the {ranks} rank{} of `--devices`",
            flags.join(" x "),
            if ranks == 1 { "" } else { "s" }
        ),
        got: match asked.len() {
            1 => values.concat(),
            _ => format!("{} = {product}", values.join(" x ")),
        },
        hint: Some("`--devices cpu:4 --tp 2` has two of each".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn degrees_make_up_the_ranks() {
        let check = |ranks, [dp, tp, pp, ep]: [Option<usize>; 4], expected: Result<&str, &str>| {
            let degrees = Degrees { dp, zero: Some(1), tp, pp, ep, ..Degrees::default() };
            let got = degrees.of_ranks(ranks).map(|it| it.to_string());
            let got = got.map_err(|error| error.to_string());
            match (&got, expected) {
                (Ok(got), Ok(expected)) => assert_eq!(got, expected),
                (Err(got), Err(expected)) => assert!(got.contains(expected), "{got}"),
                _ => panic!("expected {expected:?}, got {got:?}"),
            }
        };
        check(4, [None; 4], Ok("data 4, ZeRO 1"));
        check(4, [Some(4), None, None, None], Ok("data 4, ZeRO 1"));
        check(4, [None, Some(2), None, None], Ok("data 2, tensor 2, ZeRO 1"));
        check(4, [Some(1), Some(4), Some(1), Some(1)], Ok("data 1, tensor 4, ZeRO 1"));
        let refused = [
            (4, [None, Some(3), None, None], "--tp to divide the 4 ranks of `--devices`, got 3"),
            (2, [None, Some(3), None, None], "--tp to divide the 2 ranks of `--devices`, got 3"),
            (1, [None, None, Some(2), None], "--pp to divide the 1 rank of `--devices`, got 2"),
            (
                4,
                [None, Some(2), Some(4), None],
                "--tp x --pp to divide the 4 ranks of `--devices`, got 2 x 4 = 8",
            ),
        ];
        for (ranks, degrees, expected) in refused {
            check(ranks, degrees, Err(expected));
        }
        let expected =
            "--tp x --pp x --cp x --dp to be the 4 ranks of `--devices`, got 3 x 1 x 1 x 2";
        check(4, [Some(2), Some(3), None, None], Err(expected));
        check(4, [Some(2), None, None, None], Err("got 1 x 1 x 1 x 2"));
        check(4, [None, Some(8), None, None], Err("--tp to divide the 4 ranks"));
        check(4, [None, Some(0), None, None], Err("tensor-parallel ranks: expected at least 1"));
    }

    /// Context-parallel ranks are a subset of the ranks that sum gradients.
    #[test]
    fn sequences_are_split_among_data_parallel_ranks() {
        let check = |degrees: Degrees, expected: Result<&str, &str>| {
            let got = degrees.of_ranks(8).map(|it| it.to_string());
            let got = got.map_err(|error| error.to_string());
            match (&got, expected) {
                (Ok(got), Ok(expected)) => assert_eq!(got, expected),
                (Err(got), Err(expected)) => assert!(got.contains(expected), "{got}"),
                _ => panic!("expected {expected:?}, got {got:?}"),
            }
        };
        let cp = |cp| Degrees { cp: Some(cp), ..Degrees::default() };
        check(cp(8), Ok("data 8, context 8"));
        check(cp(2), Ok("data 8, context 2"));
        check(Degrees { dp: Some(2), tp: Some(2), ..cp(2) }, Ok("data 4, context 2, tensor 2"));
        check(Degrees { dp: Some(8), ..cp(2) }, Err("got 1 x 1 x 2 x 8"));
        check(cp(3), Err("--cp to divide the 8 ranks of `--devices`, got 3"));
        check(cp(0), Err("data-parallel ranks: expected at least 1"));
    }

    #[test]
    fn schedules_say_how_many_chunks() {
        let check = |schedule: Option<&str>, vpp, expected: Result<&str, &str>| {
            let schedule = schedule.map(str::to_string);
            let degrees = Degrees { pp: Some(2), schedule, vpp, ..Degrees::default() };
            let got = degrees.of_ranks(4).map(|it| it.to_string());
            let got = got.map_err(|error| error.to_string());
            match (&got, expected) {
                (Ok(got), Ok(expected)) => assert_eq!(got, expected),
                (Err(got), Err(expected)) => assert!(got.contains(expected), "{got}"),
                _ => panic!("expected {expected:?}, got {got:?}"),
            }
        };
        let (plain, two, three) =
            ("data 2, pipeline 2", "data 2, pipeline 2, chunks 2", "data 2, pipeline 2, chunks 3");
        check(None, None, Ok(plain));
        check(Some("1f1b"), None, Ok(plain));
        check(Some("interleaved"), None, Ok(two));
        check(Some("interleaved"), Some(3), Ok(three));
        check(None, Some(2), Ok(two));
        check(Some("1f1b"), Some(2), Err("vpp: expected 1 for 1f1b"));
        check(Some("interleaved"), Some(1), Err("vpp: expected at least 2"));
        for name in ["zero-bubble", "zb-h1"] {
            check(Some(name), None, Ok("data 2, pipeline 2, zb-h1"));
            check(Some(name), Some(2), Err("model chunks of a stage: expected 1 for zb-h1"));
        }
        check(Some("zb-h2"), None, Err("schedule: expected 1f1b or zb-h1"));
        check(Some("gpipe"), None, Err("expected 1f1b, interleaved or zero-bubble, got `gpipe`"));
        check(None, Some(0), Err("model chunks of a stage: expected at least 1"));
        let alone = Degrees { vpp: Some(2), ..Degrees::default() };
        let error = alone.of_ranks(4).unwrap_err().to_string();
        assert!(error.contains("model chunks of a stage: expected 1 where there is one stage"));
    }
}
