//! The three products of a linear layer, in F32, BF16 and MXFP8.

use deepwell_ir::ops::MxGemm;
use deepwell_ir::{DType, Op, Product};
use half::bf16;

use super::{KernelError, Operands, Run};
use crate::cpu::arena::{Arena, In, Out};
use crate::cpu::gemm::{Operand, Output, gemm};
use crate::ops::add::cpu::bias_add_forward_in_place;

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

enum Target {
    F32 { data: Out<f32>, accumulate: bool },
    Bf16(Out<bf16>),
}

impl Target {
    fn new(operands: &Operands<'_>, index: usize) -> Result<Target, KernelError> {
        let accumulate = operands.adds();
        match operands.dtype(index) {
            DType::Bf16 => operands.target(index).map(Target::Bf16),
            _ => operands.target(index).map(|data| Target::F32 { data, accumulate }),
        }
    }

    fn output<'a>(&self, arena: &'a Arena) -> Output<'a> {
        match self {
            Target::F32 { data, accumulate } => {
                Output::F32 { data: data.of(arena), accumulate: *accumulate }
            }
            Target::Bf16(data) => Output::Bf16 { data: data.of(arena) },
        }
    }
}

/// What is added to each row of the result, after the GEMM.
enum Bias {
    F32(In<f32>),
    Bf16(In<bf16>),
}

impl Bias {
    /// Of the element type of the result.
    fn new(operands: &Operands<'_>, index: usize, target: &Target) -> Result<Bias, KernelError> {
        Ok(match target {
            Target::F32 { .. } => Bias::F32(operands.input(index)?),
            Target::Bf16(_) => Bias::Bf16(operands.input(index)?),
        })
    }

    fn add(&self, target: &Target, arena: &Arena) {
        match (self, target) {
            (Bias::F32(bias), Target::F32 { data, .. }) => {
                bias_add_forward_in_place(data.of(arena), bias.of(arena));
            }
            (Bias::Bf16(bias), Target::Bf16(data)) => {
                bias_add_forward_in_place(data.of(arena), bias.of(arena));
            }
            _ => unreachable!("the bias was made for this target"),
        }
    }
}

/// fprop `[T,K]·[N,K]ᵀ`, dgrad `[T,N]·[N,K]`, wgrad `[T,N]ᵀ·[T,K]`.
pub(super) fn linear(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let tier = operands.tier()?;
    let (a, b) = (Matrix::new(operands, 0)?, Matrix::new(operands, 1)?);
    let target_index = operands.output(0);
    let target = Target::new(operands, target_index)?;
    let workspace = operands.workspace::<u8>()?;
    let (a_rows, a_columns) = (operands.shape(0)[0], operands.shape(0)[1]);
    let b_columns = operands.shape(1)[1];
    let b_rows = operands.shape(1)[0];
    let product = match op {
        Op::LinearInputGrad(_) => Product::Dgrad,
        Op::LinearWeightGrad(_) => Product::Wgrad,
        _ => Product::Fprop,
    };
    let bias = match op {
        Op::Linear(op) if op.bias => Some(Bias::new(operands, 2, &target)?),
        _ => None,
    };
    Ok(Box::new(move |arena| {
        let (a, b) = (a.rows(arena, a_columns), b.rows(arena, b_columns));
        let (m, n, k, a, b) = match product {
            Product::Fprop => (a_rows, b_rows, a_columns, a, b),
            Product::Dgrad => (a_rows, b_columns, a_columns, a, b.transposed()),
            Product::Wgrad => (a_columns, b_columns, a_rows, a.transposed(), b.transposed()),
        };
        gemm(tier, m, n, k, a, b, target.output(arena), workspace.of(arena))
            .map_err(|error| error.to_string())?;
        if let Some(bias) = &bias {
            bias.add(&target, arena);
        }
        Ok(())
    }))
}

/// `[M,K]·[N,K]ᵀ` of codes and scales.
pub(super) fn mx_gemm(operands: &Operands<'_>, op: &MxGemm) -> Result<Run, KernelError> {
    let tier = operands.tier()?;
    let (a, a_scales) = (operands.input::<u8>(0)?, operands.input::<u8>(1)?);
    let (b, b_scales) = (operands.input::<u8>(2)?, operands.input::<u8>(3)?);
    let target_index = operands.output(0);
    let target = Target::new(operands, target_index)?;
    let workspace = operands.workspace::<u8>()?;
    let (m, k, n) = (operands.shape(0)[0], operands.shape(0)[1], operands.shape(2)[0]);
    let bias = if op.bias { Some(Bias::new(operands, 4, &target)?) } else { None };
    Ok(Box::new(move |arena| {
        let a = Operand::rows_mx(a.of(arena), a_scales.of(arena), k);
        let b = Operand::rows_mx(b.of(arena), b_scales.of(arena), k);
        gemm(tier, m, n, k, a, b, target.output(arena), workspace.of(arena))
            .map_err(|error| error.to_string())?;
        if let Some(bias) = &bias {
            bias.add(&target, arena);
        }
        Ok(())
    }))
}
