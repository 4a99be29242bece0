//! Shared by the calls of GEMMs: the result, the bias and the scratch.

use deepwell_ir::{DType, KernelRequest};
use half::bf16;

use super::operands::Operands;
use crate::KernelError;
use crate::runtime::cpu::add_bias::bias_add_forward_in_place;
use crate::runtime::cpu::arena::{Arena, In, Out};
use crate::runtime::cpu::gemm::{self, DataKind, Output, Tier};

/// Where a GEMM writes its result.
pub(crate) enum GemmTarget {
    F32 { data: Out<f32>, accumulate: bool },
    Bf16(Out<bf16>),
}

impl GemmTarget {
    pub(crate) fn new(operands: &Operands<'_>, index: usize) -> Result<GemmTarget, KernelError> {
        let accumulate = operands.adds();
        match operands.dtype(index) {
            DType::Bf16 => operands.target(index).map(GemmTarget::Bf16),
            _ => operands.target(index).map(|data| GemmTarget::F32 { data, accumulate }),
        }
    }

    pub(crate) fn output<'a>(&self, arena: &'a Arena) -> Output<'a> {
        match self {
            GemmTarget::F32 { data, accumulate } => {
                Output::F32 { data: data.of(arena), accumulate: *accumulate }
            }
            GemmTarget::Bf16(data) => Output::Bf16 { data: data.of(arena) },
        }
    }
}

/// Bias, added to each row of the result after the GEMM.
pub(crate) enum Bias {
    F32(In<f32>),
    Bf16(In<bf16>),
}

impl Bias {
    /// A bias has the element type of the result.
    pub(crate) fn new(
        operands: &Operands<'_>,
        index: usize,
        target: &GemmTarget,
    ) -> Result<Bias, KernelError> {
        Ok(match target {
            GemmTarget::F32 { .. } => Bias::F32(operands.input(index)?),
            GemmTarget::Bf16(_) => Bias::Bf16(operands.input(index)?),
        })
    }

    pub(crate) fn add(&self, target: &GemmTarget, arena: &Arena) {
        match (self, target) {
            (Bias::F32(bias), GemmTarget::F32 { data, .. }) => {
                bias_add_forward_in_place(data.of(arena), bias.of(arena));
            }
            (Bias::Bf16(bias), GemmTarget::Bf16(data)) => {
                bias_add_forward_in_place(data.of(arena), bias.of(arena));
            }
            _ => unreachable!("the bias was made for this target"),
        }
    }
}

/// Scratch bytes of an `[m, n, k]` GEMM whose operands are these two of the request.
pub(crate) fn workspace_bytes(
    request: &KernelRequest<'_>,
    operands: [usize; 2],
    [m, n, k]: [usize; 3],
    tier: Tier,
) -> usize {
    let [a, b] = operands.map(|index| match request.operands[index].dtype {
        DType::Bf16 => DataKind::Bf16,
        DType::F32 => DataKind::F32,
        _ => DataKind::Mx,
    });
    gemm::workspace_bytes(tier, m, n, k, a, b)
}
