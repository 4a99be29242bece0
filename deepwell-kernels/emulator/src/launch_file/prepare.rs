//! Preparation of a launch: reads all files, fills device memory and loads the kernel.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::check::hex_bytes;
use super::contents::{of_buffer, read_elements};
use super::data_type::DataType;
use super::error::LaunchFileError;
use super::file::{Argument, Expectation, LaunchFile, Lenience, Redundant, TensorMap, Tolerance};
use super::lines::SourceLines;
use crate::bulk;
use crate::decode::{ParameterLayout, Program};
use crate::hazard::Lanes;
use crate::launch::{Emulator, LaunchSpec, ModuleId, Settings};
use crate::tcgen05::LaneBits;

/// A launch that can run any number of times, each time on the same initial memory.
#[derive(Clone, Debug)]
pub struct PreparedLaunch {
    pub(super) name: String,
    pub(super) device: Emulator,
    pub(super) module: ModuleId,
    pub(super) spec: LaunchSpec,
    pub(super) expectations: Vec<PreparedExpectation>,
    /// Name, address and size of each buffer.
    pub(super) buffers: Vec<(String, u64, u64)>,
    pub(super) lines: Arc<SourceLines>,
    pub(super) redundant: Vec<Redundant>,
    pub(super) sources: Option<PathBuf>,
    file: LaunchFile,
    ptx: PathBuf,
}

/// Expected bytes at an address.
#[derive(Clone, Debug)]
pub(super) struct PreparedExpectation {
    pub(super) name: String,
    pub(super) address: u64,
    pub(super) dtype: DataType,
    pub(super) bytes: Vec<u8>,
    pub(super) tolerance: Tolerance,
    pub(super) tolerance_other_results: Tolerance,
}

impl PreparedLaunch {
    /// Reads a document and all its files.
    ///
    /// # Errors
    /// Files that cannot be read or are malformed, PTX with unknown forms, arguments that do not
    /// match the kernel.
    pub fn read(path: &Path) -> Result<PreparedLaunch, LaunchFileError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| LaunchFileError::Read { path: path.to_owned(), source })?;
        let file = LaunchFile::parse(&text, &path.display().to_string())?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut prepared = PreparedLaunch::of(&file, folder)?;
        prepared.name = path.display().to_string();
        Ok(prepared)
    }

    /// Prepares a document whose paths are relative to `folder`.
    ///
    /// # Errors
    /// The errors of [`PreparedLaunch::read`].
    pub fn of(file: &LaunchFile, folder: &Path) -> Result<PreparedLaunch, LaunchFileError> {
        file.check().map_err(|message| refuse(file, message))?;
        let ptx = folder.join(&file.ptx);
        let text = std::fs::read_to_string(&ptx)
            .map_err(|source| LaunchFileError::Read { path: ptx.clone(), source })?;
        let emulated = |source| LaunchFileError::Ptx { path: ptx.clone(), source };
        let mut device = Emulator::new(Settings::default());
        // Allocate buffers first, because module variables may be at any address.
        let places = allocate(file, folder, &mut device)?;
        let module = device.load_kernel(&text, &file.kernel).map_err(emulated)?;
        let loaded = device.program(module, &file.kernel).map(|program| {
            let maps = encode_maps(file, program, &places)?;
            lay_out(file, program, &places, &maps)
        });
        let arguments = loaded.unwrap_or_else(|| Ok(Vec::new()))?;
        let expectations = file
            .expectations
            .iter()
            .map(|expectation| prepare_expectation(file, expectation, folder, &places))
            .collect::<Result<_, _>>()?;
        let spec = LaunchSpec {
            kernel: file.kernel.clone(),
            grid: axes(&file.grid),
            block: axes(&file.block),
            cluster: axes(&file.cluster),
            shared_bytes: file.shared_bytes,
            arguments,
            programmatic: file.programmatic,
        };
        let before = file.buffers.iter().flat_map(|buffer| {
            let base = places[&*buffer.name].address;
            buffer.written_before.iter().map(move |part| {
                base.saturating_add(part.offset)
                    ..base.saturating_add(part.offset).saturating_add(part.bytes)
            })
        });
        device.set_written_before(before.collect());
        let buffers = file
            .buffers
            .iter()
            .map(|buffer| {
                let place = &places[&*buffer.name];
                (buffer.name.clone(), place.address, place.bytes)
            })
            .collect();
        Ok(PreparedLaunch {
            name: file.kernel.clone(),
            device,
            module,
            spec,
            expectations,
            buffers,
            lines: Arc::new(SourceLines::new(&text)),
            redundant: file.redundant.clone(),
            sources: file.sources.as_ref().map(|sources| folder.join(sources)),
            file: file.clone(),
            ptx,
        })
    }

    /// Returns the path of the document, or the kernel's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the document.
    pub fn file(&self) -> &LaunchFile {
        &self.file
    }

    /// Overrides the folder of the sources with comments `// redundant`.
    pub fn set_sources(&mut self, folder: &Path) {
        self.sources = Some(folder.to_owned());
    }

    /// Applies the document's device and rules to `settings`.
    pub fn settings(&self, settings: Settings) -> Settings {
        Settings {
            sm_count: self.file.sm_count.unwrap_or(settings.sm_count),
            ctas_per_sm: self.file.ctas_per_sm.unwrap_or(settings.ctas_per_sm),
            ..self.file.lenient.iter().fold(settings, without)
        }
    }

    /// Returns the path of the PTX file.
    pub fn ptx(&self) -> &Path {
        &self.ptx
    }

    /// Returns the source lines of the PTX.
    pub fn lines(&self) -> &SourceLines {
        &self.lines
    }

    /// Returns the CTAs of a cluster: the kernel's requirement, otherwise the document's.
    pub fn cluster_ctas(&self) -> u32 {
        let required = self.program().and_then(|program| program.required_cluster);
        required.unwrap_or(self.spec.cluster).iter().product()
    }

    /// Returns the decoded kernel.
    pub fn program(&self) -> Option<&Program> {
        self.device.program(self.module, &self.spec.kernel)
    }
}

fn without(mut settings: Settings, rule: &Lenience) -> Settings {
    match rule {
        Lenience::Lanes => settings.rules.lanes = Lanes::AsOneThread,
        Lenience::TensorFences => settings.rules.tensor_fences = false,
        Lenience::RelaxedClusterArrivals => settings.rules.relaxed_cluster_arrivals = false,
        Lenience::MbarrierScopes => settings.rules.mbarrier_scopes = false,
        Lenience::ArrivalPhases => settings.rules.arrival_phases = false,
        Lenience::LaneBits => settings.lane_bits = LaneBits::Ignored,
        Lenience::Warnings => settings.rules.warnings = false,
    }
    settings
}

fn refuse(file: &LaunchFile, message: String) -> LaunchFileError {
    LaunchFileError::Field { file: format!("launch of `{}`", file.kernel), message }
}

fn axes(given: &[u32]) -> [u32; 3] {
    std::array::from_fn(|axis| given.get(axis).copied().unwrap_or(1))
}

/// Location of a buffer.
struct Place {
    address: u64,
    bytes: u64,
    dtype: DataType,
}

type Places<'a> = HashMap<&'a str, Place>;

fn allocate<'a>(
    file: &'a LaunchFile,
    folder: &Path,
    device: &mut Emulator,
) -> Result<Places<'a>, LaunchFileError> {
    let mut places = Places::new();
    for buffer in &file.buffers {
        let contents = of_buffer(buffer, folder)?;
        let wrong = |error: crate::error::EmulatorError| {
            refuse(file, format!("buffer `{}`: {error}", buffer.name))
        };
        let address = match buffer.address {
            Some(address) => {
                device.allocate_at(address, contents.length, &buffer.name).map_err(wrong)?;
                address
            }
            None => device.allocate(contents.length, &buffer.name),
        };
        if let Some(bytes) = contents.bytes.filter(|bytes| !bytes.is_empty()) {
            device.write(address, &bytes).map_err(wrong)?;
        }
        let place = Place { address, bytes: contents.length, dtype: contents.dtype };
        places.insert(&buffer.name, place);
    }
    Ok(places)
}

fn encode_maps<'a>(
    file: &'a LaunchFile,
    program: &Program,
    places: &Places<'_>,
) -> Result<HashMap<&'a str, Vec<u8>>, LaunchFileError> {
    let target = program.target.chars().filter(char::is_ascii_digit).collect::<String>();
    let target = target.parse().unwrap_or(0);
    file.tensor_maps
        .iter()
        .map(|map| {
            let spec = map_spec(map, places[&*map.buffer].address);
            let encoded = spec.check_target(target).and_then(|()| bulk::TensorMap::encode(&spec));
            match encoded {
                Ok(bytes) => Ok((map.name.as_str(), bytes.to_vec())),
                Err(fault) => Err(refuse(file, format!("tensor map `{}`: {fault}", map.name))),
            }
        })
        .collect()
}

fn map_spec(map: &TensorMap, base: u64) -> bulk::TensorMapSpec {
    let packed = || {
        let mut stride_bits = map.element.global_bits();
        let mut strides = Vec::new();
        for extent in &map.dimensions[..map.dimensions.len() - 1] {
            stride_bits = stride_bits.saturating_mul(*extent);
            strides.push(stride_bits / 8);
        }
        strides
    };
    let strides = map.strides.clone().unwrap_or_else(packed);
    let base = base.saturating_add(map.offset);
    let spec =
        bulk::TensorMapSpec::new(map.element, base, &map.dimensions, &strides, &map.box_dimensions);
    let element_strides = map.element_strides.clone().unwrap_or(spec.element_strides);
    bulk::TensorMapSpec { swizzle: map.swizzle, fill: map.fill, element_strides, ..spec }
}

/// Lays out the bytes of the kernel's parameters.
fn lay_out(
    file: &LaunchFile,
    program: &Program,
    places: &Places<'_>,
    maps: &HashMap<&str, Vec<u8>>,
) -> Result<Vec<u8>, LaunchFileError> {
    let parameters = &program.parameters;
    if parameters.len() != file.arguments.len() {
        let names: Vec<String> = parameters
            .iter()
            .map(|parameter| format!("`{}` ({} bytes)", parameter.name, parameter.bytes))
            .collect();
        return Err(refuse(
            file,
            format!(
                "expected {} arguments, {}, got {}",
                parameters.len(),
                names.join(", "),
                file.arguments.len()
            ),
        ));
    }
    let mut bytes_of_all = vec![0; program.parameter_bytes as usize];
    for (index, (parameter, argument)) in parameters.iter().zip(&file.arguments).enumerate() {
        let bytes = argument_bytes(argument, places, maps);
        let ParameterLayout { name, offset, bytes: expected, .. } = parameter;
        if bytes.len() != *expected as usize {
            return Err(refuse(
                file,
                format!(
                    "argument {}: expected {expected} bytes for `{name}`, got {}",
                    index + 1,
                    bytes.len()
                ),
            ));
        }
        let offset = *offset as usize;
        bytes_of_all[offset..offset + bytes.len()].copy_from_slice(&bytes);
    }
    Ok(bytes_of_all)
}

fn argument_bytes(
    argument: &Argument,
    places: &Places<'_>,
    maps: &HashMap<&str, Vec<u8>>,
) -> Vec<u8> {
    let buffer = argument.buffer.as_ref().map(|name| {
        let address = places[&**name].address.wrapping_add(argument.offset.unwrap_or(0));
        address.to_le_bytes().to_vec()
    });
    let values = [
        buffer,
        argument.tensor_map.as_ref().map(|name| maps[&**name].clone()),
        argument.u8.map(|value| value.to_le_bytes().to_vec()),
        argument.u16.map(|value| value.to_le_bytes().to_vec()),
        argument.u32.map(|value| value.to_le_bytes().to_vec()),
        argument.u64.map(|value| value.to_le_bytes().to_vec()),
        argument.i32.map(|value| value.to_le_bytes().to_vec()),
        argument.i64.map(|value| value.to_le_bytes().to_vec()),
        argument.f32.map(|value| value.to_le_bytes().to_vec()),
        argument.f64.map(|value| value.to_le_bytes().to_vec()),
        argument.hex.as_ref().and_then(|text| hex_bytes(text).ok()),
    ];
    values.into_iter().flatten().next().unwrap_or_default()
}

fn prepare_expectation(
    file: &LaunchFile,
    expectation: &Expectation,
    folder: &Path,
    places: &Places<'_>,
) -> Result<PreparedExpectation, LaunchFileError> {
    let name = expectation.name.clone().unwrap_or_else(|| expectation.buffer.clone());
    let wrong = |message: String| refuse(file, format!("`expect` of `{name}`: {message}"));
    let path = folder.join(&expectation.file);
    let (stored, bytes) = read_elements(&path)?;
    let place = &places[&*expectation.buffer];
    let dtype = expectation.dtype.or(stored).unwrap_or(place.dtype);
    if let Some(stored) = stored
        && stored.numpy() != dtype.numpy()
    {
        return Err(wrong(format!(
            "expected elements of {} as `{}` has them, got `dtype = \"{}\"`",
            stored.name(),
            expectation.file,
            dtype.name()
        )));
    }
    let end = expectation.offset.saturating_add(bytes.len() as u64);
    if end > place.bytes {
        return Err(wrong(format!(
            "expected at most {} bytes, the rest of `{}`, `{}` has {}",
            place.bytes.saturating_sub(expectation.offset),
            expectation.buffer,
            expectation.file,
            bytes.len()
        )));
    }
    if !bytes.len().is_multiple_of(dtype.bytes()) {
        return Err(wrong(format!(
            "expected whole elements of {} bytes, `{}` has {} bytes",
            dtype.bytes(),
            expectation.file,
            bytes.len()
        )));
    }
    let tolerance = expectation.tolerance;
    Ok(PreparedExpectation {
        address: place.address + expectation.offset,
        dtype,
        bytes,
        tolerance,
        tolerance_other_results: expectation.tolerance_other_results.unwrap_or(tolerance),
        name,
    })
}
