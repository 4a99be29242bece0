//! Times the kernels of each shape of a model on a GPU and keeps a table of them, by which
//! [`deepwell_kernels::cuda::tuned::TunedCatalog`] selects.
//!
//! Where times come from is a [`TimeSource`], so that tests plant them.

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
use crate::clock::utc_now;
use crate::{OpenDevice, TrainError};

pub use shapes::{GemmSize, TuneSettings, calls_of};

/// Gives times of kernels on a call.
pub trait TimeSource {
    /// Seconds of each round for each choice; a choice that fails has the reason.
    ///
    /// # Errors
    /// What the device failed with; as text.
    fn times(
        &mut self,
        call: &SingleCall,
        choices: &[KernelChoice],
    ) -> Result<Vec<Result<Vec<f64>, String>>, String>;
}

/// Times on a device, in turns.
pub struct OnDevice<'a>(Timer<'a>);

impl<'a> OnDevice<'a> {
    /// So many rounds of each kernel.
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
        self.0.time_in_turns(call, choices)
    }
}

/// What shapes are tuned with.
pub struct Tuning<'a> {
    /// The GPU.
    pub target: &'a Target,
    /// Its driver.
    pub driver: String,
    /// The kernels that are here.
    pub versions: &'a KernelVersions,
    /// Where times come from.
    pub source: &'a mut dyn TimeSource,
    /// Whether shapes are measured that the table has.
    pub again: bool,
    /// Keeps the table, after each shape.
    pub save: &'a mut dyn FnMut(&TunedTable) -> Result<(), TrainError>,
    /// Is told of each shape: how many of how many, and what was found.
    pub progress: &'a mut dyn FnMut(usize, usize, &Tuned),
}

/// What became of a shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tuned {
    /// Op and sizes.
    pub shape: String,
    /// The kernel that is taken, with its tile; none where all failed.
    pub taken: Option<String>,
    /// Its time, seconds.
    pub time_s: Option<f64>,
    /// The kernel that the least predicted time selects.
    pub heuristics: String,
    /// Its time over that of the one taken.
    pub behind: Option<f64>,
    /// The next one's time over that of the one taken, where there is a next one.
    pub runner_up: Option<f64>,
    /// Whether the table had it.
    pub known: bool,
    /// Kernels that failed, and how.
    pub failures: Vec<String>,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TuneReport {
    /// Where the table is.
    pub table: String,
    /// Its GPU.
    pub gpu: String,
    /// Its driver and clocks.
    pub machine: Machine,
    /// Each shape.
    pub shapes: Vec<Tuned>,
    /// How far the selection by predicted time is behind the whole table.
    pub heuristics_behind: Behind,
}

/// Times every kernel of every call with all its tiles, and takes what it finds into the table.
/// The selection by predicted time stays where nothing beats it by more than the spread.
///
/// # Errors
/// A kernel whose version is not known, or a table that cannot be kept.
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
    let (mut sampled, mut failures, mut incumbent) = (Vec::new(), Vec::new(), None);
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
                        let (choice, source) = (choice.clone(), source.clone());
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
