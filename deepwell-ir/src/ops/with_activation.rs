//! A product of a linear layer and a function of its elements, in one kernel.

use serde::{Deserialize, Serialize};

use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Op, OpError, Product};

/// `product`, then `activation` of its result, in one kernel that need not write the result itself
/// where nobody else reads it.
///
/// Takes the product's inputs, then those that the activation has beside the product's result: the
/// input of the forward pass for a [`crate::ops::GeluBackward`]. Gives the product's result if it
/// is kept, then the activation's.
///
/// The fused result is bit for bit that of the two ops one after the other: the activation sees
/// the product as it would have been stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WithActivation {
    /// What is multiplied.
    pub product: Box<Op>,
    /// The function of its elements, whose first input the product is.
    pub activation: Box<Op>,
    /// Whether the product's result is an output too: another node reads it.
    pub keep: bool,
}

/// Pairs that may be fused: the name of the fused op, and of it with a quantization behind.
const fn fused_form(product: &Op, activation: &Op) -> Option<(&'static str, &'static str)> {
    Some(match (product, activation) {
        (Op::Linear(_), Op::Gelu(_)) => ("linear_gelu", "linear_gelu_quantize"),
        (Op::LinearInputGrad(_), Op::GeluBackward(_)) => {
            ("linear_input_grad_gelu_backward", "linear_input_grad_gelu_backward_quantize")
        }
        (Op::MxGemm(op), Op::Gelu(_)) if matches!(op.product, Product::Fprop) => {
            ("mx_gemm_gelu", "mx_gemm_gelu_quantize")
        }
        (Op::MxGemm(op), Op::GeluBackward(_)) if matches!(op.product, Product::Dgrad) => {
            ("mx_gemm_gelu_backward", "mx_gemm_gelu_backward_quantize")
        }
        _ => return None,
    })
}

impl WithActivation {
    /// Whether there is a fused form of a product and what follows it at all.
    pub fn is_pair(product: &Op, activation: &Op) -> bool {
        fused_form(product, activation).is_some()
    }

    /// How many outputs there are.
    pub fn output_count(&self) -> usize {
        1 + usize::from(self.keep)
    }

    /// How many of `inputs` operands are the product's.
    pub fn product_input_count(&self, inputs: usize) -> usize {
        let others = usize::from(matches!(*self.activation, Op::GeluBackward(_)));
        inputs.saturating_sub(others)
    }

    /// The name of the op with a quantization of its outputs.
    pub(crate) fn quantized_name(&self) -> Option<&'static str> {
        fused_form(&self.product, &self.activation).map(|(_, name)| name)
    }
}

impl OpRule for WithActivation {
    /// The two names; `with_activation` where there is no such op.
    fn name(&self) -> &'static str {
        fused_form(&self.product, &self.activation).map_or("with_activation", |(name, _)| name)
    }

    fn attributes(&self) -> String {
        let of_product = self.product.rule().attributes();
        let of_activation = self.activation.rule().attributes();
        let kept = if self.keep { "product kept" } else { "" };
        let mut parts = vec![of_product.as_str(), of_activation.as_str(), kept];
        parts.retain(|part| !part.is_empty());
        parts.join("; ")
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        if fused_form(&self.product, &self.activation).is_none() {
            return Err(OpError {
                op: self.name(),
                expected: "a product forward with `gelu`, or of the input's gradient with \
                           `gelu_backward`"
                    .to_string(),
                got: format!("`{}` with `{}`", self.product.name(), self.activation.name()),
            });
        }
        let (of_product, others) = inputs.split_at(self.product_input_count(inputs.len()));
        let mut outputs = self.product.rule().infer(of_product)?;
        let product = outputs
            .first()
            .map(|output| TensorType { shape: output.shape.clone(), dtype: output.dtype });
        let of_activation: Vec<TensorType> =
            product.into_iter().chain(others.iter().cloned()).collect();
        for output in &mut outputs {
            output.suffix = "product".into();
        }
        outputs.truncate(usize::from(self.keep));
        outputs.extend(self.activation.rule().infer(&of_activation)?);
        Ok(outputs)
    }

    /// The sum of both.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let of_activation = shapes.last().map_or(0, |result| {
            self.activation.rule().flops(&[result.clone(), result.clone(), result.clone()])
        });
        self.product.rule().flops(shapes) + of_activation
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        self.product.rule().unit(operands)
    }
}

#[cfg(test)]
mod tests {
    use deepwell_precision::MxSpec;

    use super::*;
    use crate::ops::{Gelu, GeluBackward, Linear, LinearInputGrad, LinearWeightGrad, MxGemm};
    use crate::{Dim, Shape};

    fn fused(product: impl Into<Op>, activation: impl Into<Op>, keep: bool) -> WithActivation {
        let (product, activation) = (Box::new(product.into()), Box::new(activation.into()));
        WithActivation { product, activation, keep }
    }

    fn mx_gemm(product: Product) -> MxGemm {
        let spec = MxSpec::default();
        MxGemm { product, output: DType::Bf16, bias: false, a: spec, b: spec }
    }

    fn bf16(rows: impl Into<Dim>, columns: usize) -> TensorType {
        TensorType { shape: Shape(vec![rows.into(), columns.into()]), dtype: DType::Bf16 }
    }

    #[test]
    fn outputs_are_the_kept_product_then_the_activation() {
        let gelu = Gelu { tanh: true };
        let bias = TensorType { shape: Shape::new([96]), dtype: DType::Bf16 };
        let inputs = [bf16(Dim::TOKENS, 64), bf16(96usize, 64), bias];
        for keep in [false, true] {
            let op = fused(Linear { bias: true }, gelu.clone(), keep);
            assert_eq!(op.name(), "linear_gelu");
            let outputs = op.infer(&inputs).unwrap();
            assert_eq!(outputs.len(), op.output_count());
            let expected = Shape(vec![Dim::TOKENS, 96usize.into()]);
            assert!(outputs.iter().all(|output| output.shape == expected), "{outputs:?}");
            let suffixes: Vec<&str> = outputs.iter().map(|output| &*output.suffix).collect();
            assert_eq!(suffixes, if keep { vec!["product", ""] } else { vec![""] });
        }
        // The gradient of a gelu reads what went into it: as wide as the product.
        let op = fused(LinearInputGrad {}, GeluBackward { tanh: false }, false);
        let dy_w = [bf16(Dim::TOKENS, 96), bf16(96usize, 64)];
        let with = |x: TensorType| [dy_w[0].clone(), dy_w[1].clone(), x];
        assert_eq!(op.infer(&with(bf16(Dim::TOKENS, 64))).unwrap().len(), 1);
        assert!(op.infer(&with(bf16(Dim::TOKENS, 96))).is_err());
    }

    #[test]
    fn work_is_that_of_both() {
        let op = fused(Linear { bias: false }, Gelu { tanh: false }, true);
        let shapes = [vec![32, 64], vec![96, 64], vec![32, 96], vec![32, 96]];
        assert_eq!(op.flops(&shapes), 2 * 32 * 64 * 96 + 8 * 32 * 96);
    }

    #[test]
    fn pairs_that_belong_together() {
        let (gelu, backward) = (Gelu { tanh: false }, GeluBackward { tanh: false });
        let check = |product: Op, activation: Op, expected: Option<&str>| {
            let op = fused(product, activation, false);
            assert_eq!(WithActivation::is_pair(&op.product, &op.activation), expected.is_some());
            assert_eq!(op.name(), expected.unwrap_or("with_activation"));
            if expected.is_none() {
                let message = op.infer(&[]).unwrap_err().to_string();
                assert!(message.contains(op.product.name()), "{message}");
            }
        };
        check(mx_gemm(Product::Fprop).into(), gelu.clone().into(), Some("mx_gemm_gelu"));
        let name = "mx_gemm_gelu_backward";
        check(mx_gemm(Product::Dgrad).into(), backward.clone().into(), Some(name));
        check(mx_gemm(Product::Wgrad).into(), gelu.clone().into(), None);
        check(mx_gemm(Product::Fprop).into(), backward.clone().into(), None);
        check(LinearWeightGrad {}.into(), gelu.into(), None);
        check(Linear { bias: false }.into(), backward.into(), None);
    }
}
