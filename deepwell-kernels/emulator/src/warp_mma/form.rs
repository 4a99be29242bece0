//! `mma.sync`.

use super::fragment::{
    WARP_ROWS, accumulator_registers, gather_a, gather_accumulator, gather_b, scatter_accumulator,
};
use super::scales::{MmaScales, WarpScales};
use super::table::{find, format_of, mma_kind};
use super::{LANES, Row};
use crate::decode::{MmaKind, MmaShape, Type, WarpMma};
use crate::error::Fault;
use crate::number::Format;
use crate::numerics::{
    Accumulate, ElementBits, Kind, MmaSpec, Operand, ResultMode, TensorCore, multiply,
};

/// One variant of `mma.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarpMmaForm {
    /// m16n8kK.
    pub shape: MmaShape,
    /// Elements of A.
    pub a: Type,
    /// Elements of B.
    pub b: Type,
    /// Elements of C and D.
    pub d: Type,
    /// `.kind`.
    pub kind: Option<MmaKind>,
    /// `.satfinite`, for integers.
    pub saturate: bool,
    /// `.block_scale`.
    pub scales: Option<MmaScales>,
}

/// Returns the arithmetic of `mma.sync` on a target; `target` is the number in its name.
///
/// For 8-bit floats, the assembler decides: on sm_90, sm_100 and sm_103 a conversion to F16 and two
/// F16 MMAs (`F2FP` and `HMMA` in SASS), on sm_89 and sm_120 one MMA (`QMMA`). On sm_120 the
/// fraction bits are those published for Blackwell; they were not compared with hardware.
pub fn tensor_core_of(target: u32, element: Type) -> TensorCore {
    match target {
        0..=88 => TensorCore::Ampere,
        89 => TensorCore::Ada,
        90..=119 if matches!(element, Type::E4m3 | Type::E5m2) => TensorCore::HopperWarp,
        90..=99 => TensorCore::Hopper,
        _ => TensorCore::Blackwell,
    }
}

impl WarpMmaForm {
    /// Returns the form of a decoded instruction.
    ///
    /// # Errors
    /// `mma-form` for layouts other than row by column, and for different types of C and D.
    pub fn of(instruction: &WarpMma) -> Result<WarpMmaForm, Fault> {
        if !instruction.a_is_row || instruction.b_is_row {
            return Err(Fault::new("mma-form", "expected `.row.col`, got another layout"));
        }
        if instruction.c_type != instruction.d_type {
            return Err(Fault::new(
                "mma-form",
                format!(
                    "expected C and D of one type, got `{}` and `{}`",
                    instruction.c_type, instruction.d_type
                ),
            ));
        }
        Ok(WarpMmaForm {
            shape: instruction.shape,
            a: instruction.a_type,
            b: instruction.b_type,
            d: instruction.d_type,
            kind: instruction.kind,
            saturate: instruction.saturate,
            scales: instruction
                .scales
                .as_ref()
                .map(|scales| MmaScales { vector: scales.vector, scale_type: scales.scale_type }),
        })
    }

    /// Checks that the form exists on a target; `target` is the number in its name, such as 90.
    ///
    /// # Errors
    /// `mma-form`, `mma-target`.
    pub fn check(&self, target: u32) -> Result<(), Fault> {
        let scales = self.scales.map(|scales| (scales.vector, scales.scale_type));
        let form = find(self.shape, (self.a, self.b, self.d), self.kind, scales)
            .filter(|_| !self.saturate || self.d == Type::S32);
        let Some(form) = form else {
            let MmaShape { m, n, k } = self.shape;
            return Err(Fault::new(
                "mma-form",
                format!(
                    "`mma.sync.m{m}n{n}k{k}` of `{}` and `{}` into `{}` with kind {:?} and scales \
                     {scales:?} does not exist or is not emulated",
                    self.a, self.b, self.d, self.kind
                ),
            ));
        };
        if target < form.target_min {
            return Err(Fault::new(
                "mma-target",
                format!(
                    "`mma.sync` of `{}` with kind {:?} needs sm_{}, the target is sm_{target}",
                    self.a, self.kind, form.target_min
                ),
            ));
        }
        Ok(())
    }

    /// Register bits per element of A or B.
    fn container_bits(&self, element: Type) -> u32 {
        match self.kind {
            Some(MmaKind::Mxf4 | MmaKind::Mxf4nvf4) => 4,
            _ => format_of(element).map_or(32, |(_, bits)| bits),
        }
    }

    /// Registers of A, of B, and of C or D per thread.
    pub fn registers(&self) -> (usize, usize, usize) {
        let k = self.shape.k as usize;
        let words = |rows: usize, element| rows * k * self.container_bits(element) as usize / 32;
        let d_bits = if self.d == Type::F16 { 16 } else { 32 };
        (
            words(WARP_ROWS, self.a) / LANES,
            words(8, self.b) / LANES,
            accumulator_registers(d_bits, 8),
        )
    }

    /// Computes D of a warp. [`super::fragment`] defines the register layout. `scales` are required
    /// if and only if the form has scales.
    ///
    /// # Errors
    /// The errors of [`WarpMmaForm::check`] and of scale selectors; `mma-registers` for a wrong
    /// number of registers.
    pub fn run(
        &self,
        target: u32,
        model: ResultMode,
        a: &[Row],
        b: &[Row],
        c: &[Row],
        scales: Option<&WarpScales>,
    ) -> Result<Vec<Row>, Fault> {
        self.check(target)?;
        if (a.len(), b.len(), c.len()) != self.registers()
            || scales.is_some() != self.scales.is_some()
        {
            return Err(Fault::new(
                "mma-registers",
                format!(
                    "expected registers of A, B and C {:?}, got {:?}",
                    self.registers(),
                    (a.len(), b.len(), c.len())
                ),
            ));
        }
        let k = self.shape.k as usize;
        let a_element_bits = self.element_bits(gather_a(a, self.container_bits(self.a), k), self.a);
        let b_element_bits = self.element_bits(gather_b(b, self.container_bits(self.b), k), self.b);
        let a_format = format_of(self.a).map_or(Format::F32, |(format, _)| format);
        let b_format = format_of(self.b).map_or(Format::F32, |(format, _)| format);
        let mut operands = [
            Operand::new(ElementBits::U32(&a_element_bits)),
            Operand::new(ElementBits::U32(&b_element_bits)),
        ];
        let scale_element_bits = match (self.scales, scales) {
            (Some(form), Some(scales)) => Some((form, form.of_a(scales)?, form.of_b(scales)?)),
            _ => None,
        };
        if let Some((form, a_scales, b_scales)) = &scale_element_bits {
            let block = k / form.vector as usize;
            operands = [
                Operand::scaled(ElementBits::U32(&a_element_bits), form.format(), block, a_scales),
                Operand::scaled(ElementBits::U32(&b_element_bits), form.format(), block, b_scales),
            ];
        }
        let spec = MmaSpec {
            model,
            architecture: tensor_core_of(target, self.a),
            kind: match self.kind {
                Some(MmaKind::Mxf8f6f4) => Kind::Mxf8f6f4,
                Some(MmaKind::Mxf4 | MmaKind::Mxf4nvf4) => Kind::Mxf4nvf4,
                _ => mma_kind(a_format),
            },
            a: a_format,
            b: b_format,
            accumulate: match (self.d, self.saturate) {
                (Type::F16, _) => Accumulate::F16,
                (Type::S32, true) => Accumulate::I32Saturating,
                (Type::S32, false) => Accumulate::I32,
                _ => Accumulate::F32,
            },
        };
        let d_bits = if self.d == Type::F16 { 16 } else { 32 };
        let mut sum = gather_accumulator(c, d_bits, 8);
        let [a, b] = operands;
        multiply(&spec, WARP_ROWS, 8, k, &a, &b, &mut sum, true, false, false)?;
        let mut d = vec![[0; LANES]; c.len()];
        scatter_accumulator(&sum, d_bits, 8, &mut d);
        Ok(d)
    }

    /// Extracts elements smaller than their bytes: 4-bit elements are in bits 2 to 5, 6-bit
    /// elements in bits 0 to 5.
    fn element_bits(&self, mut element_bits: Vec<u32>, element: Type) -> Vec<u32> {
        if matches!(self.kind, Some(MmaKind::F8f6f4 | MmaKind::Mxf8f6f4)) {
            for code in &mut element_bits {
                *code = match element {
                    Type::E2m1 => *code >> 2 & 0xf,
                    Type::E3m2 | Type::E2m3 => *code & 0x3f,
                    _ => *code,
                };
            }
        }
        element_bits
    }
}
