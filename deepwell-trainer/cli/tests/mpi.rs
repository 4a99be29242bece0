//! Ranks that are processes, started by mpirun: the bits of ranks that are threads, and how they
//! fail.

mod run_in_folder;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use deepwell_trials::{skip, trial};

use crate::run_in_folder::{PATIENCE, TestFolder, end_of, free_port, metrics, text};

/// A folder with a text to train on, where there is an mpirun.
fn test_folder() -> TestFolder {
    if Command::new("mpirun").arg("--version").output().is_err() {
        skip("there is no mpirun: Debian's package openmpi-bin has it");
    }
    TestFolder::new()
}

impl TestFolder {
    /// A run on so many ranks, which mpirun starts. `prepare` is what a shell does before.
    fn mpirun(&self, ranks: usize, prepare: &str, train: &str) -> Command {
        let mut command = Command::new("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
        command.args(["-n", &ranks.to_string(), "sh", "-c"]);
        command.arg(format!("{prepare} exec {train} --launched --device cpu"));
        command.env("MASTER_PORT", free_port().to_string());
        command.env("RAYON_NUM_THREADS", "1");
        // No other machine is looked for, and one whose containers may not read each other's
        // memory says nothing of it.
        command.env("OMPI_MCA_plm_rsh_agent", "sh");
        command.env("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
        // A rank that has heard of a failure has twice as many seconds to say so.
        command.env("OMPI_MCA_odls_base_sigkill_timeout", "5");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

fn newest_checkpoint(out: &Path) -> PathBuf {
    let entries = deepwell_ckpt::list(&out.join("checkpoints")).expect("checkpoints");
    entries.last().expect("a checkpoint").path.clone()
}

trial!(processes_have_the_bits_of_threads);
fn processes_have_the_bits_of_threads() {
    let place = test_folder();
    let run = |command: &mut Command| {
        let output = command.output().expect("a shell and mpirun");
        assert!(output.status.success(), "{command:?}: {}", text(&output));
    };
    let check = |name: &str, plan: &str, parts: &[&str], variables: &[(&str, &str)]| {
        let [of_threads, of_processes] =
            ["threads", "processes"].map(|how| format!("{name}-{how}"));
        for part in parts {
            let all = format!("{plan} --batch-size 4 --checkpoint-every 2 {part}");
            let threads = place.train(&of_threads, &all);
            run(Command::new("sh").args(["-c", &format!("exec {threads} --devices cpu:4")]));
            let processes = place.train(&of_processes, &all);
            run(place.mpirun(4, "", &processes).envs(variables.iter().copied()));
        }
        let [of_threads, of_processes] = [of_threads, of_processes].map(|out| place.path(&out));
        let (expected, got) = (metrics(&of_threads), metrics(&of_processes));
        assert!(expected.iter().any(|line| line[1].is_some() && line[2].is_some()), "{name}");
        assert_eq!(got, expected, "{name}");
        let diff = Command::new(env!("CARGO_BIN_EXE_deepwell"))
            .args(["ckpt", "diff"])
            .args([of_threads, of_processes].map(|out| newest_checkpoint(&out)))
            .output()
            .expect("the command was built with this test");
        // The folders and names of the two runs differ.
        let diff = String::from_utf8_lossy(&diff.stdout);
        let same = "tensors equal, 0 differ, 0 changed shape or type, 0 only in a, 0 only in b";
        assert!(diff.contains(same), "{name}: {diff}");
    };
    // Processes go on from the checkpoint of processes.
    let parts = ["--steps 2", "--steps 4 --resume --accept-changes"];
    check("shares", "--model llama-micro --zero 3", &parts, &[]);
    check("stages", "--model gpt2-micro --tp 2 --pp 2", &["--steps 2"], &[]);
    // Over sockets, as between machines.
    let sockets = [("OMPI_MCA_btl", "self,tcp")];
    check("experts", "--model moe-micro --ep 2 --cp 2 --zero 1", &["--steps 2"], &sockets);
}

trial!(a_rank_that_is_killed_ends_the_others);
fn a_rank_that_is_killed_ends_the_others() {
    let place = test_folder();
    let train = place.train("out", "--model llama-micro --batch-size 3 --steps 100000");
    let ids = place.path("rank");
    let prepare = format!("echo $$ > {}-$OMPI_COMM_WORLD_RANK;", ids.display());
    let process = place.mpirun(3, &prepare, &train).spawn().expect("mpirun");
    let begin = Instant::now();
    let has_begun = || {
        let metrics = fs::read_to_string(place.path("out").join("metrics.jsonl"));
        metrics.is_ok_and(|text| text.lines().count() > 3)
    };
    while !has_begun() {
        if begin.elapsed() > PATIENCE {
            panic!("nothing after {PATIENCE:?}: {}", text(&end_of(process)));
        }
        thread::sleep(Duration::from_millis(50));
    }
    let id = fs::read_to_string(format!("{}-2", ids.display())).expect("an id");
    let killed = Command::new("kill").args(["-9", id.trim()]).status().expect("kill");
    assert!(killed.success());
    let at = Instant::now();
    let output = end_of(process);
    let (took, stderr) = (at.elapsed(), text(&output));
    assert!(!output.status.success());
    let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error")).collect();
    assert_eq!(errors, ["error: rank 2 of 3: its process ended without a word"], "{stderr}");
    assert!(took < PATIENCE / 4, "it took {took:?}");
}

trial!(ranks_that_cannot_train_together_say_so_once);
fn ranks_that_cannot_train_together_say_so_once() {
    let place = test_folder();
    let check = |name: &str, prepare: &str, more: &str, expected: &str| {
        let train = place.train(name, &format!("--model llama-micro --batch-size 4 {more}"));
        let output = end_of(place.mpirun(2, prepare, &train).spawn().expect("mpirun"));
        let stderr = text(&output);
        assert!(!output.status.success(), "{name}: {stderr}");
        let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error")).collect();
        assert_eq!(errors.len(), 1, "{name}: {stderr}");
        assert!(errors[0].contains(expected), "{name}: expected `{expected}` in `{}`", errors[0]);
    };
    check(
        "seeds",
        "",
        "--steps 2 --seed $OMPI_COMM_WORLD_RANK",
        "run: expected the same on all ranks, got another on rank 1 than on rank 0",
    );
    // The variables say something else than MPI does.
    check(
        "places",
        "export OMPI_COMM_WORLD_RANK=$((1 - OMPI_COMM_WORLD_RANK));",
        "--steps 2",
        "MPI: expected rank",
    );
}

fn main() -> ExitCode {
    deepwell_trials::run()
}
