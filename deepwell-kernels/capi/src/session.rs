//! The device of all calls, and execution of one call on the caller's memory.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use deepwell_ir::{Accumulate, DType, Instance, KernelCatalog, Op, Target};
use deepwell_kernels::{Backend, CpuBackend, CpuCatalog, SingleCall, cpu_target};

use crate::status::{DwStatus, Failure, guard};

/// Alignment of every pointer, because kernels copy whole lines.
const ALIGNMENT_BYTES: usize = 64;

/// An operand in the caller's memory.
pub(crate) struct Memory {
    name: &'static str,
    address: *mut c_void,
    dtype: DType,
    shape: Vec<usize>,
}

impl Memory {
    /// An operand that is read.
    pub(crate) fn input(
        name: &'static str,
        address: *const c_void,
        dtype: DType,
        shape: &[usize],
    ) -> Memory {
        Memory { name, address: address.cast_mut(), dtype, shape: shape.to_vec() }
    }

    /// An operand that is written.
    pub(crate) fn output(
        name: &'static str,
        address: *mut c_void,
        dtype: DType,
        shape: &[usize],
    ) -> Memory {
        Memory { name, address, dtype, shape: shape.to_vec() }
    }

    /// An output without a destination: its memory is allocated in the scratch.
    pub(crate) fn scratch(name: &'static str, dtype: DType, shape: &[usize]) -> Memory {
        Memory { name, address: std::ptr::null_mut(), dtype, shape: shape.to_vec() }
    }

    fn check(&self) -> Result<(), Failure> {
        if !self.address.addr().is_multiple_of(ALIGNMENT_BYTES) {
            return Err(Failure::InvalidArgument(format!(
                "`{}`: expected an address that is a multiple of {ALIGNMENT_BYTES} bytes, got \
                 {:p}",
                self.name, self.address
            )));
        }
        Ok(())
    }
}

/// Returns an error if a pointer is null.
pub(crate) fn not_null(operands: &[(&str, *const c_void)]) -> Result<(), Failure> {
    match operands.iter().find(|(_, address)| address.is_null()) {
        None => Ok(()),
        Some((name, _)) => Err(Failure::InvalidArgument(format!(
            "`{name}`: expected memory of the device, got a null pointer"
        ))),
    }
}

/// Converts a size that C passes as an `int`.
pub(crate) fn size(name: &str, value: i32) -> Result<usize, Failure> {
    usize::try_from(value).ok().filter(|&size| size > 0).ok_or_else(|| {
        Failure::InvalidArgument(format!("`{name}`: expected a size of at least 1, got {value}"))
    })
}

/// An op with the caller's operands.
pub(crate) struct Request {
    pub(crate) op: Op,
    pub(crate) inputs: Vec<Memory>,
    pub(crate) outputs: Vec<Memory>,
    pub(crate) batch: usize,
    pub(crate) seq: usize,
    /// Whether the result is added to the output.
    pub(crate) accumulate: bool,
}

impl Request {
    pub(crate) fn new(op: impl Into<Op>, inputs: Vec<Memory>, outputs: Vec<Memory>) -> Request {
        Request { op: op.into(), inputs, outputs, batch: 1, seq: 1, accumulate: false }
    }

    fn call(&self) -> SingleCall {
        let types = |memory: &[Memory]| -> Vec<(DType, Vec<usize>)> {
            memory.iter().map(|operand| (operand.dtype, operand.shape.clone())).collect()
        };
        let mut call =
            SingleCall::new(self.op.clone(), &types(&self.inputs), &types(&self.outputs));
        (call.batch, call.seq) = (self.batch, self.seq);
        if self.accumulate {
            call.accumulate = Accumulate::Always;
            call.access[self.inputs.len()..].fill(deepwell_ir::Access::Update);
        }
        call
    }
}

/// An open device.
#[allow(clippy::large_enum_variant)] // there is one
enum Session {
    Host {
        backend: CpuBackend,
        target: Target,
    },
    #[cfg(feature = "cuda")]
    Cuda(cuda::CudaSession),
}

impl Session {
    fn open(device: &str) -> Result<Session, Failure> {
        if device == "cpu" {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            return Ok(Session::Host { backend: CpuBackend::new(), target: cpu_target(threads) });
        }
        let ordinal = match device.strip_prefix("cuda") {
            Some("") => Some(0),
            Some(rest) => rest.strip_prefix(':').and_then(|ordinal| ordinal.parse::<usize>().ok()),
            None => None,
        };
        let Some(ordinal) = ordinal else {
            return Err(Failure::InvalidArgument(format!(
                "expected `cpu`, `cuda` or `cuda:N` as device, got `{device}`"
            )));
        };
        #[cfg(feature = "cuda")]
        return Ok(Session::Cuda(cuda::CudaSession::open(ordinal)?));
        #[cfg(not(feature = "cuda"))]
        Err(Failure::NoDevice(format!(
            "device cuda:{ordinal}: this library was built without the feature `cuda`"
        )))
    }

    fn run(&mut self, request: &Request) -> Result<(), Failure> {
        for operand in request.inputs.iter().chain(&request.outputs) {
            operand.check()?;
        }
        match self {
            Session::Host { backend, target } => run_on_host(backend, target, request),
            #[cfg(feature = "cuda")]
            Session::Cuda(session) => session.run(request),
        }
    }
}

/// Runs a call on host memory, through the backend's own arena.
fn run_on_host(
    backend: &mut CpuBackend,
    target: &Target,
    request: &Request,
) -> Result<(), Failure> {
    let call = request.call();
    let choice = CpuCatalog.select(&call.request(), target)?.choice;
    let program = call.program(choice, target.clone(), 1);
    backend.allocate(program.arena.bytes)?;
    let outputs_from = request.inputs.len();
    let read = if request.accumulate { outputs_from + request.outputs.len() } else { outputs_from };
    let at = |index: usize| program.values[index].range;
    for (index, operand) in request.inputs.iter().chain(&request.outputs).enumerate().take(read) {
        let range = at(index);
        // SAFETY: the caller provides memory of the operand's size at this address.
        let bytes =
            unsafe { std::slice::from_raw_parts(operand.address.cast::<u8>(), range.bytes) };
        backend.write(range, bytes)?;
    }
    let prepared = backend.prepare(&program, &program.calls[0], Instance::ONLY)?;
    backend.enqueue(prepared)?;
    backend.synchronize()?;
    for (index, operand) in request.outputs.iter().enumerate() {
        let range = at(outputs_from + index);
        if operand.address.is_null() {
            continue;
        }
        // SAFETY: as above, and no other code uses the memory during the call.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(operand.address.cast::<u8>(), range.bytes) };
        backend.read(range, bytes)?;
    }
    Ok(backend.forget_prepared()?)
}

#[cfg(feature = "cuda")]
mod cuda {
    //! Calls on GPU memory that the caller has allocated.

    use deepwell_ir::{KernelCatalog, Target};
    use deepwell_kernels::cuda::{
        Architecture, CUBLASLT, CublasLt, CudaBackend, CudaCatalog, CudarcDriver, DevicePtr,
        Driver, KernelImages, cuda_target,
    };
    use deepwell_kernels::{Backend, KernelError};

    use super::{ALIGNMENT_BYTES, Request};
    use crate::status::Failure;

    pub(super) struct CudaSession {
        backend: CudaBackend,
        target: Target,
        /// Scratch for calls and for outputs without a destination.
        scratch: Option<(DevicePtr, usize)>,
    }

    impl CudaSession {
        pub(super) fn open(ordinal: usize) -> Result<CudaSession, Failure> {
            let none = |what: String| Failure::NoDevice(format!("device cuda:{ordinal}: {what}"));
            let driver = CudarcDriver::open(ordinal).map_err(|error| none(error.to_string()))?;
            let properties = driver.properties().clone();
            let architecture = Architecture::of_capability(properties.capability)
                .ok_or_else(|| none(format!("no kernels for {properties:?}")))?;
            let blas = CublasLt::open(&driver).ok();
            let libraries: &[&str] = if blas.is_some() { &[CUBLASLT] } else { &[] };
            let blas = blas.map(|blas| Box::new(blas) as _);
            let backend = CudaBackend::new(Box::new(driver), blas, KernelImages::discover())?;
            let target = cuda_target(architecture, properties.sm_count as usize, libraries);
            Ok(CudaSession { backend, target, scratch: None })
        }

        pub(super) fn run(&mut self, request: &Request) -> Result<(), Failure> {
            let call = request.call();
            let choice = CudaCatalog.select(&call.request(), &self.target)?.choice;
            let mut program = call.program(choice, self.target.clone(), 1);
            let operands = || request.inputs.iter().chain(&request.outputs);
            let unasked: usize = program
                .values
                .iter()
                .zip(operands())
                .filter(|(_, operand)| operand.address.is_null())
                .map(|(value, _)| value.range.bytes.next_multiple_of(ALIGNMENT_BYTES))
                .sum();
            let mut free = self.reserve(unasked + program.calls[0].workspace.bytes)?;
            for (value, operand) in program.values.iter_mut().zip(operands()) {
                value.range.offset = match operand.address.addr() {
                    0 => {
                        let place = free;
                        free += value.range.bytes.next_multiple_of(ALIGNMENT_BYTES);
                        place
                    }
                    address => address,
                };
            }
            program.calls[0].workspace.offset = free;
            self.backend.driver().synchronize_device().map_err(KernelError::from)?;
            // SAFETY: the caller of the exported function provides addresses of this device with as
            // many bytes as the operands, and does not use them during the call; all other memory
            // is in the scratch.
            let prepared =
                unsafe { self.backend.prepare_at_addresses(&program, &program.calls[0])? };
            self.backend.enqueue(prepared)?;
            self.backend.synchronize()?;
            Ok(self.backend.forget_prepared()?)
        }

        /// Returns the start of a scratch buffer of at least `bytes` bytes.
        fn reserve(&mut self, bytes: usize) -> Result<usize, Failure> {
            if self.scratch.is_none_or(|(_, size)| size < bytes) {
                self.backend.synchronize()?;
                let driver = self.backend.driver();
                if let Some((old, _)) = self.scratch.take() {
                    driver.free(old).map_err(KernelError::from)?;
                }
                let bytes = bytes.next_power_of_two().max(1 << 20);
                let place = driver.allocate(bytes).map_err(KernelError::from)?;
                self.scratch = Some((place, bytes));
            }
            Ok(self.scratch.map_or(0, |(place, _)| place.0 as usize))
        }
    }
}

static SESSION: Mutex<Option<Session>> = Mutex::new(None);

/// Runs a request on the chosen device, by default `cuda:0`.
pub(crate) fn run(request: &Request) -> Result<(), Failure> {
    let mut session = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    if session.is_none() {
        *session = Some(Session::open("cuda:0")?);
    }
    match session.as_mut() {
        Some(session) => session.run(request),
        None => Err(Failure::NoDevice("no device is open".to_string())),
    }
}

/// Sets the device of this process's calls: `cuda` or `cuda:N` (pointers are addresses in the
/// memory of that GPU's primary context, which PyTorch and the CUDA runtime use), or `cpu`
/// (pointers are addresses of host memory). The default is `cuda:0`.
///
/// # Safety
/// `device` is a string that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_set_device(device: *const c_char) -> DwStatus {
    guard(|| {
        not_null(&[("device", device.cast())])?;
        // SAFETY: guaranteed by the caller.
        let name = unsafe { CStr::from_ptr(device) }.to_string_lossy();
        let opened = Session::open(&name)?;
        *SESSION.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        Ok(())
    })
}
