//! The command on a GPU. Without a GPU each test is reported as ignored; with
//! `DEEPWELL_REQUIRE_GPU` set that is a failure.

#[macro_use]
extern crate deepwell_trials;

#[path = "../../tests/gpu_runs/mod.rs"]
mod gpu_runs;

use std::path::Path;
use std::process::{Command, ExitCode};

use deepwell_trials::skip;

use crate::gpu_runs::{loss_bits, need_gpu, write_corpus};

/// The command. A bundle has it beside its tests and says where.
fn deepwell() -> std::ffi::OsString {
    std::env::var_os("DEEPWELL_COMMAND").unwrap_or(env!("CARGO_BIN_EXE_deepwell").into())
}

trial!(the_default_comparison_ends_with_a_verdict);
/// `deepwell parity` as a new user calls it, with fewer steps and seeds: the audit of the first
/// step once ended it with an error on every device but the CPU.
fn the_default_comparison_ends_with_a_verdict() {
    need_gpu();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let data = folder.path().join("data.txt");
    let words = (0..60_000u32).map(|index| format!("{} ", index.wrapping_mul(2_654_435_761)));
    std::fs::write(&data, words.collect::<String>()).expect("a temporary folder can be written");
    let output = Command::new(deepwell())
        .args(["parity", "--json", "--device", "cuda", "--steps", "20", "--seeds", "2", "--data"])
        .arg(&data)
        .args(["--eval-tokens", "16384", "--cache-dir"])
        .arg(folder.path().join("cache"))
        .arg("--out")
        .arg(folder.path().join("out"))
        .output()
        .expect("the command starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let report: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"));
    // Twenty steps of two pairs may be too few to tell, which is 3.
    assert!(matches!(output.status.code(), Some(0 | 3)), "{report}");
    let checks = report["checks"].as_array().expect("checks");
    for name in ["audit of the first step in low precision", "quantized GEMMs ran as planned"] {
        let is_this =
            |check: &&serde_json::Value| check["name"].as_str().unwrap_or("").starts_with(name);
        let check = checks.iter().find(is_this).unwrap_or_else(|| panic!("no `{name}`: {report}"));
        assert_eq!(check["status"], "holds", "{check}");
    }
}

/// A folder with a text.
fn folder_with_text() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write_corpus(&folder.path().join("corpus.txt"));
    folder
}

/// Trains the micro model by the command, with these variables and arguments. Bits of the losses,
/// or what it wrote to standard error.
fn train(
    folder: &Path,
    out: &str,
    variables: &[(&str, &str)],
    arguments: &[&str],
) -> Result<Vec<(u64, u64)>, String> {
    let path = |name: &str| folder.join(name).display().to_string();
    let mut command = Command::new(deepwell());
    command.args(["train", "--model", "llama-micro", "--seq-len", "64"]);
    if !arguments.contains(&"--steps") {
        command.args(["--steps", "6"]);
    }
    command.args(["--batch-size", "4", "--micro-batch", "2", "--recompute", "none"]);
    command.args(["--eval-tokens", "1024", "--checkpoint-every", "3"]);
    command.args(["--data", &path("corpus.txt"), "--cache-dir", &path("cache")]);
    command.args(["--out", &path(out)]).args(arguments).envs(variables.iter().copied());
    let output = command.output().expect("the command runs");
    match output.status.success() {
        true => Ok(loss_bits(&folder.join(out))),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// What a launcher says to one rank that is alone, on a port of its own.
fn alone(port: &str) -> [(&str, &str); 6] {
    [
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port),
    ]
}

/// Skips the test where there is no NCCL.
fn need_nccl() {
    if let Err(error) = deepwell_kernels::cuda::NcclId::new() {
        skip(error.to_string());
    }
}

trial!(a_launched_rank_trains_as_one_that_is_not);
/// All of it but other ranks: a launcher's environment, NCCL, what hosts tell each other.
fn a_launched_rank_trains_as_one_that_is_not() {
    need_gpu();
    need_nccl();
    let folder = folder_with_text();
    for precision in ["bf16", "mxfp8"] {
        let arguments = ["--device", "cuda", "--precision", precision];
        let name = |kind: &str| format!("{precision}-{kind}");
        let expected = train(folder.path(), &name("plain"), &[], &arguments).expect("a run");
        let launched = [&arguments[..], &["--launched"]].concat();
        let got = train(folder.path(), &name("launched"), &alone("29610"), &launched);
        assert_eq!(got, Ok(expected), "{precision}");
        // And goes on where it has ended.
        let longer = [&launched[..], &["--resume", "--accept-changes", "--steps", "8"]].concat();
        let got = train(folder.path(), &name("launched"), &alone("29612"), &longer).expect("a run");
        assert_eq!(got.len(), 8, "{precision}");
    }
}

trial!(gpus_that_are_not_there_are_refused);
fn gpus_that_are_not_there_are_refused() {
    need_gpu();
    let folder = folder_with_text();
    let count = deepwell_probe::probe().gpus.len();
    let devices: Vec<String> = (0..=count).map(|index| format!("cuda:{index}")).collect();
    let arguments = ["--devices", &devices.join(",")];
    let error = train(folder.path(), "out", &[], &arguments).expect_err("one GPU too many");
    let expected = format!("error: device: expected a GPU for `cuda:{count}`");
    assert!(error.starts_with(&expected), "{error}");
}

/// Skips the test where there are fewer than two GPUs.
fn need_two_gpus() {
    need_gpu();
    need_nccl();
    if deepwell_probe::gpu_memory_used_bytes(1).is_none() {
        skip("there is one GPU of 2, or one that this process may see");
    }
}

trial!(two_gpus_train_as_one_does);
/// Each rank has two sequences of four. Two summands have one order, so that sharing the optimizer
/// state and running again change no bit; the gradients of an embedding's rows are summed in
/// another order than by one GPU.
fn two_gpus_train_as_one_does() {
    need_two_gpus();
    let folder = folder_with_text();
    for precision in ["bf16", "mxfp8"] {
        let run = |name: &str, arguments: &[&str]| {
            let arguments = [arguments, &["--precision", precision]].concat();
            train(folder.path(), &format!("{precision}-{name}"), &[], &arguments).expect("a run")
        };
        let devices = ["--devices", "cuda:0,cuda:1"];
        let one = run("one", &["--device", "cuda:0"]);
        let two = run("two", &devices);
        assert_eq!(run("again", &devices), two, "{precision}: the same bits");
        let shared = run("shared", &[&devices[..], &["--zero", "1"]].concat());
        assert_eq!(shared, two, "{precision}: ZeRO 1 changes no bit");
        assert_eq!(one.len(), two.len());
        for ((step, a), (_, b)) in two.iter().zip(&one) {
            let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
            // Six steps from the same weights: rounding alone, which BF16 weights make larger.
            assert!((a - b).abs() < 1e-3 * b, "{precision}, step {step}: {a} against {b}");
        }
    }
}

trial!(a_rank_that_fails_ends_its_run);
/// One of two ranks names another seed: the run is refused, with one message.
fn a_rank_that_fails_ends_its_run() {
    need_two_gpus();
    let folder = folder_with_text();
    let start = |rank: &'static str, seed: &'static str| {
        let folder = folder.path().to_path_buf();
        std::thread::spawn(move || {
            let variables = [
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", "2"),
                ("LOCAL_WORLD_SIZE", "2"),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", "29620"),
            ];
            let arguments = ["--launched", "--device", "cuda", "--seed", seed];
            train(&folder, "out", &variables, &arguments).expect_err("two runs")
        })
    };
    let (first, second) = (start("0", "1"), start("1", "2"));
    let (first, second) = (first.join().expect("rank 0"), second.join().expect("rank 1"));
    assert!(first.contains("expected the same on all ranks"), "{first}");
    assert!(!second.contains("error:"), "{second}");
}

fn main() -> ExitCode {
    deepwell_trials::run()
}
