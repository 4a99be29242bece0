//! Errors of quantization, dequantization and scale layout changes.

use thiserror::Error;

use crate::QuantFormat;

/// Invalid arguments of a quantization function.
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
        /// Number of elements required by the shape.
        expected: usize,
        /// Actual number of elements.
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
    /// The function does not support this format.
    #[error("expected {expected}, got `{got}`")]
    Format {
        /// Supported formats.
        expected: &'static str,
        /// Requested format.
        got: QuantFormat,
    },
    /// The width is not a multiple of the transform size.
    #[error("expected rows of a multiple of {multiple} elements, got {cols}")]
    Multiple {
        /// Elements of a row.
        cols: usize,
        /// Elements per transform.
        multiple: usize,
    },
}

/// Shape of the matrix whose argument lengths a call checks.
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
