//! The three GEMMs of a linear layer, in F32 and BF16.

use deepwell_ir::{DType, GemmKind, KernelRequest, Op};
use half::bf16;

use crate::KernelError;
use crate::runtime::cpu::arena::{Arena, In};
use crate::runtime::cpu::gemm::{Operand, Tier, gemm};
use crate::runtime::cpu::gemm_output::{self, Bias, GemmTarget};
use crate::runtime::cpu::operands::{Operands, Run};

/// A high-precision matrix, row-major.
enum Matrix {
    F32(In<f32>),
    Bf16(In<bf16>),
}

impl Matrix {
    fn new(operands: &Operands<'_>, index: usize) -> Result<Matrix, KernelError> {
        match operands.dtype(index) {
            DType::Bf16 => operands.input(index).map(Matrix::Bf16),
            _ => operands.input(index).map(Matrix::F32),
        }
    }

    fn rows<'a>(&self, arena: &'a Arena, row_stride: usize) -> Operand<'a> {
        match self {
            Matrix::F32(data) => Operand::rows_f32(data.of(arena), row_stride),
            Matrix::Bf16(data) => Operand::rows_bf16(data.of(arena), row_stride),
        }
    }
}

/// fprop `[T,K]·[N,K]ᵀ`, dgrad `[T,N]·[N,K]`, wgrad `[T,N]ᵀ·[T,K]`.
pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let tier = operands.tier()?;
    let (a, b) = (Matrix::new(operands, 0)?, Matrix::new(operands, 1)?);
    let target_index = operands.output(0);
    let target = GemmTarget::new(operands, target_index)?;
    let workspace = operands.workspace::<u8>()?;
    let (a_rows, a_columns) = (operands.shape(0)[0], operands.shape(0)[1]);
    let b_columns = operands.shape(1)[1];
    let b_rows = operands.shape(1)[0];
    let kind = match op {
        Op::LinearDgrad(_) => GemmKind::Dgrad,
        Op::LinearWgrad(_) => GemmKind::Wgrad,
        _ => GemmKind::Fprop,
    };
    let bias = match op {
        Op::Linear(op) if op.bias => Some(Bias::new(operands, 2, &target)?),
        _ => None,
    };
    Ok(Box::new(move |arena| {
        let (a, b) = (a.rows(arena, a_columns), b.rows(arena, b_columns));
        let (m, n, k, a, b) = match kind {
            GemmKind::Fprop => (a_rows, b_rows, a_columns, a, b),
            GemmKind::Dgrad => (a_rows, b_columns, a_columns, a, b.transposed()),
            GemmKind::Wgrad => (a_columns, b_columns, a_rows, a.transposed(), b.transposed()),
        };
        gemm(tier, m, n, k, a, b, target.output(arena), workspace.of(arena))
            .map_err(|error| error.to_string())?;
        if let Some(bias) = &bias {
            bias.add(&target, arena);
        }
        Ok(())
    }))
}

/// Scratch bytes of the GEMM.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, tier: Tier, _: usize) -> usize {
    let (a, b) = (&request.operands[0].shape, &request.operands[1].shape);
    let sizes = match request.op {
        Op::LinearDgrad(_) => [a[0], b[1], a[1]],
        Op::LinearWgrad(_) => [a[1], b[1], a[0]],
        _ => [a[0], b[0], a[1]],
    };
    gemm_output::workspace_bytes(request, [0, 1], sizes, tier)
}
