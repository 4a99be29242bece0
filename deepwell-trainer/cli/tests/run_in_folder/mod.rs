//! Runs of several processes in a temporary folder.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any test runs that does not wait in vain.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A folder with a text to train on.
pub(crate) struct TestFolder(tempfile::TempDir);

impl TestFolder {
    pub(crate) fn new() -> TestFolder {
        let place = TestFolder(tempfile::tempdir().expect("a temporary folder"));
        let words = (0..2000u32).map(|index| format!("{} ", index.wrapping_mul(2_654_435_761)));
        fs::write(place.path("text.txt"), words.collect::<String>()).expect("a file");
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `deepwell train` with what all runs have alike, as words for a shell.
    pub(crate) fn train(&self, out: &str, more: &str) -> String {
        let path = |name: &str| self.path(name).display().to_string();
        format!(
            "{} train --seq-len 32 --micro-batch 1 --recompute none --precision mxfp8 \
             --eval-tokens 100 --data {} --cache-dir {} --out {} {more}",
            env!("CARGO_BIN_EXE_deepwell"),
            path("text.txt"),
            path("cache"),
            path(out)
        )
    }
}

/// A port for `MASTER_PORT`: the next one is free, at which rank 0 listens.
pub(crate) fn free_port() -> u16 {
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|it| it.local_addr());
    port.expect("a port").port() - 1
}

/// Messages of a process.
pub(crate) fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Losses and norms of a run, to the bit.
pub(crate) fn metrics(out: &Path) -> Vec<[Option<u64>; 4]> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let line = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of metrics");
        let number = |name: &str| line[name].as_f64().map(f64::to_bits);
        [line["step"].as_u64(), number("loss"), number("grad_norm"), number("val_loss")]
    };
    text.lines().map(line).collect()
}

/// Waits for the end of a process, and returns its messages; ends the process if it does not.
pub(crate) fn end_of(mut process: Child) -> Output {
    let begin = Instant::now();
    while process.try_wait().expect("a process").is_none() {
        if begin.elapsed() > PATIENCE {
            process.kill().expect("a process that can be ended");
            panic!("a process has not ended for {PATIENCE:?}");
        }
        thread::sleep(Duration::from_millis(50));
    }
    process.wait_with_output().expect("its output")
}
