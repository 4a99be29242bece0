//! The command `deepwell-emulate` as a user sees it: what it prints, its exit codes, its help.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const EXAMPLE: &str = "examples/saxpy.toml";

fn emulate(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_deepwell-emulate"))
        .args(args)
        .env("COLUMNS", "100")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::null())
        .output()
        .expect("the command was built with this test")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the command writes UTF-8")
}

/// What a command line prints; it must end with `code`.
#[track_caller]
fn stdout_of(args: &[&str], code: i32) -> String {
    let output = emulate(args);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
    text(&output.stdout)
}

/// What a kernel with one argument writes to.
const OUT: &str = "[[buffer]]\nname = \"out\"\nbytes = 256\n[[argument]]\nbuffer = \"out\"\n";

fn snapshot(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.add_filter(r"\d+\.\d{3} s", "[time] s");
    settings.bind(|| insta::assert_snapshot!(name, text));
}

/// A launch file of a kernel of the fixtures, in a folder of its own.
fn document(folder: &Path, kernel: &str, rest: &str) -> String {
    let ptx = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/engine.ptx");
    let path = folder.join(format!("{kernel}.toml"));
    let ptx = ptx.display();
    let text = format!("ptx = '{ptx}'\nkernel = \"{kernel}\"\ngrid = [1]\nblock = [64]\n{rest}");
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn help() {
    snapshot("help", &stdout_of(&["--help"], 0));
    snapshot("help_run", &stdout_of(&["run", "--help"], 0));
    snapshot("help_mutate", &stdout_of(&["mutate", "--help"], 0));
    snapshot("help_cycles", &stdout_of(&["cycles", "--help"], 0));
    snapshot("help_survey", &stdout_of(&["survey", "--help"], 0));
}

#[test]
fn the_example_runs() {
    snapshot("run_example", &stdout_of(&["run", EXAMPLE], 0));
    let modes = ["run", EXAMPLE, "--completion", "eager,lazy,demand", "--seed", "1,2", "--json"];
    let document: Value = serde_json::from_str(&stdout_of(&modes, 0)).unwrap();
    // Eager and demand do not depend on the seed.
    assert_eq!(document["runs"].as_array().unwrap().len(), 4);
    assert_eq!(document["runs"][0]["verdict"], "right");
    assert_eq!(document["runs"][0]["counts"]["instructions"], 440);
    let traced = stdout_of(&["run", EXAMPLE, "--trace", "2", "--tracker", "off"], 0);
    assert!(traced.contains("CTA 0,0,0 warp  0 lanes ffffffff line"), "{traced}");
    assert!(traced.contains("and so on"), "{traced}");
}

#[test]
fn what_is_wrong_is_shown_with_its_lines() {
    let folder = tempfile::tempdir().unwrap();
    let stuck = document(folder.path(), "stuck", OUT);
    let shown = stdout_of(&["run", &stuck], 1).replace(&stuck, "[file]");
    snapshot("run_deadlock", &shown);
    let zeros = [0u8; 256];
    fs::write(folder.path().join("zeros.bin"), zeros).unwrap();
    let wrong = document(
        folder.path(),
        "saxpy",
        "[[buffer]]\nname = \"x\"\ndtype = \"f32\"\nshape = [64]\nfill = 64\n\
         [[argument]]\nbuffer = \"x\"\n[[argument]]\nbuffer = \"x\"\n\
         [[argument]]\nf32 = 1.0\n[[argument]]\nu32 = 64\n\
         [[expect]]\nbuffer = \"x\"\nfile = \"zeros.bin\"\n",
    );
    let shown = stdout_of(&["run", &wrong], 1);
    let expected = "`x`: 64 of 64 elements are wrong, the first is 0: expected 0 (0x00000000)";
    assert!(shown.contains(expected), "{shown}");
}

/// Numbers that a kernel reads.
const STAGED: &str = "
[[buffer]]
name = \"x\"
bytes = 65536
random = { distribution = \"bits\" }
";

#[test]
fn mutants_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let sum = document(
        folder.path(),
        "sum",
        &format!(
            "{STAGED}[[buffer]]\nname = \"partial\"\nbytes = 64\nfill = 0\n\
             [[buffer]]\nname = \"arrivals\"\nbytes = 4\nfill = 0\n\
             [[buffer]]\nname = \"total\"\nbytes = 4\nfill = 0\n\
             [[argument]]\nbuffer = \"x\"\n[[argument]]\nbuffer = \"partial\"\n\
             [[argument]]\nbuffer = \"arrivals\"\n[[argument]]\nbuffer = \"total\"\n\
             [[argument]]\nu32 = 1000\n"
        ),
    );
    // One CTA: nothing that other CTAs would have to see is needed.
    snapshot("mutate_one_block", &stdout_of(&["mutate", &sum], 1));
    let several = fs::read_to_string(&sum).unwrap().replace("grid = [1]", "grid = [3]");
    fs::write(&sum, several).unwrap();
    snapshot("mutate_three_blocks", &stdout_of(&["mutate", "--verbose", &sum], 0));
    let json: Value = serde_json::from_str(&stdout_of(&["mutate", "--json", &sum], 0)).unwrap();
    let first = &json["kernels"][0]["mutants"][0];
    assert_eq!(first["class"], "mask");
    assert_eq!(first["what"], "lane 31 of shfl.sync");
    let stuck = document(folder.path(), "stuck", OUT);
    let output = emulate(&["mutate", &stuck]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("stuck: failed without any mistake"));
}

#[test]
fn a_survey_is_one_table() {
    let table = stdout_of(&["survey", EXAMPLE, "--mutate", "none"], 0);
    assert!(table.contains("1 of 1 kernels are right"), "{table}");
    let folder = tempfile::tempdir().unwrap();
    document(folder.path(), "stuck", OUT);
    let folder = folder.path().display().to_string();
    let table = stdout_of(&["survey", &folder], 1);
    assert!(table.contains("0 of 1 kernels are right"), "{table}");
    let json = stdout_of(&["survey", &folder, "--json"], 1);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["kernels"][0]["runs"][0]["verdict"], "failed");
    let check = |flags: &[&str], expected: &[&str]| {
        let args = [&["survey", EXAMPLE, "--mutate", "none", "--json"], flags].concat();
        let json: Value = serde_json::from_str(&stdout_of(&args, 0)).unwrap();
        let runs = json["kernels"][0]["runs"].as_array().unwrap();
        let modes: Vec<_> = runs.iter().map(|run| &run["mode"]["completion"]).collect();
        assert_eq!(modes, expected, "{flags:?}");
    };
    check(&[], &["eager", "lazy seed 1", "lazy seed 2", "demand", "late-copies"]);
    check(&["--skip-eager"], &["lazy seed 1", "lazy seed 2", "demand", "late-copies"]);
}

#[test]
fn what_cannot_be_used_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad.toml");
    fs::write(&bad, "kernel = 1").unwrap();
    let bad = bad.display().to_string();
    let empty = tempfile::tempdir().unwrap();
    let empty = empty.path().display().to_string();
    let check = |args: &[&str], contains: &str| {
        let output = emulate(args);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert_eq!(text(&output.stdout), "", "{args:?}");
        assert!(stderr.contains("error: "), "{args:?}: {stderr}");
        assert!(stderr.contains(contains), "{args:?}: expected `{contains}` in: {stderr}");
    };
    check(&["run"], "required arguments were not provided");
    check(&["run", "absent.toml"], "cannot read absent.toml");
    check(&["run", &bad], "bad.toml");
    check(&["run", &empty], "expected `.toml` files");
    check(&["mutate", "absent.toml"], "cannot read absent.toml");
    check(&["survey", &empty], "expected `.toml` files");
    check(
        &["run", EXAMPLE, "--completion", "late"],
        "[possible values: eager, lazy, demand, late-copies]",
    );
    check(&["run", EXAMPLE, "--sm-count", "0"], "--sm-count");
    check(&["walk"], "unrecognized subcommand");
}
