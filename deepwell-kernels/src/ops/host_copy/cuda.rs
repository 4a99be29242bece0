//! A copy over the link between the device and its host, by a copy engine.

use deepwell_ir::{KernelRequest, Target};

use crate::KernelError;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_host_copy", &["host_copy"], prepare).predict(predict)];

/// No other kernel serves the op, so the time decides nothing.
fn predict(_: &KernelRequest<'_>, _: &Target) -> f64 {
    0.0
}

fn prepare(call: &CallView<'_>, _: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (from, to) = (call.input(0), call.output(0));
    if from.bytes() != to.bytes() {
        return Err(call.refuse(format!(
            "expected operands of one size, got {} and {} bytes",
            from.bytes(),
            to.bytes()
        )));
    }
    Ok(vec![Step::Copy { target: to.pointer, source: from.pointer, bytes: from.bytes() }])
}
