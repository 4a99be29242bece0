//! Charts of the distribution of tokens over experts in a run: the load of each expert of each
//! layer, and the values that guards watch.

use crate::ExpertRecord;
use crate::report::{Block, HeatBand, HeatMap, LineChart, Series};

/// Columns of the map at most: windows of steps.
const COLUMNS_MAX: usize = 72;
/// Maximum number of rows of the map: experts of the shown layers.
const ROWS_MAX: usize = 512;

/// Expert records of a step, with the step's number.
pub(crate) type Step<'a> = (u64, &'a [ExpertRecord]);

/// The charts of a run, none without experts. `run` is its name.
pub(crate) fn expert_charts(run: &str, steps: &[Step<'_>]) -> Vec<Block> {
    let steps: Vec<Step<'_>> =
        steps.iter().copied().filter(|(_, experts)| !experts.is_empty()).collect();
    let Some(&(_, layers)) = steps.first() else { return Vec::new() };
    let of_layers = |value: fn(&ExpertRecord) -> f64| -> Vec<Series> {
        let of_layer = |record: &ExpertRecord| {
            let layer = record.load.layer;
            let points = steps.iter().filter_map(|&(step, experts)| {
                let record = experts.iter().find(|record| record.load.layer == layer)?;
                Some((step as f64, value(record)))
            });
            Series::new(format!("layer {layer}"), points.collect())
        };
        layers.iter().map(of_layer).collect()
    };
    let chart = |title: &str, y_label: &str, series| {
        Block::Chart(LineChart {
            title: format!("{title}, {run}"),
            x_label: "step".to_owned(),
            y_label: y_label.to_owned(),
            series,
            ..LineChart::default()
        })
    };
    let mut blocks = vec![
        Block::Heat(load_map(run, &steps, layers)),
        chart("Entropy of the load", "1 where all are equal", of_layers(|record| record.entropy)),
    ];
    let total = |value: fn(&ExpertRecord) -> f64| -> Vec<(f64, f64)> {
        let sum = |experts: &[ExpertRecord]| experts.iter().map(value).sum();
        steps.iter().map(|&(step, experts)| (step as f64, sum(experts))).collect()
    };
    let dead =
        Series::new("experts that nobody chose, all layers", total(|record| record.dead as f64));
    let dropped =
        Series::new("dropped pairs, all layers", total(|record| record.load.dropped as f64));
    blocks.push(chart("Dead experts", "experts", vec![dead]));
    if dropped.points.iter().any(|&(_, count)| count > 0.0) {
        blocks.push(chart("Dropped pairs of token and expert", "pairs", vec![dropped]));
    }
    blocks
}

/// The load of each expert over the mean of its layer, by windows of steps.
fn load_map(run: &str, steps: &[Step<'_>], layers: &[ExpertRecord]) -> HeatMap {
    let windows: Vec<&[Step<'_>]> = steps.chunks(steps.len().div_ceil(COLUMNS_MAX)).collect();
    // Layers at equal distances, as many as fit.
    let experts = layers.iter().map(|record| record.load.chosen.len()).max().unwrap_or(0);
    let every = (layers.len() * experts).div_ceil(ROWS_MAX).max(1);
    let shown: Vec<u32> = layers.iter().step_by(every).map(|record| record.load.layer).collect();
    let band = |&layer: &u32| -> HeatBand {
        let columns: Vec<Vec<f64>> = windows.iter().map(|window| shares(window, layer)).collect();
        let experts = columns.iter().map(Vec::len).max().unwrap_or(0);
        let row = |expert: usize| {
            columns.iter().map(|c| c.get(expert).copied().unwrap_or(f64::NAN)).collect()
        };
        HeatBand { label: layer.to_string(), rows: (0..experts).map(row).collect() }
    };
    let which = match every {
        1 => format!("all {} layers with experts", layers.len()),
        _ => format!("layers {shown:?} of {}", layers.len()),
    };
    HeatMap {
        title: format!("Load of experts, {run}"),
        description: format!(
            "How often each expert was chosen over the mean of its layer; a row for each expert of \
             {which}, {} steps a column",
            windows.first().map_or(0, |window| window.len())
        ),
        x_label: "step (rows: experts by layer)".to_owned(),
        x_range: (steps[0].0 as f64, steps[steps.len() - 1].0 as f64),
        bands: shown.iter().map(band).collect(),
    }
}

/// Choices of each expert of a layer within a window, relative to the mean.
fn shares(window: &[Step<'_>], layer: u32) -> Vec<f64> {
    let mut sums: Vec<u64> = Vec::new();
    for own in window.iter().flat_map(|(_, experts)| *experts) {
        if own.load.layer != layer {
            continue;
        }
        sums.resize(sums.len().max(own.load.chosen.len()), 0);
        sums.iter_mut().zip(&own.load.chosen).for_each(|(sum, count)| *sum += count);
    }
    let total: u64 = sums.iter().sum();
    let mean = total as f64 / sums.len() as f64;
    // Without tokens no comparison is possible.
    sums.into_iter().map(|sum| if total == 0 { f64::NAN } else { sum as f64 / mean }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ExpertLoad;

    fn record(layer: u32, chosen: &[u64], dropped: u64) -> ExpertRecord {
        let chosen = chosen.to_vec();
        ExpertRecord::from(&ExpertLoad { layer, chosen, dropped, ..ExpertLoad::default() })
    }

    fn map(blocks: &[Block]) -> &HeatMap {
        let Some(Block::Heat(map)) = blocks.first() else { panic!("no map: {blocks:?}") };
        map
    }

    #[test]
    fn a_row_for_each_expert_and_a_column_for_each_step() {
        let steps = [
            [record(1, &[4, 0, 2, 2], 0), record(3, &[2, 2, 2, 2], 1)],
            [record(1, &[0, 8, 0, 0], 0), record(3, &[8, 0, 0, 0], 0)],
        ];
        let steps: Vec<Step<'_>> =
            steps.iter().enumerate().map(|(i, experts)| (i as u64 + 1, &experts[..])).collect();
        let blocks = expert_charts("MXFP8", &steps);
        let expected = [
            [[2.0, 0.0], [0.0, 4.0], [1.0, 0.0], [1.0, 0.0]],
            [[1.0, 4.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]],
        ];
        for (band, expected) in map(&blocks).bands.iter().zip(expected) {
            assert_eq!(band.rows, expected, "layer {}", band.label);
        }
        assert_eq!(map(&blocks).x_range, (1.0, 2.0));
        let charts: Vec<&LineChart> = blocks
            .iter()
            .filter_map(|block| if let Block::Chart(chart) = block { Some(chart) } else { None })
            .collect();
        assert_eq!(charts.len(), 3, "entropy, dead experts and dropped pairs");
        assert_eq!(charts[1].series[0].points, [(1.0, 1.0), (2.0, 6.0)]);
        assert_eq!(charts[2].series[0].points, [(1.0, 1.0), (2.0, 0.0)]);
    }

    #[test]
    fn long_runs_and_many_layers_keep_the_map_small() {
        let layers: Vec<ExpertRecord> = (0..61).map(|layer| record(layer, &[3; 256], 0)).collect();
        let steps: Vec<Step<'_>> = (0..1000).map(|step| (step, &layers[..])).collect();
        let blocks = expert_charts("BF16", &steps);
        let map = map(&blocks);
        let rows: usize = map.bands.iter().map(|band| band.rows.len()).sum();
        assert!(rows <= ROWS_MAX, "{rows} rows");
        assert!(map.bands.iter().all(|band| band.rows[0].len() <= COLUMNS_MAX));
        assert!(map.description.contains("layers [0, 31] of 61, 14 steps"), "{}", map.description);
        assert!(map.to_svg().len() < 100_000);
    }

    #[test]
    fn dense_runs_have_none_and_no_tokens_have_no_cell() {
        assert_eq!(expert_charts("BF16", &[(1, &[]), (2, &[])]), []);
        let empty = [record(0, &[0, 0], 0)];
        let blocks = expert_charts("BF16", &[(1, &empty)]);
        assert!(map(&blocks).bands[0].rows.iter().flatten().all(|value| value.is_nan()));
    }
}
