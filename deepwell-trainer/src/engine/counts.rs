//! Counts of a run's low-precision work, updated when steps and evaluations end.

use deepwell_ir::{GemmKind, Op, Program};
use deepwell_plan::{LinearFlops, linear_flops};
use serde::{Deserialize, Serialize};

/// A count for each of the three GEMMs of a linear layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GemmCounts {
    /// `y = x · wᵀ`.
    pub fprop: u64,
    /// `dx = dy · w`.
    pub dgrad: u64,
    /// `dw = dyᵀ · x`.
    pub wgrad: u64,
}

impl GemmCounts {
    /// All three.
    pub fn total(&self) -> u64 {
        self.fprop + self.dgrad + self.wgrad
    }

    fn of(&mut self, gemm: GemmKind) -> &mut u64 {
        match gemm {
            GemmKind::Fprop => &mut self.fprop,
            GemmKind::Dgrad => &mut self.dgrad,
            GemmKind::Wgrad => &mut self.wgrad,
        }
    }

    fn add(&mut self, other: GemmCounts) {
        self.fprop += other.fprop;
        self.dgrad += other.dgrad;
        self.wgrad += other.wgrad;
    }
}

/// Completed work. A step is counted at its end, with the program that it ran: GEMMs in fallback
/// are not counted as quantized. A step without an update is counted too, because its GEMMs ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunCounts {
    /// GEMMs of quantized operands, of steps and evaluations.
    #[serde(alias = "mxfp8_gemms")]
    pub quantized_gemms: GemmCounts,
    /// Bytes of quantized data and scales read by these GEMMs.
    pub quantized_bytes: GemmCounts,
    /// FLOPs of these GEMMs in steps, without recomputation. The three sums of FLOPs are `f64`
    /// because a long run exceeds 64 bits.
    #[serde(alias = "mxfp8_flops")]
    pub quantized_flops: f64,
    /// FLOPs of all GEMMs of the blocks' linear layers of steps.
    pub linear_flops: f64,
    /// FLOPs of all GEMMs of the blocks' linear layers and of the output head.
    pub linear_flops_with_head: f64,
}

impl RunCounts {
    /// Counts of one step.
    pub(super) fn of_step(program: &Program) -> RunCounts {
        let LinearFlops { quantized, blocks, with_head } = linear_flops(program);
        RunCounts {
            quantized_flops: quantized as f64,
            linear_flops: blocks as f64,
            linear_flops_with_head: with_head as f64,
            ..RunCounts::of_evaluation(program)
        }
    }

    /// Counts of one evaluation: GEMMs and bytes.
    pub(super) fn of_evaluation(program: &Program) -> RunCounts {
        let mut counts = RunCounts::default();
        for (call, runs) in program.calls_with_runs() {
            let (kind, plane_inputs) = match call.op.leading() {
                Op::ScaledGemm(op) => (op.kind, op.plane_inputs()),
                Op::ScaledGroupedGemm(op) => (op.kind, op.plane_inputs()),
                _ => continue,
            };
            let operands = call.operands[..plane_inputs].iter();
            let bytes: usize =
                operands.map(|operand| program.value(operand.value).range.bytes).sum();
            *counts.quantized_gemms.of(kind) += runs as u64;
            *counts.quantized_bytes.of(kind) += (bytes * runs) as u64;
        }
        counts
    }

    pub(super) fn add(&mut self, other: &RunCounts) {
        self.quantized_gemms.add(other.quantized_gemms);
        self.quantized_bytes.add(other.quantized_bytes);
        self.quantized_flops += other.quantized_flops;
        self.linear_flops += other.linear_flops;
        self.linear_flops_with_head += other.linear_flops_with_head;
    }

    /// Share of the FLOPs of linear layers that ran on quantized operands: of the blocks, and of
    /// the blocks and the head. Zero before the first step.
    pub fn quantized_flop_share(&self) -> (f64, f64) {
        let share = |total: f64| if total == 0.0 { 0.0 } else { self.quantized_flops / total };
        (share(self.linear_flops), share(self.linear_flops_with_head))
    }
}
