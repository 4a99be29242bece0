//! `report.html` of a run: curves, and the parts of the model on each rank.

use std::collections::BTreeMap;
use std::path::Path;

use deepwell_plan::format_bytes;
use serde_json::Value;

use crate::atomic_write::write_atomically;
use crate::data::grouped;
use crate::expert_charts::expert_charts;
use crate::product_charts::{ProductRecord, product_charts};
use crate::rank_map::RankCoordinates;
use crate::rank_times::straggler;
use crate::report::{
    Bar, BarTable, Block, KeyValueTable, LineChart, Section, Series, Table, html_page,
};
use crate::run::{DataFacts, RunSummary};
use crate::run_paths;
use crate::{ExpertRecord, ExpertRows, Record, Settings, TrainError};

/// Writes the page of a run into its folder.
pub(crate) fn write(summary: &RunSummary) -> Result<(), TrainError> {
    let out = &summary.settings.out;
    let path = run_paths::metrics(out);
    let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
    // Ignore invalid lines: they must not prevent the page.
    let records: Vec<Record> =
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    write_atomically(&out.join(run_paths::PAGE), &page(summary, &records, out))
}

/// Name of the precision, with the choice of `auto`.
fn precision(summary: &RunSummary) -> String {
    let name = &summary.settings.precision;
    summary.auto_precision.as_ref().map_or(name.clone(), |chosen| format!("{name}: {chosen}"))
}

fn page(summary: &RunSummary, records: &[Record], out: &Path) -> String {
    let settings = &summary.settings;
    let last = records.iter().rev().find_map(|record| record.val_loss);
    let pairs = KeyValueTable::default()
        .row("model", format!("{}, {} parameters", settings.model, grouped(summary.params)))
        .row("weights", summary.weights.clone())
        .row("data", summary.data.source.clone())
        .row("tokens", tokens(&summary.data))
        .row("tokenizer", tokenizer(&summary.data))
        .row("precision", precision(summary))
        .row("learning rate", format!("{:e}", settings.schedule().peak))
        .row("device", summary.device.clone())
        .row("ranks", format!("{} ({})", summary.ranks, settings.parallel()))
        .row("steps", format!("{} of {}", grouped(summary.fit.step), grouped(settings.steps)))
        .row(
            "batch",
            format!(
                "{} sequences x {} tokens = {} tokens a step",
                grouped(settings.batch_size as u64),
                grouped(settings.seq_len as u64),
                grouped(summary.tokens_per_step)
            ),
        )
        .row("speed", format!("{} tokens/s, median", grouped(summary.fit.tokens_per_s as u64)))
        .row("time", duration(summary.wall_s))
        .row(
            "held-out loss",
            last.map_or("none".to_string(), |loss| format!("{loss:.4} nats per token")),
        )
        .row("peak memory", peak_memory(summary));
    let fullest = ExpertRows::fullest(&summary.fit.expert_rows);
    let pairs = match fullest.as_deref().and_then(|text| text.split_once(": ")) {
        Some((name, value)) => pairs.row(name, value.to_string()),
        None => pairs,
    };
    let series = |name: &str, of: &dyn Fn(&Record) -> Option<f64>| {
        let finite = |record: &Record| {
            of(record).filter(|value| value.is_finite()).map(|value| (record.step as f64, value))
        };
        Series::new(name, records.iter().filter_map(finite).collect())
    };
    let chart = |title: &str, y_label: &str, series: Vec<Series>| {
        Block::Chart(LineChart {
            title: title.to_string(),
            x_label: "step".to_string(),
            y_label: y_label.to_string(),
            series,
            ..LineChart::default()
        })
    };
    let loss = vec![series("training", &|it| it.loss), series("held-out", &|it| it.val_loss)];
    let norm = vec![series("gradient norm", &|it| it.grad_norm)];
    let rate = vec![series("learning rate", &|it| it.learning_rate)];
    let speed = vec![series("speed", &|it| it.tokens_per_s)];
    let fallbacks =
        summary.precision_fallbacks.iter().map(|it| Block::Text(format!("Not served: {it}.")));
    let run = [Block::KeyValues(pairs)].into_iter().chain(fallbacks).collect();
    let mut sections = vec![
        Section { heading: "Run".to_string(), blocks: run },
        Section {
            heading: "Curves".to_string(),
            blocks: vec![
                chart("Loss", "nats per token", loss),
                chart("Gradient norm", "before clipping", norm),
                chart("Learning rate", "learning rate", rate),
                chart("Speed", "tokens/s", speed),
            ],
        },
    ];
    sections.push(Section { heading: "Settings".to_string(), blocks: differences(settings) });
    sections.extend(sections_of_parts(records, summary));
    html_page(&format!("{} in {}", settings.model, out.display()), &sections)
}

/// Sections about ranks, experts and quantized GEMMs, of runs that have such parts.
fn sections_of_parts(records: &[Record], summary: &RunSummary) -> Vec<Section> {
    let mut sections = Vec::new();
    if summary.rank_map.len() > 1 {
        sections.push(Section { heading: "Ranks".to_string(), blocks: ranks(summary) });
    }
    let loads: Vec<(u64, &[ExpertRecord])> =
        records.iter().map(|record| (record.step, &record.experts[..])).collect();
    let experts = expert_charts("training", &loads);
    if !experts.is_empty() {
        sections.push(Section { heading: "Experts".to_string(), blocks: experts });
    }
    let products: Vec<(u64, &[ProductRecord])> =
        records.iter().map(|record| (record.step, &record.products[..])).collect();
    let products = product_charts(&products);
    if !products.is_empty() {
        sections.push(Section { heading: "Quantized GEMMs".to_string(), blocks: products });
    }
    sections
}

fn peak_memory(summary: &RunSummary) -> String {
    let predicted = format_bytes(summary.peak_bytes_predicted);
    match summary.peak_bytes_measured {
        Some(measured) => format!("{predicted} predicted, {} measured", format_bytes(measured)),
        None => format!("{predicted} predicted"),
    }
}

/// `12.3 s`, `4 min 10 s`, `3 h 5 min`.
fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", grouped(whole / 3600), whole % 3600 / 60),
    }
}

/// The settings that differ from their defaults, with their keys in a run file.
fn differences(settings: &Settings) -> Vec<Block> {
    let given = flat_values(settings);
    let default = flat_values(&Settings::default());
    let mut pairs = KeyValueTable::default();
    for (key, value) in given.into_iter().filter(|(key, value)| default.get(key) != Some(value)) {
        pairs = pairs.row(key, value);
    }
    let text = "Settings that are not the default, by their keys in a run file; values that the \
                run has chosen itself are among them.";
    vec![Block::Text(text.to_string()), Block::KeyValues(pairs)]
}

/// All settings by their keys in a run file.
fn flat_values(settings: &Settings) -> BTreeMap<String, String> {
    let mut flat = BTreeMap::new();
    // Settings are plain data.
    flatten("", &serde_json::to_value(settings).unwrap_or_default(), &mut flat);
    flat
}

/// Flattens values with their keys, those of tables as `table.key`. Null values are omitted.
fn flatten(key: &str, value: &Value, flat: &mut BTreeMap<String, String>) {
    let mut put = |text: String| drop(flat.insert(key.to_string(), text));
    match value {
        Value::Null => {}
        Value::Object(table) => {
            for (name, value) in table {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                flatten(&key, value, flat);
            }
        }
        Value::Number(number) => match number.as_u64() {
            Some(whole) => put(grouped(whole)),
            None => put(number.to_string()),
        },
        Value::String(text) => put(text.clone()),
        Value::Array(values) => {
            let texts = values.iter().map(|it| it.as_str().map_or(it.to_string(), str::to_string));
            put(texts.collect::<Vec<_>>().join(", "));
        }
        Value::Bool(_) => put(value.to_string()),
    }
}

/// Text of the number of tokens of the data.
fn tokens(data: &DataFacts) -> String {
    let [train, heldout] = [data.tokens_train, data.tokens_heldout].map(grouped);
    format!("{train} of training, {heldout} held out")
}

/// Tokenizer of the data.
fn tokenizer(data: &DataFacts) -> String {
    format!("{}, vocabulary {}", data.tokenizer, grouped(data.vocab_size))
}

/// The map of ranks, and how long each worked.
fn ranks(summary: &RunSummary) -> Vec<Block> {
    let names = ["rank", "data", "tensor", "stage", "expert", "layers"];
    let sizes = ["peak memory", "exchanged a step"];
    let mut columns: Vec<String> = names.into_iter().chain(sizes).map(str::to_string).collect();
    let times = &summary.fit.ranks;
    if !times.is_empty() {
        columns.extend(["works a step", "in exchanges"].map(str::to_string));
    }
    let row = |coordinates: &RankCoordinates| -> Vec<String> {
        let degrees =
            [coordinates.data, coordinates.tensor, coordinates.pipeline, coordinates.expert];
        let mut row = vec![coordinates.rank.to_string()];
        row.extend(degrees.map(|it| it.to_string()));
        row.push(coordinates.layers.clone());
        row.extend([coordinates.peak_bytes, coordinates.bytes_on_link].map(format_bytes));
        if let Some(time) = times.iter().find(|time| time.rank == coordinates.rank) {
            row.extend([time.busy_s, time.waited_s].map(|it| format!("{:.1} ms", it * 1e3)));
        }
        row
    };
    let rows = summary.rank_map.iter().map(row).collect();
    let mut blocks = vec![
        Block::Text(
            "Which part each rank has, counted from 0: of the sequences of a step, of each layer, \
             of the layers, of the experts."
                .to_string(),
        ),
        Block::Table(Table { columns, rows }),
    ];
    if times.is_empty() {
        return blocks;
    }
    let parallel = summary.settings.parallel();
    let slow = straggler(times, |rank| parallel.class(rank));
    let said = match slow {
        Some((slow, others_s)) => format!(
            "Rank {} works {:.1} ms a step, those with the same to do {:.1} ms: they wait for it.",
            slow.rank,
            slow.busy_s * 1e3,
            others_s * 1e3
        ),
        None => "No rank works much longer than those with the same to do.".to_string(),
    };
    let bar = |time: &crate::RankTime| Bar {
        name: format!("rank {}", time.rank),
        value: time.busy_s,
        text: format!("{:.1} ms", time.busy_s * 1e3),
        color: usize::from(slow.is_some_and(|(slow, _)| slow.rank == time.rank)),
    };
    blocks.push(Block::Text(said));
    blocks.push(Block::Bars(BarTable { bars: times.iter().map(bar).collect() }));
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of the table of settings: the differences by key, with grouped digits.
    #[test]
    fn settings_that_differ_are_listed() {
        let check = |toml: &str, expected: &[(&str, &str)]| {
            let settings = Settings::from_toml(toml, "run.toml").unwrap();
            let blocks = differences(&settings);
            let Some(Block::KeyValues(pairs)) = blocks.last() else { panic!("{blocks:?}") };
            let rows: Vec<(&str, &str)> =
                pairs.rows.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            assert_eq!(rows, expected, "{toml}");
        };
        check("", &[]);
        check("steps = 1000\nseed = 0", &[]);
        check(
            "steps = 20000\ndata = [\"a\", \"b.txt\"]\noptimizer.weight_decay = 0.5\naudit = true",
            &[
                ("audit", "true"),
                ("data", "a, b.txt"),
                ("optimizer.weight_decay", "0.5"),
                ("steps", "20,000"),
            ],
        );
        // Omitted in files if equal to the default.
        check(
            "ranks = 4\nzero = 3\nlearning_rate = 3e-4",
            &[("learning_rate", "0.0003"), ("ranks", "4"), ("zero", "3")],
        );
    }

    #[test]
    fn durations() {
        for (seconds, expected) in [
            (0.04, "0.0 s"),
            (12.34, "12.3 s"),
            (59.4, "59.4 s"),
            (59.6, "1 min 0 s"),
            (250.0, "4 min 10 s"),
            (11_100.0, "3 h 5 min"),
        ] {
            assert_eq!(duration(seconds), expected);
        }
    }
}
