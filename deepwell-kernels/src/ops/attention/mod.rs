//! Causal attention with grouped query heads, and its backward.

pub mod cpu;
mod cuda;
mod cuda_backward;
mod cuda_merge;
mod cuda_part;
pub mod oracle;
pub mod oracle_part;
mod part_tokens;
mod sm100_attention;
mod sm100_attention_backward;
mod sm90_attention;
mod sm90_attention_backward;
mod sm90_attention_backward_ordered;
mod sm90_attention_backward_stored;
mod sm90_attention_backward_wide;
mod sm90_attention_narrow_values;
mod sm90_attention_part;
mod sm90_attention_part_backward;
mod sm90_attention_part_backward_stored;
mod stored_scores;
mod tensor_map_launch;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

/// Positions of operands that follow the queries, keys and values.
mod operand {
    pub(super) mod forward {
        /// Input: one logit for each query head, only if the op has sinks.
        pub(crate) const SINKS: usize = 3;
        /// Output: log-sum-exp, `[batch, query_heads, seq]`.
        pub(crate) const LSE: usize = 1;
    }

    pub(super) mod backward {
        /// Input: the forward's log-sum-exp.
        pub(crate) const LSE: usize = 5;
        /// Input, only if the op has sinks.
        pub(crate) const SINKS: usize = 6;
        /// Output, only if the op has sinks.
        pub(crate) const DSINKS: usize = 3;
    }
}

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("attention", cpu::prepare_forward).scratch(cpu::forward_workspace).tiered(),
        CpuKernel::new("attention_backward", cpu::prepare_backward)
            .scratch(cpu::backward_workspace)
            .tiered(),
        CpuKernel::new("attention_part", cpu::prepare_forward)
            .scratch(cpu::forward_workspace)
            .tiered(),
        CpuKernel::new("attention_part_backward", cpu::prepare_backward)
            .scratch(cpu::backward_workspace)
            .tiered(),
        CpuKernel::new("merge_attention", cpu::prepare_merge),
    ],
    cuda: &[
        cuda::SPECS,
        cuda_backward::SPECS,
        cuda_part::SPECS,
        cuda_merge::SPECS,
        sm100_attention::SPECS,
        sm100_attention_backward::SPECS,
        sm90_attention::SPECS,
        sm90_attention_backward::SPECS,
        sm90_attention_backward_ordered::SPECS,
        sm90_attention_backward_stored::SPECS,
        sm90_attention_backward_wide::SPECS,
        sm90_attention_narrow_values::SPECS,
        sm90_attention_part::SPECS,
        sm90_attention_part_backward::SPECS,
        sm90_attention_part_backward_stored::SPECS,
    ],
};
