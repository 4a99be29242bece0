//! Which MMA is meant.

use super::operand::Operand;
use crate::error::Fault;
use crate::number::Format;

/// How sums are formed. The instruction set leaves their order and their rounding open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ResultMode {
    /// As the machine does it: see [`super::Model`].
    Hardware,
    /// The exact sum of one instruction's products and the accumulator, rounded once to the
    /// nearest, ties to even.
    Exact,
    /// A sum in another order, in groups of another size and with another rounding of the
    /// partial sums, all drawn from this seed, the place in the accumulator and the step.
    Fuzz(u64),
}

/// Whose tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorCore {
    /// `mma.sync` of sm_80.
    Ampere,
    /// `mma.sync` of sm_89.
    Ada,
    /// `wgmma` of sm_90a, and `mma.sync` of sm_90 but for its 8-bit floats.
    Hopper,
    /// `mma.sync` of sm_90 and sm_100 with 8-bit floats, which run as F16 there.
    HopperWarp,
    /// `tcgen05.mma` of sm_100a and sm_103a, `mma.sync` of sm_120a, and that of sm_100 but for its
    /// 8-bit floats.
    Blackwell,
}

/// Which family of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// F16 elements; on Blackwell also F16 with BF16, which `kind::f16` allows.
    F16,
    /// BF16 elements; on Blackwell also BF16 with F16.
    Bf16,
    /// TF32 elements.
    Tf32,
    /// 8-bit, 6-bit and 4-bit floats, one to an element, without scales.
    F8f6f4,
    /// The same with one UE8M0 scale for 32 elements.
    Mxf8f6f4,
    /// E2M1 elements with one scale for 32 (UE8M0) or 16 (UE8M0 or UE4M3); `kind::mxf4` and
    /// `kind::mxf4nvf4`.
    Mxf4nvf4,
    /// 8-bit integers.
    I8,
}

/// What the accumulator holds, one element in each `u32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulate {
    /// Binary16 in the low half. The upper half is ignored, and zero afterwards.
    F16,
    /// Binary32.
    F32,
    /// 32-bit integers that wrap around. [`Accumulate::F32`] with [`Kind::I8`] means this too.
    I32,
    /// 32-bit integers; the sum of each instruction is clamped (`.satfinite`).
    I32Saturating,
}

/// An MMA: machine, kind and formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaSpec {
    /// How sums are formed.
    pub model: ResultMode,
    /// Whose tensor cores.
    pub architecture: TensorCore,
    /// Which family of instructions.
    pub kind: Kind,
    /// Elements of A.
    pub a: Format,
    /// Elements of B.
    pub b: Format,
    /// Elements of the accumulator.
    pub accumulate: Accumulate,
}

impl MmaSpec {
    /// Whether element formats, accumulator and kind go together. Which of them an instruction
    /// takes is for its decoder to say.
    ///
    /// # Errors
    /// They do not.
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

    /// Whether a matrix has the scales that the kind takes.
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
