//! Vocabulary-parallel embedding, output head and cross-entropy: each rank has some rows of the
//! vocabulary.

pub mod cpu;
mod cuda;
pub mod head;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("vocab_parallel_embedding", cpu::prepare_embedding),
        CpuKernel::new("vocab_parallel_embedding_backward", cpu::prepare_embedding_backward),
        CpuKernel::new("vocab_parallel_sums", head::prepare_sums).scratch(head::workspace).tiered(),
        CpuKernel::new("vocab_parallel_cross_entropy", head::prepare_loss),
        CpuKernel::new("vocab_parallel_cross_entropy_grad", head::prepare_gradients)
            .scratch(head::workspace)
            .tiered(),
    ],
    cuda: &[cuda::SPECS],
};
