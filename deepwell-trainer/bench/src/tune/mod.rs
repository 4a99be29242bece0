//! Times the kernels of each shape of a model on a GPU and writes a table of the times;
//! [`deepwell_kernels::cuda::tuned::TunedCatalog`] selects by this table.
//!
//! Times come from a [`TimeSource`], so that tests can provide them.

mod judge;
mod shapes;

use deepwell_ir::{KernelCatalog, KernelChoice, OperandType, Target};
use deepwell_kernels::SingleCall;
use deepwell_kernels::cuda::CudaCatalog;
use deepwell_kernels::cuda::tuned::{
    Behind, KernelVersions, TunedRow, TunedTable, heuristics_behind,
};
use serde::Serialize;

use self::judge::{Sampled, ranked};
use super::Machine;
use super::timer::Timer;
use deepwell_trainer::clock::utc_now;
use deepwell_trainer::{OpenDevice, TrainError};

pub use shapes::{GemmSize, TuneSettings, calls_of};

/// Measures times of kernels on a call.
pub trait TimeSource {
    /// Returns the seconds of each round for each choice, or the reason of a failed choice.
    ///
    /// # Errors
    /// An error of the device, as text.
    fn times(
        &mut self,
        call: &SingleCall,
        choices: &[KernelChoice],
    ) -> Result<Vec<Result<Vec<f64>, String>>, String>;
}

/// Times on a device, in turns.
pub struct OnDevice<'a>(Timer<'a>);

impl<'a> OnDevice<'a> {
    /// Times kernels on `device` with this number of rounds for each kernel.
    pub fn new(
        device: &'a mut OpenDevice,
        hardware: &'a deepwell_probe::Hardware,
        rounds: usize,
    ) -> OnDevice<'a> {
        OnDevice(Timer::new(device, hardware, rounds))
    }
}

impl TimeSource for OnDevice<'_> {
    fn times(
        &mut self,
        call: &SingleCall,
        choices: &[KernelChoice],
    ) -> Result<Vec<Result<Vec<f64>, String>>, String> {
        self.0.time_interleaved(call, choices)
    }
}

/// Inputs of tuning.
pub struct Tuning<'a> {
    /// The GPU.
    pub target: &'a Target,
    /// The GPU's driver.
    pub driver: String,
    /// The installed kernels.
    pub versions: &'a KernelVersions,
    /// Source of the times.
    pub source: &'a mut dyn TimeSource,
    /// Whether shapes already in the table are measured again.
    pub again: bool,
    /// Saves the table; called after each shape.
    pub save: &'a mut dyn FnMut(&TunedTable) -> Result<(), TrainError>,
    /// Called after each shape with its number, the number of shapes, and the result.
    pub progress: &'a mut dyn FnMut(usize, usize, &Tuned),
}

/// Result of a shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tuned {
    /// Op and sizes.
    pub shape: String,
    /// The selected kernel, with its tile; none if all failed.
    pub taken: Option<String>,
    /// Time of the selected kernel, seconds.
    pub time_s: Option<f64>,
    /// The kernel with the smallest predicted time.
    pub heuristics: String,
    /// Time of that kernel over the time of the selected kernel.
    pub behind: Option<f64>,
    /// Time of the next fastest kernel over that of the selected kernel; none for a single kernel.
    pub runner_up: Option<f64>,
    /// Whether the table already had the shape.
    pub known: bool,
    /// Failed kernels, with their errors.
    pub failures: Vec<String>,
}

/// Result of tuning.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TuneReport {
    /// Path of the table.
    pub table: String,
    /// GPU of the table.
    pub gpu: String,
    /// Driver and clocks of the GPU.
    pub machine: Machine,
    /// Each shape.
    pub shapes: Vec<Tuned>,
    /// Times of kernels selected by predicted time, relative to selection by the whole table.
    pub heuristics_behind: Behind,
}

/// Times every kernel of every call with all its tiles, and stores the results in the table. The
/// selection by predicted time stays unless a kernel beats it by more than the spread.
///
/// # Errors
/// The version of a kernel is unknown, or the table cannot be written.
pub fn tune(
    calls: &[SingleCall],
    table: &mut TunedTable,
    tuning: &mut Tuning<'_>,
) -> Result<Vec<Tuned>, TrainError> {
    let mut found = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        let choices = CudaCatalog.choices(&call.request(), tuning.target);
        let mut sources = Vec::with_capacity(choices.len());
        for choice in &choices {
            let source = tuning.versions.of(&choice.kernel);
            sources.push(source.ok_or_else(|| unknown_version(&choice.kernel))?);
        }
        let known = table.rows.iter().find(|row| row.is_of(&call.request()));
        let is_known = known.is_some_and(|row| {
            let mut times = row.times.iter();
            times.all(|time| tuning.versions.are(&time.kernel, &time.source))
        });
        let tuned = match known {
            Some(row) if is_known && !tuning.again => {
                Tuned { known: true, ..of_row(row, &choices, Vec::new()) }
            }
            _ => {
                let (row, failures) = measured(call, &choices, &sources, tuning);
                let tuned = of_row(&row, &choices, failures);
                if !row.times.is_empty() {
                    table.insert(row);
                    table.heuristics_behind = Some(heuristics_behind(table));
                    (tuning.save)(table)?;
                }
                tuned
            }
        };
        (tuning.progress)(index + 1, calls.len(), &tuned);
        found.push(tuned);
    }
    Ok(found)
}

fn unknown_version(kernel: &str) -> TrainError {
    TrainError::Setting {
        setting: "kernels",
        expected: "compiled kernels with the `source_hash` of each in their manifest.json"
            .to_string(),
        got: format!("none of `{kernel}`"),
        hint: Some("`cargo xtask kernels`, or a bundle of this version, has them".to_string()),
    }
}

/// The row of a call, and the kernels that failed.
fn measured(
    call: &SingleCall,
    choices: &[KernelChoice],
    sources: &[String],
    tuning: &mut Tuning<'_>,
) -> (TunedRow, Vec<String>) {
    let mut sampled = Vec::new();
    let mut failures = Vec::new();
    let mut incumbent = None;
    match tuning.source.times(call, choices) {
        Err(error) => failures.push(error),
        Ok(times) => {
            for (index, (times, (choice, source))) in
                times.into_iter().zip(choices.iter().zip(sources)).enumerate()
            {
                match times {
                    Ok(samples) => {
                        if index == 0 {
                            incumbent = Some(sampled.len());
                        }
                        let choice = choice.clone();
                        let source = source.clone();
                        sampled.push(Sampled { choice, source, samples });
                    }
                    Err(error) => failures.push(format!("{}: {error}", name(choice))),
                }
            }
        }
    }
    let operand = |of: &OperandType| (of.dtype, of.shape.clone());
    let row = TunedRow {
        op: call.op.clone(),
        operands: call.operands.iter().map(operand).collect(),
        inputs: call.input_count,
        measured: utc_now(),
        driver: tuning.driver.clone(),
        times: ranked(&sampled, incumbent),
    };
    (row, failures)
}

fn name(choice: &KernelChoice) -> String {
    match choice.tile {
        Some(tile) => format!("{} {tile}", choice.kernel),
        None => choice.kernel.clone(),
    }
}

/// `choices` begin with the selection by predicted time.
fn of_row(row: &TunedRow, choices: &[KernelChoice], failures: Vec<String>) -> Tuned {
    let taken = row.times.first();
    let over = |time_s: f64| taken.map(|taken| time_s / taken.time_s);
    let of_choice = |choice: &KernelChoice| {
        let is_of = |time: &&deepwell_kernels::cuda::tuned::TunedTime| {
            time.kernel == choice.kernel && time.tile == choice.tile
        };
        row.times.iter().find(is_of).map(|time| time.time_s)
    };
    Tuned {
        shape: row.describe(),
        taken: taken.map(|time| {
            let (kernel, tile) = (time.kernel.clone(), time.tile);
            name(&KernelChoice { kernel, tile, workspace_bytes: 0 })
        }),
        time_s: taken.map(|time| time.time_s),
        heuristics: choices.first().map(name).unwrap_or_default(),
        behind: choices.first().and_then(of_choice).and_then(over),
        runner_up: row.times.get(1).and_then(|time| over(time.time_s)),
        known: false,
        failures,
    }
}

#[cfg(test)]
mod tests;
