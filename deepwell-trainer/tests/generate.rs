//! Logits of the forward program alone, against the losses of the engine that trained the model.

use std::path::Path;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::data::Tokenizer;
use deepwell_trainer::generate::{Forward, OpenOptions, Request, Sampling, Stop, TextModel};
use deepwell_trainer::weights::MasterWeights;
use deepwell_trainer::{CompileOptions, Device, ModelSource, SpecialTokens, compile};
use safetensors::SafeTensors;

/// Target that the loss does not count.
const IGNORED: i32 = deepwell_ir::ops::IGNORED_TARGET;
/// Both sides add the same products in FP32, in another order: a few units in the last place of
/// losses of about 6.
const TOLERANCE: f64 = 1e-4;

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

/// Trains a few steps, and wants of each token the loss that its logit says.
fn check(model: &str, precision: &str, seen: usize) {
    const SEQ: usize = 32;
    let source = ModelSource::open(model).unwrap();
    let graph = source.capture(Some(SEQ)).unwrap();
    let policy = PrecisionPolicy::preset(precision).unwrap();
    let options = CompileOptions::new(policy.clone(), SEQ, 2);
    let mut engine = compile(graph.clone(), hardware(), &options).unwrap();
    engine.initialize(7).unwrap();
    let text: Vec<i32> = (0..2 * SEQ as i32 + 1).map(|index| index * 37 % 101).collect();
    for _ in 0..3 {
        engine.step(&text[..2 * SEQ], &text[1..], 3e-3, 1.0).unwrap();
    }

    let mut forward = Forward::open(&graph, &policy, SEQ, Device::Cpu, &hardware()).unwrap();
    let mut buffer: Vec<f32> = Vec::new();
    for state in engine.program().parameters.clone() {
        buffer.resize(engine.program().value(state.master.value()).elements(), 0.0);
        engine.read_value(state.master.value(), cast_slice_mut(&mut buffer)).unwrap();
        let to = MasterWeights::program(&forward).parameters.iter().find(|p| p.name == state.name);
        let to = to.unwrap().master.value();
        forward.write_master(to, cast_slice(&buffer)).unwrap();
    }
    forward.refresh_copies().unwrap();
    let tokens: Vec<u32> = text[..seen].iter().map(|&token| token as u32).collect();
    let logits = forward.logits(&tokens).unwrap().to_vec();
    assert_eq!(logits.len(), source.vocab_size());

    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let log_sum = f64::from(largest) + sum.ln();
    let rows = engine.evaluation_rows();
    let seen_by_both = &text[seen.saturating_sub(SEQ)..seen];
    let mut inputs = vec![0; rows * SEQ];
    inputs[..seen_by_both.len()].copy_from_slice(seen_by_both);
    let mut least = (f32::MAX, 0);
    for (token, &logit) in logits.iter().enumerate() {
        let mut targets = vec![IGNORED; rows * SEQ];
        targets[seen_by_both.len() - 1] = token as i32;
        let loss = engine.evaluate(&inputs, &targets).unwrap();
        let expected = log_sum - f64::from(logit);
        assert!(
            (f64::from(loss) - expected).abs() < TOLERANCE,
            "{model} {precision}: token {token}: loss {loss}, by its logit {expected}"
        );
        if loss < least.0 {
            least = (loss, token as u32);
        }
    }
    let greedy = Sampling::greedy().pick(&logits, 0).unwrap();
    let apart = log_sum - f64::from(logits[greedy as usize]) - f64::from(least.0);
    assert!(apart.abs() < TOLERANCE, "{model} {precision}: {greedy}, least loss {least:?}");
    // What stands behind the last token changes no bit, nor does what fell out of the window.
    if seen > SEQ {
        assert_eq!(forward.logits(&tokens[seen - SEQ..]).unwrap(), logits);
    }
    let mut others = tokens.clone();
    if let Some(last) = others.last_mut() {
        *last += 1;
    }
    assert_ne!(forward.logits(&others).unwrap(), logits);
    assert_eq!(forward.logits(&tokens).unwrap(), logits);
}

#[test]
fn the_greedy_token_has_the_least_loss() {
    check("llama-micro", "f32", 5);
    check("llama-micro", "bf16", 32);
    check("llama-micro", "mxfp8", 32);
    check("llama-micro", "mxfp8-128", 1);
    check("llama-micro", "nvfp4", 32);
    check("llama-micro", "bf16", 40);
    // Positions are learned, and the head is the table of tokens.
    check("gpt2-micro", "bf16", 20);
    check("gpt2-micro", "f32", 40);
}

/// The fixtures' models as Hugging Face folders: the logits are those of PyTorch.
#[test]
fn a_folder_gives_the_logits_of_pytorch() {
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle");
    for case in ["case_00", "case_03", "case_07"] {
        let folder = tempfile::tempdir().unwrap();
        let config = oracle.join(format!("{case}.config.json"));
        std::fs::copy(config, folder.path().join("config.json")).unwrap();
        let bytes = std::fs::read(oracle.join(format!("{case}.safetensors"))).unwrap();
        let stored = SafeTensors::deserialize(&bytes).unwrap();
        let weights = stored
            .iter()
            .filter_map(|(name, view)| Some((name.strip_prefix("weight.")?.to_string(), view)));
        let to = folder.path().join("model.safetensors");
        safetensors::serialize_to_file(weights, None, &to).unwrap();
        // Any tokenizer that the vocabulary has room for.
        let tokenizer = folder.path().join("tokenizer.json");
        std::fs::write(&tokenizer, WORDS).unwrap();
        assert_eq!(Tokenizer::from_file(&tokenizer).unwrap().vocab_size(), 2);

        let ids = stored.tensor("input_ids").unwrap();
        let seq = ids.shape()[1];
        let width = ids.data().len() / ids.shape().iter().product::<usize>();
        let ids: Vec<u32> = ids
            .data()
            .chunks_exact(width)
            .map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]]))
            .collect();
        let logits = stored.tensor("logits").unwrap();
        let vocab = logits.shape()[2];
        let expected: Vec<f32> = logits
            .data()
            .chunks_exact(4)
            .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        let options = OpenOptions {
            precision: Some("f32".to_string()),
            window: Some(seq),
            ..OpenOptions::default()
        };
        let mut model = TextModel::from_folder(folder.path(), &options).unwrap();
        let largest = expected.iter().fold(0f32, |top, logit| top.max(logit.abs()));
        for seen in [1, seq / 2, seq] {
            let got = model.forward.logits(&ids[..seen]).unwrap();
            let expected = &expected[(seen - 1) * vocab..][..vocab];
            for (got, expected) in got.iter().zip(expected) {
                // Both compute in F32: what `captured_pt2.rs` allows.
                assert!((got - expected).abs() <= 1e-4 * largest, "{case}: {got} for {expected}");
            }
        }
    }
}

/// A tokenizer of two tokens, of which the second ends a text.
const WORDS: &str = r#"{"version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 1, "content": "</s>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true}],
    "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
    "decoder": null,
    "model": {"type": "WordLevel", "unk_token": "word", "vocab": {"word": 0}}}"#;

/// A text ends where the model ends it, where nobody reads on, or after so many tokens.
#[test]
fn why_a_text_ends() {
    let source = ModelSource::open("llama-micro").unwrap();
    let graph = source.capture(Some(32)).unwrap();
    let policy = PrecisionPolicy::f32();
    // Without weights all logits are zero, and the first token is taken: byte 0, the separator.
    let mut model = TextModel {
        path: "none".into(),
        step: None,
        precision: "f32".to_string(),
        tokenizer: Tokenizer::bytes(),
        special: SpecialTokens::default(),
        window_max: None,
        forward: Forward::open(&graph, &policy, 32, Device::Cpu, &hardware()).unwrap(),
    };
    model.forward.refresh_copies().unwrap();
    let request = |ignores_end: bool| Request {
        prompt: "a".to_string(),
        tokens_max: 3,
        sampling: Sampling::greedy(),
        ignores_end,
    };
    let made = model.generate(&request(false), &mut |_| Ok(())).unwrap();
    assert_eq!((made.stop, made.tokens.len(), made.text.as_str()), (Stop::EndOfText, 0, ""));
    let mut pieces = Vec::new();
    let mut keep = |piece: &[u8]| {
        pieces.push(piece.to_vec());
        Ok(())
    };
    let made = model.generate(&request(true), &mut keep).unwrap();
    assert_eq!((made.stop, made.tokens.as_slice()), (Stop::TokensMax, &[0, 0, 0][..]));
    assert_eq!(pieces, [[0], [0], [0]]);
    let mut gone = |_: &[u8]| Err(std::io::ErrorKind::BrokenPipe.into());
    let made = model.generate(&request(true), &mut gone).unwrap();
    assert_eq!((made.stop, made.tokens.len()), (Stop::ReaderGone, 1));
    let mut full = |_: &[u8]| Err(std::io::ErrorKind::StorageFull.into());
    let error = model.generate(&request(true), &mut full).unwrap_err().to_string();
    assert!(error.contains("standard output"), "{error}");
}

#[test]
fn tokens_that_cannot_be() {
    let source = ModelSource::open("llama-micro").unwrap();
    let graph = source.capture(Some(32)).unwrap();
    let policy = PrecisionPolicy::bf16();
    let mut forward = Forward::open(&graph, &policy, 32, Device::Cpu, &hardware()).unwrap();
    for (tokens, expected) in [(&[][..], "at least one, got none"), (&[300], "tokens below 256")] {
        let error = forward.logits(tokens).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
