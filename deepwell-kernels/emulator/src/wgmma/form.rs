//! `wgmma.mma_async`.

use super::descriptor::{Descriptor, Tile};
use crate::decode::{MmaShape, Type, WarpGroupMma, WarpGroupOperand};
use crate::error::Fault;
use crate::numerics::{
    Accumulate, ElementBits, MmaSpec, Operand, ResultMode, TensorCore, multiply,
};
use crate::place::Memory;
use crate::warp_mma::fragment::{
    WARP_ROWS, accumulator_registers, gather_a, gather_accumulator, scatter_accumulator,
};
use crate::warp_mma::{Row, format_of, mma_kind};

/// Registers of A per thread.
const A_REGISTERS: usize = 4;

/// One variant of `wgmma.mma_async`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WgmmaForm {
    /// m64nNkK.
    pub shape: MmaShape,
    /// Elements of A.
    pub a: Type,
    /// Elements of B.
    pub b: Type,
    /// Elements of D.
    pub d: Type,
    /// Whether A comes from registers.
    pub a_in_registers: bool,
    /// `.satfinite`, for integers.
    pub saturate: bool,
    /// `imm-scale-a` is -1.
    pub negate_a: bool,
    /// `imm-scale-b` is -1.
    pub negate_b: bool,
    /// A is M-major.
    pub transpose_a: bool,
    /// B is N-major.
    pub transpose_b: bool,
}

/// Location of A.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixA {
    /// Shared memory, with a matrix descriptor.
    Shared(u64),
    /// Registers: [`WarpFragments::a`].
    Registers,
}

/// Registers of one warp of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarpFragments {
    /// Index among the four warps; the warp has rows from `16 warp` on.
    pub warp: u32,
    /// Registers of A; empty if A is in shared memory.
    pub a: Vec<Row>,
    /// Registers of D, read and written.
    pub d: Vec<Row>,
}

impl WgmmaForm {
    /// Returns the form of a decoded instruction.
    pub fn of(instruction: &WarpGroupMma) -> WgmmaForm {
        WgmmaForm {
            shape: instruction.shape,
            a: instruction.a_type,
            b: instruction.b_type,
            d: instruction.d_type,
            a_in_registers: matches!(instruction.a, WarpGroupOperand::Registers(_)),
            saturate: instruction.saturate,
            negate_a: instruction.negate_a,
            negate_b: instruction.negate_b,
            transpose_a: instruction.transpose_a,
            transpose_b: instruction.transpose_b,
        }
    }

    /// Checks that the form exists.
    ///
    /// # Errors
    /// `wgmma-types`, `wgmma-shape`, `wgmma-transpose`, `wgmma-scale`, `wgmma-saturate`.
    pub fn check(&self) -> Result<(), Fault> {
        let is_integer = self.d == Type::S32;
        let byte_float = |element| matches!(element, Type::E4m3 | Type::E5m2);
        let integer = |element| matches!(element, Type::S8 | Type::U8);
        let k = match (self.a, self.b, self.d) {
            (Type::F16, Type::F16, Type::F16 | Type::F32) => 16,
            (Type::Bf16, Type::Bf16, Type::F32) => 16,
            (Type::Tf32, Type::Tf32, Type::F32) => 8,
            (a, b, Type::F16 | Type::F32) if byte_float(a) && byte_float(b) => 32,
            (a, b, Type::S32) if integer(a) && integer(b) => 32,
            (a, b, d) => {
                return Err(Fault::new(
                    "wgmma-types",
                    format!("`wgmma` of `{a}` and `{b}` into `{d}` does not exist"),
                ));
            }
        };
        let MmaShape { m, n, k: came } = self.shape;
        let is_n_legal = (8..=256).contains(&n)
            && if is_integer && n > 32 { n.is_multiple_of(16) } else { n.is_multiple_of(8) };
        if m != 64 || came != k || !is_n_legal {
            return Err(Fault::new(
                "wgmma-shape",
                format!(
                    "`wgmma` of `{}` has M 64, K {k} and N a multiple of 8 up to 256 (integers: of \
                     16 beyond 32), got m{m}n{n}k{came}",
                    self.a
                ),
            ));
        }
        if (self.transpose_a || self.transpose_b) && k != 16 {
            return Err(Fault::new(
                "wgmma-transpose",
                format!("only 16-bit elements can be transposed, not `{}`", self.a),
            ));
        }
        if self.transpose_a && self.a_in_registers {
            return Err(Fault::new("wgmma-transpose", "A in registers cannot be transposed"));
        }
        if is_integer && (self.negate_a || self.negate_b) {
            return Err(Fault::new("wgmma-scale", "integers cannot be negated"));
        }
        if self.saturate && !is_integer {
            return Err(Fault::new(
                "wgmma-saturate",
                format!("`.satfinite` is for integers, not for `{}`", self.a),
            ));
        }
        Ok(())
    }

    /// Registers of A (0 if A is in shared memory) and of D per thread.
    pub fn registers(&self) -> (usize, usize) {
        let a = if self.a_in_registers { A_REGISTERS } else { 0 };
        (a, accumulator_registers(self.d_bits(), self.shape.n as usize))
    }

    fn d_bits(&self) -> u32 {
        if self.d == Type::F16 { 16 } else { 32 }
    }

    fn tile(&self, descriptor: u64, is_a: bool) -> Result<Tile, Fault> {
        let element = if is_a { self.a } else { self.b };
        Ok(Tile {
            descriptor: Descriptor::decode(descriptor)?,
            rows: if is_a { self.shape.m } else { self.shape.n },
            element_bytes: element.bytes(),
            is_transposed: if is_a { self.transpose_a } else { self.transpose_b },
        })
    }

    /// Returns the tiles that the instruction reads: A, if it is in shared memory, and B.
    ///
    /// # Errors
    /// The errors of [`Descriptor::decode`].
    pub fn tiles(&self, a: MatrixA, b: u64) -> Result<(Option<Tile>, Tile), Fault> {
        let a = match a {
            MatrixA::Shared(descriptor) => Some(self.tile(descriptor, true)?),
            MatrixA::Registers => None,
        };
        Ok((a, self.tile(b, false)?))
    }

    /// Computes D of the given warps: A·B, plus D if `accumulate` (`scale-d`). Operands are in the
    /// shared memory of CTA `rank`. B is read once; of A, only the rows of the given warps are
    /// read.
    ///
    /// # Errors
    /// The errors of [`WgmmaForm::check`], [`Descriptor::decode`] and the memory; `wgmma-registers`
    /// for a wrong number of registers.
    #[expect(
        clippy::too_many_arguments,
        reason = "one instruction with its operands and modifiers"
    )]
    pub fn run(
        &self,
        model: ResultMode,
        rank: u32,
        a: MatrixA,
        b: u64,
        accumulate: bool,
        warps: &mut [WarpFragments],
        memory: &mut dyn Memory,
    ) -> Result<(), Fault> {
        self.check()?;
        for fragments in &*warps {
            let came = (fragments.a.len(), fragments.d.len());
            if came != self.registers() || fragments.warp > 3 {
                return Err(Fault::new(
                    "wgmma-registers",
                    format!(
                        "expected {:?} registers of A and D of a warp below 4, got {came:?} of \
                         warp {}",
                        self.registers(),
                        fragments.warp
                    ),
                ));
            }
        }
        if self.a_in_registers != (a == MatrixA::Registers) {
            return Err(Fault::new("wgmma-registers", "A is not where the instruction has it"));
        }
        let (a_tile, b_tile) = self.tiles(a, b)?;
        let (n, k) = (self.shape.n as usize, self.shape.k as usize);
        let mut a_element_bits = Vec::with_capacity(warps.len() * WARP_ROWS * k);
        let mut sum = Vec::with_capacity(warps.len() * WARP_ROWS * n);
        for fragments in &*warps {
            let rows = (fragments.warp * WARP_ROWS as u32, WARP_ROWS as u32);
            a_element_bits.extend(match &a_tile {
                Some(tile) => tile.read(rank, rows, memory)?,
                None => gather_a(&fragments.a, self.a.bits(), k),
            });
            sum.extend(gather_accumulator(&fragments.d, self.d_bits(), n));
        }
        let b_element_bits = b_tile.read(rank, (0, self.shape.n), memory)?;
        let spec = self.spec(model)?;
        multiply(
            &spec,
            warps.len() * WARP_ROWS,
            n,
            k,
            &Operand::new(ElementBits::U32(&a_element_bits)),
            &Operand::new(ElementBits::U32(&b_element_bits)),
            &mut sum,
            accumulate,
            self.negate_a,
            self.negate_b,
        )?;
        for (fragments, sum) in warps.iter_mut().zip(sum.chunks_exact(WARP_ROWS * n)) {
            scatter_accumulator(sum, self.d_bits(), n, &mut fragments.d);
        }
        Ok(())
    }

    fn spec(&self, model: ResultMode) -> Result<MmaSpec, Fault> {
        let format = |element: Type| {
            format_of(element).map(|(format, _)| format).ok_or_else(|| {
                Fault::new("wgmma-types", format!("`wgmma` has no elements of `{element}`"))
            })
        };
        Ok(MmaSpec {
            model,
            architecture: TensorCore::Hopper,
            kind: mma_kind(format(self.a)?),
            a: format(self.a)?,
            b: format(self.b)?,
            accumulate: match (self.d, self.saturate) {
                (Type::F16, _) => Accumulate::F16,
                (Type::S32, true) => Accumulate::I32Saturating,
                (Type::S32, false) => Accumulate::I32,
                _ => Accumulate::F32,
            },
        })
    }
}
