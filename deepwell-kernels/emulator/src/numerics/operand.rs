//! The matrices that are multiplied.

use crate::error::Fault;
use crate::number::Format;

/// Bits of elements, row after row, each in the low bits of its integer whatever its format: take
/// the width that is at hand.
#[derive(Clone, Copy, Debug)]
pub enum ElementBits<'a> {
    /// For formats of at most 8 bits.
    U8(&'a [u8]),
    /// For formats of at most 16 bits.
    U16(&'a [u16]),
    /// For all formats.
    U32(&'a [u32]),
}

impl ElementBits<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            ElementBits::U8(element_bits) => element_bits.len(),
            ElementBits::U16(element_bits) => element_bits.len(),
            ElementBits::U32(element_bits) => element_bits.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn bits(&self) -> u32 {
        match self {
            ElementBits::U8(_) => 8,
            ElementBits::U16(_) => 16,
            ElementBits::U32(_) => 32,
        }
    }

    /// Calls `each` with the index and the code of all elements from `start` to `end`.
    pub(super) fn for_each(&self, start: usize, end: usize, mut each: impl FnMut(usize, u32)) {
        match self {
            ElementBits::U8(element_bits) => {
                element_bits[start..end]
                    .iter()
                    .enumerate()
                    .for_each(|(i, &code)| each(i, code.into()));
            }
            ElementBits::U16(element_bits) => {
                element_bits[start..end]
                    .iter()
                    .enumerate()
                    .for_each(|(i, &code)| each(i, code.into()));
            }
            ElementBits::U32(element_bits) => {
                element_bits[start..end].iter().enumerate().for_each(|(i, &code)| each(i, code));
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
    pub element_bits: &'a [u8],
}

/// A matrix of `[rows, k]`, row after row: A as it is, B transposed.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Its elements.
    pub element_bits: ElementBits<'a>,
    /// Its scales, for the kinds that have them.
    pub scales: Option<Scales<'a>>,
}

impl<'a> Operand<'a> {
    /// A matrix without scales.
    pub fn new(element_bits: ElementBits<'a>) -> Operand<'a> {
        Operand { element_bits, scales: None }
    }

    /// A matrix with scales of one format, each for `block` elements along K.
    pub fn scaled(
        element_bits: ElementBits<'a>,
        format: Format,
        block: usize,
        scale_element_bits: &'a [u8],
    ) -> Operand<'a> {
        Operand {
            element_bits,
            scales: Some(Scales { format, block, element_bits: scale_element_bits }),
        }
    }

    /// Whether lengths fit `[rows, k]` and bit patterns their integers.
    pub(super) fn check(
        &self,
        name: &str,
        format: Format,
        rows: usize,
        k: usize,
    ) -> Result<(), Fault> {
        if self.element_bits.len() != rows * k || self.element_bits.bits() < format.bits() {
            return Err(Fault::new(
                "mma-operand-size",
                format!(
                    "expected {name} of {rows} x {k} element_bits of `{format}`, got {} of {} bits",
                    self.element_bits.len(),
                    self.element_bits.bits()
                ),
            ));
        }
        let Some(scales) = &self.scales else { return Ok(()) };
        let expected = rows * k.div_ceil(scales.block.max(1));
        if scales.block == 0 || scales.element_bits.len() != expected {
            return Err(Fault::new(
                "mma-scale-size",
                format!(
                    "expected {expected} scales of {name}, one for {} elements of {rows} x {k}, \
                     got {}",
                    scales.block,
                    scales.element_bits.len()
                ),
            ));
        }
        Ok(())
    }
}
