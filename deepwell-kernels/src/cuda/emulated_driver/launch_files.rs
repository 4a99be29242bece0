//! Launches written as files, which `deepwell-emulate` can run again in any mode.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepwell_emulator::bulk;
use deepwell_emulator::launch::{Emulator, Report, Settings};
use deepwell_emulator::launch_file::{
    Argument as ArgumentField, Buffer, DataType, Expectation, LaunchFile, OrderedBefore, Recorded,
    TensorMap as MapField, Tolerance, Within,
};
use deepwell_ir::DType;

use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DriverError, DriverResult, Launch, TensorMap};

/// Environment variable with a folder for the launch files of an emulated device.
pub const RECORD_VARIABLE: &str = "DEEPWELL_EMULATOR_RECORD";

/// Tolerance of recorded results when tensor cores add in another way: 1/64 of the value plus 1/64
/// of the largest value. Only gross errors show: a step of `wgmma` with 8-bit floats truncates each
/// of 33 terms at 2^-13 of the largest term, and fuzzed sums are as imprecise.
const OTHER_RESULTS: Within = Within { absolute: 0.0, relative: 1.0 / 64.0, largest: 1.0 / 64.0 };

/// Writes launch files. Of launches that differ only in data, only the first is written.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    folder: Option<PathBuf>,
    seen: HashSet<String>,
    /// Number of files per kernel so far.
    numbers: HashMap<String, usize>,
    outputs: Vec<DeviceTensor>,
}

/// A kernel's name, its module's PTX, and the files that the PTX was compiled from.
pub(super) struct Code<'a> {
    pub(super) kernel: &'a str,
    pub(super) ptx: &'a str,
    pub(super) files: &'a [String],
}

/// Memory and arguments before a launch that will be written.
pub(super) struct Begun {
    arguments: Vec<ArgumentField>,
    tensor_maps: Vec<MapField>,
    memory: BTreeMap<u64, Vec<u8>>,
    written_before: Vec<Range<u64>>,
}

impl Recorder {
    pub(super) fn record_to(&mut self, folder: &Path) {
        self.folder = Some(folder.to_path_buf());
    }

    /// Sets the outputs of the next launches, for comparison by type.
    pub(super) fn expect(&mut self, outputs: &[DeviceTensor]) {
        self.outputs = outputs.to_vec();
    }

    /// Captures the state before a launch; `None` if the launch will not be written. `allocations`
    /// are addresses and sizes of the live device memory.
    pub(super) fn begin(
        &mut self,
        kernel: &str,
        launch: &Launch,
        emulator: &Emulator,
        allocations: &BTreeMap<u64, usize>,
    ) -> Option<Begun> {
        self.folder.as_ref()?;
        let mut tensor_maps = Vec::new();
        let arguments: Vec<ArgumentField> = launch
            .arguments
            .iter()
            .map(|argument| argument_field(argument, allocations, &mut tensor_maps))
            .collect();
        if !self.seen.insert(shape_of(kernel, launch, &arguments, &tensor_maps)) {
            return None;
        }
        let memory = allocations
            .iter()
            .filter(|(_, bytes)| **bytes > 0)
            .filter_map(|(at, bytes)| Some((*at, emulator.read(*at, *bytes).ok()?.to_vec())))
            .collect();
        let written_before = match launch.programmatic {
            true => emulator.written_before().to_vec(),
            false => Vec::new(),
        };
        Some(Begun { arguments, tensor_maps, memory, written_before })
    }

    /// Writes a launch that has run.
    pub(super) fn end(
        &mut self,
        begun: Begun,
        Code { kernel, ptx, files }: Code<'_>,
        launch: &Launch,
        emulator: &Emulator,
        report: &Report,
    ) -> DriverResult<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let refused = |what: String| DriverError::new("record", what);
        let stem = files.iter().find_map(|file| {
            let path = Path::new(file);
            let is_kernel = path.extension().is_some_and(|extension| extension == "cu");
            Some(path.file_stem().filter(|_| is_kernel)?.to_string_lossy().into_owned())
        });
        let stem = stem.unwrap_or_else(|| kernel.to_string());
        let folder = folder.join(&stem);
        let store = Store { folder: &folder };
        let settings: &Settings = &emulator.settings;
        let buffers = begun
            .memory
            .iter()
            .map(|(&at, bytes)| {
                let file = store.bytes(bytes)?;
                let written_before = parts(&begun.written_before, at, bytes.len() as u64);
                Ok(Buffer {
                    name: name_of(at),
                    file: Some(file),
                    address: Some(at),
                    written_before,
                    ..Buffer::default()
                })
            })
            .collect::<Result<_, String>>()
            .map_err(refused)?;
        let expectations = self.expectations(&begun.memory, &store, emulator).map_err(refused)?;
        let ptx_name = format!("{stem}-{}.ptx", name_of_content(ptx.as_bytes()));
        store.once(&ptx_name, ptx.as_bytes()).map_err(refused)?;
        let document = LaunchFile {
            ptx: ptx_name,
            kernel: kernel.to_string(),
            grid: launch.grid.to_vec(),
            block: launch.block.to_vec(),
            // A launch without clusters has a cluster of one CTA; the kernel may require clusters.
            cluster: if launch.cluster == [1; 3] { Vec::new() } else { launch.cluster.to_vec() },
            shared_bytes: launch.shared_bytes,
            programmatic: launch.programmatic,
            sm_count: Some(settings.sm_count),
            ctas_per_sm: Some(settings.ctas_per_sm),
            sources: None,
            recorded: Some(Recorded {
                source: stem,
                instructions: report.counts.instructions,
                multiply_adds: report.counts.multiply_adds,
            }),
            buffers,
            tensor_maps: begun.tensor_maps,
            arguments: begun.arguments,
            expectations,
            redundant: Vec::new(),
            lenient: Vec::new(),
        };
        let text = document.to_toml().map_err(|error| refused(error.to_string()))?;
        let number = self.numbers.entry(kernel.to_string()).or_default();
        *number += 1;
        // Tests run concurrently, each with a separate device.
        let hash = name_of_content(text.as_bytes());
        store
            .once(&format!("{kernel}-{number}-{}.toml", &hash[..6]), text.as_bytes())
            .map_err(refused)
    }

    /// Expectations for the announced outputs; without announced outputs, for all written memory,
    /// bit for bit.
    fn expectations(
        &self,
        memory: &BTreeMap<u64, Vec<u8>>,
        store: &Store<'_>,
        emulator: &Emulator,
    ) -> Result<Vec<Expectation>, String> {
        let written = emulator.written_before();
        let mut expectations = Vec::new();
        for (index, output) in self.outputs.iter().enumerate() {
            let bytes = output.bytes();
            let range = output.pointer.0..output.pointer.0 + bytes as u64;
            let touched = |part: &Range<u64>| part.start < range.end && range.start < part.end;
            let holds = |(at, held): &(&u64, &Vec<u8>)| {
                **at <= range.start && range.end <= **at + held.len() as u64
            };
            let Some((at, _)) = memory.iter().find(holds) else { continue };
            if bytes == 0 || !written.iter().any(touched) {
                continue;
            }
            let after = emulator.read(range.start, bytes).map_err(|error| error.to_string())?;
            let (dtype, is_float) = data_type(output.dtype);
            expectations.push(Expectation {
                buffer: name_of(*at),
                offset: range.start - at,
                name: Some(format!("output {index}")),
                file: store.bytes(after)?,
                dtype: Some(dtype),
                tolerance: Tolerance::Bits,
                tolerance_other_results: Some(match is_float {
                    true => Tolerance::Within(OTHER_RESULTS),
                    false => Tolerance::Any,
                }),
            });
        }
        if !expectations.is_empty() {
            return Ok(expectations);
        }
        for part in written {
            let holds = |(at, held): &(&u64, &Vec<u8>)| {
                **at <= part.start && part.end <= **at + held.len() as u64
            };
            let Some((at, _)) = memory.iter().find(holds) else { continue };
            let bytes = (part.end - part.start) as usize;
            let after = emulator.read(part.start, bytes).map_err(|error| error.to_string())?;
            expectations.push(Expectation {
                buffer: name_of(*at),
                offset: part.start - at,
                file: store.bytes(after)?,
                tolerance_other_results: Some(Tolerance::Any),
                ..Expectation::default()
            });
        }
        Ok(expectations)
    }
}

/// The folder of a kernel's launches.
struct Store<'a> {
    folder: &'a Path,
}

impl Store<'_> {
    /// Writes bytes to a file named by content hash, and returns the name.
    fn bytes(&self, bytes: &[u8]) -> Result<String, String> {
        let name = format!("{}.bin", name_of_content(bytes));
        self.once(&name, bytes)?;
        Ok(name)
    }

    /// Writes a file unless it exists; another test may be writing the same file.
    fn once(&self, name: &str, bytes: &[u8]) -> Result<(), String> {
        let path = self.folder.join(name);
        if path.exists() {
            return Ok(());
        }
        let thread = format!("{:?}", std::thread::current().id());
        let number: String = thread.chars().filter(char::is_ascii_digit).collect();
        let partial = path.with_extension(format!("partial-{}-{number}", std::process::id()));
        fs::create_dir_all(self.folder)
            .and_then(|()| fs::write(&partial, bytes))
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(|error| format!("{}: {error}", path.display()))
    }
}

fn name_of(at: u64) -> String {
    format!("memory_{at:x}")
}

/// A content hash, so that equal bytes are stored once.
fn name_of_content(bytes: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    let first = hasher.finish();
    bytes.len().hash(&mut hasher);
    format!("{first:016x}{:016x}", hasher.finish())
}

/// The parts of ranges that are within an allocation.
fn parts(ranges: &[Range<u64>], at: u64, bytes: u64) -> Vec<OrderedBefore> {
    ranges
        .iter()
        .map(|range| range.start.max(at)..range.end.min(at + bytes))
        .filter(|range| range.start < range.end)
        .map(|range| OrderedBefore { offset: range.start - at, bytes: range.end - range.start })
        .collect()
}

/// A key of a launch without data and addresses.
fn shape_of(
    kernel: &str,
    launch: &Launch,
    arguments: &[ArgumentField],
    tensor_maps: &[MapField],
) -> String {
    let arguments = arguments.iter().map(|argument| ArgumentField {
        // Kernels may branch on the alignment of addresses.
        offset: argument.offset.map(|offset| offset % 16),
        buffer: argument.buffer.as_ref().map(|_| String::new()),
        ..argument.clone()
    });
    let maps =
        tensor_maps.iter().map(|map| MapField { buffer: String::new(), offset: 0, ..map.clone() });
    format!(
        "{kernel} {:?} {:?} {:?} {} {:?} {:?}",
        launch.grid,
        launch.block,
        launch.cluster,
        launch.shared_bytes,
        arguments.collect::<Vec<_>>(),
        maps.collect::<Vec<_>>()
    )
}

/// The allocation that contains an address, and the offset in the allocation.
fn place(address: u64, allocations: &BTreeMap<u64, usize>) -> Option<(String, u64)> {
    let (at, bytes) = allocations.range(..=address).next_back()?;
    (address - at < *bytes as u64).then(|| (name_of(*at), address - at))
}

fn argument_field(
    argument: &Argument,
    allocations: &BTreeMap<u64, usize>,
    maps: &mut Vec<MapField>,
) -> ArgumentField {
    let none = ArgumentField::default();
    match argument {
        Argument::Pointer(pointer) => match place(pointer.0, allocations) {
            Some((buffer, offset)) => {
                ArgumentField { buffer: Some(buffer), offset: Some(offset), ..none }
            }
            None => ArgumentField { u64: Some(pointer.0), ..none },
        },
        Argument::I32(value) => ArgumentField { i32: Some(*value), ..none },
        Argument::U32(value) => ArgumentField { u32: Some(*value), ..none },
        Argument::I64(value) => ArgumentField { i64: Some(*value), ..none },
        Argument::U64(value) => ArgumentField { hex: Some(hex(&value.to_le_bytes())), ..none },
        Argument::F32(value) => ArgumentField { f32: Some(*value), ..none },
        Argument::TensorMap(map) => match map_field(map, allocations, maps.len()) {
            Some(field) => {
                let name = Some(field.name.clone());
                maps.push(field);
                ArgumentField { tensor_map: name, ..none }
            }
            None => ArgumentField { hex: Some(hex(&map_bytes(map))), ..none },
        },
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn map_bytes(map: &TensorMap) -> [u8; bulk::TENSOR_MAP_BYTES] {
    let mut bytes = [0; bulk::TENSOR_MAP_BYTES];
    for (target, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(map.0) {
        *target = word.to_le_bytes();
    }
    bytes
}

/// A tensor map for a launch file; `None` if the driver did not create the map.
fn map_field(
    map: &TensorMap,
    allocations: &BTreeMap<u64, usize>,
    index: usize,
) -> Option<MapField> {
    let map = bulk::TensorMap::decode(&map_bytes(map)).ok()?;
    let spec = map.spec();
    let (buffer, offset) = place(spec.global_address, allocations)?;
    Some(MapField {
        name: format!("map_{index}"),
        buffer,
        offset,
        element: spec.element,
        dimensions: spec.global_dimensions.clone(),
        strides: Some(spec.global_strides_bytes.clone()),
        box_dimensions: spec.box_dimensions.clone(),
        element_strides: None,
        swizzle: spec.swizzle,
        fill: Default::default(),
    })
}

/// The element type of an output, and whether another summation order may change its bits.
fn data_type(dtype: DType) -> (DataType, bool) {
    match dtype {
        DType::F32 => (DataType::F32, true),
        DType::Bf16 => (DataType::Bf16, true),
        DType::I32 => (DataType::I32, false),
        DType::U64 => (DataType::U64, false),
        DType::E4m3 => (DataType::E4m3, false),
        DType::E8m0 => (DataType::Ue8m0, false),
        // Bytes, for types without a name in launch files.
        _ => (DataType::U8, false),
    }
}
