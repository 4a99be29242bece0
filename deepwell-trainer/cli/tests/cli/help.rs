//! Help of each command, whole.

use super::{deepwell, stdout_of, text};

/// Every command that does something.
pub(crate) const COMMANDS: [&[&str]; 26] = [
    &["probe"],
    &["capture"],
    &["plan"],
    &["replan"],
    &["dryrun"],
    &["score"],
    &["train"],
    &["parity"],
    &["generate"],
    &["eval"],
    &["report"],
    &["recipe", "list"],
    &["recipe", "show"],
    &["recipe", "run"],
    &["recipe", "check"],
    &["bench"],
    &["tune"],
    &["ckpt", "inspect"],
    &["ckpt", "verify"],
    &["ckpt", "diff"],
    &["ckpt", "fits"],
    &["export", "hf"],
    &["export", "mlflow"],
    &["quantize"],
    &["tokenizer", "train"],
    &["completions"],
];

#[test]
fn help_of_the_whole() {
    insta::assert_snapshot!("help", stdout_of(&["--help"]));
}

#[test]
fn help_of_each_command() {
    for command in COMMANDS {
        let help = stdout_of(&[command, &["--help"]].concat());
        insta::assert_snapshot!(format!("help_{}", command.join("_")), help);
        // `-h` says what `--help` says, and so does `help`.
        let short = stdout_of(&[command, &["-h"]].concat());
        for part in ["Examples:\n", "Exit codes: 0 ", "Usage: deepwell "] {
            assert!(help.contains(part), "{command:?}: no `{part}` in {help}");
            assert!(short.contains(part), "{command:?}: no `{part}` in {short}");
        }
        assert_eq!(stdout_of(&[&["help"], command].concat()), help);
        let too_long = help.lines().find(|line| line.chars().count() > 100);
        assert_eq!(too_long, None, "{command:?}");
    }
}

/// The list above is the list of the command itself.
#[test]
fn no_command_is_left_out() {
    let names_of = |help: &str| -> Vec<String> {
        let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
        commands
            .take_while(|line| !line.is_empty())
            .filter_map(|line| line.split_whitespace().next().map(str::to_string))
            .filter(|name| name != "help")
            .collect()
    };
    let mut found: Vec<Vec<String>> = Vec::new();
    for name in names_of(&stdout_of(&["--help"])) {
        let below = names_of(&stdout_of(&[&name, "--help"]));
        if below.is_empty() {
            found.push(vec![name]);
            continue;
        }
        found.extend(below.into_iter().map(|inner| vec![name.clone(), inner]));
    }
    assert_eq!(found, COMMANDS);
}

/// Where nothing is a terminal there are no colours, whatever is asked of the log.
#[test]
fn no_colours_in_pipes() {
    let check = |args: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_deepwell"))
            .args(args)
            .env("DEEPWELL_LOG", "trace")
            .env_remove("NO_COLOR")
            .stdin(std::process::Stdio::null())
            .output()
            .expect("the command was built with this test");
        for bytes in [&output.stdout, &output.stderr] {
            assert!(!bytes.contains(&0x1b), "{args:?}: {}", text(bytes));
        }
    };
    check(&["--help"]);
    check(&["bake"]);
    check(&["capture", "llama-micro", "--summary"]);
    check(&["plan", "no-such-model"]);
    check(&["dryrun", "llama-micro"]);
    assert_eq!(deepwell(&["--version"]).status.code(), Some(0));
}
