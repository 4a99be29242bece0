//! Plans: a kernel selected once for sizes and types, run on any memory and stream.

use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use deepwell_ir::Program;

use crate::cuda_device::Workspace;
use crate::device::{self, Device};
use crate::emulated_device;
use crate::request::{Checked, DwRequest};
use crate::session::not_null;
use crate::status::{DwStatus, Failure, guard};
use crate::template::{self, Template};

/// Version of the interface of plans: a library with the same number, or a larger one, serves a
/// caller that was written for this number.
pub const DW_ABI_VERSION: u32 = 3;

/// Alignment of every operand and workspace, because kernels copy whole lines.
const ALIGNMENT_BYTES: usize = 64;

/// A kernel for one op, one device and fixed sizes.
pub struct DwPlan {
    device: Arc<Mutex<Device>>,
    program: Program,
    pub(crate) workspace: Workspace,
    kernel: CString,
    /// `None` if each run prepares the call.
    template: Mutex<Option<Template>>,
}

impl DwPlan {
    pub(crate) fn new(
        device: Arc<Mutex<Device>>,
        call: &deepwell_kernels::SingleCall,
    ) -> Result<DwPlan, Failure> {
        let mut open = device::lock(&device);
        let choice = open.select(call)?.choice;
        let kernel = CString::new(choice.kernel.clone()).unwrap_or_default();
        let program = open.program(call, choice);
        let (workspace, template) = match &mut *open {
            Device::Host(_) => (Workspace { kernel_bytes: 0, counters: 0 }, None),
            Device::Emulated(gpu) => (gpu.warm_up(&program)?, None),
            Device::Cuda(cuda) => {
                let workspace = cuda.warm_up(&program)?;
                (workspace, cuda.template(&program, workspace)?)
            }
        };
        drop(open);
        Ok(DwPlan { device, program, workspace, kernel, template: Mutex::new(template) })
    }

    /// # Safety
    /// As [`dw_plan_run`].
    pub(crate) unsafe fn run(
        &self,
        operands: &[*mut c_void],
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: u64,
    ) -> Result<(), Failure> {
        self.check(operands, workspace, workspace_bytes)?;
        match &mut *device::lock(&self.device) {
            // SAFETY: guaranteed by the caller.
            Device::Host(host) => unsafe { host.run(&self.program, operands) },
            Device::Emulated(gpu) => {
                // SAFETY: guaranteed by the caller.
                unsafe { emulated_device::run(gpu, &self.program, operands, self.workspace) }
            }
            Device::Cuda(cuda) => {
                let mut addresses: Vec<usize> = Vec::with_capacity(operands.len() + 1);
                addresses.extend(operands.iter().map(|operand| operand.expose_provenance()));
                addresses.push(workspace.expose_provenance());
                let mut template = self.template.lock().unwrap_or_else(PoisonError::into_inner);
                let is_aligned = |at: &usize| at.is_multiple_of(template::ALIGNMENT_BYTES);
                if let Some(template) = template.as_mut()
                    && addresses.iter().all(is_aligned)
                {
                    return cuda.enqueue(template.at(&addresses), stream);
                }
                let steps = cuda.steps(&self.program, &addresses, self.workspace)?;
                cuda.enqueue(&steps, stream)
            }
        }
    }

    fn check(
        &self,
        operands: &[*mut c_void],
        workspace: *mut c_void,
        workspace_bytes: usize,
    ) -> Result<(), Failure> {
        let invalid = |message: String| Err(Failure::InvalidArgument(message));
        for (index, operand) in operands.iter().enumerate() {
            let is_empty = self.program.values[index].range.bytes == 0;
            if operand.is_null() && !is_empty {
                return invalid(format!("operand {index}: expected memory, got a null pointer"));
            }
            if !operand.addr().is_multiple_of(ALIGNMENT_BYTES) {
                return invalid(format!(
                    "operand {index}: expected an address that is a multiple of \
                     {ALIGNMENT_BYTES} bytes, got {operand:p}"
                ));
            }
        }
        let needed = self.workspace.bytes();
        if workspace_bytes < needed || (needed > 0 && workspace.is_null()) {
            return invalid(format!(
                "`workspace`: expected {needed} bytes, got {workspace_bytes} at {workspace:p}"
            ));
        }
        if !workspace.addr().is_multiple_of(ALIGNMENT_BYTES) {
            return invalid(format!(
                "`workspace`: expected an address that is a multiple of {ALIGNMENT_BYTES} bytes, \
                 got {workspace:p}"
            ));
        }
        Ok(())
    }
}

/// Version of the library's interface, `DW_ABI_VERSION`.
#[unsafe(no_mangle)]
pub extern "C" fn dw_abi_version() -> u32 {
    DW_ABI_VERSION
}

/// Whether a kernel serves a request: `DW_STATUS_OK`, or `DW_STATUS_UNSUPPORTED` with the reason of
/// every kernel in `dw_last_error`. For a device `cpu` or `cuda:N` of this machine, or for an
/// architecture (`sm90`, `sm100`, `sm103`, `sm120`) that need not be here.
///
/// # Safety
/// `request` is a request whose strings end with a zero byte, with as many operands as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_supported(request: *const DwRequest) -> DwStatus {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let checked = unsafe { Checked::read(request)? };
        device::select(&checked.device, &checked.call).map(|_| ())
    })
}

/// Selects a kernel for a request and loads it. `plan` receives the plan, which belongs to the
/// caller until `dw_plan_destroy`. May allocate device memory and wait for the device.
///
/// # Safety
/// As `dw_supported`; `plan` is memory for one pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_plan_create(
    request: *const DwRequest,
    plan: *mut *mut DwPlan,
) -> DwStatus {
    guard(|| {
        not_null(&[("plan", plan.cast_const().cast())])?;
        // SAFETY: guaranteed by the caller.
        unsafe { *plan = ptr::null_mut() };
        // SAFETY: guaranteed by the caller.
        let checked = unsafe { Checked::read(request)? };
        let made = DwPlan::new(device::device(&checked.device)?, &checked.call)?;
        // SAFETY: guaranteed by the caller.
        unsafe { *plan = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

/// Frees a plan. Work of the plan that is still in a stream is not affected. Null is ignored.
///
/// # Safety
/// `plan` is null or a plan of `dw_plan_create` that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_plan_destroy(plan: *mut DwPlan) {
    if !plan.is_null() {
        // SAFETY: made by `Box::into_raw`, and given back once.
        drop(unsafe { Box::from_raw(plan) });
    }
}

/// Bytes of device memory that a run needs besides the operands, aligned to 64 bytes.
///
/// # Safety
/// `plan` is a plan of `dw_plan_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_plan_workspace_bytes(plan: *const DwPlan) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe { plan.as_ref() }.map_or(0, |plan| plan.workspace.bytes())
}

/// Name of the plan's kernel, `cuda_rms_norm` for example. Valid as long as the plan.
///
/// # Safety
/// `plan` is a plan of `dw_plan_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_plan_kernel(plan: *const DwPlan) -> *const c_char {
    // SAFETY: guaranteed by the caller.
    unsafe { plan.as_ref() }.map_or(ptr::null(), |plan| plan.kernel.as_ptr())
}

/// Floating-point operations of a run, by the op's definition: two per multiply-add of a GEMM, and
/// those of the visible scores alone in attention. Since version 2 of the interface.
///
/// # Safety
/// `plan` is a plan of `dw_plan_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_plan_flops(plan: *const DwPlan) -> u64 {
    // SAFETY: guaranteed by the caller.
    unsafe { plan.as_ref() }.map_or(0, |plan| plan.program.calls[0].cost.flops)
}

/// Runs a plan. On a GPU the work is enqueued in `stream` (a `CUstream`; null is the legacy default
/// stream), without an allocation and without waiting, so the stream may be captured into a CUDA
/// graph. On the CPU the result is complete when the function returns. `operands` has the
/// addresses of inputs, then outputs, each a multiple of 64 bytes; operands do not overlap.
/// `workspace` has at least `dw_plan_workspace_bytes` bytes, with any contents.
///
/// # Safety
/// `plan` is a plan of `dw_plan_create`, and each address is memory of its device with as many
/// bytes as the request says. Until the work has ended, no other work writes this memory or
/// accesses outputs and workspace.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_plan_run(
    plan: *const DwPlan,
    operands: *const *mut c_void,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
) -> DwStatus {
    guard(|| {
        not_null(&[("plan", plan.cast()), ("operands", operands.cast())])?;
        // SAFETY: guaranteed by the caller.
        let (plan, operands) = unsafe {
            let plan = &*plan;
            (plan, std::slice::from_raw_parts(operands, plan.program.values.len()))
        };
        let stream = stream.expose_provenance() as u64;
        // SAFETY: guaranteed by the caller.
        unsafe { plan.run(operands, workspace, workspace_bytes, stream) }
    })
}
