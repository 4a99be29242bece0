//! `deepwell tune` where there is nothing to tune, and tables that cannot be used.

use std::process::{Command, Stdio};

use crate::{check_error, text};

#[test]
fn what_cannot_be_tuned_is_one_error() {
    // A GPU that no machine has, and so the error of a machine without a driver too.
    for (args, expected) in [
        (&["--device", "cuda:99"][..], "a GPU for `cuda:99`"),
        (&["--device", "cpu"], "kernels of a processor have no rivals"),
        (&["--device", "emulated:sm90"], "an emulated GPU has no speed"),
        (&["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (&["--shapes", "1x2"], "tokens, outputs and inputs"),
    ] {
        check_error(&[&["tune"], args].concat(), 2, &[expected]);
    }
    // There is nothing to tune on a processor.
    let output = crate::deepwell(&["tune", "--device", "cuda:99"]);
    assert!(!text(&output.stderr).contains("cpu"), "{}", text(&output.stderr));
}

#[test]
fn tables_that_are_none_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json");
    std::fs::write(&path, "{}").unwrap();
    let run = |value: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_deepwell"))
            .args(["plan", "llama-micro", "--device", "cpu"])
            .env("DEEPWELL_TUNED", value)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let (code, stderr) = run(path.to_str().unwrap());
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("t.json: missing field"), "{stderr}");
    assert!(stderr.contains("`DEEPWELL_TUNED=off`"), "{stderr}");
    assert_eq!(run("off").0, Some(0));
}
