//! A driver that emulates a GPU: PTX runs on the CPU.

mod chip;
mod environment;
mod launch;
mod launch_files;
mod record;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use deepwell_emulator::bulk;
use deepwell_emulator::error::EmulatorError;
use deepwell_emulator::launch::{Emulator, ModuleId, Settings};

pub use self::environment::{
    COMPLETION_VARIABLE, CTAS_VARIABLE, RESULTS_VARIABLE, TRACKER_VARIABLE, WARNINGS_VARIABLE,
    emulator_settings,
};
pub use self::launch_files::RECORD_VARIABLE;
pub use self::record::{EmulatedLaunch, EmulatedLaunches, LOG_VARIABLE, LaunchOutcome};

use self::chip::Chip;
use self::launch_files::Recorder;
use self::record::Records;
use super::host_driver::{HostBlas, HostDriver, Machine, State, lock, no_such};
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{
    DeviceProperties, DevicePtr, DriverError, DriverResult, Function, Launch, Module, TensorMap,
    TensorMapElement, TensorMapSpec, TensorMapSwizzle,
};

/// Device memory reported by an emulated device: enough for kernel tests and small models, and
/// allocated on the host.
const MEMORY_BYTES: u64 = 8 << 30;
/// Shared memory per CTA that is reserved for the system.
const SHARED_BYTES_RESERVED: u32 = 1 << 10;

/// A driver that runs our kernels' PTX on the CPU, instruction by instruction.
///
/// Memory, streams and captures are on the host. A launch runs to its end when it is enqueued or
/// when its graph is launched. Errors of a kernel, and data races, fail the launch with the
/// emulator's report. GEMMs of a vendor's library are computed by the host, if requested
/// ([`EmulatedDriver::blas`]).
///
/// Modules are PTX text ([`KernelImages::into_ptx`](super::KernelImages::into_ptx)). The register
/// count of a kernel is unknown, so CTAs per SM are limited by threads, shared memory and
/// [`Settings::ctas_per_sm`] only.
///
/// ```
/// use deepwell_kernels::cuda::emulator::launch::Settings;
/// use deepwell_kernels::cuda::{Architecture, Driver, EmulatedDriver};
///
/// let driver = EmulatedDriver::new(Architecture::Sm90a, Settings::default());
/// assert_eq!(driver.properties().name, "emulated sm_90a");
/// assert_eq!(driver.properties().sm_count, 4);
/// ```
pub type EmulatedDriver = HostDriver<EmulatedMachine>;

impl EmulatedDriver {
    /// Creates a device of an architecture with [`Settings::sm_count`] SMs.
    pub fn new(architecture: Architecture, settings: Settings) -> EmulatedDriver {
        let chip = Chip::of(architecture);
        let properties = DeviceProperties {
            name: format!("emulated {}", architecture.name()),
            capability: chip.capability,
            sm_count: settings.sm_count,
            memory_bytes: MEMORY_BYTES,
            l2_bytes: chip.l2_bytes,
            shared_bytes_per_cta: chip.shared_bytes_per_cta,
            cuda_version: 13_000,
        };
        let emulator = Emulator::new(settings);
        let machine = EmulatedMachine {
            architecture,
            emulator,
            modules: Vec::new(),
            kernels: Vec::new(),
            allocations: 0,
            records: Records::default(),
            live: BTreeMap::new(),
            recorder: Recorder::default(),
        };
        HostDriver::with_machine(properties, machine)
    }

    /// Creates a device with `defaults` overridden by the environment ([`emulator_settings`]). If
    /// [`LOG_VARIABLE`] names a file, launches are logged to the file; if [`RECORD_VARIABLE`] names
    /// a folder, launches are written to the folder as launch files.
    ///
    /// # Errors
    /// An invalid value of a variable.
    pub fn from_environment(
        architecture: Architecture,
        defaults: Settings,
    ) -> DriverResult<EmulatedDriver> {
        let variable = |name: &str| std::env::var(name).ok();
        let driver = EmulatedDriver::new(architecture, emulator_settings(defaults, variable)?);
        if let Some(path) = std::env::var_os(LOG_VARIABLE).filter(|path| !path.is_empty()) {
            driver.log_to(Path::new(&path));
        }
        if let Some(folder) = std::env::var_os(RECORD_VARIABLE).filter(|path| !path.is_empty()) {
            driver.record_to(Path::new(&folder));
        }
        Ok(driver)
    }

    /// Writes every later launch as a launch file of `deepwell-emulate`, with the initial memory
    /// and the expected results: `<folder>/<architecture>/<.cu file>/<kernel>-….toml`. Of launches
    /// that differ only in data, only the first is written.
    pub fn record_to(&self, folder: &Path) {
        let machine = &mut lock(self.shared()).machine;
        machine.recorder.record_to(&folder.join(machine.architecture.name()));
    }

    /// Creates GEMMs in place of a library's. The bits may differ from the library's: each sum is
    /// exact enough and rounded once.
    pub fn blas(&self) -> HostBlas<EmulatedMachine> {
        HostBlas::new(Arc::clone(self.shared()))
    }

    /// Returns a handle to all launches since the first call of this function.
    pub fn launches(&self) -> EmulatedLaunches {
        lock(self.shared()).machine.records.keep()
    }

    /// A switch for the hazard tracker.
    pub fn tracker(&self) -> EmulatedTracker {
        let asked_for = lock(self.shared()).machine.emulator.settings.tracker;
        EmulatedTracker { shared: Arc::clone(self.shared()), asked_for }
    }

    /// Appends a line of JSON, an [`EmulatedLaunch`], to a file for every later launch.
    pub fn log_to(&self, path: &Path) {
        lock(self.shared()).machine.records.log_to(path);
    }
}

/// Turns the hazard tracker of an emulated device on and off: launches take twice as long with
/// tracking.
pub struct EmulatedTracker {
    shared: Arc<Mutex<State<EmulatedMachine>>>,
    asked_for: bool,
}

impl EmulatedTracker {
    /// Enables or disables tracking of later launches; a device created without a tracker never
    /// tracks.
    pub fn set(&self, on: bool) {
        lock(&self.shared).machine.emulator.settings.tracker = on && self.asked_for;
    }
}

/// A kernel of a loaded module.
#[derive(Clone, Debug)]
struct Kernel {
    module: ModuleId,
    name: String,
    /// Index into [`EmulatedMachine::modules`].
    loaded: usize,
}

/// A loaded module and its text, which goes into launch files.
struct Loaded {
    id: ModuleId,
    ptx: String,
}

/// The machine of an [`EmulatedDriver`].
pub struct EmulatedMachine {
    architecture: Architecture,
    emulator: Emulator,
    modules: Vec<Loaded>,
    kernels: Vec<Kernel>,
    /// Number of allocations so far, for their names in reports.
    allocations: usize,
    records: Records,
    /// Addresses and sizes of live allocations.
    live: BTreeMap<u64, usize>,
    recorder: Recorder,
}

impl EmulatedMachine {
    fn kernel(&self, function: Function) -> DriverResult<&Kernel> {
        let kernel = self.kernels.get(function.0 as usize);
        kernel.ok_or_else(|| no_such("function", function.0))
    }
}

fn failed(call: &str) -> impl Fn(EmulatorError) -> DriverError {
    move |error| DriverError::new(call, error)
}

impl Machine for EmulatedMachine {
    fn memory(&self) -> (u64, u64) {
        (MEMORY_BYTES.saturating_sub(self.emulator.bytes_allocated()), MEMORY_BYTES)
    }

    fn allocate(&mut self, bytes: usize) -> DriverResult<DevicePtr> {
        let (free_bytes, _) = self.memory();
        if bytes as u64 > free_bytes {
            let reason = format!("expected at most {free_bytes} bytes, got {bytes}");
            return Err(DriverError {
                out_of_memory: true,
                ..DriverError::new("allocate", reason)
            });
        }
        self.allocations += 1;
        let name = format!("allocation {}", self.allocations);
        let address = self.emulator.allocate(bytes as u64, &name);
        self.live.insert(address, bytes);
        Ok(DevicePtr(address))
    }

    fn free(&mut self, pointer: DevicePtr) -> DriverResult<()> {
        self.emulator.free(pointer.0).map_err(failed("free"))?;
        self.live.remove(&pointer.0);
        Ok(())
    }

    fn check(&self, at: DevicePtr, bytes: usize) -> DriverResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.emulator.read(at.0, bytes).map(|_| ()).map_err(failed("memory"))
    }

    fn read(&mut self, target: &mut [u8], source: DevicePtr) -> DriverResult<()> {
        if target.is_empty() {
            return Ok(());
        }
        let bytes = self.emulator.read(source.0, target.len()).map_err(failed("memory"))?;
        target.copy_from_slice(bytes);
        Ok(())
    }

    fn write(&mut self, target: DevicePtr, source: &[u8]) -> DriverResult<()> {
        if source.is_empty() {
            return Ok(());
        }
        self.emulator.write(target.0, source).map_err(failed("memory"))
    }

    fn fill(&mut self, target: DevicePtr, byte: u8, bytes: usize) -> DriverResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.emulator.bytes_mut(target.0, bytes).map_err(failed("memory"))?.fill(byte);
        Ok(())
    }

    fn copy(&mut self, target: DevicePtr, source: DevicePtr, bytes: usize) -> DriverResult<()> {
        let mut copied = vec![0; bytes];
        self.read(&mut copied, source)?;
        self.write(target, &copied)
    }

    fn load_module(&mut self, image: &[u8]) -> DriverResult<Module> {
        let text = image.split_last().filter(|(last, _)| **last == 0).map(|(_, text)| text);
        let text = text.and_then(|text| std::str::from_utf8(text).ok()).ok_or_else(|| {
            DriverError::new(
                "load_module",
                format!(
                    "expected PTX with a final zero byte, got something else, {} bytes long",
                    image.len()
                ),
            )
        })?;
        let module = self.emulator.load(text).map_err(failed("load_module"))?;
        let target = self.emulator.module(module).target.first();
        if target.is_none_or(|target| **target != *self.architecture.name()) {
            return Err(DriverError::new(
                "load_module",
                format!(
                    "expected PTX for `{}`, got PTX for `{}`",
                    self.architecture.name(),
                    target.map_or("nothing", |target| target)
                ),
            ));
        }
        self.modules.push(Loaded { id: module, ptx: text.to_string() });
        Ok(Module(self.modules.len() as u64 - 1))
    }

    fn function(&mut self, module: Module, name: &str) -> DriverResult<Function> {
        let loaded = self.modules.get(module.0 as usize);
        let loaded = loaded.ok_or_else(|| no_such("module", module.0))?.id;
        if self.emulator.program(loaded, name).is_none() {
            let known: Vec<&str> = self.emulator.kernels(loaded).collect();
            return Err(DriverError::new(
                "function",
                format!("expected one of {}, got `{name}`", known.join(", ")),
            ));
        }
        let kernel = Kernel { module: loaded, name: name.to_string(), loaded: module.0 as usize };
        self.kernels.push(kernel);
        Ok(Function(self.kernels.len() as u64 - 1))
    }

    fn kernel_name(&self, function: Function) -> DriverResult<&str> {
        self.kernel(function).map(|kernel| kernel.name.as_str())
    }

    fn ctas_per_sm(
        &self,
        function: Function,
        threads: u32,
        shared_bytes: u32,
    ) -> DriverResult<u32> {
        let kernel = self.kernel(function)?;
        let program = self.emulator.program(kernel.module, &kernel.name);
        let static_bytes = program.map_or(0, |program| program.shared_static_bytes);
        let shared = shared_bytes.saturating_add(static_bytes + SHARED_BYTES_RESERVED);
        let chip = Chip::of(self.architecture);
        let by_threads = chip.threads_per_sm / threads.next_multiple_of(32).max(32);
        let by_shared = chip.shared_bytes_per_sm / shared;
        Ok(by_threads.min(by_shared).min(self.emulator.settings.ctas_per_sm))
    }

    fn tensor_map(&self, spec: &TensorMapSpec) -> DriverResult<TensorMap> {
        let element = match spec.element {
            TensorMapElement::U8 => bulk::ElementType::U8,
            TensorMapElement::Bf16 => bulk::ElementType::Bf16,
            TensorMapElement::F32 => bulk::ElementType::F32,
        };
        let swizzle = match spec.swizzle {
            TensorMapSwizzle::None => bulk::Swizzle::None,
            TensorMapSwizzle::Bytes32 => bulk::Swizzle::Bytes32,
            TensorMapSwizzle::Bytes64 => bulk::Swizzle::Bytes64,
            TensorMapSwizzle::Bytes128 => bulk::Swizzle::Bytes128,
        };
        let (sizes, strides) = (&spec.sizes, &spec.strides_bytes);
        let map = bulk::TensorMapSpec::new(element, spec.base.0, sizes, strides, &spec.box_sizes);
        let map = bulk::TensorMapSpec { swizzle, ..map };
        let encoded = map
            .check_target(Chip::of(self.architecture).target)
            .and_then(|()| bulk::TensorMap::encode(&map))
            .map_err(|fault| DriverError::new("tensor_map", format!("{fault}: {spec:?}")))?;
        let mut words = [0; 16];
        for (word, bytes) in words.iter_mut().zip(encoded.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        Ok(TensorMap(words))
    }

    fn expect_outputs(&mut self, outputs: &[DeviceTensor]) {
        self.recorder.expect(outputs);
    }

    fn launch(&mut self, launch: &Launch) -> DriverResult<()> {
        let kernel = self.kernel(launch.function)?.clone();
        self.run(&kernel, launch)
    }
}
