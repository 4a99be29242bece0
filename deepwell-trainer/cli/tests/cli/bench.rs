//! `deepwell bench` on a processor.

use std::fs;

use serde_json::Value;

use crate::{check_error, deepwell, text};

/// Every section on the smallest model: each row is measured, and the files say the same.
#[test]
fn every_section_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let output = deepwell(&[
        "bench",
        "--device",
        "cpu",
        "--iterations",
        "1",
        "--seq-len",
        "32",
        "--json",
        "--out",
        out,
    ]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    for (section, op) in [
        ("gemm", "linear_wgrad"),
        ("gemm", "scaled_gemm dgrad"),
        ("moe", "moe layer"),
        ("quantize", "quantize column"),
        ("attention", "attention_backward"),
        ("norms", "swiglu_backward"),
        ("norms", "add_rms_norm_quantize both"),
        ("optimizer", "adamw"),
        ("transformer", "linear_cross_entropy_grad"),
        ("forward", "llama-micro"),
        ("train", "llama-micro"),
        ("memory", "llama-micro"),
    ] {
        let is_it = |row: &&Value| row["section"] == section && row["what"] == op;
        let row = rows.iter().find(is_it).unwrap_or_else(|| panic!("no {section} {op}"));
        assert_eq!(row["failure"], Value::Null, "{row}");
        assert!(row["rate"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["roofline_share"].as_f64().unwrap() > 0.0, "{row}");
    }
    for section in ["forward", "train", "memory"] {
        let of_section = rows.iter().filter(|row| row["section"] == section);
        let dtypes: Vec<&Value> = of_section.map(|row| &row["dtype"]).collect();
        assert_eq!(dtypes, ["bf16", "mxfp8"], "{section}");
    }
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    let written: Value = serde_json::from_str(&read("bench.json")).unwrap();
    assert_eq!(written, report);
    assert!(read("bench.txt").contains("optimizer: 2 rows"));
    let page = read("bench.html");
    assert!(page.contains("<h2>optimizer</h2>") && page.contains("adamw"));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    check_error(&["bench", "--device", "cpu", "nonsense"], 2, &["nonsense", "SECTION"]);
    check_error(&["bench", "--device", "cpu", "--model", "no-such"], 2, &["no-such"]);
    check_error(
        &["bench", "gemm", "--device", "cpu", "--iterations", "0"],
        2,
        &["--iterations: expected at least 1, got 0"],
    );
    check_error(
        &["bench", "moe", "--device", "cpu", "--mixture", "4x32x64x5"],
        2,
        &["TOP_K at most EXPERTS", "got `4x32x64x5`"],
    );
}

/// Layers of given sizes, each in both precisions and beside a dense one.
#[test]
fn layers_of_experts_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let args = ["bench", "moe", "--device", "cpu", "--iterations", "1", "--mixture"];
    let sizes = ["4x32x64x1,8x64x32x3", "--mixture-tokens", "33", "--json", "--out", out];
    let output = deepwell(&[&args[..], &sizes].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    for (dtype, what, shape) in [
        ("bf16", "moe layer", "33 tokens, 4x32x64x1 balanced"),
        ("bf16", "dense layer", "33 tokens, 4x32x64x1"),
        ("bf16", "grouped_gemm", "33 tokens, 8x64x32x3 experts.gate_proj"),
        ("mxfp8", "moe layer", "33 tokens, 8x64x32x3 zipf"),
        ("mxfp8", "scaled_grouped_gemm wgrad", "33 tokens, 8x64x32x3 experts.down_proj.wgrad"),
        ("mxfp8", "dense layer", "33 tokens, 8x64x32x3"),
    ] {
        let is_it = |row: &&Value| {
            row["section"] == "moe"
                && row["dtype"] == dtype
                && row["what"] == what
                && row["shape"] == shape
        };
        let row = rows.iter().find(is_it).unwrap_or_else(|| panic!("no {dtype} {what} {shape}"));
        assert!(row["failure"].is_null() && row["rate"].as_f64() > Some(0.0), "{row}");
    }
    let table = fs::read_to_string(folder.path().join("bench.txt")).unwrap();
    assert!(table.contains("all else") && table.contains("over balanced"), "{table}");
}
