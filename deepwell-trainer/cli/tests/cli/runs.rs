//! Runs and their folders on the command line.

use super::*;

#[test]
fn a_folder_holds_one_run() {
    let folder = Folder::new();
    let training = folder.training("llama-micro", "2");
    let with = |more: &[&str]| {
        let more = more.iter().map(ToString::to_string);
        deepwell(&training.iter().cloned().chain(more).collect::<Vec<_>>())
    };
    let check = |more: &[&str], code: i32, contains: &[&str]| {
        let output = with(more);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{more:?}: {stderr}");
        for part in contains {
            assert!(stderr.contains(part), "{more:?}: expected `{part}` in: {stderr}");
        }
    };
    check(&[], 0, &[]);
    check(&[], 2, &["holds the results of run ", "checkpoints", "hint: `--resume` goes on"]);
    check(&["--resume"], 0, &["resumed after step 2"]);
    let differs = ["  seed: the run has 0, now 1\n", "hint: give what the run has"];
    check(&["--resume", "--seed", "1"], 2, &differs);
    check(&["--resume", "--accept-changes", "--seed", "1"], 0, &["changed: seed: "]);
    check(&["--resume", "--overwrite"], 2, &["--overwrite"]);
    check(&["--accept-changes"], 2, &["--resume"]);
    check(&["--overwrite"], 0, &[]);
}

/// What capture left out is said before the run, not only by `deepwell capture`.
#[test]
fn remarks_of_capture_are_printed() {
    let folder = Folder::new();
    let config = json!({
        "model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 1, "n_head": 2,
        "n_positions": 64, "attn_pdrop": 0.1, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    });
    let config = folder.file("config.json", config.to_string());
    let output = deepwell(&folder.training(&config, "1"));
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(
        stderr.contains("note: `attn_pdrop` is not 0: training is without dropout"),
        "{stderr}"
    );
}

/// What launchers set and what the command was told do not fit: one error, before anything is read.
#[test]
fn environments_that_cannot_be_are_refused() {
    let folder = Folder::new();
    let training = folder.training("llama-micro", "1");
    let check = |more: &[&str], environment: &[(&str, &str)], expected: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepwell"));
        let output = command.args(&training).args(more).envs(environment.iter().copied()).output();
        let output = output.expect("the command was built with this test");
        let stderr = text(&output.stderr);
        let code = if expected.is_some() { 2 } else { 0 };
        assert_eq!(output.status.code(), Some(code), "{environment:?}: {stderr}");
        let expected = expected.unwrap_or_default();
        assert!(stderr.contains(expected), "{environment:?}: expected `{expected}` in: {stderr}");
        // One error, with at most a few lines of hints.
        let errors = stderr.lines().filter(|line| line.starts_with("error")).count();
        assert_eq!(errors, usize::from(code != 0), "{stderr}");
    };
    let two = [("RANK", "1"), ("WORLD_SIZE", "2")];
    check(&[], &two, Some("launched: expected `--launched` on a rank of torchrun, which has set"));
    let on_gpus = ["--launched", "--device", "cuda"];
    check(&on_gpus, &[("RANK", "0")], Some("WORLD_SIZE: expected a number, as torchrun"));
    check(&on_gpus, &[("RANK", "2"), ("WORLD_SIZE", "2")], Some("RANK: expected a number be"));
    check(&on_gpus, &[], Some("launched: expected a launcher that sets `RANK`"));
    for more in [&["--launched"][..], &["--launched", "--device", "cpu"]] {
        check(more, &[], Some("launched: expected a launcher that sets `RANK`"));
    }
    // A missing library is said at once, by a rank that nobody has joined yet.
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|it| it.local_addr());
    let port = (port.expect("a port").port() - 1).to_string();
    let first = [
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &port),
        ("DEEPWELL_NCCL", "/nowhere/libnccl.so.2"),
    ];
    let expected =
        "rank 0 of 2: cuda: NCCL: looked for `/nowhere/libnccl.so.2`, and could load none";
    if cfg!(feature = "cuda") {
        check(&["--launched", "--device", "cuda"], &first, Some(expected));
    }
    check(&["--rank-timeout", "0"], &[], Some("rank_timeout_s: expected at least 1, got 0"));
    check(&["--overwrite"], &[("RANK", "0"), ("WORLD_SIZE", "1")], None);
}
