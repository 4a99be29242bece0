//! The `deepwell` command as a user sees it: exit codes, errors, help, data on stdout.
//!
//! Each row of a table is a command line with what it must come to. No row may panic.

mod auto_precision;
mod bench;
mod capture;
mod ckpt_diff;
mod completions;
mod documented;
mod eval;
mod export;
mod generate;
mod help;
mod model_folder;
mod parity;
mod plan;
mod predicted_times;
mod quantize;
mod report;
mod runs;
mod tables;
mod tokenizer;
mod tune;
mod unserved;

use std::ffi::OsStr;
use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use deepwell_ckpt::{CheckpointContents, SaveOptions, Section, TensorView};
use serde_json::{Value, json};

fn deepwell<A: AsRef<OsStr>>(args: &[A]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_deepwell"))
        .args(args)
        .env("COLUMNS", "100")
        .env_remove("DEEPWELL_LOG")
        .stdin(Stdio::null())
        .output()
        .expect("the command was built with this test")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the command writes UTF-8")
}

/// Runs a command line that fails: `code`, nothing on stdout, and all of `contains` on stderr.
#[track_caller]
fn check_error(args: &[&str], code: i32, contains: &[&str]) {
    let output = deepwell(args);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(stderr.contains("error: "), "{args:?}: {stderr}");
    assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
    assert_eq!(text(&output.stdout), "", "{args:?}");
    for part in contains {
        assert!(stderr.contains(part), "{args:?}: expected `{part}` in: {stderr}");
    }
}

/// Runs a command line that succeeds and gives its stdout.
#[track_caller]
fn stdout_of<A: AsRef<OsStr> + Debug>(args: &[A]) -> String {
    let output = deepwell(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[track_caller]
fn json_of<A: AsRef<OsStr> + Debug>(args: &[A]) -> Value {
    let stdout = stdout_of(args);
    serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{args:?}: {error}: {stdout}"))
}

/// A temporary folder with files in it.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().expect("a temporary folder"))
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// Writes a file and gives its path.
    fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        fs::write(self.0.path().join(name), contents).expect("a file in a temporary folder");
        self.path(name)
    }

    /// Writes the configuration of a small model with some keys changed; null removes a key.
    fn config(&self, name: &str, changes: Value) -> String {
        let mut config = json!({
            "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        });
        for (key, value) in changes.as_object().expect("changes are an object") {
            config[key] = value.clone();
        }
        if let Some(config) = config.as_object_mut() {
            config.retain(|_, value| !value.is_null());
        }
        self.file(name, config.to_string())
    }

    /// The command line of a small run on text of its own, with its output below `out`.
    fn training(&self, model: &str, steps: &str) -> Vec<String> {
        let words = (0..6000u32).map(|index| format!("{} ", index.wrapping_mul(2_654_435_761)));
        let data = self.file("data.txt", words.collect::<String>());
        let cache = self.path("cache");
        let run_file = self.file("run.toml", format!("eval_tokens = 512\ncache_dir = {cache:?}\n"));
        let out = self.path("out");
        let options = [
            ("--run-file", run_file.as_str()),
            ("--model", model),
            ("--data", &data),
            ("--steps", steps),
            ("--seq-len", "32"),
            ("--batch-size", "4"),
            ("--out", &out),
        ];
        let mut args = vec!["train".to_string(), "--json".to_string()];
        args.extend(options.iter().flat_map(|(name, value)| [name.to_string(), value.to_string()]));
        args
    }

    /// Saves two checkpoints below `checkpoints` and gives the folders of both.
    fn checkpoints(&self) -> [PathBuf; 2] {
        let root = self.0.path().join("checkpoints");
        let values: Vec<f32> = (0..4096).map(|index| index as f32).collect();
        [20, 40].map(|step| {
            let mut contents = CheckpointContents::new(step);
            contents.tensors =
                vec![TensorView::from_f32(Section::Weights, "lm_head", &[64, 64], &values)];
            deepwell_ckpt::save(&root, &contents, &SaveOptions::default()).expect("saved").path
        })
    }
}

fn shard_of(checkpoint: &Path) -> PathBuf {
    let mut names: Vec<PathBuf> = fs::read_dir(checkpoint)
        .expect("a checkpoint is a folder")
        .map(|entry| entry.expect("a readable entry").path())
        .filter(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .collect();
    assert_eq!(names.len(), 1, "{names:?}");
    names.remove(0)
}

#[test]
fn models_that_cannot_be_read() {
    let folder = Folder::new();
    let none = folder.path("none");
    let empty = folder.path(".");
    let not_json = folder.file("not.json", "{\"hidden_size\": }");
    let odd_heads = folder.config("odd.json", json!({ "num_attention_heads": 3 }));
    let kv_heads = folder.config("kv.json", json!({ "num_key_value_heads": 3 }));
    let unknown = folder.config("unknown.json", json!({ "moon_phase": 3 }));
    let missing = folder.config("missing.json", json!({ "vocab_size": null }));
    let layers = folder.config("layers.json", json!({ "num_hidden_layers": 0 }));
    for command in ["capture", "plan", "dryrun"] {
        let check = |model: &str, contains: &[&str]| check_error(&[command, model], 2, contains);
        check("lama-micro", &["got `lama-micro`", "llama-micro, parity-600k", "hint: "]);
        check(&none, &["a model folder", &none]);
        check(&empty, &["a config.json", "hint: "]);
        check(&not_json, &["not.json:1:17: not valid JSON"]);
        check(&odd_heads, &["key `hidden_size`", "multiple of `num_attention_heads` (3)", "64"]);
        check(&kv_heads, &["key `num_key_value_heads`", "divisor"]);
        check(&unknown, &["unknown key `moon_phase`"]);
        check(&missing, &["key `vocab_size` is missing"]);
        check(&layers, &["key `num_hidden_layers`", "got `0`"]);
    }
}

#[test]
fn requests_that_cannot_be_planned() {
    let folder = Folder::new();
    let nothing = folder.file(
        "nothing.toml",
        "precision = \"mxfp8\"\n[[rule]]\ntensors = \"*.moe.*\"\nformat = \"bf16\"\n",
    );
    let broken = folder.file("broken.toml", "precision = \"mxfp8\"\n  granularity = 48\n");
    let unclosed = folder.file("unclosed.toml", "precision = \"mxfp8");
    let hardware = folder.file("machine.json", "{\"cpu\": 3}");
    let none = folder.path("none.toml");
    for command in ["plan", "dryrun"] {
        let check = |options: &[&str], contains: &[&str]| {
            check_error(&[&[command, "llama-micro"], options].concat(), 2, contains);
        };
        check(&["--seq", "0"], &["--seq: expected at least 1, got 0"]);
        check(&["--batch", "0"], &["--batch: expected at least 1, got 0"]);
        check(&["--seq", "many"], &["--seq", "many"]);
        check(&["--seq", "100000", "--batch", "100000"], &["at most 2147483647 tokens"]);
        check(&["--micro-batch", "3"], &["micro-batch", "divisor of the batch of 8", "got 3"]);
        check(&["--micro-batch", "0"], &["micro-batch", "got 0"]);
        check(
            &["--recompute", "some"],
            &["`none`, `norms`, `activations`, `selective`, `full`, or"],
        );
        check(&["--recompute", "full:9"], &["recompute full:9: expected at most 2 layers"]);
        check(&["--precision", "mxfp9"], &["mxfp9", "mxfp8-floor"]);
        check(&["--precision", "bf16", "--policy", &nothing], &["cannot be used with"]);
        check(&["--policy", &nothing], &["nothing.toml:3:11: rule `*.moe.*` matches none"]);
        check(&["--policy", &broken], &["broken.toml:2:17: ", "got `48`"]);
        check(&["--policy", &unclosed], &["unclosed.toml:1:"]);
        check(&["--policy", &none], &["cannot read the policy", "none.toml", "caused by"]);
        check(&["--memory-limit", "2 gulps"], &["2 gulps", "`2GiB`"]);
        check(&["--hardware", &hardware], &["machine.json", "line 1", "deepwell probe --json"]);
        check(&["--hardware", "none.json"], &["got `none.json`", "preset", "hint: "]);
        let devices = "`cpu`, `cuda`, `cuda:N` or one of emulated:sm90, emulated:sm100";
        check(&["--device", "tpu"], &[devices, "tpu"]);
        check(&["--device", "emulated"], &[devices, "got `emulated`"]);
        for device in ["cuda", "cuda:1"] {
            check(&["--device", device], &["expected a GPU for", "`--device cpu` needs none"]);
        }
    }
}

/// That nothing fits is a verdict, not a mistake in the command line.
#[test]
fn a_model_that_does_not_fit() {
    for command in ["plan", "dryrun"] {
        let args = [command, "llama-micro", "--memory-limit", "64KiB"];
        check_error(&args, 1, &["no plan fits into 64.0 KiB", "recompute full", "hint: "]);
    }
}

/// MXFP8 takes whole blocks of 32; BF16 takes any size.
#[test]
fn sizes_that_blocks_do_not_divide() {
    let folder = Folder::new();
    let config = folder.config("odd.json", json!({ "hidden_size": 48 }));
    let expected = ["divisible by 32 for mxfp8", "48", "hint: choose such sizes"];
    check_error(&["dryrun", &config], 2, &expected);
    check_error(&["parity", "--model", &config, "--steps", "3"], 2, &expected);
    let predicted = json_of(&["dryrun", &config, "--precision", "bf16", "--json"]);
    assert!(predicted["time_s"].as_f64() > Some(0.0), "{predicted}");
}

/// Ctrl-C ends a run in order: with its own exit code and a sound checkpoint to go on from.
#[cfg(unix)]
#[test]
fn an_interrupted_run() {
    let folder = Folder::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_deepwell"))
        .args(folder.training("llama-micro", "1000000"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command was built with this test");
    let metrics = folder.path("out/metrics.jsonl");
    let begun = || fs::metadata(&metrics).is_ok_and(|metadata| metadata.len() > 0);
    for _ in 0..1000 {
        if begun() || child.try_wait().expect("a child").is_some() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let pid = child.id().to_string();
    let sent = Command::new("kill").args(["-INT", &pid]).status().expect("`kill` is a command");
    let output = child.wait_with_output().expect("the command ends");
    assert!(sent.success() && begun(), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let summary: Value = serde_json::from_slice(&output.stdout).expect("a summary");
    assert_eq!(summary["fit"]["interrupted"], true);
    let report = json_of(&["ckpt", "verify", &folder.path("out"), "--json"]);
    assert_eq!(report["sound"], true);
    assert_eq!(report["report"]["step"], summary["fit"]["step"]);
}

#[test]
fn checkpoints_that_are_damaged() {
    let folder = Folder::new();
    let run = folder.path(".");
    let [older, newer] = folder.checkpoints();
    let (older_text, newer_text) = (older.display().to_string(), newer.display().to_string());

    let report = json_of(&["ckpt", "verify", &run, "--json"]);
    assert_eq!((&report["sound"], &report["report"]["step"]), (&json!(true), &json!(40)));
    let inspection = json_of(&["ckpt", "inspect", &older_text, "--json"]);
    assert_eq!((&inspection["step"], &inspection["tensor_bytes"]), (&json!(20), &json!(16384)));
    assert!(stdout_of(&["ckpt", "inspect", &run, "--tensors"]).contains("lm_head"));
    assert!(stdout_of(&["ckpt", "verify", &older_text]).starts_with("sound: "));

    let check = |args: &[&str], stdout_parts: &[&str]| {
        let output = deepwell(args);
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stdout}{stderr}");
        assert!(stderr.contains("is damaged"), "{args:?}: {stderr}");
        for part in stdout_parts {
            assert!(stdout.contains(part), "{args:?}: expected `{part}` in: {stdout}");
        }
    };
    // One bit in the middle of a shard: the checkpoint is complete, and not sound.
    let shard = shard_of(&newer);
    let sound = fs::read(&shard).expect("a shard");
    let mut flipped = sound.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0x10;
    fs::write(&shard, &flipped).expect("a flipped shard");
    check(&["ckpt", "verify", &newer_text], &["damaged: ", "tensor `weights/lm_head`"]);
    check(&["ckpt", "verify", &run], &["damaged: ", "step 40"]);
    check(&["ckpt", "verify", &run, "--json"], &["\"sound\": false", "weights/lm_head"]);

    // A truncated shard: not even complete, so the older one is the newest to inspect.
    fs::write(&shard, &sound[..middle]).expect("a truncated shard");
    check(&["ckpt", "verify", &newer_text], &["damaged: ", "expected", "bytes, got"]);
    check(&["ckpt", "verify", &run, "--json"], &["\"sound\": false", "\"report\": null"]);
    assert_eq!(json_of(&["ckpt", "inspect", &run, "--json"])["step"], 20);
    check_error(&["ckpt", "inspect", &newer_text], 2, &["is damaged: expected", "hint: "]);

    let manifest = newer.join("manifest.json");
    let mut bytes = fs::read(&manifest).expect("a manifest");
    bytes[10] ^= 1;
    fs::write(&manifest, &bytes).expect("a flipped manifest");
    check(&["ckpt", "verify", &newer_text], &["manifest", "is damaged: expected checksum"]);
}

/// Verifying once ended with 2, as for a folder that is no checkpoint, where a file was missing.
#[test]
fn damage_of_every_kind_ends_with_one() {
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path), &'a str);
    let remove = |path: &Path| fs::remove_file(path).expect("a file");
    let cut = |path: &Path| {
        let bytes = fs::read(path).expect("a file");
        fs::write(path, &bytes[..bytes.len() / 2]).expect("a shorter file");
    };
    let empty = |path: &Path| fs::write(path, "").expect("an empty file");
    let lengthen = |path: &Path| {
        let bytes = fs::read(path).expect("a file");
        fs::write(path, [&bytes[..], b"garbage"].concat()).expect("a longer file");
    };
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).expect("a file");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        fs::write(path, bytes).expect("another file");
    };
    let shard = "weights-00001.safetensors";
    let damages: &[Damage<'_>] = &[
        (shard, &remove, "got no such file"),
        (shard, &cut, "bytes, got"),
        (shard, &empty, "bytes, got 0"),
        (shard, &lengthen, "bytes, got"),
        (shard, &flip, "expected"),
        ("manifest.json", &remove, "it has no `manifest.json`"),
        ("manifest.json", &cut, "is damaged: expected checksum"),
        ("manifest.json", &empty, "is damaged: expected checksum"),
        ("manifest.json", &lengthen, "is damaged: expected checksum"),
        ("manifest.json", &flip, "is damaged: expected checksum"),
        ("manifest.blake3", &remove, "it has no `manifest.blake3`"),
        ("manifest.blake3", &cut, "is damaged: expected checksum"),
        ("manifest.blake3", &empty, "is damaged: expected checksum"),
        ("manifest.blake3", &lengthen, "is damaged: expected checksum"),
        ("manifest.blake3", &flip, "is damaged: expected checksum"),
    ];
    for (file, damage, expected) in damages {
        let folder = Folder::new();
        let newer = folder.checkpoints()[1].clone();
        damage(&newer.join(file));
        // The checkpoint, and the folder in which it is the newest.
        for path in [newer.display().to_string(), folder.path(".")] {
            let output = deepwell(&["ckpt", "verify", &path]);
            let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
            assert_eq!(output.status.code(), Some(1), "{file}: {stdout}{stderr}");
            assert!(stdout.starts_with("damaged: ") && stdout.contains(expected), "{stdout}");
            let output = deepwell(&["ckpt", "verify", &path, "--json"]);
            let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
            assert_eq!((output.status.code(), &report["sound"]), (Some(1), &json!(false)));
        }
        // The other commands go on with the older one, or cannot use the newer one.
        let newer = newer.display().to_string();
        if !only_bytes_tell(file, expected) {
            assert_eq!(json_of(&["ckpt", "inspect", &folder.path("."), "--json"])["step"], 20);
            check_error(&["ckpt", "inspect", &newer], 2, &["is damaged"]);
            check_error(&["ckpt", "diff", &newer, &newer], 2, &["is damaged"]);
        }
    }
}

/// Whether only reading every byte of a shard tells of the damage.
fn only_bytes_tell(file: &str, expected: &str) -> bool {
    file.ends_with(".safetensors") && expected == "expected"
}

#[test]
fn paths_that_hold_no_checkpoint() {
    let folder = Folder::new();
    let file = folder.file("file", "text");
    for command in ["inspect", "verify"] {
        let check =
            |path: &str, contains: &[&str]| check_error(&["ckpt", command, path], 2, contains);
        check(&folder.path("none"), &["is not a checkpoint: no such folder"]);
        check(&file, &["is not a checkpoint"]);
        check(&folder.path("."), &["found neither", "hint: "]);
    }
}

#[test]
fn command_lines_that_are_not_understood() {
    let check = |args: &[&str], contains: &[&str]| check_error(args, 2, contains);
    check(&["bake"], &["unrecognized subcommand 'bake'"]);
    check(&["plan"], &["<MODEL>"]);
    check(&["probe", "--jsn"], &["'--jsn'"]);
    check(&["capture", "llama-micro", "--dot", "--json"], &["cannot be used with"]);
    for (variable, value) in [("DEEPWELL_LOG", "deepwell=loud"), ("DEEPWELL_CPU_TIER", "avx")] {
        let output = Command::new(env!("CARGO_BIN_EXE_deepwell"))
            .args(["probe", "--json"])
            .env(variable, value)
            .output()
            .expect("the command was built with this test");
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(&format!("error: `{variable}`")), "{stderr}");
    }
}

/// A reader that goes away, as `head` does, is no error.
#[test]
fn a_closed_stdout() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_deepwell"))
        .args(["capture", "llama-134m", "--json"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command was built with this test");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the command ends");
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
}

/// Progress that nobody reads stops no run: the line, the notes and the JSON are passed over.
#[test]
fn closed_pipes_end_no_run() {
    let folder = Folder::new();
    let run = |args: &[String], log: &str| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_deepwell"))
            .args(args)
            .env("DEEPWELL_LOG", log)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command was built with this test");
        drop((child.stdout.take(), child.stderr.take()));
        child.wait().expect("the command ends").code()
    };
    let training = folder.training("llama-micro", "2");
    assert_eq!(run(&training, "trace"), Some(0));
    assert_eq!(json_of(&["ckpt", "verify", &folder.path("out"), "--json"])["sound"], true);
    let data = folder.path("data.txt");
    let out = folder.path("tokenizer.json");
    let tokenizer = ["tokenizer", "train", "--data", &data, "--vocab-size", "300", "--out", &out];
    assert_eq!(run(&tokenizer.map(str::to_string), "warn"), Some(0));
    assert!(Path::new(&out).exists());
}

/// From text to a tokenizer to a model that trains on its tokens, and the same again.
#[test]
fn data_goes_to_stdout_as_json() {
    let hardware = stdout_of(&["probe", "--measure", "--json"]);
    let hardware = deepwell_probe::Hardware::from_json(&hardware).expect("a description");
    assert!(hardware.cpu.memory_gbps.is_some_and(|gbps| gbps > 0.0));

    let graph = stdout_of(&["capture", "llama-micro", "--json"]);
    let graph = deepwell_ir::Graph::from_json(&graph).expect("a graph");
    let summary = json_of(&["capture", "llama-micro", "--summary", "--json"]);
    assert_eq!(summary["parameter_count"], graph.parameter_count());
    let of_tags: u64 = summary["tags"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|tag| tag["parameter_count"].as_u64())
        .sum();
    assert_eq!(of_tags, graph.parameter_count());
    assert!(stdout_of(&["capture", "llama-micro", "--dot"]).starts_with("digraph"));

    let planned = json_of(&["plan", "llama-micro", "--seq", "64", "--json"]);
    let plan: deepwell_plan::Plan =
        serde_json::from_value(planned["plan"].clone()).expect("a plan");
    assert_eq!((plan.seq, plan.micro_batch * plan.micro_batches), (64, 8));
    assert!(!planned["kernels"].as_array().expect("a list").is_empty());

    let predicted = json_of(&["dryrun", "parity-3m", "--json"]);
    let run: deepwell_plan::DryRun =
        serde_json::from_value(predicted.clone()).expect("a prediction");
    assert_eq!(run.tokens, 128 * 8);
    let speedup = run.expected_speedup_over_bf16.expect("the policy is MXFP8");
    let expected = predicted["in_bf16"]["time_s"].as_f64().expect("a time") / run.time_s;
    // The same two numbers divided twice.
    assert!((speedup / expected - 1.0).abs() < 1e-12, "{speedup} {expected}");
    let share = predicted["quantized_flop_share"]["blocks"].as_f64().expect("a share");
    assert!(share > 0.5 && share <= 1.0, "{share}");
    let in_bf16 = json_of(&["dryrun", "parity-3m", "--precision", "bf16", "--json"]);
    assert_eq!(in_bf16["expected_speedup_over_bf16"], Value::Null);
}

/// What one machine's `probe --json` says is enough to plan for it on another.
#[test]
fn plans_for_a_described_machine() {
    let folder = Folder::new();
    let machine = folder.file("machine.json", stdout_of(&["probe", "--json"]));
    // Free memory changes from one call to the next.
    let options = ["--seq", "64", "--memory-limit", "1GiB", "--json"];
    let here = json_of(&[&["plan", "llama-micro"], &options[..]].concat());
    let there = json_of(&[&["plan", "llama-micro", "--hardware", &machine], &options[..]].concat());
    assert_eq!(here["plan"]["arch"], there["plan"]["arch"]);
    assert_eq!(here["plan"]["micro_batch"], there["plan"]["micro_batch"]);
    let preset = json_of(&[&["plan", "llama-micro", "--hardware", "cpu"], &options[..]].concat());
    assert_eq!(preset["plan"]["arch"], "cpu");
}

#[test]
fn explanations_name_what_was_not_taken() {
    // No machine has a kernel on matrix instructions for f32 operands.
    let args = ["plan", "llama-micro", "--batch", "4", "--precision", "f32", "--explain"];
    let explained = stdout_of(&args);
    for part in [
        "plans not taken",
        "micro-batch 1, recompute none: a larger one fits",
        "kernels not taken",
        "taken: cpu_linear_f32",
        "cpu_linear_avx512: ",
        "kinds of calls have no other kernel",
    ] {
        assert!(explained.contains(part), "expected `{part}` in: {explained}");
    }
}

/// Runs that cannot begin: nothing is written to the output folder.
#[test]
fn runs_that_cannot_begin() {
    let folder = Folder::new();
    let out = folder.path("out");
    let none = folder.path("none");
    let broken = folder.file("broken.toml", "steps = 10\nstepz = 20\n");
    for command in ["train", "parity"] {
        let check = |options: &[&str], contains: &[&str]| {
            check_error(&[&[command, "--out", &out], options].concat(), 2, contains);
            assert!(!Path::new(&out).exists(), "{options:?}");
        };
        check(&["--steps", "0"], &["steps: expected at least 1, got 0"]);
        check(&["--seq-len", "0"], &["seq_len: expected at least 1, got 0"]);
        check(&["--batch-size", "0"], &["batch_size: expected at least 1, got 0"]);
        check(&["--learning-rate", "nan"], &["learning_rate: expected a positive number, got NaN"]);
        check(&["--device", "cuda"], &["device", "`cuda:0`", "hint: ", "`--device cpu`"]);
        check(&["--model", "lama"], &["model", "`lama`", "llama-micro"]);
        check(&["--precision", "mxfp9"], &["`mxfp9`", "`mxfp8-floor`"]);
        check(&["--policy", &none], &["none"]);
        check(&["--data", &none], &["no file or folder", "none"]);
    }
    let args = ["train", "--out", &out, "--run-file", &broken];
    check_error(&args, 2, &["broken.toml", "line 2", "stepz"]);
    let args = ["train", "--out", &out, "--router-z", "inf"];
    check_error(&args, 2, &["router.z: expected a number of at least 0, got inf"]);
}
