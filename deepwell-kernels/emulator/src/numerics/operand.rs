//! Operands of MMAs.

use crate::error::Fault;
use crate::number::Format;

/// Bit patterns of elements, row-major, each in the low bits of an integer. The integer may be
/// wider than the format.
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
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            ElementBits::U8(element_bits) => element_bits.len(),
            ElementBits::U16(element_bits) => element_bits.len(),
            ElementBits::U32(element_bits) => element_bits.len(),
        }
    }

    /// Whether there are no elements.
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

    /// Calls `each` with the index and the code of each element from `start` to `end`.
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

/// Scale factors `[rows, k / block]`, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// [`Format::UE8M0`] or [`Format::UE4M3`].
    pub format: Format,
    /// Elements along K per scale: 16 or 32.
    pub block: usize,
    /// One code per scale.
    pub element_bits: &'a [u8],
}

/// A row-major matrix `[rows, k]`: A, or B transposed.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Bit patterns of the elements.
    pub element_bits: ElementBits<'a>,
    /// Scales, for kinds with block scales.
    pub scales: Option<Scales<'a>>,
}

impl<'a> Operand<'a> {
    /// Creates a matrix without scales.
    pub fn new(element_bits: ElementBits<'a>) -> Operand<'a> {
        Operand { element_bits, scales: None }
    }

    /// Creates a matrix with scales, one for each `block` elements along K.
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

    /// Checks that the lengths match `[rows, k]` and that the integers are wide enough.
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
