//! What tests of runs on a GPU share: the GPU that they need, a text, the losses of a run.

use std::path::Path;

use deepwell_trainer::{Record, Trainer};
use deepwell_trials::skip;

/// Skips the test where there is no GPU.
pub(crate) fn need_gpu() {
    let hardware = deepwell_probe::probe();
    if hardware.gpus.is_empty() {
        let required = std::env::var_os("DEEPWELL_REQUIRE_GPU").is_some();
        let reason = hardware.gpus_absent.map_or("no GPU".to_string(), |absence| absence.reason);
        assert!(!required, "DEEPWELL_REQUIRE_GPU is set, and there is no GPU: {reason}");
        skip(reason);
    }
}

/// A text that is not trivial to predict.
pub(crate) fn write_corpus(path: &Path) {
    let mut state = 1u64;
    let mut text = String::new();
    for line in 0..4000 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let word = ["alpha", "beta", "gamma", "delta"][(state >> 60) as usize % 4];
        text.push_str(&format!("line {line} of {word} says {:04x} and ends here\n", state >> 48));
    }
    std::fs::write(path, text).expect("a temporary folder can be written");
}

/// Step, and the bits of the loss.
pub(crate) fn loss_bits(out: &Path) -> Vec<(u64, u64)> {
    let text = std::fs::read_to_string(Trainer::metrics_path(out)).expect("metrics are there");
    text.lines()
        .map(|line| serde_json::from_str::<Record>(line).expect("whole lines"))
        .filter_map(|record| Some((record.step, record.loss?.to_bits())))
        .collect()
}
