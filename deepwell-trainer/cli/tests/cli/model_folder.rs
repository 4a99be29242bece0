//! Files that belong to a model: weights, tokenizer, tokens that end a text. They are taken
//! together or refused, never passed over in silence.

use std::fs;
use std::path::Path;

use deepwell_ckpt::hf::{WriteTensor, write};
use deepwell_ir::capture::{ModelConfig, Weights};
use serde_json::{Value, json};

use super::{Folder, check_error, deepwell, json_of, stdout_of, text};

const VOCAB: usize = 40;
const SEQ: usize = 16;

/// A folder `m` of a small model with weights that no fresh ones are like, and token files.
pub(super) struct Model {
    folder: Folder,
    config: Value,
}

impl Model {
    pub(super) fn new(changes: Value) -> Model {
        let folder = Folder::new();
        let mut config = json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB,
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
            "tie_word_embeddings": false
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        fs::create_dir(folder.path("m")).unwrap();
        folder.file("m/config.json", config.to_string());
        let model = Model { folder, config };
        model.write("model.safetensors", &|name| Some(name.to_string()));
        for (name, count) in [("x_train.bin", SEQ + 1), ("x_val.bin", 4 * SEQ + 1)] {
            let mut file = vec![0u8; 1024];
            for (at, value) in [20_240_520, 1, count as i32].into_iter().enumerate() {
                file[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
            }
            let ids = (0..count).map(|at| (at * 7 % (VOCAB - 2) + 1) as u16);
            file.extend(ids.flat_map(u16::to_le_bytes));
            model.folder.file(name, file);
        }
        model
    }

    /// The tensors of the model under the names that `rename` gives them; it leaves out some.
    fn write(&self, file: &str, rename: &dyn Fn(&str) -> Option<String>) {
        let (config, _) = ModelConfig::from_json(&self.config.to_string(), "c").unwrap();
        let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
        for (spec, parts) in config.stored_slices() {
            for part in parts {
                let Some(name) = rename(&part.name) else { continue };
                if tensors.iter().any(|(other, ..)| *other == name) {
                    continue;
                }
                let seed = spec.name.len() as u64;
                let count: usize = part.shape.iter().product();
                let values = (0..count as u64).map(|at| {
                    let bits = (at + seed * 977).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
                    bits as f32 / (1 << 23) as f32 - 1.0
                });
                tensors.push((name, part.shape, values.collect()));
            }
        }
        let views: Vec<WriteTensor<'_>> = tensors
            .iter()
            .map(|(name, shape, values)| WriteTensor::from_f32(name, shape, values))
            .collect();
        write(Path::new(&self.path(&format!("m/{file}"))), &views).unwrap();
    }

    fn path(&self, name: &str) -> String {
        self.folder.path(name)
    }

    fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        self.folder.file(name, contents)
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.path(name)).unwrap();
    }

    /// A command line of one step, on these data.
    fn training(&self, model: &str, data: &[&str], more: &[&str]) -> Vec<String> {
        let [model, out, cache] = [model, "run", "cache"].map(|name| self.path(name));
        let args = ["train", "--model", &model, "--out", &out, "--cache-dir", &cache];
        let settings = "--overwrite --precision f32 --steps 1 --batch-size 1 --eval-tokens 16 \
                        --learning-rate 1e-12 --seq-len 16";
        let mut all: Vec<String> = args.iter().map(|word| word.to_string()).collect();
        all.extend(settings.split_whitespace().map(str::to_string));
        all.push("--data".to_string());
        all.extend(data.iter().map(|name| self.path(name)));
        all.extend(more.iter().map(|word| word.to_string()));
        all
    }

    /// Trains and gives what was said, and the held-out loss of the weights that it began with.
    fn train(&self, model: &str, data: &[&str], more: &[&str]) -> (String, f64) {
        let args = self.training(model, data, more);
        let output = deepwell(&args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {said}");
        let metrics = fs::read_to_string(self.path("run/metrics.jsonl")).unwrap();
        let mut losses = metrics
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok()?["val_loss"].as_f64());
        (said, losses.next().unwrap())
    }

    fn tokens(&self) -> [&'static str; 2] {
        ["x_train.bin", "x_val.bin"]
    }

    #[track_caller]
    fn refuses(&self, model: &str, data: &[&str], more: &[&str], contains: &[&str]) {
        let args = self.training(model, data, more);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        check_error(&args, 2, contains);
    }

    fn generate(&self, prompt: &str) -> Value {
        let model = self.path("m");
        let args = ["generate", &model, "--prompt", prompt, "--greedy", "--precision", "f32"];
        json_of(&[&args[..], &["--max-tokens", "6", "--json"]].concat())
    }
}

/// A tokenizer of the words `a0` to `a35` with ids 2 to 37, `<s>` 1 and `</s>` 38, and others
/// behind it.
fn words(post_processor: &Value, more: &[&str]) -> String {
    let mut vocab = json!({"[UNK]": 0, "<s>": 1, "</s>": 38});
    for id in 2..38 {
        vocab[format!("a{}", id - 2)] = json!(id);
    }
    let special = [(1, "<s>"), (38, "</s>")].into_iter();
    let more = more.iter().enumerate().map(|(at, name)| (39 + at, *name));
    let added: Vec<Value> = special
        .chain(more)
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": post_processor, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": vocab}
    })
    .to_string()
}

/// A template that puts a token before each text.
fn template(name: &str, id: u32) -> Value {
    json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]}}
    })
}

fn some_text() -> String {
    (0..400).map(|at| format!("a{} ", at * 5 % 36)).collect()
}

#[test]
fn issue_31_no_run_begins_from_fresh_weights_beside_others() {
    let model = Model::new(json!({}));
    let data = model.tokens();
    let (said, loss) = model.train("m", &data, &[]);
    let file = model.path("m/model.safetensors");
    assert!(said.contains(&format!("weights  {file}, 12 tensors\n")), "{said}");
    let summary: Value =
        serde_json::from_slice(&fs::read(model.path("run/summary.json")).unwrap()).unwrap();
    assert_eq!(summary["weights"], format!("{file}, 12 tensors"));
    assert_eq!(summary["data"]["tokens_train"], SEQ + 1);
    let page = fs::read_to_string(model.path("run/report.html")).unwrap();
    for row in ["weights", "data", "tokens", "tokenizer", "learning rate"] {
        assert!(page.contains(&format!(">{row}<")), "{row}");
    }
    assert!(page.contains("12 tensors"), "{page}");

    // The configuration itself begins from fresh weights, and says which it does not read.
    let (said, fresh) = model.train("m/config.json", &data, &[]);
    let words = format!("weights  random, seed 0; `{file}` is not read, `");
    assert!(said.contains(&words), "{said}");
    assert!((fresh - loss).abs() > 0.1, "{fresh} {loss}");

    for name in ["weights.safetensors", "pytorch_model.bin", "model.gguf", "model.pth"] {
        fs::rename(&file, model.path(&format!("m/{name}"))).unwrap();
        let named = format!("got `{name}`");
        model.refuses("m", &data, &[], &[&named, "begins from fresh weights"]);
        check_error(&["generate", &model.path("m")], 2, &[&named]);
        check_error(&["capture", &model.path("m")], 2, &[&named]);
        fs::rename(model.path(&format!("m/{name}")), &file).unwrap();
    }

    // Two shards without an index are the same weights.
    for (number, is_first) in [(1, true), (2, false)] {
        let shard = format!("model-0000{number}-of-00002.safetensors");
        let is_in = |name: &&str| name.contains("mlp") == is_first;
        model.write(&shard, &|name| Some(name).filter(is_in).map(str::to_string));
    }
    model.remove("m/model.safetensors");
    let (said, sharded) = model.train("m", &data, &[]);
    assert!(said.contains("model-00001-of-00002.safetensors and 1 more, 12 tensors"), "{said}");
    assert_eq!(sharded, loss);
    model.remove("m/model-00002-of-00002.safetensors");
    model.refuses("m", &data, &[], &["got 1 of the shards", "download the others"]);
    model.remove("m/model-00001-of-00002.safetensors");
    let (said, alone) = model.train("m", &data, &[]);
    assert!(said.contains("weights  random, seed 0\n"), "{said}");
    assert_eq!(alone, fresh);
    check_error(&["generate", &model.path("m")], 2, &["a configuration alone"]);
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("../blobs/none", &file).unwrap();
        model.refuses("m", &data, &[], &["a link to `../blobs/none`, where there is none"]);
        check_error(&["generate", &model.path("m")], 2, &["a link to `../blobs/none`"]);
    }
}

#[test]
fn issue_31_a_tied_table_is_read_under_either_name() {
    for (family, table) in [
        (json!({"tie_word_embeddings": true}), "model.embed_tokens.weight"),
        (
            json!({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32,
                "n_layer": 1, "n_head": 2, "n_positions": 128, "tie_word_embeddings": true}),
            "wte.weight",
        ),
    ] {
        let mut model = Model::new(json!({"tie_word_embeddings": true}));
        if family["model_type"] == "gpt2" {
            model.config = family;
            model.config["vocab_size"] = json!(VOCAB);
            model.file("m/config.json", model.config.to_string());
        }
        let file = "model.safetensors";
        model.write(file, &|name| Some(name.to_string()));
        let (_, loss) = model.train("m", &model.tokens(), &[]);
        let headed = |name: &str| if name == table { "lm_head.weight" } else { name }.to_string();
        model.write(file, &|name| Some(headed(name)));
        let (_, other) = model.train("m", &model.tokens(), &[]);
        assert_eq!(other, loss, "{table}");
        // What is exported is the same model.
        let exported = model.path("exported");
        stdout_of(&["export", "hf", &model.path("run"), "--to", &exported]);
        let folder = Weights::open(Path::new(&exported)).unwrap();
        let is_table = |name: &str| name.trim_start_matches("transformer.") == table;
        assert!(folder.tensors().any(|tensor| is_table(&tensor.name)));
        model.write(file, &|name| (name != table).then(|| name.to_string()));
        model.refuses("m", &model.tokens(), &[], &["found in no file of"]);
    }
}

#[test]
fn issue_31_the_tokenizer_of_a_folder_is_its_own() {
    let model = Model::new(json!({"eos_token_id": 38}));
    model.file("text.txt", some_text());
    let data = ["text.txt"];
    model.refuses("m", &data, &[], &["a tokenizer.json beside the config.json of", "got none"]);
    for name in ["tokenizer.model", "vocab.json", "tokenizer_config.json", "qwen.tiktoken"] {
        let file = model.file(&format!("m/{name}"), "{}");
        model.refuses("m", &data, &[], &[&file, "save_pretrained", "--tokenizer bytes"]);
        let parity = ["parity", "--model", &model.path("m"), "--data", &model.path("text.txt")];
        check_error(&parity, 2, &[&file]);
        check_error(&["generate", &model.path("m")], 2, &[&file]);
        // Token files need none.
        model.train("m", &model.tokens(), &[]);
        model.remove(&format!("m/{name}"));
    }

    let own = words(&Value::Null, &[]);
    model.file("m/tokenizer.json", &own);
    model.file("m/merges.txt", "#version: 0.2\n");
    let (said, _) = model.train("m", &data, &[]);
    assert!(said.contains("m/tokenizer.json`, vocabulary 39"), "{said}");
    let summary = json_of(&model.training("m", &data, &["--json"]));
    let data_facts = &summary["data"];
    let count = data_facts["tokens_train"].as_u64().unwrap();
    assert_eq!(count + data_facts["tokens_heldout"].as_u64().unwrap(), 400);
    let export = |to: &str| {
        let to = model.path(to);
        stdout_of(&["export", "hf", &model.path("run"), "--to", &to]);
        let read = |name: &str| fs::read_to_string(Path::new(&to).join(name)).unwrap();
        let config: Value = serde_json::from_str(&read("config.json")).unwrap();
        (read("tokenizer.json"), config["eos_token_id"].clone(), to)
    };
    let (tokenizer, eos, to) = export("own");
    assert_eq!((tokenizer, eos), (own, json!(38)));
    assert!(Path::new(&to).join("merges.txt").is_file());
    // A run's text model has the tokenizer too.
    let run = model.path("run");
    let args = ["generate", &run, "--prompt", "a1 a2", "--max-tokens", "1", "--json"];
    assert_eq!(json_of(&args)["prompt_tokens"], json!([3, 4]));

    // Another one is said, and goes into the export with its own end of text.
    let other = words(&Value::Null, &[]).replace("\"</s>\"", "\"<eos>\"").replace("38", "37");
    let other = other.replace(",\"a35\":37", "").replace("\"a35\":37,", "");
    let path = model.file("other.json", &other);
    let (said, _) = model.train("m", &data, &["--tokenizer", &path]);
    assert!(said.contains("takes the place of the model's own"), "{said}");
    let (tokenizer, eos, _) = export("other");
    assert_eq!((tokenizer, eos), (other, json!(37)));

    // Bytes want to be asked for, and larger ids than the model has are refused.
    model.file("low.txt", [1u8, 9, 10, 13].repeat(100));
    let (said, _) = model.train("m", &["low.txt"], &["--tokenizer", "bytes"]);
    assert!(said.contains("note: bytes are the tokens, not the 40 of the model"), "{said}");
    model.refuses("m", &data, &["--tokenizer", "bytes"], &["vocab"]);
}

#[test]
fn issue_31_one_rule_for_vocabularies() {
    let model = Model::new(json!({"vocab_size": 39}));
    model.file("m/tokenizer.json", words(&Value::Null, &["[PAD]", "[MASK]"]));
    model.file("text.txt", some_text());
    let (said, _) = model.train("m", &["text.txt"], &[]);
    assert!(said.contains("note: the tokenizer has 41 tokens, the model rows for 39"), "{said}");
    let (folder, run) = (model.path("m"), model.path("run"));
    for path in [&folder, &run] {
        let generate = |prompt: &'static str| ["generate", path, "--prompt", prompt, "--json"];
        let report = json_of(&generate("a1 a2"));
        assert_eq!(report["prompt_tokens"], json!([3, 4]));
        check_error(&generate("a1 [PAD]"), 2, &["token 39, `[PAD]`", "tokens below 39"]);
    }
    let output = deepwell(&["export", "hf", &run, "--to", &model.path("exported")]);
    let said = text(&output.stderr) + &text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("the tokenizer has 41 tokens"), "{said}");
    model.file("padded.txt", format!("{} [PAD] {0}", some_text()));
    model.refuses("m", &["padded.txt"], &[], &["39"]);
}

#[test]
fn issue_31_every_end_token_ends_a_text() {
    let model = Model::new(json!({}));
    model.file("m/tokenizer.json", words(&Value::Null, &[]));
    let whole = model.generate("a3");
    let tokens: Vec<u32> = serde_json::from_value(whole["tokens"].clone()).unwrap();
    assert_eq!((tokens.len(), &whole["stop"]), (6, &json!("tokens_max")));
    let end = tokens[2];
    let first = tokens.iter().position(|&token| token == end).unwrap();
    let check = |generation: Value, config: Value, ends: bool| {
        let own = model.config.clone();
        let mut changed = own.clone();
        for (key, value) in config.as_object().unwrap() {
            changed[key] = value.clone();
        }
        model.file("m/config.json", changed.to_string());
        if generation.is_null() {
            let _ = fs::remove_file(model.path("m/generation_config.json"));
        } else {
            model.file("m/generation_config.json", generation.to_string());
        }
        let report = model.generate("a3");
        let (count, stop) = if ends { (first, "end_of_text") } else { (6, "tokens_max") };
        assert_eq!(report["tokens"], json!(tokens[..count]), "{generation} {config}");
        assert_eq!(report["stop"], stop, "{generation} {config}");
    };
    check(json!({"eos_token_id": [0, end]}), json!({}), true);
    check(json!({"eos_token_id": end}), json!({}), true);
    check(json!({"eos_token_id": [0]}), json!({"eos_token_id": end}), false);
    check(Value::Null, json!({"eos_token_id": end}), true);
    check(json!({}), json!({"eos_token_id": [0, end]}), true);
    check(json!({"eos_token_id": null}), json!({"eos_token_id": 0}), false);
}

#[test]
fn issue_31_an_empty_prompt_is_what_the_template_says() {
    let model = Model::new(json!({}));
    let null = Value::Null;
    let check =
        |post: &Value, tokenizer: Value, generation: Value, prompt: &str, expected: Value| {
            model.file("m/tokenizer.json", words(post, &[]));
            model.file("m/tokenizer_config.json", tokenizer.to_string());
            model.file("m/generation_config.json", generation.to_string());
            let report = model.generate(prompt);
            assert_eq!(report["prompt_tokens"], expected, "{post} {tokenizer} {generation}");
        };
    let begins = template("<s>", 1);
    let bos = |adds: Value| json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": adds});
    check(&begins, json!({"eos_token": "</s>"}), json!({"bos_token_id": 7}), "", json!([1]));
    check(&begins, json!({}), json!({}), "a1", json!([1, 3]));
    check(&null, json!({}), json!({"bos_token_id": 7}), "", json!([7]));
    check(&null, json!({}), json!({"bos_token_id": 7}), "a1", json!([3]));
    check(&null, json!({}), json!({}), "", json!([38]));
    check(&null, bos(json!(true)), json!({}), "", json!([1]));
    check(&null, bos(json!(true)), json!({}), "a1", json!([1, 3]));
    check(&begins, bos(json!(false)), json!({"bos_token_id": 7}), "", json!([7]));
    check(&begins, bos(json!(false)), json!({}), "a1", json!([3]));
    check(&begins, bos(json!(null)), json!({}), "", json!([1]));
    let nothing = words(&null, &[]).replace("</s>", "end");
    model.file("m/tokenizer.json", nothing);
    model.file("m/tokenizer_config.json", "{}");
    model.file("m/generation_config.json", "{}");
    check_error(&["generate", &model.path("m"), "--prompt", ""], 2, &["at least one token"]);
}

/// Phi-3 trains as the llama that it is but for its files, and its export has them again.
#[test]
fn phi3_folders_train_and_export() {
    let phi3 = json!({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"],
        "pad_token_id": 0, "sliding_window": null});
    let model = Model::new(phi3);
    let (_, loss) = model.train("m", &model.tokens(), &[]);
    let exported = model.path("exported");
    stdout_of(&["export", "hf", &model.path("run"), "--to", &exported]);
    let [before, after] =
        [model.path("m"), exported.clone()].map(|path| Weights::open(Path::new(&path)).unwrap());
    let names = |folder: &Weights| -> Vec<(String, Vec<usize>)> {
        folder.tensors().map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect()
    };
    assert_eq!(names(&before), names(&after));
    for (name, shape) in names(&before) {
        let [before, after] = [&before, &after].map(|it| it.read_f32(&name, &shape).unwrap());
        let largest = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // One step of 1e-12 moves nothing.
        assert!(largest < 1e-6, "{name}: {largest}");
    }
    // The same values as a llama: its projections are rows of the fused ones.
    let rows = |name: &str, from: usize, count: usize| -> Vec<f32> {
        let name = format!("model.layers.0.{name}.weight");
        let shape = before.tensor(&name).unwrap().shape.clone();
        let all = before.read_f32(&name, &shape).unwrap();
        all[from * shape[1]..(from + count) * shape[1]].to_vec()
    };
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    for (name, shape) in names(&before) {
        if !name.contains("qkv_proj") && !name.contains("gate_up_proj") {
            let values = before.read_f32(&name, &shape).unwrap();
            tensors.push((name, shape, values));
        }
    }
    for (own, fused, from, count) in [
        ("self_attn.q_proj", "self_attn.qkv_proj", 0, 32),
        ("self_attn.k_proj", "self_attn.qkv_proj", 32, 16),
        ("self_attn.v_proj", "self_attn.qkv_proj", 48, 16),
        ("mlp.gate_proj", "mlp.gate_up_proj", 0, 48),
        ("mlp.up_proj", "mlp.gate_up_proj", 48, 48),
    ] {
        let name = format!("model.layers.0.{own}.weight");
        tensors.push((name, vec![count, 32], rows(fused, from, count)));
    }
    let views: Vec<WriteTensor<'_>> = tensors
        .iter()
        .map(|(name, shape, values)| WriteTensor::from_f32(name, shape, values))
        .collect();
    write(Path::new(&model.path("m/model.safetensors")), &views).unwrap();
    let mut llama = model.config.clone();
    llama["model_type"] = json!("llama");
    llama["architectures"] = json!(["LlamaForCausalLM"]);
    llama["rms_norm_eps"] = json!(1e-5);
    llama.as_object_mut().unwrap().remove("sliding_window");
    model.file("m/config.json", llama.to_string());
    let (_, same) = model.train("m", &model.tokens(), &[]);
    assert_eq!(same, loss);
}

#[test]
fn an_unknown_preset_is_answered_with_the_nearest() {
    check_error(&["plan", "lama-micro"], 2, &["hint: did you mean `llama-micro`?"]);
    check_error(&["plan", "LLAMA3-8B"], 2, &["hint: did you mean `llama-3-8b`?"]);
    check_error(&["plan", "./nowhere"], 2, &["hint: there is no such file or folder"]);
}

/// An evaluation on token files asked for the tokenizer of a folder that has none.
#[test]
fn issue_31_token_files_are_evaluated_without_a_tokenizer() {
    let model = Model::new(json!({}));
    let [folder, data, cache] = ["m", "x_val.bin", "cache"].map(|name| model.path(name));
    let args = ["eval", &folder, "--data", &data, "--cache-dir", &cache, "--seq-len", "16"];
    let args = [&args[..], &["--precision", "f32", "--json"]].concat();
    let evaluated = json_of(&args);
    assert_eq!(evaluated["tokens_predicted"], json!(4 * SEQ));
    let tokenizer = model.file("words.json", words(&Value::Null, &[]));
    let named = json_of(&[&args[..], &["--tokenizer", &tokenizer]].concat());
    assert_eq!(evaluated["loss"], named["loss"]);
    // Text still needs one.
    let text = model.file("a.txt", "a1 a2 a3 ".repeat(50));
    check_error(&["eval", &folder, "--data", &text], 2, &["tokenizer.json", "has 40 tokens"]);
}
