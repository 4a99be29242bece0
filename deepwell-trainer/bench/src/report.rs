//! All results of a benchmark run, and its settings.

use std::path::{Path, PathBuf};

use deepwell_ir::capture::ModelConfig;
use deepwell_ir::{Graph, PrecisionPolicy, Program};
use deepwell_plan::{OptimizerSpec, PlanRequest, autoplan};
use deepwell_probe::Hardware;
use serde::{Deserialize, Serialize};

use super::{Machine, MixtureSize, Row, page, text};
use deepwell_trainer::{Device, TrainError};

/// Settings of a benchmark run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Where.
    pub device: Device,
    /// Preset, config.json or model folder.
    pub model: String,
    /// Name of a precision preset.
    pub precision: String,
    /// Whether BF16 is measured too.
    pub beside_bf16: bool,
    /// Sequences of a step.
    pub batch_size: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Samples of a kernel, and steps of a model.
    pub iterations: usize,
    /// Memcpy bandwidth measured before, 10⁹ bytes per second; none: the datasheet's.
    pub copy_gbps: Option<f64>,
    /// Substrings of kernel names. All matching kernels that support a call are timed, each with
    /// all its tiles; if empty, only the selected kernel is timed.
    #[serde(default)]
    pub kernels: Vec<String>,
    /// Layers of mixtures.
    #[serde(default)]
    pub mixtures: Vec<MixtureSize>,
    /// Tokens of each mixture.
    #[serde(default)]
    pub mixture_tokens: usize,
}

impl Settings {
    /// The measured precisions.
    pub fn precisions(&self) -> Vec<&str> {
        let bf16 = (self.beside_bf16 && self.precision != "bf16").then_some("bf16");
        bf16.into_iter().chain([self.precision.as_str()]).collect()
    }

    /// The model's configuration.
    ///
    /// # Errors
    /// The model is unknown.
    pub fn config(&self) -> Result<ModelConfig, TrainError> {
        match ModelConfig::preset(&self.model) {
            Some(config) => Ok(config),
            None => Ok(ModelConfig::from_path(&self.model)?.0),
        }
    }

    /// The model's graph.
    ///
    /// # Errors
    /// The model is unknown, or has no graph for sequences of this length.
    pub fn graph(&self) -> Result<Graph, TrainError> {
        Ok(self.config()?.capture(Some(self.seq_len))?)
    }

    /// Plans the model's training step in a precision.
    ///
    /// # Errors
    /// The model or precision is unknown, or the model does not fit.
    pub fn plan(&self, precision: &str, hardware: &Hardware) -> Result<Program, TrainError> {
        let request = PlanRequest {
            seq: self.seq_len,
            global_batch: self.batch_size,
            policy: PrecisionPolicy::preset(precision)?,
            optimizer: OptimizerSpec::default(),
            memory_limit_bytes: None,
            micro_batch: None,
            recompute: None,
            saved_activations: Default::default(),
        };
        let catalog = self.device.catalog();
        let target = self.device.target(hardware)?;
        let planned = autoplan(&self.graph()?, hardware, &request, catalog.as_ref(), &target)?;
        planned.fallbacks(false)?;
        Ok(planned.program)
    }
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Day and time of the start, UTC.
    pub began: String,
    /// Settings of the run.
    pub settings: Settings,
    /// The machine that ran the benchmark.
    pub machine: Machine,
    /// All rows in the order of measurement.
    pub rows: Vec<Row>,
}

impl Report {
    /// Number of rows that failed.
    pub fn failures(&self) -> usize {
        self.rows.iter().filter(|row| row.failure.is_some()).count()
    }

    /// As a table for a terminal.
    pub fn to_text(&self) -> String {
        text::table(&self.rows)
    }

    /// As Markdown, with machine and method.
    pub fn to_markdown(&self) -> String {
        text::markdown(self)
    }

    /// As an HTML page with plots.
    pub fn to_html(&self) -> String {
        page::html(self)
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a report is plain data")
    }

    /// Writes `bench.json`, `bench.txt` and `bench.html` to a folder.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), TrainError> {
        let files = [
            ("bench.json", self.to_json()),
            ("bench.txt", self.to_text()),
            ("bench.html", self.to_html()),
        ];
        files.iter().try_for_each(|(name, text)| write_file(&folder.join(name), text))
    }

    /// Writes `<what>_<device>_<day>.md`, `.json` and `.html` to a folder of records and returns
    /// the path of the Markdown file. An existing record is kept: a number is added to the new
    /// name.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn write_record(&self, folder: &Path) -> Result<PathBuf, TrainError> {
        let mut sections: Vec<&str> = self.rows.iter().map(|row| row.section.name()).collect();
        sections.sort_unstable();
        sections.dedup();
        let what = match sections.as_slice() {
            [] => "nothing".to_string(),
            sections if sections.len() > 3 => "bench".to_string(),
            sections => sections.join("-"),
        };
        let day = self.began.split('T').next().unwrap_or_default();
        let stem = format!("{what}_{}_{day}", self.machine.slug());
        let named = |number: usize| match number {
            1 => stem.clone(),
            number => format!("{stem}_{number}"),
        };
        let is_free = |name: &String| {
            ["md", "json", "html"].iter().all(|end| !folder.join(format!("{name}.{end}")).exists())
        };
        let name = (1..).map(named).find(is_free).unwrap_or(stem.clone());
        let path = folder.join(format!("{name}.md"));
        write_file(&path, &self.to_markdown())?;
        write_file(&folder.join(format!("{name}.json")), &self.to_json())?;
        write_file(&folder.join(format!("{name}.html")), &self.to_html())?;
        Ok(path)
    }
}

fn write_file(path: &Path, text: &str) -> Result<(), TrainError> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(TrainError::io(folder))?;
    }
    std::fs::write(path, text).map_err(TrainError::io(path))
}
