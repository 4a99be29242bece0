//! Charts of the error of quantized GEMMs over a run.

use std::collections::BTreeMap;

use deepwell_precision::GemmKind;
use serde::{Deserialize, Serialize};

use crate::report::{Block, HeatBand, HeatMap, LineChart, Series};
use crate::{Gemm, ProductSums};

/// Columns of the map at most: measurements.
const COLUMNS_MAX: usize = 144;

/// The signal of a GEMM over its error in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProductRecord {
    /// Name of the weight.
    pub weight: String,
    /// Transformer layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
    /// GEMM of the linear layer.
    pub gemm: GemmKind,
    /// Sum of squares of the product over that of its error; 10 is 10 dB.
    pub ratio: f64,
}

impl ProductRecord {
    /// The records of a step. A product of zeros or without an error has no ratio.
    pub(crate) fn all(sums: &[ProductSums], gemms: &[Gemm]) -> Vec<ProductRecord> {
        let of = |sums: &ProductSums| {
            let (gemm, ratio) = (gemms.get(sums.gemm)?, sums.signal / sums.error);
            let (weight, layer) = (gemm.weight.clone(), gemm.layer);
            let has_ratio = ratio.is_finite() && ratio > 0.0;
            has_ratio.then_some(ProductRecord { weight, layer, gemm: sums.kind, ratio })
        };
        sums.iter().filter_map(of).collect()
    }
}

/// Records of a step, with the step's number.
pub(crate) type Step<'a> = (u64, &'a [ProductRecord]);

/// The charts of a run, none without measurements.
pub(crate) fn product_charts(steps: &[Step<'_>]) -> Vec<Block> {
    let steps: Vec<Step<'_>> =
        steps.iter().copied().filter(|(_, products)| !products.is_empty()).collect();
    if steps.is_empty() {
        return Vec::new();
    }
    let lowest = |kind: GemmKind| {
        let of_step = |&(step, products): &Step<'_>| {
            let ratios = products.iter().filter(|it| it.gemm == kind).map(|it| it.ratio);
            Some((step as f64, 10.0 * ratios.min_by(f64::total_cmp)?.log10()))
        };
        Series::new(kind.name(), steps.iter().filter_map(of_step).collect())
    };
    let chart = LineChart {
        title: "Lowest signal-to-error ratio of a GEMM".to_string(),
        x_label: "step".to_string(),
        y_label: "dB".to_string(),
        series: GemmKind::ALL.iter().map(|&kind| lowest(kind)).collect(),
        ..LineChart::default()
    };
    vec![Block::Heat(map(&steps)), Block::Chart(chart)]
}

/// The ratio of each GEMM over its own median.
fn map(steps: &[Step<'_>]) -> HeatMap {
    // The last measurement of each of equally long runs of steps.
    let every = steps.len().div_ceil(COLUMNS_MAX).max(1);
    let shown: Vec<Step<'_>> = steps.chunks(every).map(|run| run[run.len() - 1]).collect();
    let mut rows: BTreeMap<(Option<u32>, &str, GemmKind), Vec<f64>> = BTreeMap::new();
    for (column, (_, products)) in shown.iter().enumerate() {
        for ProductRecord { weight, layer, gemm, ratio } in *products {
            let row = rows.entry((*layer, weight.as_str(), *gemm)).or_default();
            row.resize(column, f64::NAN);
            row.push(*ratio);
        }
    }
    let mut bands: BTreeMap<Option<u32>, Vec<Vec<f64>>> = BTreeMap::new();
    for ((layer, ..), mut row) in rows {
        row.resize(shown.len(), f64::NAN);
        let mut sorted: Vec<f64> = row.iter().copied().filter(|it| it.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[(sorted.len() - 1) / 2];
        bands.entry(layer).or_default().push(row.into_iter().map(|it| it / median).collect());
    }
    let label = |layer: Option<u32>| layer.map_or(String::new(), |layer| layer.to_string());
    HeatMap {
        title: "Signal-to-error ratio of each GEMM over its median".to_string(),
        description: "Measured on one tile of each GEMM against the product of the unquantized \
                      operands; a row for fprop, dgrad and wgrad of each weight, by layer"
            .to_string(),
        x_label: "step (rows: GEMMs by layer)".to_string(),
        x_range: (shown[0].0 as f64, shown[shown.len() - 1].0 as f64),
        bands: bands
            .into_iter()
            .map(|(layer, rows)| HeatBand { label: label(layer), rows })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_gemms_and_columns_are_measurements() {
        let of = |layer: u32, gemm, ratio| {
            let weight = format!("layers.{layer}.up_proj");
            ProductRecord { weight, layer: Some(layer), gemm, ratio }
        };
        let first = [of(0, GemmKind::Fprop, 40.0), of(1, GemmKind::Dgrad, 20.0)];
        let second = [of(0, GemmKind::Fprop, 20.0)];
        let third = [of(0, GemmKind::Fprop, 80.0), of(1, GemmKind::Dgrad, 10.0)];
        let steps: [Step<'_>; 4] = [(64, &first), (65, &[]), (128, &second), (192, &third)];
        let blocks = product_charts(&steps);
        let [Block::Heat(map), Block::Chart(chart)] = &blocks[..] else { panic!("{blocks:?}") };
        let bands: Vec<(&str, String)> =
            map.bands.iter().map(|it| (it.label.as_str(), format!("{:?}", it.rows))).collect();
        let expected = [("0", "[[1.0, 0.5, 2.0]]"), ("1", "[[2.0, NaN, 1.0]]")];
        assert_eq!(bands, expected.map(|(label, rows)| (label, rows.to_string())));
        assert_eq!(map.x_range, (64.0, 192.0));
        let points = |name: &str| {
            let series = chart.series.iter().find(|it| it.name == name).expect("a series");
            series.points.iter().map(|&(step, db)| (step, db.round())).collect::<Vec<_>>()
        };
        assert_eq!(points("fprop"), [(64.0, 16.0), (128.0, 13.0), (192.0, 19.0)]);
        assert_eq!(points("dgrad"), [(64.0, 13.0), (192.0, 10.0)]);
        assert!(product_charts(&[(1, &[])]).is_empty());
    }

    #[test]
    fn products_without_a_ratio_have_no_record() {
        let gemms = [Gemm { weight: "w".to_string(), layer: Some(3), elements: 4 }];
        let sums = |gemm, signal, error| ProductSums { gemm, kind: GemmKind::Wgrad, signal, error };
        let all = [sums(0, 8.0, 2.0), sums(0, 0.0, 1.0), sums(0, 1.0, 0.0), sums(1, 1.0, 1.0)];
        let records = ProductRecord::all(&all, &gemms);
        let got: Vec<_> =
            records.iter().map(|it| (it.weight.as_str(), it.layer, it.ratio)).collect();
        assert_eq!(got, [("w", Some(3), 4.0)]);
    }
}
