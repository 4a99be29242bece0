//! Descriptions of MMAs.

use super::operand::Operand;
use crate::error::Fault;
use crate::number::Format;

/// How sums are formed. The instruction set does not define their order and rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ResultMode {
    /// The hardware's sum: see [`super::Model`].
    Hardware,
    /// The exact sum of the accumulator and one instruction's products, rounded once to nearest,
    /// ties to even.
    Exact,
    /// A sum with another order, group size and rounding of partial sums. All are drawn from this
    /// seed, the position in the accumulator and the step.
    Fuzz(u64),
}

/// Generations of tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorCore {
    /// `mma.sync` of sm_80.
    Ampere,
    /// `mma.sync` of sm_89.
    Ada,
    /// `wgmma` of sm_90a, and `mma.sync` of sm_90 except with 8-bit floats.
    Hopper,
    /// `mma.sync` of sm_90 and sm_100 with 8-bit floats, executed as F16.
    HopperWarp,
    /// `tcgen05.mma` of sm_100a and sm_103a, `mma.sync` of sm_120a, and `mma.sync` of sm_100 except
    /// with 8-bit floats.
    Blackwell,
}

/// Kinds of MMA instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// F16 elements; on Blackwell also F16 with BF16, which `kind::f16` allows.
    F16,
    /// BF16 elements; on Blackwell also BF16 with F16.
    Bf16,
    /// TF32 elements.
    Tf32,
    /// 8-bit, 6-bit and 4-bit floats, one per container, without scales.
    F8f6f4,
    /// The elements of `F8f6f4`, with one UE8M0 scale per 32 elements.
    Mxf8f6f4,
    /// E2M1 elements with one scale per 32 (UE8M0) or 16 (UE8M0 or UE4M3) elements; `kind::mxf4`
    /// and `kind::mxf4nvf4`.
    Mxf4nvf4,
    /// 8-bit integers.
    I8,
}

/// Accumulator formats, one element in each `u32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulate {
    /// Binary16 in the low half. The upper half is ignored on input and zero on output.
    F16,
    /// Binary32.
    F32,
    /// 32-bit integers that wrap around; also the meaning of [`Accumulate::F32`] with [`Kind::I8`].
    I32,
    /// 32-bit integers; the sum of each instruction is clamped (`.satfinite`).
    I32Saturating,
}

/// An MMA: machine, kind and formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaSpec {
    /// How sums are formed.
    pub model: ResultMode,
    /// Generation of the tensor cores.
    pub architecture: TensorCore,
    /// Kind of instruction.
    pub kind: Kind,
    /// Format of A.
    pub a: Format,
    /// Format of B.
    pub b: Format,
    /// Format of the accumulator.
    pub accumulate: Accumulate,
}

impl MmaSpec {
    /// Checks that element formats, accumulator and kind are compatible. The decoder checks which
    /// combinations an instruction supports.
    ///
    /// # Errors
    /// An incompatible combination.
    pub fn check(&self) -> Result<(), Fault> {
        let takes: &[Format] = match self.kind {
            Kind::F16 | Kind::Bf16 => &[Format::F16, Format::BF16],
            Kind::Tf32 => &[Format::TF32],
            Kind::F8f6f4 | Kind::Mxf8f6f4 => {
                &[Format::E4M3, Format::E5M2, Format::E3M2, Format::E2M3, Format::E2M1]
            }
            Kind::Mxf4nvf4 => &[Format::E2M1],
            Kind::I8 => &[Format::S8, Format::U8],
        };
        for (name, format) in [("A", self.a), ("B", self.b)] {
            if !takes.contains(&format) {
                return Err(Fault::new(
                    "mma-element-format",
                    format!("{:?} MMAs have no {name} of `{format}`", self.kind),
                ));
            }
        }
        let accumulates = match self.kind {
            Kind::I8 => self.accumulate != Accumulate::F16,
            Kind::F16 | Kind::F8f6f4 => {
                matches!(self.accumulate, Accumulate::F16 | Accumulate::F32)
            }
            _ => self.accumulate == Accumulate::F32,
        };
        if !accumulates {
            return Err(Fault::new(
                "mma-accumulator",
                format!("{:?} MMAs do not accumulate in {:?}", self.kind, self.accumulate),
            ));
        }
        Ok(())
    }

    /// Checks that a matrix has the scales required by the kind.
    pub(super) fn check_scales(&self, name: &str, operand: &Operand<'_>) -> Result<(), Fault> {
        let scales = operand.scales.map(|scales| (scales.format, scales.block));
        let (right, takes) = match self.kind {
            Kind::Mxf8f6f4 => {
                (scales == Some((Format::UE8M0, 32)), "one scale of `ue8m0` for 32 elements")
            }
            Kind::Mxf4nvf4 => (
                matches!(scales, Some((Format::UE8M0, 16 | 32) | (Format::UE4M3, 16 | 32))),
                "one scale of `ue8m0` or `ue4m3` for 16 or 32 elements",
            ),
            _ => (scales.is_none(), "no scales"),
        };
        if right {
            return Ok(());
        }
        let got = match scales {
            Some((format, block)) => format!("one of `{format}` for {block} elements"),
            None => "none".to_owned(),
        };
        Err(Fault::new(
            "mma-scale-format",
            format!("{:?} MMAs take {takes} of {name}, got {got}", self.kind),
        ))
    }
}
