//! The product of two block-scaled matrices.

use deepwell_precision::{BlockShape, ElementFormat, MxSpec};
use serde::{Deserialize, Serialize};

use super::quantize::scales_shape;
use super::{Check, product};
use crate::op::{MathUnit, OpRule, OutputType, Product, TensorType};
use crate::{DType, OpError, Shape};

/// `out = a · bᵀ (+ bias)` with FP32 accumulation: a codes `[M, K]`, a scales
/// `[M/128, K/128, 512]`, b codes `[N, K]`, b scales `[N/128, K/128, 512]` (, bias `[N]`) →
/// `[M, N]`. Scales, one for 32 codes along K, lie in tiles, see
/// [`deepwell_precision::scale_tiles`].
///
/// All three products of a linear layer have this form once each operand is quantized along its
/// own contraction. Wgrad accumulates into FP32; the others write the activation type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MxGemm {
    /// Which product of the layer.
    pub product: Product,
    /// Storage of the result of fprop and dgrad.
    pub output: DType,
    /// Whether a fifth operand is added to each row.
    pub bias: bool,
    /// How `a` was quantized. Kernels that scale by larger blocks than the stored ones ask for it.
    pub a: MxSpec,
    /// How `b` was quantized.
    pub b: MxSpec,
}

/// Rows and columns of the blocks that share an exponent, `1x128` for example.
fn extent(spec: MxSpec) -> String {
    let elements = spec.granularity.elements();
    match spec.block {
        BlockShape::Square => format!("{elements}x{elements}"),
        _ => format!("1x{elements}"),
    }
}

impl OpRule for MxGemm {
    fn name(&self) -> &'static str {
        "mx_gemm"
    }

    fn attributes(&self) -> String {
        let mut text = self.product.name().to_string();
        if self.bias {
            text += " bias";
        }
        // The blocks of the format itself go without saying.
        let blocks = [self.a, self.b].map(extent);
        if blocks.iter().any(|block| block != "1x32") {
            text += &format!(" blocks={}*{}", blocks[0], blocks[1]);
        }
        text
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let mut names = vec!["a", "a_scale", "b", "b_scale"];
        if self.bias {
            names.push("bias");
        }
        let check = Check::count(self.name(), inputs, &names)?;
        let a = check.rank(0, 2)?;
        let b = check.rank(2, 2)?;
        for (index, spec) in [(0, self.a), (2, self.b)] {
            if spec.element != ElementFormat::E4M3 {
                return Err(check.error("element format e4m3", spec.element.name()));
            }
            check.dtype(index, DType::E4m3)?;
            check.dtype(index + 1, DType::E8m0)?;
            let codes = &inputs[index].shape.0;
            check.shape(index + 1, &Shape(scales_shape(codes[0], codes[1])))?;
        }
        check.shape(2, &Shape(vec![b[0], a[1]]))?;
        if self.bias {
            check.shape(4, &Shape(vec![b[0]]))?;
            check.dtype(4, self.output)?;
        }
        let shape = Shape(vec![a[0], b[0]]);
        Ok(vec![match self.product {
            Product::Wgrad => OutputType::accumulator("dw", shape),
            _ => OutputType::activation("", shape, self.output),
        }])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0]) * shapes[2][0] as u64
    }

    fn unit(&self, _operands: &[DType]) -> MathUnit {
        MathUnit::Mxfp8
    }
}
