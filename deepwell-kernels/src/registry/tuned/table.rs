//! A table of measured times, as a file and indexed for lookup.

use std::collections::BTreeSet;

use deepwell_ir::{DType, KernelRequest, Op, OperandType, Target, Tile};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::KernelVersions;
use super::shape::{NEAREST, Sizes};

/// Value of the field `format` of a table.
pub const FORMAT: &str = "deepwell tuned kernels";
/// The version of the format that this crate writes and reads.
pub const VERSION: u32 = 1;

/// Measured times of the kernels of one GPU model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedTable {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// Architecture of the GPU, as in [`Target::arch`].
    pub architecture: String,
    /// Name of the GPU, as reported by the driver.
    pub gpu: String,
    /// SMs of the GPU.
    pub sm_count: usize,
    /// Clocks, power and temperature before and after, name and value.
    pub clocks: Vec<(String, String)>,
    /// Gap between the selection by predicted time and the rows.
    pub heuristics_behind: Option<super::Behind>,
    /// Sorted by op and sizes.
    pub rows: Vec<TunedRow>,
}

/// Measurements of a shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedRow {
    /// The op with its attributes.
    pub op: Op,
    /// Inputs, then outputs.
    pub operands: Vec<TypedOperand>,
    /// Number of inputs among the operands.
    pub inputs: usize,
    /// Time of the measurement, UTC.
    pub measured: String,
    /// Version of the driver.
    pub driver: String,
    /// The preferred kernel, then the others, fastest first.
    pub times: Vec<TunedTime>,
}

/// Element type and shape of an operand.
pub type TypedOperand = (DType, Vec<usize>);

/// Measured time of a kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedTime {
    /// The kernel.
    pub kernel: String,
    /// The tile, if the kernel has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tile: Option<Tile>,
    /// Median of the rounds, seconds.
    pub time_s: f64,
    /// Half of the difference between the 90th and the 10th percentile, relative to the median.
    pub spread: f64,
    /// The version of the kernel, as [`KernelVersions::of`] gives it.
    pub source: String,
}

/// A table that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{name}: expected {expected}, got {got}\nhint: `deepwell tune` makes a table")]
pub struct TableError {
    /// The file.
    pub name: String,
    /// The expected contents.
    pub expected: String,
    /// The actual contents.
    pub got: String,
}

impl TunedRow {
    /// The operands in the form of a request.
    pub fn operand_types(&self) -> Vec<OperandType> {
        let operand =
            |(dtype, shape): &TypedOperand| OperandType { dtype: *dtype, shape: shape.clone() };
        self.operands.iter().map(operand).collect()
    }

    /// The measured request; `operands` are the result of [`TunedRow::operand_types`].
    pub fn request<'a>(&'a self, operands: &'a [OperandType]) -> KernelRequest<'a> {
        KernelRequest { op: &self.op, operands, input_count: self.inputs }
    }

    /// Whether the row measures this request.
    pub fn is_of(&self, request: &KernelRequest<'_>) -> bool {
        let are_alike = |((dtype, shape), operand): (&TypedOperand, &OperandType)| {
            *dtype == operand.dtype && *shape == operand.shape
        };
        self.op == *request.op
            && self.operands.len() == request.operands.len()
            && self.operands.iter().zip(request.operands).all(are_alike)
    }

    /// Op and sizes, for messages.
    pub fn describe(&self) -> String {
        let operands = self.operand_types();
        let request = self.request(&operands);
        let attributes = self.op.rule().attributes();
        let of = format!("{} {attributes}", self.op.name());
        let dtype = self.operands.first().map_or_else(String::new, |(dtype, _)| dtype.to_string());
        format!("{} {dtype} {}", of.trim_end(), Sizes::of(&request).text())
    }
}

impl TunedTable {
    /// A table without rows.
    pub fn new(architecture: &str, gpu: &str, sm_count: usize) -> TunedTable {
        TunedTable {
            format: FORMAT.to_string(),
            version: VERSION,
            architecture: architecture.to_string(),
            gpu: gpu.to_string(),
            sm_count,
            clocks: Vec::new(),
            heuristics_behind: None,
            rows: Vec::new(),
        }
    }

    /// Inserts a row, replacing any earlier row of the same request.
    pub fn insert(&mut self, row: TunedRow) {
        let operands = row.operand_types();
        self.rows.retain(|known| !known.is_of(&row.request(&operands)));
        let place = self.rows.partition_point(|known| known.describe() <= row.describe());
        self.rows.insert(place, row);
    }
}

/// A table with an index of its rows.
#[derive(Clone, Debug)]
pub struct LoadedTable {
    name: String,
    fingerprint: String,
    table: TunedTable,
    /// Rows whose kernels all have the measured version.
    rows: Vec<Indexed>,
    /// Kernels whose version differs from the measured version.
    stale: BTreeSet<String>,
}

#[derive(Clone, Debug)]
struct Indexed {
    sizes: Sizes,
    row: TunedRow,
}

impl LoadedTable {
    /// Loads a table, with the name of its file and a hash of its text. Rows with a kernel version
    /// other than in `versions` are skipped.
    ///
    /// # Errors
    /// An unknown format or format version.
    pub fn new(
        name: &str,
        fingerprint: &str,
        table: TunedTable,
        versions: &KernelVersions,
    ) -> Result<LoadedTable, TableError> {
        if table.format != FORMAT || table.version != VERSION {
            return Err(TableError {
                name: name.to_string(),
                expected: format!("`{FORMAT}` of version {VERSION}"),
                got: format!("`{}` of version {}", table.format, table.version),
            });
        }
        let (mut rows, mut stale) = (Vec::new(), BTreeSet::new());
        for row in &table.rows {
            let operands = row.operand_types();
            if operands.len() < row.inputs || operands.is_empty() || row.times.is_empty() {
                return Err(TableError {
                    name: name.to_string(),
                    expected: "operands and times in each row".to_string(),
                    got: format!("{} and {}", operands.len(), row.times.len()),
                });
            }
            let others = row.times.iter().filter(|time| !versions.are(&time.kernel, &time.source));
            let others: Vec<String> = others.map(|time| time.kernel.clone()).collect();
            if others.is_empty() {
                let sizes = Sizes::of(&row.request(&operands));
                rows.push(Indexed { sizes, row: row.clone() });
            }
            stale.extend(others);
        }
        let (name, fingerprint) = (name.to_string(), fingerprint.to_string());
        Ok(LoadedTable { name, fingerprint, table, rows, stale })
    }

    /// The contents of the file.
    pub fn table(&self) -> &TunedTable {
        &self.table
    }

    /// Whether the table was measured on this GPU model and has usable rows.
    pub fn is_of(&self, target: &Target) -> bool {
        let TunedTable { architecture, gpu, sm_count, .. } = &self.table;
        !self.rows.is_empty()
            && *architecture == target.arch
            && target.gpu_name.as_ref() == Some(gpu)
            && *sm_count == target.workers
    }

    /// Name, GPU, day and hash, for plans.
    pub fn describe(&self) -> String {
        let day = self.rows.iter().map(|of| of.row.measured.as_str()).max().unwrap_or("never");
        format!(
            "{} ({}, {} rows, {day}, {})",
            self.name,
            self.table.gpu,
            self.rows.len(),
            self.fingerprint
        )
    }

    /// The warning about unused rows, if there are any.
    pub fn warning(&self) -> Option<String> {
        let unused = self.table.rows.len() - self.rows.len();
        let kernels: Vec<&str> = self.stale.iter().map(String::as_str).collect();
        (unused > 0).then(|| {
            format!(
                "tuned kernels: {unused} of {} rows of {} were measured with other versions of {} \
                 and are not used\nhint: `deepwell tune` measures them again",
                self.table.rows.len(),
                self.name,
                kernels.join(", ")
            )
        })
    }

    /// The nearest row, with its distance and its place for messages.
    pub(super) fn nearest(&self, request: &KernelRequest<'_>) -> Option<(f64, &TunedRow, String)> {
        let sizes = Sizes::of(request);
        let is_alike = |row: &TunedRow| {
            let dtypes = row.operands.iter().map(|(dtype, _)| dtype);
            row.op == *request.op
                && row.inputs == request.input_count
                && dtypes.eq(request.operands.iter().map(|operand| &operand.dtype))
        };
        let mut nearest: Option<(f64, &Indexed)> = None;
        for known in self.rows.iter().filter(|known| is_alike(&known.row)) {
            let Some(distance) = known.sizes.distance(&sizes) else { continue };
            if distance <= NEAREST && nearest.is_none_or(|(least, _)| distance < least) {
                nearest = Some((distance, known));
            }
        }
        nearest.map(|(distance, known)| {
            (distance, &known.row, format!("{} in {}", known.sizes.text(), self.name))
        })
    }
}
