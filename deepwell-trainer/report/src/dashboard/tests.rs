//! The page as HTML.

use super::*;
use crate::Block;
use crate::check::assert_well_formed;

fn run(name: &str, seed: &str) -> DashboardRun {
    let points = vec![(1.0, 5.5), (2.0, f64::NAN), (10.0, 0.123456789)];
    DashboardRun {
        name: name.to_owned(),
        cells: vec![
            Cell::Text("<b>".to_owned()),
            Cell::Number { value: 0.5, text: "50 %".to_owned() },
            Cell::Missing("no \"clock\"".to_owned()),
        ],
        settings: vec![
            ("model".to_owned(), "micro".to_owned()),
            ("seed".to_owned(), seed.to_owned()),
        ],
        tokens_per_step: Some(512.0),
        times: vec![(1.0, 0.5), (10.0, 5.0)],
        curves: vec![Curve::Points(points), Curve::Scaled { chart: 0, factor: 2.0 }],
        event_steps: vec![7.0],
        details: vec![Block::Text("memory & more".to_owned())],
    }
}

fn page(names: &[(&str, &str)]) -> Dashboard {
    let column = |title: &str| Column { title: title.to_owned(), help: "a <help>".to_owned() };
    let chart = |title: &str| DashboardChart { title: title.to_owned(), ..Default::default() };
    Dashboard {
        title: "Runs <1>".to_owned(),
        remarks: vec!["two & more".to_owned()],
        columns: ["state", "MFU", "goodput"].map(column).to_vec(),
        charts: ["Loss", "Twice"].map(chart).to_vec(),
        runs: names.iter().map(|(name, seed)| run(name, seed)).collect(),
        refresh_s: None,
    }
}

/// The page without the contents of its scripts, and the data.
fn split(html: &str) -> (String, serde_json::Value) {
    let (before, rest) = html.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    let (data, rest) = rest.split_once("</script>").unwrap();
    let (_, after) = rest.split_once("</script>").unwrap();
    (format!("{before}{after}"), serde_json::from_str(data).unwrap())
}

#[test]
fn a_page_is_well_formed_and_loads_nothing() {
    let html = page(&[("a</script>", "0"), ("b & c", "1")]).to_html();
    let (markup, data) = split(&html);
    assert_well_formed(markup.strip_prefix("<!DOCTYPE html>\n").unwrap());
    for outside in ["http:", "https:", "src=", "@import", "<link", "fetch(", "XMLHttp", "import("] {
        assert!(!html.contains(outside), "{outside}");
    }
    for part in [
        "<h1>Runs &lt;1&gt;</h1>",
        "<th scope=\"row\"><a href=\"#run-0\">a&lt;/script&gt;</a></th>",
        "<td>&lt;b&gt;</td><td class=\"number\" data-value=\"0.5\">50 %</td>",
        "<td class=\"missing\" title=\"no &quot;clock&quot;\">not recorded</td>",
        "<details class=\"run\" id=\"run-1\" data-run=\"1\"><summary>b &amp; c</summary>",
        "<p>memory &amp; more</p>",
    ] {
        assert!(markup.contains(part), "{part}");
    }
    assert!(!markup.contains("http-equiv"), "no refresh was asked for");
    assert_eq!(data["runs"][0]["name"], "a</script>");
    let curve = &data["runs"][0]["curves"][0];
    assert_eq!(curve["x"], serde_json::json!([1, 1, 8]), "differences");
    assert_eq!(curve["y"], serde_json::json!([5.5, null, 0.12346]));
    assert_eq!(data["runs"][1]["curves"][1], serde_json::json!({"of": 0, "by": 2}));
    assert_eq!(data["runs"][1]["settings"], "model=micro seed=1");
}

#[test]
fn settings_that_differ_are_marked() {
    let table = |names: &[(&str, &str)]| {
        let mut out = String::new();
        tables::push_settings(&mut out, &page(names).runs);
        assert_well_formed(&out);
        out
    };
    let out = table(&[("a", "0"), ("b", "1"), ("c", "1")]);
    assert!(out.contains("<th scope=\"col\">run</th><th scope=\"col\">seed</th>"), "{out}");
    assert_eq!(out.matches("class=\"differs\"").count(), 1, "{out}");
    assert!(out.contains("<th scope=\"row\">a</th><td class=\"differs\" title=\"0\">0</td>"));
    assert!(out.contains("1 settings that are equal in all runs"), "{out}");
    // Where no value occurs twice, none is the usual one; of two runs the second is marked.
    assert!(!table(&[("a", "0"), ("b", "1"), ("c", "2")]).contains("differs\""));
    assert_eq!(table(&[("a", "0"), ("b", "1")]).matches("class=\"differs\"").count(), 1);
    assert!(table(&[("a", "0"), ("b", "0")]).contains("All recorded settings are equal."));
    assert!(table(&[("a", "0")]).contains("One run has nothing to differ from."));
    // A key that a run lacks differs, too.
    let mut runs = page(&[("a", "0"), ("b", "0"), ("c", "0")]).runs;
    runs[2].settings.truncate(1);
    let mut out = String::new();
    tables::push_settings(&mut out, &runs);
    assert!(out.contains("<td class=\"differs\" title=\"none\">none</td>"), "{out}");
}

#[test]
fn curves_of_many_long_runs_stay_small() {
    let long: Vec<(f64, f64)> =
        (0..10_000).map(|step| (f64::from(step), 1.0 + f64::from(step % 997) / 3.0)).collect();
    let mut large = page(&[("a", "0")]);
    large.runs[0].curves = vec![Curve::Points(long); 6];
    large.runs = vec![large.runs[0].clone(); 50];
    let html = large.to_html();
    assert!(html.len() < 5_000_000, "{} bytes", html.len());
    assert!(html.contains("Curves are thinned: of each of 416 intervals"));
    assert!(page(&[("a", "0")]).to_html().contains("Curves show every recorded value."));
}
