//! Predicted memory of small runs on a processor beside what the process held.

use std::path::Path;
use std::process::Command;

use deepwell_kernels::cpu::gemm::{Tier, best_tier};
use deepwell_trainer::run::RunSummary;

const SEQ_LEN: usize = 128;

/// Heap scratch of a GEMM on the F32 tier, which no prediction includes: `4 kc (m + n)` bytes
/// ([`deepwell_kernels::cpu::gemm`], section *Memory*) with at most 512 of `k`, all tokens and the
/// 512 columns of the widest matrix here. On a CPU without AVX-512 the largest difference was 2.9
/// MB in a run of 26 MB.
fn scratch_bytes(batch: usize) -> usize {
    if best_tier() == Tier::F32 { 4 * 512 * (batch * SEQ_LEN + 512) } else { 0 }
}

/// Predictions are within a tenth of the measurement in runs of 20 to 30 MB. The tolerance covers
/// memory outside of the arena, up to 1 MB: stacks, and packing buffers of FP32 operands, whose
/// size follows the processor's caches. Runs of 7 MB were 10.1 % off on another processor.
/// The reserve of GEMMs that fall back was touched and not predicted: 27 % off.
#[cfg(target_os = "linux")]
#[test]
fn small_runs_hold_what_was_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "a well is deep, and water is in it. ".repeat(4000)).unwrap();
    let mut of_mixtures = Vec::new();
    for (model, batch, precision, capacity) in [
        ("llama-micro", 32, "bf16", None),
        ("llama-micro", 32, "mxfp8", None),
        ("parity-600k", 8, "mxfp8", None),
        ("moe-micro", 32, "mxfp8", None),
        ("moe-micro", 32, "mxfp8", Some("1")),
        ("moe-micro", 32, "mxfp8", Some("0.25")),
    ] {
        let of_capacity = capacity.unwrap_or("all");
        let out = folder.path().join(format!("{model}-{batch}-{precision}-{of_capacity}"));
        let summary = run(&text, &out, (model, batch, precision), capacity);
        let predicted = summary.peak_bytes_predicted as f64;
        let measured = summary.peak_bytes_measured.unwrap() as f64;
        let off = (measured / predicted - 1.0) * 100.0;
        let what =
            format!("{model} x {batch} in {precision}, {of_capacity}: {predicted} bytes predicted");
        println!("{what}, {off:+.1} %");
        let most = predicted * 1.1 + scratch_bytes(batch) as f64;
        let is_near = (predicted * 0.9..=most).contains(&measured);
        assert!(is_near, "{what}, {measured} measured, {off:+.1} %");
        if model == "moe-micro" {
            of_mixtures.push((predicted, measured));
        }
    }
    // The smaller the capacity, the less is predicted. A capacity of 1 saves 1 %, which is within
    // the noise of the measurement; a quarter of it is measured.
    assert!(of_mixtures.is_sorted_by(|a, b| a.0 > b.0), "{of_mixtures:?}");
    assert!(of_mixtures[2].1 < of_mixtures[0].1.min(of_mixtures[1].1), "{of_mixtures:?}");
}

/// A process of its own, so that nothing but the run takes memory.
fn run(
    text: &Path,
    out: &Path,
    (model, batch, precision): (&str, usize, &str),
    capacity: Option<&str>,
) -> RunSummary {
    let capacity = capacity.map(|factor| ["--capacity-factor", factor]);
    let status = Command::new(env!("CARGO_BIN_EXE_deepwell"))
        .args(["train", "--model", model, "--precision", precision])
        .args(["--batch-size", &batch.to_string(), "--seq-len", &SEQ_LEN.to_string()])
        .args(["--steps", "3", "--eval-tokens", "512", "--no-checkpoints"])
        .args(capacity.iter().flatten())
        .arg("--data")
        .arg(text)
        .arg("--cache-dir")
        .arg(out.with_extension("cache"))
        .arg("--out")
        .arg(out)
        // Outside of the workspace: parsing the manifest of its kernels leaves free memory behind,
        // which the run would use.
        .current_dir(out.parent().unwrap())
        .output()
        .unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    let summary = std::fs::read_to_string(out.join("summary.json")).unwrap();
    serde_json::from_str(&summary).unwrap()
}
