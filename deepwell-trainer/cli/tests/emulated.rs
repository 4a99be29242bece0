//! The command on an emulated GPU. Where the kernels were not compiled the test is reported as
//! ignored.

#[macro_use]
extern crate deepwell_trials;

#[path = "../../tests/kernels_needed/mod.rs"]
mod kernels_needed;

use std::process::{Command, ExitCode};

use crate::kernels_needed::need_kernels;

trial!(the_default_comparison_ends_with_a_verdict);
/// `deepwell parity`, audit included, on kernels that an emulator runs; the same on a GPU is among
/// the tests of the bundle.
fn the_default_comparison_ends_with_a_verdict() {
    need_kernels((9, 0));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let data = folder.path().join("data.txt");
    let words = (0..6000u32).map(|index| format!("{} ", index.wrapping_mul(2_654_435_761)));
    std::fs::write(&data, words.collect::<String>()).expect("a temporary folder can be written");
    let output = Command::new(env!("CARGO_BIN_EXE_deepwell"))
        .args(["parity", "--json", "--model", "llama-micro", "--device", "emulated:sm90"])
        .args(["--seeds", "1", "--steps", "2", "--batch-size", "1", "--seq-len", "128"])
        // Wide enough that two steps of a micro model are well within it.
        .args(["--eval-tokens", "256", "--tolerance", "50", "--data"])
        .arg(&data)
        .arg("--cache-dir")
        .arg(folder.path().join("cache"))
        .arg("--out")
        .arg(folder.path().join("out"))
        .output()
        .expect("the command starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let report: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"));
    assert_eq!(output.status.code(), Some(3), "{report}");
    assert_eq!(report["verdict"], "cannot-tell", "one pair never tells");
    let checks = report["checks"].as_array().expect("checks");
    for name in ["audit of the first step in low precision", "quantized GEMMs ran as planned"] {
        let is_this =
            |check: &&serde_json::Value| check["name"].as_str().unwrap_or("").starts_with(name);
        let check = checks.iter().find(is_this).unwrap_or_else(|| panic!("no `{name}`: {report}"));
        assert_eq!(check["status"], "holds", "{check}");
    }
}

fn main() -> ExitCode {
    deepwell_trials::run()
}
