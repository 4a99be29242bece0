//! How much was computed in MXFP8.

use deepwell_ir::{Op, Product, Program};
use serde::{Deserialize, Serialize};

/// MXFP8 products run so far and what was quantized for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProductCounts {
    /// `y = x · wᵀ`.
    pub fprop: u64,
    /// `dx = dy · w`.
    pub dgrad: u64,
    /// `dw = dyᵀ · x`.
    pub wgrad: u64,
}

impl ProductCounts {
    fn add(&mut self, product: Product, amount: u64) {
        match product {
            Product::Fprop => self.fprop += amount,
            Product::Dgrad => self.dgrad += amount,
            Product::Wgrad => self.wgrad += amount,
        }
    }

    /// MXFP8 products of one run of a program.
    pub fn gemms_of(program: &Program) -> ProductCounts {
        let mut counts = ProductCounts::default();
        for call in &program.calls {
            if let Op::MxGemm(op) = call.op.leading() {
                counts.add(op.product, 1);
            }
        }
        counts
    }

    /// Bytes of codes and scales that the products of one run of a program read.
    pub fn bytes_of(program: &Program) -> ProductCounts {
        let mut counts = ProductCounts::default();
        for call in &program.calls {
            if let Op::MxGemm(op) = call.op.leading() {
                let bytes: usize = call.operands[..4]
                    .iter()
                    .map(|operand| program.value(operand.value).range.bytes)
                    .sum();
                counts.add(op.product, bytes as u64);
            }
        }
        counts
    }

    pub(super) fn accumulate(&mut self, other: ProductCounts) {
        self.fprop += other.fprop;
        self.dgrad += other.dgrad;
        self.wgrad += other.wgrad;
    }
}
