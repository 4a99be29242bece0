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
