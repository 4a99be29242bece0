//! Which targets have a kernel for a request: the hint of an error when the chosen target has none.

use deepwell_ir::{KernelRequest, Target};

use super::cpu::serves;
use super::cuda::cuda_kernels;
use crate::runtime::cuda::architecture::Architecture;

/// Architectures other than `target`'s with a kernel, not from a library, that serves the request.
pub(crate) fn others_that_serve(request: &KernelRequest<'_>, target: &Target) -> Vec<String> {
    let core = request.op.leading().rule().name();
    let on_gpu = |architecture: &Architecture| {
        cuda_kernels().any(|spec| {
            spec.ops.contains(&core)
                && spec.library.is_none()
                && spec.architectures.contains(architecture)
                && (spec.epilogue)(request.op.leading()).reject(request.op).is_none()
                && (spec.reject)(request).is_none()
        })
    };
    let gpus = Architecture::ALL.into_iter().filter(on_gpu).map(Architecture::target_name);
    let cpu = serves(request).then_some("cpu");
    cpu.into_iter().chain(gpus).filter(|arch| *arch != target.arch).map(str::to_string).collect()
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{Attention, AttentionHeads, Opaque};
    use deepwell_ir::{DType, KernelCatalog, Op};

    use crate::cuda::{Architecture, CudaCatalog, cuda_target};
    use crate::{CpuCatalog, SingleCall, cpu_target};

    #[test]
    fn errors_name_who_has_a_kernel() {
        let check = |call: &SingleCall, catalog: &dyn KernelCatalog, target, expected: &str| {
            let error = call.select(catalog, &target).unwrap_err().to_string();
            assert!(error.ends_with(expected), "{error}");
        };
        let attention = |head_dim| {
            let heads = AttentionHeads {
                heads: 2,
                kv_heads: 1,
                head_dim,
                scale: 0.1,
                causal: true,
                ..AttentionHeads::default()
            };
            let x = |heads| (DType::Bf16, vec![8, heads * head_dim]);
            let outputs = [x(2), (DType::F32, vec![1, 2, 8])];
            SingleCall::new(Attention { heads }, &[x(2), x(1), x(1)], &outputs)
        };
        let hopper = || cuda_target(Architecture::Sm90a, 132, &[]);
        check(&attention(100), &CudaCatalog, hopper(), "\nhint: there is a kernel on `cpu`");
        let (target, arguments) = ("aten.sort".to_string(), String::new());
        let op = Op::from(Opaque { target, arguments, outputs: Vec::new() });
        let nobody = SingleCall::new(op, &[(DType::Bf16, vec![8])], &[]);
        let nowhere = "captured and counted, not run";
        check(&nobody, &CudaCatalog, hopper(), nowhere);
        check(&nobody, &CpuCatalog, cpu_target(1), nowhere);
        // The CPU catalog, asked about a GPU.
        check(
            &attention(64),
            &CpuCatalog,
            hopper(),
            "\nhint: there is a kernel on `cpu`, `blackwell-sm100`, `blackwell-sm103`, \
             `blackwell-sm120`",
        );
    }
}
