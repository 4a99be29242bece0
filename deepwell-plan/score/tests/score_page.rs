//! The scores of docs/planner.md and its figure are those that the planner has.
//!
//! `INSTA_UPDATE=always cargo test --workspace --test score_page` writes both.

use std::path::{Path, PathBuf};

use deepwell_score::{TABLES, docs_table, figure, score};

const BEGIN: &str = "<!-- scores: written by a test -->\n";
const END: &str = "<!-- scores end -->\n";

fn docs(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(file)
}

/// Compares a file with what it should hold, or writes it where updates are asked for.
fn check(file: &str, expected: &str) {
    let path = docs(file);
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    if found != expected && std::env::var("INSTA_UPDATE").is_ok_and(|update| update == "always") {
        std::fs::write(&path, expected).unwrap();
        return;
    }
    assert!(found == expected, "docs/{file} is not what the planner scores: see this test's head");
}

#[test]
fn pages_show_the_scores() {
    let tables: Vec<_> = TABLES.iter().map(|(file, text)| score(file, text).unwrap()).collect();
    let svg = figure(&tables);
    let rows: usize = tables.iter().map(|table| table.rows.len()).sum();
    assert_eq!(svg.matches("<circle").count(), rows);
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
    check("planner-scores.svg", &svg);
    let page = std::fs::read_to_string(docs("planner.md")).unwrap();
    let (head, rest) = page.split_once(BEGIN).expect(BEGIN);
    let (_, tail) = rest.split_once(END).expect(END);
    check("planner.md", &format!("{head}{BEGIN}{}{END}{tail}", docs_table(&tables)));
}
