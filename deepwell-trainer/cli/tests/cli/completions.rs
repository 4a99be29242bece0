//! `deepwell completions`.

use std::process::Command;

use super::{Folder, check_error, stdout_of, text};

#[test]
fn scripts_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout_of(&["completions", shell]);
        for word in ["probe", "generate", "quantize", "diff", "--max-tokens", "completions"] {
            // fish writes options without their dashes.
            let bare = word.trim_start_matches("--");
            assert!(script.contains(word) || script.contains(bare), "{shell}: no `{word}`");
        }
    }
    check_error(&["completions", "csh"], 2, &["csh", "[possible values: bash, zsh, fish]"]);
}

/// What bash completes with the script.
#[test]
fn bash_completes_words() {
    let folder = Folder::new();
    let script = folder.file("deepwell.bash", stdout_of(&["completions", "bash"]));
    let check = |words: &[&str], expected: &[&str]| {
        let line = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
        let at = words.len() - 1;
        let current = words[at];
        let previous = words[at - 1];
        let run = format!(
            "source {script}; COMP_WORDS=({line}); COMP_CWORD={at}; \
             _deepwell deepwell '{current}' '{previous}'; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        let output = Command::new("bash").args(["--norc", "-c", &run]).output();
        let output = output.expect("this test runs bash");
        let stdout = text(&output.stdout);
        let got: Vec<&str> = stdout.lines().collect();
        assert_eq!(got, expected, "{words:?}: {}", text(&output.stderr));
    };
    check(&["deepwell", "gen"], &["generate"]);
    check(&["deepwell", "c"], &["capture", "ckpt", "corpus", "completions"]);
    check(&["deepwell", "ckpt", "d"], &["diff"]);
    check(&["deepwell", "generate", "--top"], &["--top-k", "--top-p"]);
    check(&["deepwell", "completions", "z"], &["zsh"]);
    check(&["deepwell", "quantize", "--format", "nv"], &["nvfp4"]);
}
