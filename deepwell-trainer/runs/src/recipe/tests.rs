//! Recipes and their comparison with runs.

use super::*;
use crate::run::{Metric, Run};

#[test]
fn every_recipe_is_whole() {
    for name in Recipe::names() {
        let recipe = Recipe::find(name).unwrap();
        assert_eq!(recipe.name, name);
        assert!(!recipe.figures.is_empty(), "{name} has no figure");
        assert!(recipe.command.starts_with("deepwell "), "{name}: {}", recipe.command);
        let of_points = recipe.points.iter().map(|point| (point.basis, &point.source));
        let of_figures = recipe.figures.iter().map(|figure| (figure.basis, &figure.source));
        for (basis, source) in of_points.chain(of_figures) {
            let expected = match basis {
                Basis::Measured => "benchmarks/",
                Basis::Predicted => "deepwell ",
            };
            assert!(source.starts_with(expected), "{name}: {source} is no {}", basis.name());
        }
        // A benchmarks file that is not there was never measured.
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let sources = recipe.points.iter().map(|point| &point.source);
        for source in sources.chain(recipe.figures.iter().map(|figure| &figure.source)) {
            if let Some(file) = source.split([',', ':', ' ']).next().filter(|it| it.contains('/')) {
                assert!(root.join(file).is_file(), "{name}: no {file}");
            }
        }
    }
}

#[test]
fn wrong_recipes_are_named() {
    let head = "summary = \"a\"\nhardware = \"b\"\ncommand = \"c\"\ndata = \"none\"\n";
    let check = |rest: &str, expected: &str| {
        let error = Recipe::from_toml("mine.toml", &format!("{head}{rest}")).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("recipe `mine.toml`") && error.contains(expected), "{error}");
    };
    check("speed = 3", "unknown field `speed`");
    check(
        "[[point]]\nstep = 3\nof = \"val_loss\"\nlow = 2\nhigh = 1\nbasis = \"measured\"\n\
         source = \"\"",
        "step 3: expected low <= high, got 2 and 1",
    );
    check(
        "[[figure]]\nof = \"mfu\"\nvalue = 0.5\nlow = nan\nbasis = \"predicted\"\nsource = \"\"",
        "MFU: expected low <= high",
    );
    check("[[figure]]\nof = \"beauty\"", "unknown variant `beauty`");
    let error = Recipe::find("llama").unwrap_err().to_string();
    assert!(
        error.contains("no recipe `llama`: expected one of llama-micro, llama-134m"),
        "{error}"
    );
    let recipe = Recipe::from_toml("path/mine.toml", head).unwrap();
    assert_eq!((recipe.name.as_str(), recipe.is_runnable()), ("mine", false));
}

/// A recipe with a point, a figure of an H200 and one of any machine.
fn recipe() -> Recipe {
    let text = "
        summary = \"a\"
        hardware = \"b\"
        command = \"c\"
        data = \"corpus\"
        data_hash = \"abc\"
        [run]
        learning_rate = 1e-3
        steps = 40
        out = \"elsewhere\"
        [[point]]
        step = 40
        of = \"val_loss\"
        low = 2.0
        high = 3.0
        basis = \"measured\"
        source = \"s\"
        [[point]]
        step = 40
        of = \"train_loss\"
        low = 2.0
        high = 3.0
        basis = \"measured\"
        source = \"s\"
        [[figure]]
        of = \"tokens_per_s\"
        value = 1000
        low = 900
        on = \"H200\"
        precision = \"mxfp8\"
        basis = \"measured\"
        source = \"s\"
        [[figure]]
        of = \"peak_bytes\"
        value = 1024
        high = 2048
        basis = \"predicted\"
        source = \"s\"
        [[figure]]
        of = \"params\"
        value = 5
        basis = \"measured\"
        source = \"s\"";
    Recipe::from_toml("mine", text).unwrap()
}

/// A run that is within the recipe.
fn good() -> Run {
    let mut run = Run { name: "run".to_owned(), step_last: 40, ..Run::default() };
    run.settings.insert("learning_rate".to_owned(), "0.001".to_owned());
    run.settings.insert("steps".to_owned(), "40".to_owned());
    run.facts.data_hash = Some("abc".to_owned());
    run.facts.machine = Some("NVIDIA H200".to_owned());
    run.facts.precision_name = Some("mxfp8".to_owned());
    run.facts.peak_bytes_predicted = Some(4096.0);
    run.facts.peak_bytes_measured = Some(1500.0);
    run.curves.insert(Metric::ValLoss, vec![(20.0, 9.0), (40.0, 2.5)]);
    // The mean of the last 20 is 2.5, the last value alone is not within.
    let loss =
        |step: u32| if step > 20 { if step.is_multiple_of(2) { 1.5 } else { 3.5 } } else { 9.0 };
    let curve = (1..=40).map(|step| (f64::from(step), loss(step))).collect();
    run.curves.insert(Metric::Loss, curve);
    run.curves.insert(Metric::TokensPerS, vec![(1.0, 1000.0)]);
    run
}

/// Changes the good run; gives the result and the row that changed.
#[track_caller]
fn check(change: impl Fn(&mut Run), within: Option<bool>, row: usize, part: &str) {
    let mut run = good();
    change(&mut run);
    let check = Check::of(&recipe(), &run);
    assert_eq!(check.within, within, "{check}");
    let line = check.to_string().lines().nth(row).unwrap().to_owned();
    assert!(line.contains(part), "expected `{part}` in `{line}`");
}

#[test]
fn a_run_is_within_only_if_every_compared_value_is() {
    check(|_| {}, Some(true), 0, "within   settings of the recipe");
    check(|_| {}, Some(true), 4, "within   tokens/s");
    check(|_| {}, Some(true), 6, "not compared: the recipe gives no interval");
    let set = |key: &'static str, value: &'static str| {
        move |run: &mut Run| drop(run.settings.insert(key.to_owned(), value.to_owned()))
    };
    check(set("learning_rate", "0.002"), Some(false), 0, "learning_rate is 0.002, not 0.001");
    check(set("seed", "7"), Some(true), 0, "within");
    check(set("data", "mine.txt"), Some(true), 2, "not compared: the curve is of the default");
    check(|run| run.facts.data_hash = Some("abd".to_owned()), Some(false), 1, "OUTSIDE");
    check(
        |run| drop(run.curves.insert(Metric::ValLoss, vec![(40.0, 3.01)])),
        Some(false),
        2,
        "OUTSIDE  held-out loss at step 40",
    );
    check(
        |run| drop(run.curves.insert(Metric::ValLoss, vec![(40.0, f64::NAN)])),
        Some(false),
        2,
        "OUTSIDE",
    );
    check(
        |run| drop(run.curves.insert(Metric::ValLoss, vec![(39.0, 2.5)])),
        Some(true),
        2,
        "the run did not evaluate at this step",
    );
    check(|run| drop(run.curves.remove(&Metric::Loss)), Some(true), 3, "not compared");
    check(
        |run| drop(run.curves.insert(Metric::TokensPerS, vec![(1.0, 899.0)])),
        Some(false),
        4,
        "OUTSIDE  tokens/s",
    );
    check(
        |run| run.facts.machine = Some("NVIDIA H100".to_owned()),
        Some(true),
        4,
        "the figure is of H200, the run of NVIDIA H100",
    );
    check(
        |run| run.facts.precision_name = Some("bf16".to_owned()),
        Some(true),
        4,
        "the figure is of mxfp8, the run of bf16",
    );
    check(|run| run.facts.peak_bytes_measured = None, Some(false), 5, "OUTSIDE  peak memory");
}

#[test]
fn a_run_of_which_nothing_can_be_compared_is_undecided() {
    let run = Run { name: "empty".to_owned(), ..Run::default() };
    let check = Check::of(&recipe(), &run);
    assert_eq!(check.within, None, "{check}");
    assert!(check.to_string().ends_with("empty: nothing of recipe mine could be compared\n"));
    // Equal settings alone are no result.
    let settings = good().settings;
    assert_eq!(Check::of(&recipe(), &Run { settings, ..run }).within, None);
}
