//! Every small preset on two ranks, by each degree of parallelism alone: it trains and evaluates as
//! one rank does, or is refused with the reason.

use std::time::Duration;

use deepwell_ir::Graph;
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, ModelSource, Parallel, TrainError, World};

const SEQ: usize = 32;
const ROWS: usize = 4;
const STEPS: usize = 2;
/// Ranks round partial sums to BF16 and add them in another order: 2^-9 for each rounding. Losses
/// of presets and degrees here differ by 4e-4 at most, those of a rank that sums nothing by 1e-2
/// and more.
const TOLERANCE_REL: f32 = 2e-3;

const MODELS: [&str; 6] =
    ["llama-micro", "qwen3-micro", "moe-micro", "deepseek-micro", "gpt-oss-micro", "gpt2-micro"];

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn degrees() -> Vec<(&'static str, Parallel)> {
    let one = Parallel::default();
    let data = |zero| Parallel { data: 2, zero, ..one };
    vec![
        ("dp", data(0)),
        ("zero 1", data(1)),
        ("zero 2", data(2)),
        ("zero 3", data(3)),
        ("tp", Parallel { tensor: 2, ..one }),
        ("cp", Parallel { data: 2, context: 2, ..one }),
        ("pp", Parallel { pipeline: 2, ..one }),
        ("ep", Parallel { expert: 2, ..data(0) }),
    ]
}

/// The words of the error by which a model refuses a degree.
fn refusal(model: &str, degree: &str) -> Option<&'static str> {
    match (model, degree) {
        ("llama-micro" | "qwen3-micro" | "moe-micro", "tp") => Some("key-value heads"),
        ("gpt2-micro", "cp") => Some("positions"),
        ("llama-micro" | "qwen3-micro" | "gpt2-micro", "ep") => Some("a model with experts"),
        _ => None,
    }
}

/// Losses of two steps; an evaluation follows them.
fn losses(graph: &Graph, parallel: Parallel) -> Result<Vec<f32>, TrainError> {
    let policy = PrecisionPolicy::preset("bf16").expect("a known preset");
    let options = CompileOptions {
        parallel,
        rank_timeout: Duration::from_secs(60),
        ..CompileOptions::new(policy, SEQ, ROWS)
    };
    let tokens = |step: usize, shift: usize| -> Vec<i32> {
        let token = |at: usize| ((step * 31 + (at + shift) * (at + shift) * 7) % 251) as i32;
        (0..ROWS * SEQ).map(token).collect()
    };
    let mut world = World::compile(graph.clone(), hardware(), &options)?;
    let of_ranks = world.on_all(|engine| {
        engine.initialize(7)?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            losses.push(engine.step(&tokens(step, 0), &tokens(step, 1), 1e-3, 1.0)?.loss);
        }
        // Ranks evaluate sequences of their own, or parts of one.
        let of = 0..engine.evaluation_rows() * SEQ;
        let evaluated = engine.evaluate(&tokens(9, 0)[of.clone()], &tokens(9, 1)[of])?;
        assert!(evaluated.is_finite(), "{evaluated}");
        Ok(losses)
    })?;
    assert!(of_ranks.iter().all(|losses| losses == &of_ranks[0]), "{of_ranks:?}");
    Ok(of_ranks[0].clone())
}

fn check(model: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let graph = ModelSource::open(model).unwrap().capture(Some(SEQ)).unwrap();
    let alone = losses(&graph, Parallel::default()).unwrap();
    for (degree, parallel) in degrees() {
        match (losses(&graph, parallel), refusal(model, degree)) {
            (Ok(of_ranks), None) => {
                for (alone, of_ranks) in alone.iter().zip(&of_ranks) {
                    let distance = (alone - of_ranks).abs() / alone;
                    if distance >= TOLERANCE_REL {
                        wrong.push(format!("{model}, {degree}: {alone} and {of_ranks}"));
                    }
                }
            }
            (Err(error), Some(words)) => {
                let text = error.to_string();
                if !text.contains(words) {
                    wrong.push(format!("{model}, {degree}: `{words}` is not in `{text}`"));
                }
            }
            (Ok(_), Some(words)) => {
                wrong.push(format!("{model}, {degree}: expected `{words}`, it trains"));
            }
            (Err(error), None) => wrong.push(format!("{model}, {degree}: {error}")),
        }
    }
    wrong
}

/// `--zero 3` of a model with selection biases panicked where its evaluation was lowered.
#[test]
fn presets_train_by_each_degree_alone() {
    let wrong: Vec<String> = MODELS.iter().flat_map(|model| check(model)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
