//! Runs a launch on the emulator: lays out the arguments, and turns the report into an error.

use std::time::Instant;

use deepwell_emulator::decode::ParameterLayout;
use deepwell_emulator::launch::{LaunchSpec, Report};

use super::launch_files::{Begun, Code};
use super::record::EmulatedLaunch;
use super::{EmulatedMachine, Kernel};
use crate::runtime::cuda::driver::{Argument, DriverError, DriverResult, Launch};

/// Maximum number of findings that an error lists.
const FINDINGS_SHOWN: usize = 8;

impl EmulatedMachine {
    /// Runs a kernel to its end.
    pub(super) fn run(&mut self, kernel: &Kernel, launch: &Launch) -> DriverResult<()> {
        let refuse = |reason: String| {
            let (grid, block, cluster) = (launch.grid, launch.block, launch.cluster);
            DriverError::new(
                "launch",
                format!(
                    "kernel `{}`, grid {grid:?}, block {block:?}, cluster {cluster:?}, {} bytes of \
                     shared memory: {reason}",
                    kernel.name, launch.shared_bytes
                ),
            )
        };
        let program = self.emulator.program(kernel.module, &kernel.name);
        let program = program.ok_or_else(|| refuse("there is no such kernel".to_string()))?;
        let arguments = lay_out(&program.parameters, program.parameter_bytes, &launch.arguments)
            .map_err(refuse)?;
        let spec = LaunchSpec {
            kernel: kernel.name.clone(),
            grid: launch.grid,
            block: launch.block,
            cluster: launch.cluster,
            shared_bytes: launch.shared_bytes,
            arguments,
            programmatic: launch.programmatic,
        };
        let recorded = self.recorder.begin(&kernel.name, launch, &self.emulator, &self.live);
        let begun = Instant::now();
        let result = self.emulator.launch(kernel.module, &spec);
        let time_s = begun.elapsed().as_secs_f64();
        let settings = &self.emulator.settings;
        self.records.add(|| {
            let told = EmulatedLaunch::new(launch, &kernel.name, self.architecture, settings);
            EmulatedLaunch { time_s, ..told.ended(&result) }
        })?;
        let report = result.map_err(|error| refuse(error.to_string()))?;
        let all = findings(&report);
        if all.is_empty() {
            return match recorded {
                Some(recorded) => self.write(recorded, kernel, launch, &report),
                None => Ok(()),
            };
        }
        let shown = all.iter().take(FINDINGS_SHOWN).map(|text| format!("\n{text}"));
        let shown: String = shown.collect();
        let files = &self.emulator.module(kernel.module).files;
        let names: Vec<String> =
            files.iter().enumerate().map(|(index, name)| format!("{index} {name}")).collect();
        let count = all.len();
        Err(refuse(format!("{count} findings{shown}\nfiles: {}", names.join(", "))))
    }
}

impl EmulatedMachine {
    /// Writes a launch as a launch file.
    fn write(
        &mut self,
        begun: Begun,
        kernel: &Kernel,
        launch: &Launch,
        report: &Report,
    ) -> DriverResult<()> {
        let ptx = self.modules.get(kernel.loaded).map_or("", |loaded| loaded.ptx.as_str());
        let files = &self.emulator.module(kernel.module).files;
        let code = Code { kernel: &kernel.name, ptx, files };
        self.recorder.end(begun, code, launch, &self.emulator, report)
    }
}

/// The problems of a launch that ran to its end.
pub(super) fn findings(report: &Report) -> Vec<String> {
    let hazards = report.errors().map(|hazard| hazard.to_string());
    let unwritten = report.unwritten.iter().map(|read| {
        let source = read.source.map(|(file, line)| format!(" (line {line} of file {file})"));
        format!(
            "read of what nobody wrote at PTX line {}{}: {}",
            read.ptx_line,
            source.unwrap_or_default(),
            read.what
        )
    });
    hazards.chain(unwritten).collect()
}

/// Lays out the parameter bytes of a launch.
pub(super) fn lay_out(
    parameters: &[ParameterLayout],
    bytes: u32,
    arguments: &[Argument],
) -> Result<Vec<u8>, String> {
    let values: Vec<Vec<u8>> = arguments.iter().map(bytes_of).collect();
    let expected: Vec<usize> = parameters.iter().map(|known| known.bytes as usize).collect();
    let got: Vec<usize> = values.iter().map(Vec::len).collect();
    if expected != got {
        return Err(format!("expected arguments of {expected:?} bytes, got {got:?}"));
    }
    let mut block = vec![0; bytes as usize];
    for (parameter, value) in parameters.iter().zip(values) {
        let offset = parameter.offset as usize;
        block[offset..offset + value.len()].copy_from_slice(&value);
    }
    Ok(block)
}

fn bytes_of(argument: &Argument) -> Vec<u8> {
    match argument {
        Argument::Pointer(value) => value.0.to_le_bytes().to_vec(),
        Argument::I32(value) => value.to_le_bytes().to_vec(),
        Argument::U32(value) => value.to_le_bytes().to_vec(),
        Argument::I64(value) => value.to_le_bytes().to_vec(),
        Argument::U64(value) => value.to_le_bytes().to_vec(),
        Argument::F32(value) => value.to_le_bytes().to_vec(),
        Argument::TensorMap(map) => map.0.iter().flat_map(|word| word.to_le_bytes()).collect(),
    }
}
