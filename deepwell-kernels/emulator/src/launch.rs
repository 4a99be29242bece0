//! Launches: settings, arguments and results.
//!
//! An [`Emulator`] owns device memory and loaded modules; [`Emulator::launch`] runs a kernel to
//! completion. Launches run one after another, as in one stream.

use std::collections::BTreeMap;
mod report;

use std::ops::Range;
use std::sync::Arc;

pub use self::report::{BytesMoved, Counts, Report, Unwritten, Waited, WaitingWarp};
use crate::decode::{self, DecodeError, Program};
use crate::engine::{self, Random, SM_REGISTERS, Shape, World};
use crate::error::EmulatorError;
use crate::hazard::{Direction, Rules};
use crate::memory::{GlobalMemory, SHARED_BYTES_LIMIT};
use crate::numerics::ResultMode;
use crate::observe::Observer;
use crate::ptx::{self, Module};
use crate::tcgen05::LaneBits;
use crate::trace::Trace;

/// When asynchronous operations complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Completion {
    /// Immediately, when issued.
    #[default]
    Eager,
    /// At random moments. The same random numbers choose the warp that runs next.
    Lazy {
        /// Seed of the random sequence.
        seed: u64,
    },
    /// As late as possible: only when no warp can continue, and then only an operation that a warp
    /// waits for.
    Demand,
    /// MMAs immediately, copies as late as possible: an MMA that does not wait for its copy reads
    /// poison.
    LateCopies,
}

impl Completion {
    /// Whether MMAs complete when they are issued.
    pub(crate) fn runs_mmas_at_issue(self) -> bool {
        matches!(self, Completion::Eager | Completion::LateCopies)
    }
}

/// Settings of an emulator.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// When asynchronous operations complete.
    pub completion: Completion,
    /// Summation order and rounding of MMAs, which the ISA leaves open.
    pub results: ResultMode,
    /// Track which thread may see which bytes, and report hazards.
    pub tracker: bool,
    /// Rules of the tracker.
    pub rules: Rules,
    /// Whether an address of `tcgen05.ld` and `.st` must name the lanes of the executing warp, as
    /// the ISA requires. Hardware is said to ignore these bits, and some kernels give all warps one
    /// address.
    pub lane_bits: LaneBits,
    /// Number of SMs.
    pub sm_count: u32,
    /// Most CTAs that an SM runs at a time; fewer if their threads or their shared memory do not
    /// fit.
    pub ctas_per_sm: u32,
    /// Most instructions of a launch, over all warps. A longer launch is aborted.
    pub step_limit: u64,
    /// End a launch at its first hazard and report only the hazards found so far. Results are
    /// incomplete.
    pub stop_at_hazard: bool,
    /// Most instructions that the trace keeps; 0 disables the trace.
    pub trace_limit: usize,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            completion: Completion::Eager,
            results: ResultMode::Hardware,
            tracker: true,
            rules: Rules::default(),
            lane_bits: LaneBits::Checked,
            sm_count: 4,
            ctas_per_sm: 2,
            step_limit: 20_000_000_000,
            stop_at_hazard: false,
            trace_limit: 0,
        }
    }
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchSpec {
    /// Name of the kernel.
    pub kernel: String,
    /// CTAs along each axis.
    pub grid: [u32; 3],
    /// Threads of a CTA along each axis.
    pub block: [u32; 3],
    /// CTAs of a cluster along each axis; `[1, 1, 1]` for no cluster, or for the kernel's own.
    pub cluster: [u32; 3],
    /// Dynamic shared memory of a CTA, in bytes.
    pub shared_bytes: u32,
    /// The parameters, laid out as in [`Program::parameters`] of [`Emulator::program`].
    /// [`Arguments`] builds these bytes.
    pub arguments: Vec<u8>,
    /// The launch may begin before the previous launch has ended (programmatic dependent launch).
    pub programmatic: bool,
}

/// Builds the bytes of a launch's parameters.
///
/// ```
/// use deepwell_emulator::launch::Arguments;
///
/// let bytes = Arguments::new().u64(0x1000).u32(7).u64(1).bytes();
/// assert_eq!(bytes.len(), 24);
/// assert_eq!(bytes[8], 7);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Arguments(Vec<u8>);

impl Arguments {
    /// No parameters.
    pub fn new() -> Arguments {
        Arguments::default()
    }

    /// Appends a parameter with an alignment equal to the size.
    fn scalar(mut self, bytes: &[u8]) -> Arguments {
        self.0.resize(self.0.len().next_multiple_of(bytes.len()), 0);
        self.0.extend_from_slice(bytes);
        self
    }

    /// Appends a 64-bit address or integer.
    pub fn u64(self, value: u64) -> Arguments {
        self.scalar(&value.to_le_bytes())
    }

    /// Appends a 32-bit integer.
    pub fn u32(self, value: u32) -> Arguments {
        self.scalar(&value.to_le_bytes())
    }

    /// Appends a single-precision float.
    pub fn f32(self, value: f32) -> Arguments {
        self.scalar(&value.to_le_bytes())
    }

    /// Appends a structure with the given alignment, such as a tensor map.
    pub fn structure(mut self, bytes: &[u8], alignment: usize) -> Arguments {
        self.0.resize(self.0.len().next_multiple_of(alignment), 0);
        self.0.extend_from_slice(bytes);
        self
    }

    /// Returns the parameter bytes.
    pub fn bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Handle of a loaded module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModuleId(usize);

#[derive(Clone, Debug)]
struct Loaded {
    module: Arc<Module>,
    /// Addresses of the module's variables.
    variables: BTreeMap<String, u64>,
    programs: BTreeMap<String, Arc<Program>>,
}

/// A device: memory and loaded modules. A clone is another device with the same contents.
#[derive(Clone, Debug)]
pub struct Emulator {
    /// Settings, which may change between launches.
    pub settings: Settings,
    global: GlobalMemory,
    modules: Vec<Loaded>,
    /// Lines of device memory that the last launch wrote.
    written_before: Vec<Range<u64>>,
}

impl Emulator {
    /// Creates a device with empty memory and no modules.
    pub fn new(settings: Settings) -> Emulator {
        Emulator {
            settings,
            global: GlobalMemory::new(),
            modules: Vec::new(),
            written_before: Vec::new(),
        }
    }

    /// Allocates device memory, filled with poison, and returns its address. `name` is for error
    /// messages.
    pub fn allocate(&mut self, bytes: u64, name: &str) -> u64 {
        self.global.allocate(bytes, name)
    }

    /// Allocates device memory at an address that [`Emulator::allocate`] returned, on this or
    /// another device. Pointers inside recorded memory then stay valid.
    ///
    /// # Errors
    /// An address that `allocate` does not return, or that is already in use here.
    pub fn allocate_at(
        &mut self,
        address: u64,
        bytes: u64,
        name: &str,
    ) -> Result<(), EmulatorError> {
        self.global.allocate_at(address, bytes, name).map_err(EmulatorError::Host)
    }

    /// Frees device memory.
    ///
    /// # Errors
    /// `address` is not the start of a live allocation.
    pub fn free(&mut self, address: u64) -> Result<(), EmulatorError> {
        self.global.free(address).map_err(EmulatorError::Host)
    }

    /// Copies bytes to device memory.
    ///
    /// # Errors
    /// Bytes outside of one allocation.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), EmulatorError> {
        let target = self.global.slice_mut(address, bytes.len()).map_err(EmulatorError::Host)?;
        target.copy_from_slice(bytes);
        Ok(())
    }

    /// Returns bytes of device memory.
    ///
    /// # Errors
    /// Bytes outside of a single allocation.
    pub fn read(&self, address: u64, bytes: usize) -> Result<&[u8], EmulatorError> {
        self.global.slice(address, bytes).map_err(EmulatorError::Host)
    }

    /// Returns bytes of device memory for writing in place.
    ///
    /// # Errors
    /// Bytes outside of a single allocation.
    pub fn bytes_mut(&mut self, address: u64, bytes: usize) -> Result<&mut [u8], EmulatorError> {
        self.global.slice_mut(address, bytes).map_err(EmulatorError::Host)
    }

    /// Number of allocated bytes of device memory.
    pub fn bytes_allocated(&self) -> u64 {
        self.global.bytes_allocated()
    }

    /// Parses a module, allocates its variables and decodes all its kernels.
    ///
    /// # Errors
    /// Text that is not PTX, and unknown instruction forms, all of them in one error.
    pub fn load(&mut self, ptx: &str) -> Result<ModuleId, EmulatorError> {
        self.load_those(ptx, |_| true)
    }

    /// [`Emulator::load`] of one kernel. Other kernels are neither decoded nor available.
    ///
    /// # Errors
    /// The errors of [`Emulator::load`], and a module without this kernel.
    pub fn load_kernel(&mut self, ptx: &str, kernel: &str) -> Result<ModuleId, EmulatorError> {
        let id = self.load_those(ptx, |name| name == kernel)?;
        if self.program(id, kernel).is_some() {
            return Ok(id);
        }
        let present = self.module(id).kernels().map(|known| format!("`{}`", known.name));
        let present = present.collect::<Vec<_>>().join(", ");
        Err(DecodeError::NoKernel { name: kernel.to_owned(), present }.into())
    }

    fn load_those(
        &mut self,
        ptx: &str,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<ModuleId, EmulatorError> {
        let module = ptx::parse(ptx)?;
        let loaded = self.load_variables(module, wanted)?;
        self.modules.push(loaded);
        Ok(ModuleId(self.modules.len() - 1))
    }

    fn load_variables(
        &mut self,
        module: Module,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Loaded, EmulatorError> {
        let mut variables = BTreeMap::new();
        for variable in decode::global_variables(&module) {
            let address = self.global.allocate(variable.bytes, &variable.name);
            variables.insert(variable.name, address);
        }
        for (name, image) in decode::global_images(&module, &variables)? {
            if let Some(address) = variables.get(&name) {
                self.write(*address, &image)?;
            }
        }
        let mut programs = BTreeMap::new();
        let mut unknown = Vec::new();
        for kernel in module.kernels().filter(|kernel| wanted(&kernel.name)) {
            match decode::decode(&module, &kernel.name, &variables) {
                Ok(mut program) => {
                    engine::share_rows(&mut program);
                    programs.insert(program.name.clone(), Arc::new(program));
                }
                Err(DecodeError::UnknownForms(forms)) => unknown.extend(forms),
                Err(other) => return Err(other.into()),
            }
        }
        if !unknown.is_empty() {
            return Err(DecodeError::UnknownForms(unknown).into());
        }
        Ok(Loaded { module: Arc::new(module), variables, programs })
    }

    /// Returns the names of a module's kernels.
    pub fn kernels(&self, module: ModuleId) -> impl Iterator<Item = &str> {
        self.modules[module.0].programs.keys().map(String::as_str)
    }

    /// Returns a kernel's program, with its limits and parameter layout.
    pub fn program(&self, module: ModuleId, kernel: &str) -> Option<&Program> {
        self.modules[module.0].programs.get(kernel).map(Arc::as_ref)
    }

    /// Replaces the kernel of the program's name, for example by a mutant of [`crate::mutation`].
    pub fn replace_program(&mut self, module: ModuleId, program: Program) {
        self.modules[module.0].programs.insert(program.name.clone(), Arc::new(program));
    }

    /// Device memory that the last launch wrote, as ranges of 128-byte lines.
    pub fn written_before(&self) -> &[Range<u64>] {
        &self.written_before
    }

    /// Sets the ranges of the last launch, as though it had run on this device. A programmatic
    /// launch may not access these ranges before `griddepcontrol.wait`.
    pub fn set_written_before(&mut self, ranges: Vec<Range<u64>>) {
        self.written_before = ranges;
    }

    /// Returns the parsed text of the module.
    pub fn module(&self, module: ModuleId) -> &Module {
        &self.modules[module.0].module
    }

    /// Returns the address of a `.global` or `.const` variable of a module.
    pub fn variable(&self, module: ModuleId, name: &str) -> Option<u64> {
        self.modules[module.0].variables.get(name).copied()
    }

    /// Returns the number of clusters that are resident on the device at a time, whatever the grid
    /// size. Kernels whose CTAs wait for each other may rely on this number.
    ///
    /// # Errors
    /// A launch that does not fit the kernel or the device.
    pub fn clusters_resident(
        &self,
        module: ModuleId,
        spec: &LaunchSpec,
    ) -> Result<u32, EmulatorError> {
        let program = self.program(module, &spec.kernel).ok_or_else(|| no_kernel(spec))?;
        let shape = shape(program, spec, &self.settings)
            .map_err(|message| EmulatorError::Launch { kernel: spec.kernel.clone(), message })?;
        Ok(shape.clusters_resident(&self.settings))
    }

    /// Runs a kernel to completion.
    ///
    /// # Errors
    /// A launch that does not fit, undefined behavior, a deadlock.
    pub fn launch(&mut self, module: ModuleId, spec: &LaunchSpec) -> Result<Report, EmulatorError> {
        self.launch_observed(module, spec, None)
    }

    /// Runs a kernel to completion and reports events to an observer.
    ///
    /// # Errors
    /// A launch that does not fit, undefined behavior, a deadlock.
    pub fn launch_observed(
        &mut self,
        module: ModuleId,
        spec: &LaunchSpec,
        observer: Option<&mut dyn Observer>,
    ) -> Result<Report, EmulatorError> {
        let refuse =
            |message: String| EmulatorError::Launch { kernel: spec.kernel.clone(), message };
        let loaded = &self.modules[module.0];
        let program = loaded.programs.get(&spec.kernel).cloned().ok_or_else(|| no_kernel(spec))?;
        let shape = shape(&program, spec, &self.settings).map_err(refuse)?;
        let parameters = self.global.allocate(u64::from(program.parameter_bytes), "parameters");
        self.write(parameters, &spec.arguments)?;
        let constants = self.global.allocate(program.constants.len() as u64, "constants");
        self.write(constants, &program.constants)?;
        let shape = Shape { parameters, constants, ..shape };
        // Writes of the host are visible now; those of the previous launch may still be pending.
        let before = std::mem::take(&mut self.written_before);
        self.global.take_written();
        let before = if spec.programmatic { before } else { Vec::new() };
        let result = self.run(&program, shape, &before, observer);
        self.written_before = self.global.take_written();
        self.free(parameters)?;
        self.free(constants)?;
        result
    }

    fn run(
        &mut self,
        program: &Program,
        shape: Shape,
        written_before: &[Range<u64>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Report, EmulatorError> {
        let seed = match self.settings.completion {
            Completion::Lazy { seed } => seed,
            Completion::Eager | Completion::Demand | Completion::LateCopies => 0,
        };
        let watched = if self.settings.tracker { engine::watched(program) } else { Vec::new() };
        let digits = program.target.chars().filter(char::is_ascii_digit).collect::<String>();
        let mut world = World {
            program,
            target: digits.parse().unwrap_or(0),
            global: &mut self.global,
            cluster_count: shape.clusters().iter().map(|count| u64::from(*count)).product(),
            shape,
            settings: &self.settings,
            random: Random::new(seed),
            counts: Counts {
                executed: vec![0; program.steps.len()],
                parities: vec![0; program.steps.len()],
                ..Counts::default()
            },
            next_cluster: 0,
            observer: observer.map(|observer| observer as &mut dyn Observer),
            changes: 0,
            instructions: 0,
            tracker: self
                .settings
                .tracker
                .then(|| engine::tracker_of(program, self.settings.rules)),
            trace: Trace::default(),
            watched: &watched,
            lane: None,
            copying_lane: None,
            operation: None,
            unwritten: Vec::new(),
        };
        if let Some(tracker) = &mut world.tracker {
            for range in written_before {
                tracker.previous_grid(range.clone(), Direction::Write);
            }
        }
        engine::run(&mut world)?;
        let mut counts = std::mem::take(&mut world.counts);
        counts.instructions = world.instructions;
        let unwritten = std::mem::take(&mut world.unwritten)
            .into_iter()
            .map(|(pc, what)| {
                let step = program.steps.get(pc as usize);
                Unwritten {
                    ptx_line: step.map_or(0, |step| step.ptx_line),
                    source: step.and_then(|step| step.source),
                    what,
                }
            })
            .collect();
        let hazards =
            world.tracker.as_ref().map(|tracker| tracker.hazards().to_vec()).unwrap_or_default();
        let warnings_fail = self.settings.rules.warnings_fail;
        Ok(Report {
            warnings_fail,
            hazards,
            unwritten,
            counts,
            trace: std::mem::take(&mut world.trace),
        })
    }
}

fn no_kernel(spec: &LaunchSpec) -> EmulatorError {
    EmulatorError::Launch {
        kernel: spec.kernel.clone(),
        message: "the module has no kernel of this name".to_owned(),
    }
}

/// Checks a launch against the kernel and the device.
fn shape(program: &Program, spec: &LaunchSpec, settings: &Settings) -> Result<Shape, String> {
    let threads: u64 = spec.block.iter().map(|axis| u64::from(*axis)).product();
    if threads == 0 || threads > 1024 || spec.block[2] > 64 {
        return Err(format!(
            "a CTA of {:?} threads: expected 1 to 1024 in all, 64 at most along z",
            spec.block
        ));
    }
    if spec.grid.contains(&0) {
        return Err(format!("a grid of {:?} CTAs: every axis must have one", spec.grid));
    }
    if let Some(required) = program.required_threads
        && required != spec.block
    {
        return Err(format!("CTAs of {:?} threads, `.reqntid` says {required:?}", spec.block));
    }
    if let Some(limit) = program.max_threads {
        let limit: u64 = limit.iter().map(|axis| u64::from((*axis).max(1))).product();
        if threads > limit {
            return Err(format!("a CTA of {threads} threads, `.maxntid` allows {limit}"));
        }
    }
    let asked = spec.cluster != [1, 1, 1];
    let cluster = match program.required_cluster {
        Some(required) if asked && required != spec.cluster => {
            return Err(format!(
                "clusters of {:?} CTAs, `.reqnctapercluster` says {required:?}",
                spec.cluster
            ));
        }
        Some(required) => required,
        None => spec.cluster,
    };
    if program.explicit_cluster && program.required_cluster.is_none() && !asked {
        return Err("the kernel is `.explicitcluster`: the launch must name a cluster".to_owned());
    }
    let ctas: u64 = cluster.iter().map(|axis| u64::from(*axis)).product();
    if ctas == 0 || ctas > 16 {
        return Err(format!("a cluster of {cluster:?} CTAs: expected 1 to 16 in all"));
    }
    if (0..3).any(|axis| !spec.grid[axis].is_multiple_of(cluster[axis])) {
        return Err(format!(
            "a grid of {:?} CTAs is no multiple of clusters of {cluster:?}",
            spec.grid
        ));
    }
    let shared_bytes = u64::from(program.shared_static_bytes) + u64::from(spec.shared_bytes);
    if shared_bytes > u64::from(SHARED_BYTES_LIMIT) {
        return Err(format!(
            "{shared_bytes} bytes of shared memory, a CTA may have {SHARED_BYTES_LIMIT}"
        ));
    }
    if spec.arguments.len() as u64 != u64::from(program.parameter_bytes) {
        return Err(format!(
            "{} bytes of arguments, the kernel takes {}",
            spec.arguments.len(),
            program.parameter_bytes
        ));
    }
    if settings.sm_count == 0 {
        return Err("a machine without SMs".to_owned());
    }
    let launch_registers = engine::launch_registers(program);
    if let Some(registers) = launch_registers {
        let of_cta = registers * (threads as u32).next_multiple_of(32);
        if of_cta > SM_REGISTERS {
            return Err(format!(
                "{threads} threads of {registers} registers are {of_cta}: an SM has {SM_REGISTERS}"
            ));
        }
    }
    Ok(Shape {
        launch_registers,
        grid: spec.grid,
        block: spec.block,
        cluster,
        explicit_cluster: asked || program.required_cluster.is_some(),
        shared_dynamic_bytes: spec.shared_bytes,
        shared_bytes: shared_bytes as u32,
        parameters: 0,
        constants: 0,
    })
}
