//! Why a quantization, dequantization or scale layout change was refused.

use thiserror::Error;

use crate::QuantFormat;

/// A slice does not have the length that the shape asks for.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// A slice has the wrong length.
    #[error("`{operand}` of a {rows} x {cols} matrix: expected {expected} elements, got {got}")]
    Length {
        /// Name of the argument.
        operand: &'static str,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Elements that the shape asks for.
        expected: usize,
        /// Elements that came.
        got: usize,
    },
    /// rows * cols exceeds the address space.
    #[error("a {rows} x {cols} matrix has more elements than this machine can address")]
    TooLarge {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
    },
    /// The format is not one that this function makes.
    #[error("expected {expected}, got `{got}`")]
    Format {
        /// What it makes.
        expected: &'static str,
        /// What was asked for.
        got: QuantFormat,
    },
    /// The width is not a multiple of what is transformed together.
    #[error("expected rows of a multiple of {multiple} elements, got {cols}")]
    Multiple {
        /// Elements of a row.
        cols: usize,
        /// Elements that are transformed together.
        multiple: usize,
    },
}

/// The lengths that one call checks.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl Shape {
    pub(crate) fn new(rows: usize, cols: usize) -> Result<Self, QuantizeError> {
        match rows.checked_mul(cols) {
            Some(_) => Ok(Self { rows, cols }),
            None => Err(QuantizeError::TooLarge { rows, cols }),
        }
    }

    pub(crate) fn expect(
        self,
        operand: &'static str,
        expected: usize,
        got: usize,
    ) -> Result<(), QuantizeError> {
        let Self { rows, cols } = self;
        if expected == got {
            Ok(())
        } else {
            Err(QuantizeError::Length { operand, rows, cols, expected, got })
        }
    }
}
