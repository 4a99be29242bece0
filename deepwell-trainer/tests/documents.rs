//! Documents that share a sequence and are told apart: what they give is what they give alone.

use std::time::Duration;

use bytemuck::cast_slice_mut;
use deepwell_ir::capture::{Gpt2Config, LlamaConfig, capture, capture_for_sequence, capture_gpt2};
use deepwell_ir::ops::IGNORED_TARGET;
use deepwell_ir::{Graph, mask_documents};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Engine, Parallel, StepOutcome, World, compile};

const SEQ: usize = 48;
/// Ends a document.
const END: i32 = 0;
/// Of each row: documents of one token, of odd lengths, and one that goes on in no other row.
const ROWS: [&[usize]; 2] = [&[5, 1, 17, 25], &[1, 31, 16]];

fn model(name: &str, seq: usize) -> Graph {
    let preset = |name| LlamaConfig::preset(name).unwrap();
    match name {
        "gpt2" => capture_gpt2(&Gpt2Config::preset("gpt2-micro").unwrap()).unwrap(),
        // Windows of 7 tokens in one of two layers, and sinks.
        "gpt-oss" => {
            let config = LlamaConfig { sliding_window: Some(7), ..preset("gpt-oss-micro") };
            // Captured alike for each length: shorter documents have windows as well.
            capture_for_sequence(&config, seq.max(8)).unwrap()
        }
        "deepseek" => capture(&preset("deepseek-micro")).unwrap(),
        _ => capture(&preset("llama-micro")).unwrap(),
    }
}

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

/// Rows of documents, each with the end behind it but where the row ends first, and the tokens that
/// follow.
fn batch() -> (Vec<i32>, Vec<i32>) {
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for (row, lengths) in ROWS.iter().enumerate() {
        let mut tokens: Vec<i32> =
            (0..=SEQ).map(|at| ((at * 31 + row * 7) % 95 + 1) as i32).collect();
        let mut end = 0;
        for length in &lengths[..lengths.len() - 1] {
            end += length;
            tokens[end - 1] = END;
        }
        inputs.extend(&tokens[..SEQ]);
        targets.extend(&tokens[1..]);
    }
    (inputs, targets)
}

fn engine(graph: Graph, precision: &str, (rows, seq): (usize, usize), end: Option<i32>) -> Engine {
    let policy = PrecisionPolicy::preset(precision).unwrap();
    let options = CompileOptions {
        micro_batch: Some(1),
        document_end: end,
        ..CompileOptions::new(policy, seq, rows)
    };
    let mut engine = compile(graph, hardware(), &options).unwrap();
    engine.initialize(7).unwrap();
    engine
}

/// Loss and gradients of a step that changes nothing.
fn gradients(engine: &mut Engine, inputs: &[i32], targets: &[i32]) -> (f64, Vec<Vec<f64>>) {
    let outcome = engine.step(inputs, targets, 0.0, 1e30).unwrap();
    let mut states = engine.program().parameters.clone();
    // In the place of a selection bias's gradient stand counts of tokens.
    states.retain(|state| !state.name.ends_with("e_score_correction_bias"));
    let of = states.into_iter().filter_map(|state| state.gradient).map(|id| {
        let mut values = vec![0f32; engine.program().value(id).elements()];
        engine.read_value(id, cast_slice_mut(&mut values)).unwrap();
        values.into_iter().map(f64::from).collect()
    });
    (f64::from(outcome.loss), of.collect())
}

/// The distance of two lists of tensors over the length of the second.
fn distance(got: &[Vec<f64>], expected: &[Vec<f64>]) -> f64 {
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        got.iter().flatten().zip(expected.iter().flatten()).map(|(&a, &b)| of(a, b)).sum()
    };
    (sum(&|a, b| (a - b).powi(2)) / sum(&|_, b| b * b)).sqrt()
}

/// What the documents give one by one, as a mean over the targets that count.
fn one_by_one(name: &str, precision: &str) -> (f64, Vec<Vec<f64>>) {
    let (inputs, targets) = batch();
    let (mut first, mut counted) = (0, 0.0);
    let (mut loss, mut sums) = (0.0, Vec::<Vec<f64>>::new());
    for length in ROWS.concat() {
        let inputs = &inputs[first..first + length];
        let mut targets = targets[first..first + length].to_vec();
        first += length;
        let ends = inputs.iter().zip(&mut targets).filter(|(input, _)| **input == END);
        ends.for_each(|(_, target)| *target = IGNORED_TARGET);
        let count = targets.iter().filter(|&&target| target != IGNORED_TARGET).count() as f64;
        if count == 0.0 {
            continue;
        }
        let mut alone = engine(model(name, length), precision, (1, length), None);
        let (of_loss, of_gradients) = gradients(&mut alone, inputs, &targets);
        counted += count;
        loss += count * of_loss;
        sums.resize(of_gradients.len(), Vec::new());
        for (sum, of) in sums.iter_mut().zip(of_gradients) {
            sum.resize(of.len(), 0.0);
            sum.iter_mut().zip(of).for_each(|(sum, of)| *sum += count * of);
        }
    }
    sums.iter_mut().flatten().for_each(|sum| *sum /= counted);
    (loss / counted, sums)
}

#[test]
fn documents_of_a_row_give_what_they_give_one_by_one() {
    // Sums in another order, and with MXFP8 other blocks of 32 tokens in wgrad.
    for (name, precision, of_loss, of_gradients) in [
        ("llama", "f32", 1e-6, 2e-6),
        ("gpt2", "f32", 1e-6, 2e-6),
        ("gpt-oss", "f32", 1e-6, 2e-6),
        ("deepseek", "f32", 1e-6, 2e-6),
        ("llama", "mxfp8", 2e-3, 0.1),
    ] {
        let what = format!("{name} in {precision}");
        let (inputs, targets) = batch();
        let (expected, of_expected) = one_by_one(name, precision);
        let graph = mask_documents(&model(name, SEQ)).unwrap();
        let mut packed = engine(graph, precision, (ROWS.len(), SEQ), Some(END));
        let (loss, got) = gradients(&mut packed, &inputs, &targets);
        let far = distance(&got, &of_expected);
        assert!((loss - expected).abs() < of_loss * expected, "{what}: {loss}, {expected} alone");
        assert!(far < of_gradients, "{what}: gradients are {far} away");

        let mut joined = engine(model(name, SEQ), precision, (ROWS.len(), SEQ), None);
        let (_, of_joined) = gradients(&mut joined, &inputs, &targets);
        let far = distance(&of_joined, &of_expected);
        assert!(far > 2.0 * of_gradients, "{what}: joined documents would pass, {far} away");
    }
}

/// A row that is one document is trained as ever, to the bit.
#[test]
fn one_document_changes_no_bit() {
    let (inputs, targets) = batch();
    let [got, expected] = [true, false].map(|is_masked| {
        let graph = model("llama", SEQ);
        let graph = if is_masked { mask_documents(&graph).unwrap() } else { graph };
        let size = (ROWS.len(), SEQ);
        // No such token in the batch.
        let mut engine = engine(graph, "mxfp8", size, is_masked.then_some(200));
        let of = gradients(&mut engine, &inputs, &targets);
        (of, engine.evaluate(&inputs[..SEQ], &targets[..SEQ]).unwrap().to_bits())
    });
    assert!(got == expected);
}

#[test]
fn evaluation_tells_documents_apart_too() {
    let (inputs, targets) = batch();
    let graph = mask_documents(&model("gpt2", SEQ)).unwrap();
    let mut packed = engine(graph, "f32", (1, SEQ), Some(END));
    let evaluated = packed.evaluate(&inputs[..SEQ], &targets[..SEQ]).unwrap();
    let trained = packed.step(&inputs[..SEQ], &targets[..SEQ], 0.0, 1.0).unwrap().loss;
    assert!((evaluated - trained).abs() < 1e-6 * trained, "{evaluated}, {trained}");
}

/// Ranks that split the batch, layers or the model's depth.
#[test]
fn ranks_tell_documents_apart() {
    let (inputs, targets) = batch();
    let outcome = |name: &str, parallel: Parallel| -> StepOutcome {
        let graph = match name {
            "gpt2" => {
                let micro = Gpt2Config::preset("gpt2-micro").unwrap();
                capture_gpt2(&Gpt2Config { num_heads: 4, hidden_size: 128, ..micro }).unwrap()
            }
            _ => {
                let micro = LlamaConfig::preset("llama-micro").unwrap();
                let (num_heads, num_kv_heads, head_dim) = (4, 2, 32);
                capture(&LlamaConfig { num_heads, num_kv_heads, head_dim, ..micro }).unwrap()
            }
        };
        let options = CompileOptions {
            micro_batch: Some(1),
            document_end: Some(END),
            parallel,
            rank_timeout: Duration::from_secs(60),
            ..CompileOptions::new(PrecisionPolicy::f32(), SEQ, ROWS.len())
        };
        let graph = mask_documents(&graph).unwrap();
        let mut world = World::compile(graph, hardware(), &options).unwrap();
        let all = world.on_all(|engine| {
            engine.initialize(7)?;
            engine.step(&inputs, &targets, 1e-3, 1.0)
        });
        all.unwrap()[0]
    };
    for name in ["llama", "gpt2"] {
        let alone = outcome(name, Parallel::data(1));
        for parallel in [
            Parallel::data(2),
            Parallel { tensor: 2, ..Parallel::data(1) },
            Parallel { pipeline: 2, ..Parallel::data(1) },
        ] {
            let got = outcome(name, parallel);
            for (got, alone) in [(got.loss, alone.loss), (got.grad_norm, alone.grad_norm)] {
                assert!((got - alone).abs() < 1e-5 * alone, "{name} {parallel}: {got}, {alone}");
            }
        }
    }
}

#[test]
fn what_cannot_be_is_said() {
    let compiled = |graph: Graph, end, parallel| {
        let options = CompileOptions {
            document_end: end,
            parallel,
            ..CompileOptions::new(PrecisionPolicy::f32(), SEQ, 2)
        };
        World::compile(graph, hardware(), &options).err().expect("refused").to_string()
    };
    let masked = || mask_documents(&model("llama", SEQ)).unwrap();
    let message = compiled(masked(), None, Parallel::data(1));
    assert!(message.contains("the token that ends a document"), "{message}");
    let message = compiled(model("llama", SEQ), Some(END), Parallel::data(1));
    assert!(message.contains("a graph that tells documents apart"), "{message}");
    let context = Parallel { context: 2, ..Parallel::data(2) };
    let message = compiled(masked(), Some(END), context);
    assert!(message.contains("got documents told apart"), "{message}");
    let message = mask_documents(&masked()).unwrap_err().to_string();
    assert!(message.contains("tells documents apart already"), "{message}");
}
