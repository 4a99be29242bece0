//! Addresses in tensor memory.

use std::fmt;

use crate::error::Fault;
use crate::place::{Place, TENSOR_COLUMNS, TENSOR_LANES};

/// Tensor-memory address: the lane is the upper half of the 32 bits, the column the lower half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorAddress {
    /// Lane, below [`TENSOR_LANES`].
    pub lane: u32,
    /// Column, below [`TENSOR_COLUMNS`].
    pub column: u32,
}

impl TensorAddress {
    /// Decodes an address.
    ///
    /// # Errors
    /// A lane or a column outside of tensor memory.
    pub fn decode(bits: u32) -> Result<TensorAddress, Fault> {
        let address = TensorAddress { lane: bits >> 16, column: bits & 0xffff };
        if address.lane >= TENSOR_LANES || address.column >= TENSOR_COLUMNS {
            return Err(Fault::new(
                "tensor-memory-out-of-range",
                format!(
                    "address {bits:#010x} is {address}: there are {TENSOR_LANES} lanes of \
                     {TENSOR_COLUMNS} columns"
                ),
            ));
        }
        Ok(address)
    }

    /// Returns the 32-bit encoding.
    pub fn encode(self) -> u32 {
        self.lane << 16 | self.column
    }

    /// Returns the place of the address in the CTA `rank`.
    pub fn place(self, rank: u32) -> Place {
        Place::Tensor { rank, lane: self.lane, column: self.column }
    }

    /// Checks that `columns` columns from this address on exist.
    ///
    /// # Errors
    /// A column outside of tensor memory.
    pub fn check_columns(self, what: &str, columns: u32) -> Result<(), Fault> {
        if self.column + columns > TENSOR_COLUMNS {
            return Err(Fault::new(
                "tensor-memory-out-of-range",
                format!(
                    "{what} takes columns {} to {}: there are {TENSOR_COLUMNS}",
                    self.column,
                    self.column + columns - 1
                ),
            ));
        }
        Ok(())
    }

    /// Checks that `allowed` contains the lane.
    ///
    /// # Errors
    /// A lane outside of `allowed`.
    pub fn check_lane(self, what: &str, allowed: &[u32]) -> Result<(), Fault> {
        if allowed.contains(&self.lane) {
            return Ok(());
        }
        Err(Fault::new(
            "tensor-lane-alignment",
            format!("{what} begins at lane {}, expected one of {allowed:?}", self.lane),
        ))
    }
}

impl fmt::Display for TensorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lane {} column {}", self.lane, self.column)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_lane_and_column() {
        let address = TensorAddress::decode(0x0020_0011).unwrap();
        assert_eq!(address, TensorAddress { lane: 32, column: 17 });
        assert_eq!(address.encode(), 0x0020_0011);
        for bits in [0x0080_0000, 0x0000_0200, 0x4000_0000] {
            let fault = TensorAddress::decode(bits).unwrap_err();
            assert_eq!(fault.rule, "tensor-memory-out-of-range");
        }
        assert!(address.check_columns("D", 495).is_ok());
        assert!(address.check_columns("D", 496).is_err());
        assert_eq!(address.check_lane("D", &[0, 16]).unwrap_err().rule, "tensor-lane-alignment");
    }
}
