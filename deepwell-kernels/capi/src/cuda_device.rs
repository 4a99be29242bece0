//! A GPU whose memory and streams belong to the caller.
//!
//! [`CudaDevice::warm_up`] prepares a call at addresses that nothing reads, which loads modules and
//! constants, and [`CudaDevice::template`] finds out where the addresses are in its steps. A run
//! fills in the caller's addresses. It neither allocates device memory nor synchronizes, so a
//! caller may capture it.

use std::collections::HashMap;

use deepwell_ir::{Instance, Program, Target};
use deepwell_kernels::KernelError;
use deepwell_kernels::cuda::{
    ArenaAddress, CallView, Constants, Device as Launcher, DevicePtr, Driver, KernelImages, Module,
    Step, Stream, cuda_kernels,
};

use crate::status::Failure;
use crate::template::{Template, moved};

/// Alignment of the parts of a workspace.
const ALIGNMENT_BYTES: usize = 256;
/// Address of the first operand while a call warms up. No kernel runs on it.
const WARM_UP_ADDRESS: usize = 1 << 32;

/// A driver with the kernels that plans have loaded.
pub(crate) struct CudaDevice {
    images: KernelImages,
    modules: HashMap<&'static str, Module>,
    constants: Constants,
    /// Streams of the caller.
    streams: HashMap<u64, Stream>,
    target: Target,
    driver: Box<dyn Driver>,
}

/// Bytes of a plan's workspace: the kernel's own, then arrival counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Workspace {
    pub(crate) kernel_bytes: usize,
    pub(crate) counters: usize,
}

impl Workspace {
    fn counters_offset(self) -> usize {
        self.kernel_bytes.next_multiple_of(ALIGNMENT_BYTES)
    }

    pub(crate) fn bytes(self) -> usize {
        match self.counters {
            0 => self.kernel_bytes,
            counters => self.counters_offset() + counters * size_of::<u32>(),
        }
    }
}

impl CudaDevice {
    #[cfg(feature = "cuda")]
    pub(crate) fn open(ordinal: usize) -> Result<CudaDevice, Failure> {
        use deepwell_kernels::cuda::{Architecture, CudarcDriver, cuda_target};

        let none = |what: String| Failure::NoDevice(format!("device cuda:{ordinal}: {what}"));
        let driver = CudarcDriver::open(ordinal).map_err(|error| none(error.to_string()))?;
        let properties = driver.properties().clone();
        let architecture = Architecture::of_capability(properties.capability)
            .ok_or_else(|| none(format!("no kernels for {properties:?}")))?;
        // Without the vendor's library: its workspace and plans are not the caller's, and the
        // frameworks that call this interface have it themselves.
        let target = cuda_target(architecture, properties.sm_count as usize, &[]);
        Ok(CudaDevice::new(Box::new(driver), KernelImages::discover(), target))
    }

    #[cfg(not(feature = "cuda"))]
    pub(crate) fn open(ordinal: usize) -> Result<CudaDevice, Failure> {
        Err(Failure::NoDevice(format!(
            "device cuda:{ordinal}: this library was built without the feature `cuda`"
        )))
    }

    #[cfg_attr(not(any(test, feature = "cuda", feature = "emulated")), allow(dead_code))]
    pub(crate) fn new(driver: Box<dyn Driver>, images: KernelImages, target: Target) -> CudaDevice {
        let (modules, constants, streams) = Default::default();
        CudaDevice { images, modules, constants, streams, target, driver }
    }

    pub(crate) fn driver(&mut self) -> &mut dyn Driver {
        self.driver.as_mut()
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// Loads everything that a call needs besides its operands, and returns its workspace.
    pub(crate) fn warm_up(&mut self, program: &Program) -> Result<Workspace, Failure> {
        let mut program = program.clone();
        for value in &mut program.values {
            value.range.offset += WARM_UP_ADDRESS;
        }
        let kernel_bytes = program.calls[0].workspace.bytes;
        program.calls[0].workspace.offset += WARM_UP_ADDRESS;
        let counters_at = WARM_UP_ADDRESS + program.arena.bytes.next_multiple_of(ALIGNMENT_BYTES);
        let (_, counters) = self.prepare(&program, counters_at)?;
        Ok(Workspace { kernel_bytes, counters })
    }

    /// Finds the places of addresses in the steps of a call that was warmed up.
    pub(crate) fn template(
        &mut self,
        program: &Program,
        workspace: Workspace,
    ) -> Result<Option<Template>, Failure> {
        let offsets = program.values.iter().map(|value| value.range.offset);
        let addresses: Vec<usize> = offsets
            .chain([program.arena.bytes.next_multiple_of(ALIGNMENT_BYTES)])
            .map(|offset| WARM_UP_ADDRESS + offset)
            .collect();
        let moved: Vec<usize> =
            addresses.iter().enumerate().map(|(index, &address)| moved(index, address)).collect();
        let first = self.steps(program, &addresses, workspace)?;
        let second = self.steps(program, &moved, workspace)?;
        Ok(Template::new(first, second, &addresses))
    }

    /// Turns a call at the caller's addresses into steps: of its operands, then of the workspace.
    pub(crate) fn steps(
        &mut self,
        program: &Program,
        addresses: &[usize],
        workspace: Workspace,
    ) -> Result<Vec<Step>, Failure> {
        let mut program = program.clone();
        for (value, &address) in program.values.iter_mut().zip(addresses) {
            value.range.offset = address;
        }
        let workspace_at = addresses[program.values.len()];
        program.calls[0].workspace.offset = workspace_at;
        let counters_at = workspace_at + workspace.counters_offset();
        let (mut steps, counters) = self.prepare(&program, counters_at)?;
        if counters > workspace.counters {
            return Err(Failure::Device(KernelError::Run {
                call: program.calls[0].name.clone(),
                what: format!("expected {} arrival counters, got {counters}", workspace.counters),
            }));
        }
        if counters > 0 {
            let target = DevicePtr(counters_at as u64);
            let bytes = counters * size_of::<u32>();
            steps.insert(0, Step::Fill { target, byte: 0, bytes });
        }
        Ok(steps)
    }

    /// Returns the steps of a call, and how many arrival counters they use.
    fn prepare(
        &mut self,
        program: &Program,
        counters_at: usize,
    ) -> Result<(Vec<Step>, usize), Failure> {
        let call = &program.calls[0];
        let spec = cuda_kernels().find(|spec| spec.name == call.choice.kernel);
        let spec = spec.ok_or_else(|| KernelError::UnknownKernel {
            call: call.name.clone(),
            backend: "cuda",
            kernel: call.choice.kernel.clone(),
        })?;
        let view =
            CallView { program, call, instance: Instance::ONLY, arena: ArenaAddress::OF_ADDRESSES };
        self.constants.lend_arrival_counters(DevicePtr(counters_at as u64));
        let mut launcher = Launcher {
            driver: self.driver.as_mut(),
            blas: None,
            comm: None,
            images: &self.images,
            modules: &mut self.modules,
            constants: &mut self.constants,
        };
        let steps = (spec.prepare)(&view, &mut launcher);
        let counters = self.constants.take_arrival_counters();
        Ok((steps?, counters))
    }

    /// Enqueues steps in a stream of the caller.
    pub(crate) fn enqueue(&mut self, steps: &[Step], stream: u64) -> Result<(), Failure> {
        let driver = self.driver.as_mut();
        let stream = match self.streams.get(&stream) {
            Some(&known) => known,
            None => {
                let known = driver.foreign_stream(stream).map_err(KernelError::from)?;
                self.streams.insert(stream, known);
                known
            }
        };
        for step in steps {
            match step {
                Step::Launch(launch) => driver.launch(launch, stream),
                Step::Copy { target, source, bytes } => {
                    driver.copy(*target, *source, *bytes, stream)
                }
                Step::Fill { target, byte, bytes } => driver.fill(*target, *byte, *bytes, stream),
                Step::Matmul(_) | Step::Exchange(_) => {
                    return Err(Failure::InvalidArgument(
                        "expected an op of one GPU without the vendor's library".to_string(),
                    ));
                }
            }
            .map_err(KernelError::from)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
