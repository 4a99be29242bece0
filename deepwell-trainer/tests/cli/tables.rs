//! What commands print, whole. The machine is a described one, so that numbers are the same
//! everywhere.

use std::fs;

use super::{Folder, stdout_of};

/// Snapshots a table without the temporary folder's name.
fn check(name: &str, folder: &Folder, args: &[&str]) {
    let here = fs::canonicalize(folder.0.path()).expect("the folder is there");
    let output = stdout_of(args)
        .replace(&here.display().to_string(), "FOLDER")
        .replace(&folder.0.path().display().to_string(), "FOLDER");
    // How long it took is another number each time.
    insta::with_settings!({ filters => vec![(r"(?m)^  time .*$", "  time [times]")] }, {
        insta::assert_snapshot!(name, output);
    });
}

#[test]
fn tables_of_each_command() {
    let folder = Folder::new();
    folder.checkpoints();
    let checkpoints = folder.path("checkpoints");
    let machine = ["--hardware", "cpu", "--seq", "32", "--batch", "2"];
    let of_model = |command: &'static str| [&[command, "llama-micro"], &machine[..]].concat();
    check("dryrun", &folder, &of_model("dryrun"));
    check("plan_explain", &folder, &[&of_model("plan")[..], &["--explain"]].concat());
    check("capture_summary", &folder, &["capture", "gpt2-micro", "--summary"]);
    check("ckpt_inspect", &folder, &["ckpt", "inspect", &checkpoints, "--tensors"]);
    check("ckpt_verify", &folder, &["ckpt", "verify", &checkpoints]);
    folder.training("llama-micro", "1");
    let (data, out) = (folder.path("data.txt"), folder.path("tokenizer.json"));
    let tokenizer = ["tokenizer", "train", "--data", &data, "--vocab-size", "300", "--out", &out];
    check("tokenizer_train", &folder, &tokenizer);
}

/// What is measured stands beside the hardware, which `--hardware` takes as before.
#[test]
fn measurements_of_this_machine() {
    let folder = Folder::new();
    let probed = super::json_of(&["probe", "--measure", "--json"]);
    let cpu = &probed["measured"]["cpu"];
    assert_eq!(cpu["copy_gbps"], probed["cpu"]["memory_gbps"]);
    for (product, format) in cpu["products"].as_array().unwrap().iter().zip(["fp32", "bf16"]) {
        assert_eq!(product["format"], format);
        assert!(product["tflops"].as_f64() > Some(0.0), "{product}");
    }
    let machine = folder.file("machine.json", probed.to_string());
    stdout_of(&["plan", "llama-micro", "--hardware", &machine, "--seq", "32", "--json"]);
    let table = stdout_of(&["probe", "--measure"]);
    for part in ["\nmeasured\nCPU              copy ", "  fp32 ", "  bf16 ", "1024 x 1024 x 1024"] {
        assert!(table.contains(part), "expected `{part}` in: {table}");
    }
}
