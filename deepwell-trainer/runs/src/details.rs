//! The details of a run on the page: facts, memory, precision by layer, routing, guard events.

use std::collections::BTreeMap;

use deepwell_report::{Bar, BarTable, Block, HeatBand, HeatMap, KeyValueTable, Table};

use crate::run::Run;
use crate::units::{bytes, count, duration, percent};

/// Guard events in the table, at most; the rest is counted.
const EVENTS_MAX: usize = 200;
/// Columns of the map of routing: windows of steps.
const COLUMNS_MAX: usize = 72;
/// Layers of the map of routing, at most.
const LAYERS_MAX: usize = 64;

/// The blocks of a run.
pub(crate) fn details(run: &Run) -> Vec<Block> {
    let mut blocks = vec![Block::KeyValues(pairs(run))];
    blocks.extend(run.notes.iter().map(|note| Block::Text(format!("Not read: {note}."))));
    blocks.extend(run.facts.fallbacks.iter().map(|it| Block::Text(format!("Not served: {it}."))));
    memory(run, &mut blocks);
    precision(run, &mut blocks);
    routing(run, &mut blocks);
    events(run, &mut blocks);
    blocks
}

fn pairs(run: &Run) -> KeyValueTable {
    let facts = &run.facts;
    let mut pairs = KeyValueTable::default().row("folder", run.folder.display().to_string());
    let mut add = |key: &str, value: Option<String>| {
        let value = value.unwrap_or_else(|| "not recorded".to_owned());
        pairs = std::mem::take(&mut pairs).row(key, value);
    };
    add("run", facts.id.clone());
    add("started", facts.started.clone());
    add("version of Deepwell", facts.version.clone());
    add("hardware", facts.machine.clone());
    add("memory of the hardware", facts.memory_bytes.map(bytes));
    add(
        "driver",
        facts.driver.clone().or(Some("none".to_owned())).filter(|_| facts.machine.is_some()),
    );
    let peak = facts.peak_bf16_flops.map(|peak| {
        let source = facts.peak_source.as_deref().unwrap_or("unknown");
        let (value, unit) = if peak < 1e12 { (peak / 1e9, 'G') } else { (peak / 1e12, 'T') };
        format!("{value:.0} {unit}FLOP/s a rank ({source})")
    });
    add("dense BF16 peak", peak);
    add("parameters", facts.params.map(count));
    add("tokens of a step", facts.tokens_per_step.map(count));
    add("FLOPs of a step", facts.flops_per_step.map(count));
    add("recomputation", facts.recompute.clone());
    add("data", facts.data_source.clone().or_else(|| run.settings.get("data").cloned()));
    let goodput = run.goodput().zip(run.wall_s()).map(|(share, wall_s)| {
        let steps = duration(run.step_time_s);
        format!("{}: {steps} of steps in {}", percent(share), duration(wall_s))
    });
    add("goodput", goodput);
    add("stalls for checkpoints", facts.checkpoint_stalls_s.map(duration));
    pairs
}

fn memory(run: &Run, blocks: &mut Vec<Block>) {
    if run.facts.bytes_at_peak.is_empty() {
        blocks.push(Block::Text("Memory by kind is not recorded.".to_owned()));
        return;
    }
    blocks.push(Block::Text(
        "Predicted memory of a rank at the call with the largest sum, by kind, and the whole peak:"
            .to_owned(),
    ));
    let bar = |(kind, value): (&String, &f64)| Bar {
        name: kind.clone(),
        value: *value,
        text: bytes(*value),
        color: 0,
    };
    let mut bars: Vec<Bar> = run.facts.bytes_at_peak.iter().map(bar).collect();
    let sums = [
        ("predicted peak", run.facts.peak_bytes_predicted),
        ("measured peak", run.facts.peak_bytes_measured),
    ];
    bars.extend(sums.into_iter().filter_map(|(name, value)| {
        let value = value?;
        Some(Bar { name: name.to_owned(), value, text: bytes(value), color: 1 })
    }));
    blocks.push(Block::Bars(BarTable { bars }));
}

/// A tensor name without the numbers of layers and experts, and the layer.
fn layer_of(name: &str) -> (String, Option<u32>) {
    let mut layer = None;
    let parts: Vec<&str> = name
        .split('.')
        .map(|part| match part.parse::<u32>() {
            Ok(number) => {
                layer.get_or_insert(number);
                "*"
            }
            Err(_) => part,
        })
        .collect();
    (parts.join("."), layer)
}

/// The format of each kind of weight, layers with the same format together.
fn precision(run: &Run, blocks: &mut Vec<Block>) {
    if run.facts.precision.is_empty() {
        blocks.push(Block::Text("Precision by layer is not recorded.".to_owned()));
        return;
    }
    // Kind of weight and format: layers, and the reason of the first.
    let mut rows: BTreeMap<(String, &str), (Vec<u32>, &str)> = BTreeMap::new();
    for [tensor, format, reason] in &run.facts.precision {
        let (kind, layer) = layer_of(tensor);
        let row = rows.entry((kind, format)).or_insert_with(|| (Vec::new(), reason));
        row.0.extend(layer);
    }
    let rows = rows.into_iter().map(|((kind, format), (mut layers, reason))| {
        layers.sort_unstable();
        layers.dedup();
        vec![kind, format.to_owned(), ranges(&layers), reason.to_owned()]
    });
    let columns = ["weight", "format", "layers", "reason"].map(str::to_owned).to_vec();
    blocks.push(Block::Text("Precision by layer:".to_owned()));
    blocks.push(Block::Table(Table { columns, rows: rows.collect() }));
}

/// Sorted numbers as ranges: `0-3, 5`.
fn ranges(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [only] => only.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    let text = runs.collect::<Vec<_>>().join(", ");
    // A cell that begins with a digit would be aligned as a number.
    if text.is_empty() { text } else { format!("layers {text}") }
}

/// Largest load over the mean, by layer and window of steps.
fn routing(run: &Run, blocks: &mut Vec<Block>) {
    let Some((first, last)) =
        run.loads.values().next().and_then(|points| Some((points.first()?.0, points.last()?.0)))
    else {
        return;
    };
    let every = run.loads.len().div_ceil(LAYERS_MAX);
    let width = (last - first).max(1.0) / COLUMNS_MAX as f64;
    let band = |(layer, points): (&u32, &Vec<(f64, f64)>)| {
        let mut row = vec![f64::NAN; COLUMNS_MAX];
        for &(step, value) in points {
            let column = (((step - first) / width) as usize).min(COLUMNS_MAX - 1);
            row[column] = value.max(row[column]);
        }
        // A log with fewer steps than columns leaves gaps between its values.
        let mut before = f64::NAN;
        for value in &mut row {
            if value.is_nan() {
                *value = before;
            }
            before = *value;
        }
        HeatBand { label: layer.to_string(), rows: vec![row] }
    };
    blocks.push(Block::Heat(HeatMap {
        title: "Routing: largest load of an expert over the mean, by layer".to_owned(),
        description: format!(
            "The highest value of each of {COLUMNS_MAX} windows of steps, for {} of {} layers",
            run.loads.len().div_ceil(every),
            run.loads.len()
        ),
        x_label: "step (rows: layers)".to_owned(),
        x_range: (first, last),
        bands: run.loads.iter().step_by(every).map(band).collect(),
    }));
}

fn events(run: &Run, blocks: &mut Vec<Block>) {
    if run.events.is_empty() {
        blocks.push(Block::Text("No guard events.".to_owned()));
        return;
    }
    let rest = run.events.len().saturating_sub(EVENTS_MAX);
    blocks.push(Block::Text(match rest {
        0 => "Guard events:".to_owned(),
        _ => format!("Guard events, the first {EVENTS_MAX}; {rest} more are in metrics.jsonl:"),
    }));
    let row = |event: &crate::run::Event| {
        let whole = if event.gemm.is_empty() { "whole run" } else { &event.gemm };
        vec![event.step.to_string(), event.kind.clone(), whole.to_owned(), event.reason.clone()]
    };
    let columns = ["step", "event", "weight", "reason"].map(str::to_owned).to_vec();
    let rows = run.events.iter().take(EVENTS_MAX).map(row).collect();
    blocks.push(Block::Table(Table { columns, rows }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_with_one_format_share_a_row() {
        let mut run = Run::default();
        let tensor = |layer: u32, format: &str| {
            let name = format!("model.layers.{layer}.mlp.experts.3.up_proj.weight");
            [name, format.to_owned(), "because".to_owned()]
        };
        run.facts.precision =
            [0, 1, 2, 5].into_iter().map(|layer| tensor(layer, "mxfp8")).collect();
        run.facts.precision.push(tensor(3, "bf16"));
        run.facts.precision.push(["lm_head.weight", "bf16", "head"].map(str::to_owned));
        let mut blocks = Vec::new();
        precision(&run, &mut blocks);
        let Some(Block::Table(table)) = blocks.last() else { panic!("{blocks:?}") };
        let weight = "model.layers.*.mlp.experts.*.up_proj.weight";
        let expected = [
            ["lm_head.weight", "bf16", "", "head"],
            [weight, "bf16", "layers 3", "because"],
            [weight, "mxfp8", "layers 0-2, 5", "because"],
        ];
        assert_eq!(table.rows, expected.map(|row| row.map(str::to_owned).to_vec()));
    }

    #[test]
    fn the_map_of_routing_keeps_the_highest_load() {
        let mut run = Run::default();
        assert_eq!((routing(&run, &mut Vec::new()), run.loads.len()), ((), 0));
        let points: Vec<(f64, f64)> =
            (0..7200).map(|step| (f64::from(step), if step == 555 { 7.5 } else { 1.0 })).collect();
        run.loads = (0..100).map(|layer| (layer, points.clone())).collect();
        let mut blocks = Vec::new();
        routing(&run, &mut blocks);
        let [Block::Heat(map)] = &blocks[..] else { panic!("{blocks:?}") };
        assert!(map.bands.len() <= LAYERS_MAX, "{} layers", map.bands.len());
        assert_eq!((map.bands[0].rows[0][5], map.bands[0].rows[0][6]), (7.5, 1.0));
        assert!(map.description.ends_with("for 50 of 100 layers"), "{}", map.description);
    }
}
