//! The page and the table of a few runs.

use deepwell_report::Block;

use super::*;
use crate::run::{Event, Points, RunState};

fn run(name: &str, seed: &str, speed: Option<f64>) -> Run {
    let mut run = Run { name: name.to_owned(), state: RunState::Finished, ..Run::default() };
    let curve: Points = (1..=100).map(|step| (f64::from(step), 5.0 / f64::from(step))).collect();
    run.curves.insert(Metric::Loss, curve);
    run.curves.insert(Metric::ValLoss, vec![(50.0, 3.25), (100.0, f64::NAN)]);
    if let Some(speed) = speed {
        run.curves.insert(Metric::TokensPerS, vec![(1.0, speed)]);
        run.facts.flops_per_step = Some(2e9);
        run.facts.tokens_per_step = Some(512.0);
        run.facts.peak_bf16_flops = Some(1e10);
        run.facts.machine = Some("NVIDIA H200".to_owned());
        run.facts.ranks = Some(2);
    }
    run.settings.insert("seed".to_owned(), seed.to_owned());
    run.settings.insert("model".to_owned(), "a|b".to_owned());
    run.facts.model = Some("a|b".to_owned());
    run.events.push(Event { step: 7, kind: "to bf16".to_owned(), ..Event::default() });
    run.step_last = 100;
    run
}

#[test]
fn missing_values_have_reasons_and_others_units() {
    let runs = [run("a", "0", Some(1280.0)), run("b", "1", None)];
    let page = dashboard(&runs, "Two", Some(9));
    let cell = |run: usize, title: &str| {
        let at = page.columns.iter().position(|column| column.title == title).expect(title);
        page.runs[run].cells[at].clone()
    };
    let number = |value, text: &str| Cell::Number { value, text: text.to_owned() };
    assert_eq!(cell(0, "tokens/s"), number(1280.0, "1280"));
    // 2 GFLOP for 512 tokens at 1280 tokens/s, of 10 GFLOP/s.
    assert_eq!(cell(0, "MFU"), number(0.5, "50.0 %"));
    assert_eq!(cell(0, "hardware"), Cell::Text("2 ranks, NVIDIA H200".to_owned()));
    assert_eq!(cell(0, "held-out loss"), number(3.25, "3.2500"));
    assert_eq!(cell(0, "guard events"), number(1.0, "1"));
    for title in ["tokens/s", "MFU", "hardware", "goodput", "peak memory"] {
        let Cell::Missing(reason) = cell(1, title) else { panic!("{title}") };
        assert!(reason.len() > 10, "{title}: {reason}");
    }
    assert_eq!(page.runs[0].event_steps, [7.0]);
    // Routing is shown only where a run has it.
    let titles: Vec<&str> = page.charts.iter().map(|chart| chart.title.as_str()).collect();
    assert_eq!(titles[5], "MFU");
    assert!(!titles.iter().any(|title| title.starts_with("Routing")), "{titles:?}");
    assert_eq!(page.runs[0].curves[5], Curve::Scaled { chart: 4, factor: 2e9 / 512.0 / 1e10 });
    assert_eq!(page.runs[1].curves[5], Curve::None);
    let html = page.to_html();
    for part in [
        "<meta http-equiv=\"refresh\" content=\"9\"/>",
        "<th scope=\"col\">seed</th>",
        "2 runs of Deepwell.",
        "<td class=\"missing\" title=\"no speed in the log\">not recorded</td>",
    ] {
        assert!(html.contains(part), "{part}");
    }
    let has_memory = page.runs[1].details.iter().any(
        |block| matches!(block, Block::Text(text) if text == "Memory by kind is not recorded."),
    );
    assert!(has_memory, "{:?}", page.runs[1].details);
}

#[test]
fn a_table_for_a_readme() {
    let runs = [run("a", "0", Some(1280.0)), run("b|c", "1", None)];
    insta::assert_snapshot!("markdown", markdown(&runs));
}
