//! Which CUDA kernels there are, for the planner.

use deepwell_ir::{
    KernelCatalog, KernelChoice, KernelRequest, NoKernel, Rejected, Selection, Target,
};

use super::kernels::cuda_kernels;
use super::spec::{Architecture, CudaKernelSpec};

/// The library of matrix products as [`Target::libraries`] names it.
pub const CUBLASLT: &str = "cublaslt";

/// The CUDA kernels as a catalog.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaCatalog;

/// A GPU as a target.
pub fn cuda_target(
    architecture: Architecture,
    multiprocessors: usize,
    libraries: &[&str],
) -> Target {
    Target {
        arch: architecture.target_name().to_string(),
        features: Vec::new(),
        libraries: libraries.iter().map(|&library| library.to_string()).collect(),
        workers: multiprocessors,
    }
}

/// What a context, its loaded kernels and the vendor's library hold on an H200 with driver 580
/// before the first allocation of ours, as the driver counts free memory.
const CONTEXT_BYTES: usize = 560 << 20;

impl KernelCatalog for CudaCatalog {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        let op = request.op.name();
        let mut rejected = Vec::new();
        for spec in cuda_kernels().filter(|spec| spec.ops.contains(&op)) {
            match rejection(spec, request, target) {
                Some(reason) => {
                    rejected.push(Rejected { kernel: spec.name.to_string(), reason });
                }
                None => {
                    let choice = KernelChoice {
                        kernel: spec.name.to_string(),
                        tile: None,
                        workspace_bytes: (spec.workspace_bytes)(request, target),
                    };
                    return Ok(Selection { choice, rejected });
                }
            }
        }
        Err(NoKernel { op, arch: target.arch.clone(), rejected })
    }

    fn fixed_overhead_bytes(&self, _target: &Target) -> usize {
        CONTEXT_BYTES + super::prepare::RESERVED_BYTES
    }
}

fn rejection(
    spec: &CudaKernelSpec,
    request: &KernelRequest<'_>,
    target: &Target,
) -> Option<String> {
    let serves = |known: &Architecture| known.target_name() == target.arch;
    if !spec.architectures.iter().any(serves) {
        let known: Vec<_> = spec.architectures.iter().map(|known| known.target_name()).collect();
        return Some(format!("runs on {}, not on {}", known.join(", "), target.arch));
    }
    if let Some(library) = spec.library
        && !target.libraries.iter().any(|known| known == library)
    {
        return Some(format!("needs the library `{library}`"));
    }
    (spec.reject)(request)
}
