//! The CUDA kernels, selected by measured times where available.

use std::sync::Arc;

use deepwell_ir::{
    Call, KernelCatalog, KernelChoice, KernelRequest, MathUnit, NoKernel, Selection, Target,
};
use deepwell_precision::{QuantFormat, Role};
use serde::{Deserialize, Serialize};

use super::{LoadedTable, TunedRow, TunedTable};
use crate::registry::cuda::{CudaCatalog, candidates, no_kernel};
use crate::registry::selection::{self, Measured};
use crate::runtime::cuda::architecture::CUBLASLT;

/// [`CudaCatalog`] with tables of measured times. The nearest of all rows near a request decides;
/// among equally near rows, the row of the first table.
#[derive(Clone, Debug, Default)]
pub struct TunedCatalog {
    tables: Arc<[LoadedTable]>,
}

impl TunedCatalog {
    /// Selects by `tables`, preferred tables first.
    pub fn new(tables: Arc<[LoadedTable]>) -> TunedCatalog {
        TunedCatalog { tables }
    }

    fn nearest(&self, request: &KernelRequest<'_>, target: &Target) -> Option<(&TunedRow, String)> {
        let mut nearest: Option<(f64, &TunedRow, String)> = None;
        for table in self.tables.iter().filter(|table| table.is_of(target)) {
            let Some(found) = table.nearest(request) else { continue };
            if nearest.as_ref().is_none_or(|(least, ..)| found.0 < *least) {
                nearest = Some(found);
            }
        }
        nearest.map(|(_, row, place)| (row, place))
    }
}

impl KernelCatalog for TunedCatalog {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        let Some((row, place)) = self.nearest(request, target) else {
            return CudaCatalog.select(request, target);
        };
        let times = Measured { times: &row.times, place };
        selection::measured(candidates(request, target), &times)
            .map_err(|rejected| no_kernel(request, target, rejected))
    }

    fn choices(&self, request: &KernelRequest<'_>, target: &Target) -> Vec<KernelChoice> {
        let mut choices = CudaCatalog.choices(request, target);
        if let Ok(Selection { choice, .. }) = self.select(request, target) {
            choices.sort_by_key(|known| *known != choice);
        }
        choices
    }

    fn predicted_s(&self, request: &KernelRequest<'_>, target: &Target) -> Option<f64> {
        CudaCatalog.predicted_s(request, target)
    }

    fn serves(&self, format: &QuantFormat, role: Role, target: &Target) -> Result<(), String> {
        CudaCatalog.serves(format, role, target)
    }

    fn unit_of(&self, kernel: &str, unit: MathUnit) -> MathUnit {
        CudaCatalog.unit_of(kernel, unit)
    }

    fn peak_share(&self, kernel: &str, target: &Target) -> f64 {
        CudaCatalog.peak_share(kernel, target)
    }

    fn tables(&self, target: &Target) -> Vec<String> {
        let of_target = self.tables.iter().filter(|table| table.is_of(target));
        of_target.map(LoadedTable::describe).collect()
    }

    fn fixed_overhead_bytes(&self, target: &Target, calls: &[Call]) -> usize {
        CudaCatalog.fixed_overhead_bytes(target, calls)
    }
}

/// Gap between the selection by predicted time and the selection by a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Behind {
    /// Number of compared rows.
    pub rows: usize,
    /// Rows without a measurement of the kernel with the least predicted time.
    pub unmeasured: usize,
    /// Geometric mean of the time of the predicted kernel over the time of the table's kernel.
    pub mean: f64,
    /// The largest ratio.
    pub worst: f64,
    /// The row of the largest ratio.
    pub worst_row: String,
}

/// Compares selection by predicted time with selection by a table, by the times in the table.
pub fn heuristics_behind(table: &TunedTable) -> Behind {
    let target = Target {
        arch: table.architecture.clone(),
        features: Vec::new(),
        libraries: vec![CUBLASLT.to_string()],
        workers: table.sm_count,
        gpu: Some(0),
        gpu_name: Some(table.gpu.clone()),
        ranks: deepwell_ir::Ranks::default(),
    };
    let (mut logs, mut unmeasured) = (0.0, 0);
    let mut behind =
        Behind { rows: 0, unmeasured: 0, mean: 1.0, worst: 1.0, worst_row: String::new() };
    for row in &table.rows {
        let operands = row.operand_types();
        let selected = CudaCatalog.select(&row.request(&operands), &target);
        let time_s = selected.ok().and_then(|Selection { choice, .. }| {
            let mut times = row.times.iter();
            let is_of =
                |time: &&super::TunedTime| time.kernel == choice.kernel && time.tile == choice.tile;
            times.find(is_of).map(|time| time.time_s)
        });
        let (Some(time_s), Some(best)) = (time_s, row.times.first()) else {
            unmeasured += 1;
            continue;
        };
        let ratio = time_s / best.time_s;
        logs += ratio.ln();
        behind.rows += 1;
        if ratio > behind.worst {
            (behind.worst, behind.worst_row) = (ratio, row.describe());
        }
    }
    behind.unmeasured = unmeasured;
    if behind.rows > 0 {
        behind.mean = (logs / behind.rows as f64).exp();
    }
    behind
}
