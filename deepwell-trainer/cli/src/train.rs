//! `deepwell train` and `deepwell parity`: the arguments and the work are the library's; the
//! signals are handled here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::commands::{ParityArgs, TrainArgs, parity, train};
use anyhow::{Context, Result};
use deepwell_trainer::ExitStatus;

use crate::{INTERRUPTED, Outcome};

pub(crate) const TRAIN_AFTER_HELP: &str = "\
Without --data, trains on the Rust sources of the locked dependencies with bytes as tokens, so that
nothing needs to be downloaded. Checkpoints and metrics.jsonl go to the output folder. Ctrl-C stops
the run after the current step and writes a checkpoint; --resume continues from there with the same
results as an uninterrupted run. A second Ctrl-C exits immediately.

An output folder holds one run; a second run or process in the same folder is an error. If a resumed
run has settings that change its results, the error lists them. Nothing is deleted without
--overwrite.

Examples:
  deepwell train --steps 200
  deepwell train --model llama-micro --data book.txt --out runs/book
  deepwell train --model config.json --data 'texts/**/*.md' --tokenizer tokenizer.json
  deepwell train --run-file run.toml --seed 7
  deepwell train --run-file run.toml --resume
  deepwell train --devices cpu:4 --zero 1
  deepwell train --devices cuda:0,cuda:1
  deepwell train --plan plan.json                 plan from `deepwell plan MODEL --json > plan.json`
  torchrun --no-python --nproc-per-node 2 deepwell train --launched --device cuda
  mpirun -n 4 deepwell train --launched --device cpu    with the feature `mpi`

A run file:
  model = \"parity-3m\"
  data = [\"texts\"]
  precision = \"mxfp8\"
  steps = 2000
  learning_rate = 2e-3

Exit codes: 0 done, 1 a guard stopped the run or no plan fits into memory, 2 an input cannot be
used, 130 interrupted";

pub(crate) const PARITY_AFTER_HELP: &str = "\
Trains pairs of models, one in BF16 and one in low precision (MXFP8 by default), from the same
weights on the same batches, and decides whether low precision holds BF16's held-out loss. Rounding
differences grow chaotically during training, so one pair cannot separate the effect of precision
from chaos; several seeds give a mean gap with a confidence interval. Parity holds if the upper end
of the interval is within --tolerance, and fails if the lower end is above it. Otherwise the verdict
is open, and the report estimates the number of seeds that would decide; --again trains as many
pairs again at once. For the default settings the deviation of a pair is known from recorded pairs;
the interval uses it unless the pairs of this comparison contradict it.

report.html, report.json and metrics.jsonl go to the output folder. Ctrl-C writes a checkpoint and a
report of the finished part.

Examples:
  deepwell parity                          4 pairs of 1000 steps of qwen3-600k
  deepwell parity --seeds 1 --steps 200    one pair, for a first look
  deepwell parity --control                add BF16 from perturbed weights: the effect of chaos
  deepwell parity --precision nvfp4 --out target/parity-nvfp4
  deepwell parity --resume                 resume an earlier comparison
  deepwell parity --resume --seeds 8       train four more pairs
  deepwell parity --precision bf16         compare BF16 with itself: the gap is 0

Exit codes: 0 holds, 1 does not hold or is no valid comparison, 2 an input cannot be used,
3 the verdict is open, 130 interrupted";

/// Trains one model.
pub(crate) fn run_train(args: TrainArgs) -> Result<Outcome> {
    until_interrupted(|stop| train(args, stop))
}

/// Trains in BF16 and in low precision and compares.
pub(crate) fn run_parity(args: ParityArgs) -> Result<Outcome> {
    until_interrupted(|stop| parity(args, stop))
}

/// Runs `work` with a flag that Ctrl-C or a termination request sets.
fn until_interrupted(work: impl FnOnce(Arc<AtomicBool>) -> Result<ExitStatus>) -> Result<Outcome> {
    let stop = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        // A second signal exits without waiting for the checkpoint. A checkpoint in progress is
        // then never listed.
        if raised.swap(true, Ordering::SeqCst) {
            std::process::exit(i32::from(INTERRUPTED));
        }
    })
    .context("cannot listen for Ctrl-C")?;
    Ok(match work(stop)? {
        ExitStatus::Success => Outcome::Success,
        ExitStatus::Failed => Outcome::Failed,
        ExitStatus::Open => Outcome::Open,
        ExitStatus::Interrupted => Outcome::Interrupted,
        ExitStatus::Reported(code) => Outcome::Reported(code),
    })
}
