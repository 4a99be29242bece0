//! Export and import: a checkpoint's model as a Hugging Face folder, read again, computes the same
//! loss to the bit. Names and shapes of the tensors are those that transformers 5.23.0 has
//! (`scripts/compare_transformers.py` loads such folders with it).

use std::path::{Path, PathBuf};

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ckpt::hf::{WriteTensor, write};
use deepwell_ckpt::{CheckpointContents, CkptDtype, SaveOptions, Section, TensorView};
use deepwell_ir::capture::Weights;
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::export::{ExportOptions, ModelFiles, TokensOf, export_hf};
use deepwell_trainer::{CompileOptions, Engine, ModelSource, Settings, SpecialTokens, compile};
use safetensors::Dtype;
use serde_json::{Value, json};

const SEQ: usize = 12;
const BATCH: usize = 2;

/// A small configuration of a family, with some keys changed.
fn config(family: &str, changes: Value) -> Value {
    let mut object = match family {
        "gpt2" => json!({
            "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16,
            "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0
        }),
        _ => json!({
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
        }),
    };
    let map = object.as_object_mut().unwrap();
    map.insert("model_type".to_string(), json!(family));
    map.insert("vocab_size".to_string(), json!(96));
    map.extend(changes.as_object().unwrap().clone());
    object
}

fn engine(model: &ModelSource) -> Engine {
    let options = CompileOptions {
        micro_batch: Some(BATCH),
        ..CompileOptions::new(PrecisionPolicy::f32(), SEQ, BATCH)
    };
    let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
    compile(model.capture(Some(SEQ)).unwrap(), Hardware::cpu_only(cpu), &options).unwrap()
}

/// Loss of a batch that is the same for all models.
fn loss(engine: &mut Engine) -> f32 {
    let tokens: Vec<i32> = (0..(SEQ * BATCH) as i32).map(|index| index * 37 % 96).collect();
    let targets: Vec<i32> = tokens.iter().map(|token| (token * 5 + 1) % 96).collect();
    engine.evaluate(&tokens, &targets).unwrap()
}

/// Saves an engine's master weights as a run of `model` in `out` does, and gives the checkpoint.
fn saved(out: &Path, model: &ModelSource, engine: &mut Engine) -> PathBuf {
    ModelFiles::of(model, TokensOf::Bytes).unwrap().keep(&out.join("model")).unwrap();
    let parameters = engine.program().parameters.clone();
    let masters: Vec<(String, Vec<usize>, Vec<f32>)> = parameters
        .iter()
        .map(|state| {
            let value = engine.program().value(state.master.value()).clone();
            let mut values = vec![0.0f32; value.elements()];
            engine.read_value(state.master.value(), cast_slice_mut(&mut values)).unwrap();
            (state.name.clone(), value.shape, values)
        })
        .collect();
    let mut contents = CheckpointContents::new(7);
    contents.tensors = masters
        .iter()
        .map(|(name, shape, values)| TensorView {
            name,
            dtype: CkptDtype::F32,
            shape: shape.clone(),
            data: cast_slice(values),
            section: Section::Master,
        })
        .collect();
    let settings = Settings { model: model.name().to_string(), ..Settings::default() };
    contents.run = json!({ "settings": settings });
    let root = out.join("checkpoints");
    deepwell_ckpt::save(&root, &contents, &SaveOptions::default()).unwrap().path
}

fn options(checkpoint: PathBuf, to: PathBuf) -> ExportOptions {
    ExportOptions {
        checkpoint,
        to,
        dtype: CkptDtype::F32,
        shard_bytes_max: 5_000_000_000,
        model: None,
        tokenizer: None,
        config: None,
    }
}

/// Exports a freshly made model, reads it again, and gives the names and shapes of its tensors.
fn round_trip(config: &Value, dtype: CkptDtype, shard_bytes_max: u64) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("given.json");
    std::fs::write(&path, config.to_string()).unwrap();
    let model = ModelSource::open(path.to_str().unwrap()).unwrap();
    let mut trained = engine(&model);
    trained.initialize(3).unwrap();
    let out = folder.path().join("out");
    let checkpoint = saved(&out, &model, &mut trained);
    // The run's folder is enough.
    std::fs::remove_file(&path).unwrap();
    let to = folder.path().join("exported");
    let mut last = (0, 0);
    let export = ExportOptions { dtype, shard_bytes_max, ..options(checkpoint, to.clone()) };
    let exported = export_hf(&export, &mut |done, total| last = (done, total)).unwrap();
    assert_eq!(last, (exported.folder.tensor_bytes, exported.folder.tensor_bytes), "{config}");
    assert_eq!(exported.step, 7);

    let mut again = ModelSource::open(to.to_str().unwrap()).unwrap();
    let mut engine = engine(&again);
    assert!(again.load_weights(&mut engine).unwrap());
    let (before, after) = (loss(&mut trained), loss(&mut engine));
    match dtype {
        CkptDtype::F32 => assert_eq!(before.to_bits(), after.to_bits(), "{config}"),
        // Rounding weights to 8 bits moves a loss of 4.6 by less than this; a tensor in another's
        // place, or turned, moves it by 1e-2 or more.
        _ => assert!((before - after).abs() < 2e-3, "{config}: {before}, {after}"),
    }
    let weights = Weights::open(&to).unwrap();
    for tensor in weights.tensors() {
        // A step of a selection bias is less than what BF16 tells apart.
        let keeps = tensor.name.ends_with("e_score_correction_bias") || dtype == CkptDtype::F32;
        assert_eq!(tensor.dtype, if keeps { Dtype::F32 } else { Dtype::BF16 }, "{tensor:?}");
    }
    weights.tensors().map(|it| format!("{} {:?}", it.name, it.shape)).collect()
}

fn deepseek() -> Value {
    json!({
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": null, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1
    })
}

#[test]
fn models_of_every_family_come_back() {
    let experts = json!({"num_local_experts": 4, "num_experts_per_tok": 2});
    let more = json!({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24});
    let oss = json!({
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5
    });
    for (family, changes, tensors) in [
        ("llama", json!({}), 21),
        ("llama", json!({"tie_word_embeddings": true, "head_dim": 16}), 20),
        ("llama", json!({"attention_bias": true, "mlp_bias": true}), 35),
        ("mistral", json!({"sliding_window": null}), 21),
        ("mistral", json!({"sliding_window": 5}), 21),
        ("qwen2", json!({}), 27),
        ("qwen3", json!({"head_dim": 16}), 25),
        ("mixtral", experts, 41),
        ("qwen3_moe", more, 57),
        ("gpt_oss", oss, 37),
        ("deepseek_v3", deepseek(), 37),
        ("gpt2", json!({}), 28),
        ("gpt2", json!({"tie_word_embeddings": false, "n_inner": 40}), 29),
    ] {
        let config = config(family, changes);
        let names = round_trip(&config, CkptDtype::F32, 5_000_000_000);
        assert_eq!(names.len(), tensors, "{config}: {names:#?}");
    }
}

#[test]
fn half_the_bytes_and_in_shards() {
    for family in ["llama", "gpt2"] {
        let whole = round_trip(&config(family, json!({})), CkptDtype::F32, 5_000_000_000);
        // The token table alone is more than a shard.
        assert_eq!(round_trip(&config(family, json!({})), CkptDtype::F32, 5_000), whole);
        assert_eq!(round_trip(&config(family, json!({})), CkptDtype::Bf16, 20_000), whole);
    }
    round_trip(&config("deepseek_v3", deepseek()), CkptDtype::Bf16, 20_000);
}

/// GPT-2's projections lie as `[inputs, outputs]`, those of attention side by side, under the names
/// of `GPT2LMHeadModel`.
#[test]
fn tensors_have_the_names_and_shapes_of_transformers() {
    let names = round_trip(&config("gpt2", json!({"n_layer": 1})), CkptDtype::F32, 5_000_000_000);
    let expected = [
        "transformer.h.0.attn.c_attn.bias [96]",
        "transformer.h.0.attn.c_attn.weight [32, 96]",
        "transformer.h.0.attn.c_proj.bias [32]",
        "transformer.h.0.attn.c_proj.weight [32, 32]",
        "transformer.h.0.ln_1.bias [32]",
        "transformer.h.0.ln_1.weight [32]",
        "transformer.h.0.ln_2.bias [32]",
        "transformer.h.0.ln_2.weight [32]",
        "transformer.h.0.mlp.c_fc.bias [128]",
        "transformer.h.0.mlp.c_fc.weight [32, 128]",
        "transformer.h.0.mlp.c_proj.bias [32]",
        "transformer.h.0.mlp.c_proj.weight [128, 32]",
        "transformer.ln_f.bias [32]",
        "transformer.ln_f.weight [32]",
        "transformer.wpe.weight [16, 32]",
        "transformer.wte.weight [96, 32]",
    ];
    assert_eq!(names, expected);
    let changes = json!({"num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 1});
    let names = round_trip(&config("mixtral", changes), CkptDtype::F32, 5_000_000_000);
    for (name, shape) in [("gate", "[3, 32]"), ("experts.2.w1", "[48, 32]")] {
        let name = format!("model.layers.0.block_sparse_moe.{name}.weight {shape}");
        assert!(names.contains(&name), "{name}: {names:#?}");
    }
    let changes = json!({"num_hidden_layers": 1});
    let names = round_trip(&config("qwen2", changes), CkptDtype::F32, 5_000_000_000);
    let attention = "model.layers.0.self_attn";
    for (name, shape) in [
        (format!("{attention}.q_proj.weight"), "[32, 32]"),
        (format!("{attention}.k_proj.bias"), "[16]"),
        ("model.layers.0.mlp.down_proj.weight".to_string(), "[32, 48]"),
        ("lm_head.weight".to_string(), "[96, 32]"),
    ] {
        assert!(names.contains(&format!("{name} {shape}")), "{name} {shape}: {names:#?}");
    }
}

/// A `.pt2` archive gives its tensors back under the names of the module, fused as they were, and
/// with what is not trained; there is no config.json to write but the one that is given.
#[test]
fn exported_modules_come_back_as_their_state() {
    for (name, beside) in [("phi3", 0), ("gpt2", 0), ("maskfill", 1)] {
        let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deepwell-ir/tests/pt2");
        let archive = archive.join(format!("{name}.pt2"));
        let mut model = ModelSource::open(archive.to_str().unwrap()).unwrap();
        let mut trained = engine(&model);
        assert!(model.load_weights(&mut trained).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = saved(&folder.path().join("out"), &model, &mut trained);
        let to = folder.path().join("exported");
        let given = folder.path().join("given.json");
        std::fs::write(&given, "{\"model_type\": \"phi3\"}").unwrap();
        let config = (name == "phi3").then_some(given);
        let has_config = config.is_some();
        let export = ExportOptions { config, ..options(checkpoint, to.clone()) };
        let exported = export_hf(&export, &mut |_, _| {}).unwrap();
        let remarks = beside + usize::from(!has_config);
        // Bytes are more tokens than these modules have, too.
        let of_tokens = exported.remarks.iter().filter(|it| it.contains("has 256 tokens")).count();
        let others = exported.remarks.len() - of_tokens;
        assert_eq!(others, remarks, "{name}: {:?}", exported.remarks);
        assert_eq!(to.join("config.json").is_file(), has_config, "{name}");

        let weights = Weights::open(&to).unwrap();
        let stored = model.archive_tensors();
        assert_eq!(weights.tensors().len(), stored.len(), "{name}");
        let mut archive = deepwell_ir::capture::Pt2Model::open(&archive).unwrap();
        for tensor in stored {
            let written = weights.read_f32(&tensor.name, &tensor.shape).unwrap();
            assert_eq!(written, archive.read_stored(&tensor.name).unwrap(), "{name}: {tensor:?}");
        }
    }
}

/// What was opened is read again neither for the weights, nor for the configuration of an export,
/// nor for the tokens that end a text.
#[test]
fn issue_37_a_folder_is_opened_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("given.json");
    std::fs::write(&path, config("qwen3", json!({"eos_token_id": 7})).to_string()).unwrap();
    let model = ModelSource::open(path.to_str().unwrap()).unwrap();
    let mut trained = engine(&model);
    trained.initialize(3).unwrap();
    let checkpoint = saved(&folder.path().join("out"), &model, &mut trained);
    let to = folder.path().join("to");
    let export = ExportOptions { shard_bytes_max: 9000, ..options(checkpoint, to.clone()) };
    assert!(export_hf(&export, &mut |_, _| {}).unwrap().folder.files.len() > 4);
    std::fs::write(to.join("config.json"), std::fs::read(&path).unwrap()).unwrap();
    // Tokenizers are opened where they are used.
    std::fs::remove_file(to.join("tokenizer.json")).unwrap();

    let mut opened = ModelSource::open(to.to_str().unwrap()).unwrap();
    let readings = |model: &ModelSource| {
        let files = ModelFiles::of(model, TokensOf::Unknown).unwrap();
        (SpecialTokens::of_model(model, None).unwrap(), files)
    };
    let before = readings(&opened);
    assert_eq!(before.0.ends, [7]);
    std::fs::remove_dir_all(&to).unwrap();
    assert_eq!(readings(&opened), before);
    let mut again = engine(&opened);
    assert!(opened.load_weights(&mut again).unwrap());
    assert_eq!(loss(&mut again).to_bits(), loss(&mut trained).to_bits());
}

/// transformers does not tie what is stored as two different tensors, so neither is it done here.
#[test]
fn a_stored_head_that_is_not_the_table_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let tied = config("llama", json!({"tie_word_embeddings": true, "num_hidden_layers": 1}));
    std::fs::write(path.join("config.json"), tied.to_string()).unwrap();
    let model = ModelSource::open(path.to_str().unwrap()).unwrap();
    let mut trained = engine(&model);
    trained.initialize(3).unwrap();
    let to = folder.path().join("to");
    let checkpoint = saved(&folder.path().join("out"), &model, &mut trained);
    export_hf(&options(checkpoint, to.clone()), &mut |_, _| {}).unwrap();
    let weights = Weights::open(&to).unwrap();
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = weights
        .tensors()
        .map(|tensor| {
            let values = weights.read_f32(&tensor.name, &tensor.shape).unwrap();
            (tensor.name.clone(), tensor.shape.clone(), values)
        })
        .collect();
    let table = tensors.iter().find(|tensor| tensor.0 == "model.embed_tokens.weight").unwrap();
    tensors.push(("lm_head.weight".to_string(), table.1.clone(), table.2.clone()));
    for (change, expected) in [(0.0, None), (0.5, Some("another tensor: 1 elements differ"))] {
        tensors.last_mut().unwrap().2[7] += change;
        let views: Vec<WriteTensor<'_>> = tensors
            .iter()
            .map(|(name, shape, values)| WriteTensor::from_f32(name, shape, values))
            .collect();
        write(&to.join("model.safetensors"), &views).unwrap();
        let mut model = ModelSource::open(to.to_str().unwrap()).unwrap();
        let error = model.load_weights(&mut engine(&model)).err().map(|error| error.to_string());
        match expected {
            None => assert_eq!(error, None),
            Some(part) => assert!(error.unwrap().contains(part)),
        }
    }
}

#[test]
fn exports_that_cannot_be_trained_as_pytorch_does_are_refused() {
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deepwell-ir/tests/pt2");
    let check = |name: &str, trains_frozen, expected: Option<&str>| {
        let path = archive.join(format!("{name}.pt2"));
        let model = ModelSource::open(path.to_str().unwrap()).unwrap();
        let error = model.check_trainable(trains_frozen).err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), expected, "{name}");
    };
    check("maskfill", false, None);
    check("maskcore", true, None);
    for name in ["encoder", "encoder_both_ways", "mha", "mha_core"] {
        check(name, false, None);
    }
    check(
        "head_bias",
        false,
        Some(
            "model: expected an exported graph whose first output is that of a linear layer \
             without bias, got `head` with a bias\nhint: the loss is computed together with the \
             output head: make that `torch.nn.Linear(width, vocabulary, bias=False)`, give its \
             logits first, and export again",
        ),
    );
    check(
        "maskcore",
        false,
        Some(
            "model: expected parameters that are all to be trained, got `positions.weight` \
             exported with `requires_grad = false`\nhint: freezing is not supported: \
             `--train-frozen` trains them too, or call `requires_grad_(True)` and export again",
        ),
    );
    check(
        "sine",
        true,
        Some(
            "model: expected an exported graph of known ops, got `aten.sin.default` (node `sin`) \
             and 3 more\nhint: such a model can be captured and counted, not trained; \
             `deepwell capture MODEL --summary` lists its unknown calls",
        ),
    );
}
