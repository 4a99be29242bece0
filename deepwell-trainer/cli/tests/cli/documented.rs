//! What the documentation says of the command line and of run files, beside the command itself.

use std::collections::{BTreeMap, BTreeSet};

use deepwell_ir::capture::ModelConfig;
use deepwell_plan::ModelShape;
use deepwell_trainer::Settings;

use super::help::COMMANDS;
use super::*;

/// Pages that a user follows.
const PAGES: [&str; 11] = [
    "README.md",
    "docs/command.md",
    "docs/emulator.md",
    "docs/environment.md",
    "docs/files.md",
    "docs/formats.md",
    "docs/getting-started.md",
    "docs/mixtures.md",
    "docs/planner.md",
    "docs/runs.md",
    "docs/tour.md",
];

/// Options of other programs, of `cargo xtask` and of `deepwell-emulate`, that these pages name.
const OF_OTHERS: [&str; 38] = [
    "--all",
    "--bin",
    "--bind-to",
    "--completion",
    "--cycles",
    "--eod-mask-loss",
    "--every",
    "--example",
    "--features",
    "--lib",
    "--master-addr",
    "--max-restarts",
    "--mca",
    "--mma-order",
    "--mpi",
    "--mutate",
    "--mutations",
    "--nnodes",
    "--no-deps",
    "--node-rank",
    "--only",
    "--open",
    "--path",
    "--pipeline-model-parallel-layout",
    "--ptx",
    "--record",
    "--release",
    "--reset-attention-mask",
    "--reset-position-ids",
    "--results",
    "--skip-eager",
    "--sm-count",
    "--test",
    "--timeline",
    "--tracker",
    "--unproven",
    "--warnings",
    "--workspace",
];

fn page(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Words that begin with two hyphens: options.
fn options_in(text: &str) -> BTreeSet<String> {
    let is_of_option = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let begins = |word: &str| {
        word.starts_with("--") && word[2..].starts_with(|c: char| c.is_ascii_lowercase())
    };
    let words = text.split(|c: char| !is_of_option(c));
    words.filter(|word| begins(word)).map(|word| word.trim_end_matches('-').to_string()).collect()
}

/// Options of each command, by its words: what its help lists before the examples.
fn options_of_commands() -> BTreeMap<String, BTreeSet<String>> {
    let of = |command: &[&str]| {
        let help = stdout_of(&[command, &["--help"]].concat());
        // Aliases are named after their option.
        (command.join(" "), options_in(&help))
    };
    COMMANDS.into_iter().map(of).collect()
}

/// What stands in backticks or in a console block, as in `deepwell plan MODEL --zero 3`.
fn command_lines(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let mut found = Vec::new();
    let mut is_block = false;
    for line in joined.lines() {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
        } else if is_block {
            let command = line.trim_start().strip_prefix("$ ").unwrap_or(line);
            // What follows two spaces and a hash explains it.
            found.push(command.split("  #").next().unwrap_or_default().to_string());
        } else {
            found.extend(line.split('`').skip(1).step_by(2).map(str::to_string));
        }
    }
    found
}

/// The arguments of `deepwell` in a command line, also where `cargo xtask` or a launcher starts it.
fn arguments(line: &str) -> Option<&str> {
    let starts = ["deepwell -- ", "cargo xtask ", "deepwell "];
    starts.iter().find_map(|start| line.split_once(start).map(|(_, rest)| rest))
}

/// Names of models in a command's arguments that are no preset, no path and no placeholder: what
/// follows `--model`, and the first argument of commands that take a model.
fn unknown_models(arguments: &str) -> Vec<String> {
    let words: Vec<&str> = arguments.split_whitespace().collect();
    let of_option =
        words.iter().position(|word| *word == "--model").and_then(|at| words.get(at + 1));
    let takes_model = matches!(words.first(), Some(&("plan" | "dryrun" | "capture")));
    let first = words.get(1).filter(|_| takes_model);
    let names = [of_option, first].into_iter().flatten().flat_map(|names| names.split(','));
    let is_other = |name: &str| {
        name.starts_with('-')
            || name.contains(['/', '.', '"', '\'']) && !name.contains("llama-3.1")
            || name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
    };
    let is_known = |name: &str| {
        ModelConfig::presets().any(|preset| preset == name) || ModelShape::LARGE.contains(&name)
    };
    names.filter(|name| !is_other(name) && !is_known(name)).map(str::to_string).collect()
}

/// Defaults that an example of help states in words are those of its options: it said 4 pairs of
/// the 3 M model.
#[test]
fn the_first_example_of_parity_is_its_defaults() {
    let help = stdout_of(&["parity", "--help"]);
    let default = |option: &str| {
        let (_, rest) = help.split_once(&format!("      {option} <")).expect(option);
        let (_, rest) = rest.split_once("[default: ").expect(option);
        rest.split(']').next().unwrap_or_default().to_string()
    };
    let [seeds, steps, model] = ["--seeds", "--steps", "--model"].map(default);
    let expected = format!("{seeds} pairs of {steps} steps of {model}\n");
    let example = help.lines().find(|line| line.trim_start().starts_with("deepwell parity  "));
    let example = format!("{}\n", example.expect("an example"));
    assert!(example.ends_with(&expected), "expected `{expected}` at the end of `{example}`");
}

/// Command lines with an option that their command does not have, and options in prose that no
/// command has, were printed by help and pages.
#[test]
fn options_that_pages_name_are_there() {
    let commands = options_of_commands();
    let all: BTreeSet<&str> = commands.values().flatten().map(String::as_str).collect();
    let mut wrong = Vec::new();
    for path in PAGES {
        let text = page(path);
        for line in command_lines(&text) {
            let Some(arguments) = arguments(&line) else { continue };
            let named = |command: &&String| {
                arguments == command.as_str() || arguments.starts_with(&format!("{command} "))
            };
            let Some(command) = commands.keys().filter(named).max_by_key(|name| name.len()) else {
                continue;
            };
            // What another command gets, behind a bar, is its own.
            let own = arguments.split([';', '|', '>']).next().unwrap_or_default();
            for option in options_in(own) {
                if !commands[command].contains(&option) {
                    wrong.push(format!("{path}: `{command}` has no {option}: {line}"));
                }
            }
            for model in unknown_models(own) {
                wrong.push(format!("{path}: no preset `{model}`: {line}"));
            }
        }
        for option in options_in(&text) {
            if !all.contains(option.as_str()) && !OF_OTHERS.contains(&option.as_str()) {
                wrong.push(format!("{path}: no command has {option}"));
            }
        }
    }
    // Examples of help are command lines, too.
    for command in COMMANDS {
        let help = stdout_of(&[command, &["--help"]].concat());
        let (options, rest) = help.split_once("\nExamples:\n").expect("help has examples");
        let known = options_in(options);
        let own = format!("deepwell {}", command.join(" "));
        for line in rest.lines().take_while(|line| line.starts_with("  ")) {
            let example = line.trim().split("   ").next().unwrap_or_default();
            let Some((_, arguments)) = example.split_once(&own) else { continue };
            for option in options_in(arguments) {
                if !known.contains(&option) {
                    wrong.push(format!("help of {own}: no {option}: {example}"));
                }
            }
            for model in unknown_models(&format!("{}{arguments}", command.join(" "))) {
                wrong.push(format!("help of {own}: no preset `{model}`: {example}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Keys of a table of the run file, as its reader lists them when it meets one that it does not
/// know.
fn keys_of(table: &str) -> BTreeSet<String> {
    let unknown = match table {
        "" => "no_such_key = 1".to_string(),
        table => format!("[{table}]\nno_such_key = 1"),
    };
    let error = Settings::from_toml(&unknown, "run.toml").expect_err("no such key").to_string();
    let (_, list) = error.split_once("expected one of ").unwrap_or_else(|| panic!("{error}"));
    let list = list.split('\n').next().unwrap_or_default();
    list.split('`').skip(1).step_by(2).map(str::to_string).collect()
}

/// `chunks` and `plan` were accepted and not on the page.
#[test]
fn keys_of_run_files_are_documented() {
    let text = page("docs/files.md");
    let (_, section) = text.split_once("\n## Run files\n").expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let words = |text: &str| -> BTreeSet<String> {
        text.split('`').skip(1).step_by(2).map(str::to_string).collect()
    };
    let mut tables = section.split("\n|---|---|---|\n").skip(1);
    let mut rows = || -> Vec<Vec<String>> {
        let table = tables.next().expect("a table");
        let rows = table.lines().take_while(|line| line.starts_with('|'));
        rows.map(|row| row.split(" | ").map(str::to_string).collect()).collect()
    };
    let main = rows();
    let documented: BTreeSet<String> = main.iter().flat_map(|row| words(&row[0])).collect();
    assert_eq!(documented, keys_of(""), "keys of a run file, left as documented");
    for table in ["optimizer", "router"] {
        let row = main.iter().find(|row| row[0].contains(&format!("`{table}`"))).expect(table);
        let missing: Vec<String> = keys_of(table).difference(&words(&row[2])).cloned().collect();
        assert!(missing.is_empty(), "{table}: {missing:?}");
    }
    let guards = keys_of("guards");
    let named = words(section);
    let missing: Vec<&String> = guards.difference(&named).collect();
    assert!(missing.is_empty(), "guards: {missing:?}");
    let of_table: BTreeSet<String> = rows().iter().flat_map(|row| words(&row[0])).collect();
    assert!(of_table.is_subset(&guards), "{of_table:?} are not all in {guards:?}");
}

/// The list of help had 8 of 25.
#[test]
fn presets_of_help_are_those_that_there_are() {
    let help = stdout_of(&["--help"]);
    let (_, rest) = help.split_once("Presets:\n").expect("the list");
    let list: String = rest.lines().take_while(|line| !line.is_empty()).collect();
    let (presets, large) = list.split_once("; for `plan` on a cluster also").expect("two lists");
    let names = |text: &str| -> BTreeSet<String> {
        text.split([',', ' ']).filter(|word| !word.is_empty()).map(str::to_string).collect()
    };
    let known: BTreeSet<String> = ModelConfig::presets().map(str::to_string).collect();
    assert_eq!(names(presets), known);
    let large_known = ModelShape::LARGE.map(str::to_string);
    let large_known: BTreeSet<String> = large_known.into_iter().collect();
    assert_eq!(names(large), large_known.difference(&known).cloned().collect());
}

/// They were "unexpected argument '-1' found".
#[test]
fn negative_numbers_are_named_with_their_option() {
    let check = |args: &[&str], option: &str, value: &str| {
        let expected = format!("error: {option}: expected a number of 0 or more, got `{value}`\n");
        check_error(args, 2, &[&expected]);
    };
    check(&["train", "--steps", "-1"], "--steps", "-1");
    check(&["train", "--steps=-1"], "--steps", "-1");
    check(&["train", "--learning-rate", "-3e-4", "--steps", "1"], "--learning-rate", "-3e-4");
    check(&["tune", "--rounds", "-.5"], "--rounds", "-.5");
    check(&["plan", "llama-micro", "--batch", "-12"], "--batch", "-12");
    check_error(&["train", "--stepz", "1"], 2, &["unexpected argument '--stepz'"]);
    check_error(&["train", "-x"], 2, &["unexpected argument '-x'"]);
}
