//! The matrices that are multiplied.

use crate::error::Fault;
use crate::number::Format;

/// Element codes, row after row, each in the low bits of its integer whatever its format: take
/// the width that is at hand.
#[derive(Clone, Copy, Debug)]
pub enum Codes<'a> {
    /// For formats of at most 8 bits.
    U8(&'a [u8]),
    /// For formats of at most 16 bits.
    U16(&'a [u16]),
    /// For all formats.
    U32(&'a [u32]),
}

impl Codes<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Codes::U8(codes) => codes.len(),
            Codes::U16(codes) => codes.len(),
            Codes::U32(codes) => codes.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn bits(&self) -> u32 {
        match self {
            Codes::U8(_) => 8,
            Codes::U16(_) => 16,
            Codes::U32(_) => 32,
        }
    }

    /// Calls `each` with the index and the code of all elements from `start` to `end`.
    pub(super) fn for_each(&self, start: usize, end: usize, mut each: impl FnMut(usize, u32)) {
        match self {
            Codes::U8(codes) => {
                codes[start..end].iter().enumerate().for_each(|(i, &code)| each(i, code.into()));
            }
            Codes::U16(codes) => {
                codes[start..end].iter().enumerate().for_each(|(i, &code)| each(i, code.into()));
            }
            Codes::U32(codes) => {
                codes[start..end].iter().enumerate().for_each(|(i, &code)| each(i, code));
            }
        }
    }
}

/// Scale factors, `[rows, k / block]`, row after row.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// [`Format::UE8M0`] or [`Format::UE4M3`].
    pub format: Format,
    /// Elements along K that share one: 16 or 32.
    pub block: usize,
    /// One code each.
    pub codes: &'a [u8],
}

/// A matrix of `[rows, k]`, row after row: A as it is, B transposed.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Its elements.
    pub codes: Codes<'a>,
    /// Its scales, for the kinds that have them.
    pub scales: Option<Scales<'a>>,
}

impl<'a> Operand<'a> {
    /// A matrix without scales.
    pub fn new(codes: Codes<'a>) -> Operand<'a> {
        Operand { codes, scales: None }
    }

    /// A matrix with scales of one format, each for `block` elements along K.
    pub fn scaled(
        codes: Codes<'a>,
        format: Format,
        block: usize,
        scale_codes: &'a [u8],
    ) -> Operand<'a> {
        Operand { codes, scales: Some(Scales { format, block, codes: scale_codes }) }
    }

    /// Whether lengths fit `[rows, k]` and codes their integers.
    pub(super) fn check(
        &self,
        name: &str,
        format: Format,
        rows: usize,
        k: usize,
    ) -> Result<(), Fault> {
        if self.codes.len() != rows * k || self.codes.bits() < format.bits() {
            return Err(Fault::new(
                "mma-operand-size",
                format!(
                    "expected {name} of {rows} x {k} codes of `{format}`, got {} of {} bits",
                    self.codes.len(),
                    self.codes.bits()
                ),
            ));
        }
        let Some(scales) = &self.scales else { return Ok(()) };
        let expected = rows * k.div_ceil(scales.block.max(1));
        if scales.block == 0 || scales.codes.len() != expected {
            return Err(Fault::new(
                "mma-scale-size",
                format!(
                    "expected {expected} scales of {name}, one for {} elements of {rows} x {k}, \
                     got {}",
                    scales.block,
                    scales.codes.len()
                ),
            ));
        }
        Ok(())
    }
}
