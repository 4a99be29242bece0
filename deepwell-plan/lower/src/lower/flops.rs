//! FLOPs of a program's linear layers.

use deepwell_ir::{Call, Op, Operand, Program};

/// FLOPs of the GEMMs of linear layers in a step. Recomputed calls do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinearFlops {
    /// GEMMs with quantized operands.
    pub quantized: u64,
    /// All GEMMs of the blocks.
    pub blocks: u64,
    /// All GEMMs of the blocks and of the output head.
    pub with_head: u64,
}

impl LinearFlops {
    /// Returns the share of GEMMs with quantized operands, relative to the blocks and to blocks and
    /// output head.
    pub fn quantized_share(&self) -> (f64, f64) {
        let LinearFlops { quantized, blocks, with_head } = *self;
        let share = |total: u64| if total == 0 { 0.0 } else { quantized as f64 / total as f64 };
        (share(blocks), share(with_head))
    }
}

impl std::iter::Sum for LinearFlops {
    fn sum<I: Iterator<Item = LinearFlops>>(all: I) -> LinearFlops {
        all.fold(LinearFlops::default(), |sum, it| LinearFlops {
            quantized: sum.quantized + it.quantized,
            blocks: sum.blocks + it.blocks,
            with_head: sum.with_head + it.with_head,
        })
    }
}

/// Adds up the GEMMs of linear layers of a program.
pub fn linear_flops(program: &Program) -> LinearFlops {
    let mut sums = LinearFlops::default();
    for (call, runs) in program.calls_with_runs().filter(|(call, _)| !call.recomputes) {
        let flops = || gemm_flops(program, call) * runs as u64;
        match call.op.leading() {
            Op::ScaledGemm(_) | Op::ScaledGroupedGemm(_) => {
                let flops = flops();
                sums.quantized += flops;
                sums.blocks += flops;
                sums.with_head += flops;
            }
            // For grouped rows only token-expert pairs count, not alignment padding.
            Op::Linear(_)
            | Op::LinearDgrad(_)
            | Op::LinearWgrad(_)
            | Op::GroupedGemm(_)
            | Op::GroupedGemmDgrad(_)
            | Op::GroupedGemmWgrad(_) => {
                let flops = flops();
                sums.blocks += flops;
                sums.with_head += flops;
            }
            Op::LinearCrossEntropy(_)
            | Op::LinearCrossEntropyGrad(_)
            | Op::VocabParallelSums(_)
            | Op::VocabParallelCrossEntropyGrad(_) => sums.with_head += flops(),
            _ => {}
        }
    }
    sums
}

/// FLOPs of the GEMM in a call with an epilogue; the GEMM's inputs are the first inputs of the
/// call.
fn gemm_flops(program: &Program, call: &Call) -> u64 {
    let core = call.op.leading();
    if core == &call.op {
        return call.cost.flops;
    }
    let shape = |operand: &Operand| program.value(operand.value).shape.clone();
    core.rule().flops(&call.inputs().iter().map(shape).collect::<Vec<_>>())
}

/// Share of linear-layer FLOPs with quantized operands, relative to the blocks and to blocks and
/// output head; see [`linear_flops`].
pub fn quantized_flop_share(program: &Program) -> (f64, f64) {
    linear_flops(program).quantized_share()
}

/// Bytes of data and scales that the quantizations of one step write.
pub fn quantized_bytes(program: &Program) -> u64 {
    let bytes_of = |call: &Call| -> u64 {
        call.quantizations()
            .into_iter()
            .flat_map(|quantization| quantization.outputs)
            .map(|operand| program.value(operand.value).range.bytes as u64)
            .sum()
    };
    program.calls_with_runs().map(|(call, runs)| bytes_of(call) * runs as u64).sum()
}
