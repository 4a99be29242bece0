//! Devices that plans run on. A device is opened once and stays open until the process ends.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use deepwell_ir::{
    Access, Instance, KernelCatalog, KernelChoice, NoKernel, Program, Selection, Target,
};
use deepwell_kernels::cuda::{Architecture, CudaCatalog, cuda_target};
use deepwell_kernels::{Backend, CpuBackend, CpuCatalog, SingleCall, cpu_target};

use crate::cuda_device::CudaDevice;
use crate::emulated_device;
use crate::status::Failure;

/// SMs of an architecture that is not here.
const SM_COUNT: usize = 132;

/// An open device.
#[allow(clippy::large_enum_variant)] // there are a few
pub(crate) enum Device {
    Host(HostDevice),
    Cuda(CudaDevice),
    Emulated(CudaDevice),
}

impl Device {
    fn open(name: &str) -> Result<Device, Failure> {
        if name == "cpu" {
            return Ok(Device::Host(HostDevice { backend: CpuBackend::new(), target: host() }));
        }
        if let Some(architecture) = name.strip_prefix("emulated:") {
            return Ok(Device::Emulated(emulated_device::open(architecture)?));
        }
        let ordinal = match name.strip_prefix("cuda") {
            Some("") => Some(0),
            Some(rest) => rest.strip_prefix(':').and_then(|ordinal| ordinal.parse().ok()),
            None => None,
        };
        match ordinal {
            Some(ordinal) => Ok(Device::Cuda(CudaDevice::open(ordinal)?)),
            None => Err(Failure::InvalidArgument(format!(
                "expected `cpu`, `cuda`, `cuda:N` or `emulated:ARCHITECTURE` as device, got \
                 `{name}`"
            ))),
        }
    }

    /// Selects the kernel of a call.
    pub(crate) fn select(&self, call: &SingleCall) -> Result<Selection, NoKernel> {
        match self {
            Device::Host(host) => CpuCatalog.select(&call.request(), &host.target),
            Device::Cuda(cuda) | Device::Emulated(cuda) => {
                CudaCatalog.select(&call.request(), cuda.target())
            }
        }
    }

    /// The program of a call.
    pub(crate) fn program(&self, call: &SingleCall, choice: KernelChoice) -> Program {
        match self {
            Device::Host(host) => call.program(choice, host.target.clone(), 1),
            Device::Cuda(cuda) | Device::Emulated(cuda) => {
                call.program(choice, cuda.target().clone(), 1)
            }
        }
    }
}

fn host() -> Target {
    cpu_target(std::thread::available_parallelism().map_or(1, usize::from))
}

static DEVICES: Mutex<Vec<(String, Arc<Mutex<Device>>)>> = Mutex::new(Vec::new());

/// Returns a device by its name, and opens it the first time.
pub(crate) fn device(name: &str) -> Result<Arc<Mutex<Device>>, Failure> {
    let name = if name == "cuda" { "cuda:0" } else { name };
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, device)) = devices.iter().find(|(known, _)| known == name) {
        return Ok(Arc::clone(device));
    }
    let device = Arc::new(Mutex::new(Device::open(name)?));
    devices.push((name.to_string(), Arc::clone(&device)));
    Ok(device)
}

pub(crate) fn lock(device: &Mutex<Device>) -> MutexGuard<'_, Device> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Selects the kernel of a call on an open device, or for an architecture that need not be here.
pub(crate) fn select(name: &str, call: &SingleCall) -> Result<Selection, Failure> {
    match Architecture::of_short_name(name) {
        Some(architecture) => {
            let target = cuda_target(architecture, SM_COUNT, &[]);
            Ok(CudaCatalog.select(&call.request(), &target)?)
        }
        None => Ok(lock(&*device(name)?).select(call)?),
    }
}

/// The CPU. Calls run on copies of the operands in the backend's arena.
pub(crate) struct HostDevice {
    backend: CpuBackend,
    target: Target,
}

impl HostDevice {
    /// Runs a program of one call on memory of the caller.
    ///
    /// # Safety
    /// Each address has as many bytes as the value of the same index, and no other code accesses
    /// the outputs during the call.
    pub(crate) unsafe fn run(
        &mut self,
        program: &Program,
        addresses: &[*mut c_void],
    ) -> Result<(), Failure> {
        let call = &program.calls[0];
        self.backend.allocate(program.arena.bytes)?;
        let operands = || program.values.iter().zip(addresses).zip(&call.operands);
        for ((value, address), operand) in operands() {
            if operand.access != Access::Write {
                let bytes = value.range.bytes;
                // SAFETY: guaranteed by the caller.
                let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), bytes) };
                self.backend.write(value.range, bytes)?;
            }
        }
        let prepared = self.backend.prepare(program, call, Instance::ONLY)?;
        self.backend.enqueue(prepared)?;
        self.backend.synchronize()?;
        for ((value, address), operand) in operands() {
            if operand.access != Access::Read {
                let bytes = value.range.bytes;
                // SAFETY: guaranteed by the caller.
                let bytes = unsafe { std::slice::from_raw_parts_mut(address.cast::<u8>(), bytes) };
                self.backend.read(value.range, bytes)?;
            }
        }
        Ok(self.backend.forget_prepared()?)
    }
}
