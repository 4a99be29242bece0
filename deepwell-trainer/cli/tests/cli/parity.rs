//! `deepwell parity`: what it says, and with which exit code.

use std::fs;
use std::path::Path;

use deepwell_trainer::lock::OutputLock;
use serde_json::Value;

use super::{Folder, check_error, deepwell, json_of, text};

/// The command line of a comparison of four steps of a micro model; `options` come last and
/// replace what is set here.
fn command(folder: &Folder, options: &[&str]) -> Vec<String> {
    let words = (0..6000u32).map(|index| format!("{} ", index.wrapping_mul(2_654_435_761)));
    let data = folder.file("data.txt", words.collect::<String>());
    let (cache, out) = (folder.path("cache"), folder.path("out"));
    let fixed = [
        ("--model", "llama-micro"),
        ("--data", &data),
        ("--cache-dir", &cache),
        ("--out", &out),
        ("--steps", "4"),
        ("--seq-len", "32"),
        ("--batch-size", "4"),
        ("--eval-tokens", "512"),
        // Wide enough that four steps of a micro model are well within it.
        ("--tolerance", "50"),
    ];
    let mut args = vec!["parity".to_string(), "--json".to_string()];
    let kept = fixed.iter().filter(|(name, _)| !options.contains(name));
    args.extend(kept.flat_map(|(name, value)| [name.to_string(), value.to_string()]));
    args.extend(options.iter().map(|option| option.to_string()));
    args
}

/// Runs a comparison that ends with a verdict; gives its exit code and report.
#[track_caller]
fn report(folder: &Folder, options: &[&str]) -> (Option<i32>, Value) {
    let output = deepwell(&command(folder, options));
    let stderr = text(&output.stderr);
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{options:?}: {error}: {stderr}"));
    (output.status.code(), report)
}

/// Status and detail of the check whose name begins so.
#[track_caller]
fn check_of<'a>(report: &'a Value, name: &str) -> (&'a str, &'a str) {
    let checks = report["checks"].as_array().expect("checks");
    let found = checks.iter().find(|check| check["name"].as_str().unwrap().starts_with(name));
    let check = found.unwrap_or_else(|| panic!("no check `{name}` in {checks:?}"));
    (check["status"].as_str().unwrap(), check["detail"].as_str().unwrap())
}

#[test]
fn verdicts_with_their_exit_codes() {
    for (options, code, verdict, check, status, detail) in [
        (&["--seeds", "3"][..], 0, "holds", "held-out loss at the end", "holds", "interval"),
        (&["--seeds", "1"], 3, "cannot-tell", "held-out loss at the end", "open", "--seeds 4"),
        (
            &["--seeds", "2", "--precision", "bf16"],
            0,
            "holds",
            "quantized GEMMs ran as planned",
            "holds",
            "BF16 was compared with itself",
        ),
        (
            &["--seeds", "2", "--precision", "nvfp4"],
            0,
            "holds",
            "quantized GEMMs ran as planned",
            "holds",
            "FLOPs ran in MXFP8+NVFP4",
        ),
    ] {
        let folder = Folder::new();
        let (got, report) = report(&folder, options);
        assert_eq!((got, &report["verdict"]), (Some(code), &verdict.into()), "{options:?}");
        let (got_status, got_detail) = check_of(&report, check);
        assert_eq!(got_status, status, "{options:?}: {got_detail}");
        assert!(got_detail.contains(detail), "{options:?}: {got_detail}");
        let (audit, detail) = check_of(&report, "audit of the first step in low precision");
        assert_eq!(audit, "holds", "{options:?}: {detail}");
        let of = options.iter().position(|&option| option == "--precision");
        let precision = match of.map_or("mxfp8", |at| options[at + 1]) {
            // The last blocks are in MXFP8.
            "nvfp4" => "mxfp8+nvfp4",
            precision => precision,
        };
        assert_eq!(report["precision"], precision, "{options:?}");
        // An eighth of 512 tokens is less than a batch, which is 4 x 32.
        let read = [&report["interim_eval_tokens"], &report["eval_tokens"]];
        assert_eq!(read, [128, 512], "{options:?}");
        for file in ["report.html", "report.json", "metrics.jsonl", "seed-0/bf16/summary.json"] {
            assert!(fs::metadata(folder.path("out").to_string() + "/" + file).is_ok(), "{file}");
        }
    }
}

/// Routers of both precisions see the same weights and tokens: BF16 in the place of the low
/// precision chooses all alike, MXFP8 nearly all.
#[test]
fn mixtures_say_how_much_of_the_routing_is_alike() {
    for (precision, least, most) in [("bf16", 1.0, 1.0), ("mxfp8", 0.8, 0.9999)] {
        let folder = Folder::new();
        let options = ["--model", "moe-micro", "--seeds", "1", "--precision", precision];
        let (_, report) = report(&folder, &options);
        let routing = &report["routing"];
        assert_eq!(report["routing_left_out"], Value::Null, "{precision}");
        let of_pair = [&routing["seed"], &routing["step"], &routing["tokens"]];
        assert_eq!(of_pair, [0, 4, 512], "{precision}");
        let layers = routing["layers"].as_array().expect("layers");
        let (mut choices, mut alike) = (0, 0);
        for (index, layer) in layers.iter().enumerate() {
            assert_eq!((&layer["layer"], &layer["choices"]), (&index.into(), &1024.into()));
            choices += layer["choices"].as_u64().expect("a count");
            alike += layer["alike"].as_u64().expect("a count");
        }
        assert_eq!(layers.len(), 2, "{precision}");
        let share = routing["share"].as_f64().expect("a share");
        assert_eq!(share, alike as f64 / choices as f64, "{precision}");
        assert!((least..=most).contains(&share), "{precision}: {share}");
        let page = fs::read_to_string(folder.path("out").to_string() + "/report.html").unwrap();
        assert!(page.contains("tokens whose choices are all alike"), "{precision}");
    }
    let folder = Folder::new();
    let (_, dense) = report(&folder, &["--seeds", "1"]);
    assert!(dense.get("routing").is_none(), "a dense model has no routing");
}

#[test]
fn a_control_and_more_pairs_later() {
    let folder = Folder::new();
    let (_, first) = report(&folder, &["--seeds", "1", "--control"]);
    assert_eq!(first["pairs"].as_array().map(Vec::len), Some(1));
    let control = first["pairs"][0]["control_gap_rel"].as_f64().expect("a control");
    assert!(control != 0.0 && control.abs() < 0.01, "{control}");
    // Two for each run once filled the disk of a machine that compared a model of a billion
    // parameters.
    for run in ["bf16", "low_precision", "control"] {
        let path = folder.path("out").to_string() + "/seed-0/" + run + "/checkpoints";
        let kept = deepwell_ckpt::list(path.as_ref()).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(kept.len(), 1, "{path}");
    }
    let (code, second) = report(&folder, &["--seeds", "2", "--control", "--resume"]);
    assert_eq!((code, &second["verdict"]), (Some(0), &"holds".into()), "{second}");
    assert_eq!(second["pairs"][0], first["pairs"][0]);
}

/// Two comparisons in one folder once mixed their curves: 2.03 against 5.56, and passed.
#[test]
fn a_folder_belongs_to_one_comparison() {
    let folder = Folder::new();
    let check = |options: &[&str], contains: &[&str]| {
        let args = command(&folder, options);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        check_error(&args, 2, contains);
    };
    let out = folder.path("out");
    let held = OutputLock::acquire(Path::new(&out)).expect("a lock");
    let pid = format!("process {}", std::process::id());
    check(&["--seeds", "1"], &["is in use by process", &pid, "hint: "]);
    drop(held);
    let (_, first) = report(&folder, &["--seeds", "1"]);
    check(&["--seeds", "1"], &["holds the results", "seed-0", "`--resume`", "`--overwrite`"]);
    let (_, again) = report(&folder, &["--seeds", "1", "--overwrite"]);
    assert_eq!(again["pairs"][0]["gap_rel"], first["pairs"][0]["gap_rel"]);
}

#[test]
fn an_ablation_ranks_what_each_class_costs() {
    let folder = Folder::new();
    let args = command(&folder, &["--ablate", "gemm", "--seeds", "2"]);
    let kept = args.iter().zip(args.iter().skip(1)).position(|(name, _)| name == "--tolerance");
    let mut args = args.clone();
    if let Some(at) = kept {
        args.drain(at..at + 2);
    }
    let report = json_of(&args);
    let classes = report["classes"].as_array().expect("classes");
    let mut names: Vec<&str> = classes.iter().map(|c| c["class"].as_str().unwrap()).collect();
    let alone = |index: usize| classes[index]["alone"]["mean"].as_f64().unwrap();
    assert!(alone(0) >= alone(1) && alone(1) >= alone(2), "{report}");
    names.sort_unstable();
    assert_eq!(names, ["dgrad", "fprop", "wgrad"]);
    assert_eq!(report["whole"]["pairs"], 2);
    // Each run had a policy of its own.
    let policy = fs::read_to_string(folder.path("out/seed-1/without-dgrad.toml")).expect("written");
    assert!(policy.contains("dgrad"), "{policy}");
    assert!(fs::metadata(folder.path("out/ablation.html")).is_ok());
}
