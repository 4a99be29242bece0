//! Several GEMMs as one op: cores of fused kernels beyond a single GEMM.

use serde::{Deserialize, Serialize};

use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Op, OpError};

/// Two GEMMs with the same `a`, for example gate and up projection: with a [`super::SwiGlu`]
/// epilogue, neither result is stored.
///
/// Inputs: the inputs of `gemm`, then the inputs of the second `gemm` without the planes of `a`.
/// Outputs: both results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DualGemm {
    /// Op of both GEMMs: a [`super::Linear`] or a [`super::ScaledGemm`].
    pub gemm: Box<Op>,
}

impl DualGemm {
    /// Number of operands of `gemm` that form `a`; `None` for any other op.
    fn shared_inputs(&self) -> Option<usize> {
        match &*self.gemm {
            Op::Linear(_) => Some(1),
            Op::ScaledGemm(op) => Some(op.b_input()),
            _ => None,
        }
    }

    /// Operand indices of the two GEMMs among `inputs` inputs; `None` if the number does not fit.
    pub fn operands(&self, inputs: usize) -> Option<[Vec<usize>; 2]> {
        let shared = self.shared_inputs()?;
        let own = inputs.checked_sub(shared).filter(|own| own.is_multiple_of(2))? / 2;
        let of = |start: usize| (0..shared).chain(start..start + own).collect();
        Some([of(shared), of(shared + own)])
    }
}

impl OpRule for DualGemm {
    fn name(&self) -> &'static str {
        "dual_gemm"
    }

    fn attributes(&self) -> String {
        let attributes = self.gemm.rule().attributes();
        [&*self.gemm.name(), &attributes].join(" ").trim_end().to_string()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let error = |expected: &str, got: String| OpError {
            op: self.name(),
            expected: expected.to_string(),
            got,
        };
        if self.shared_inputs().is_none() {
            let got = format!("`{}`", self.gemm.name());
            return Err(error("two of `linear` or of a GEMM of quantized operands", got));
        }
        let of = self.operands(inputs.len()).ok_or_else(|| {
            error("one `a`, and as many operands for either GEMM", inputs.len().to_string())
        })?;
        let mut outputs = Vec::with_capacity(2);
        for (suffix, operands) in ["first", "second"].into_iter().zip(of) {
            let operands: Vec<TensorType> =
                operands.into_iter().map(|index| inputs[index].clone()).collect();
            for output in self.gemm.rule().infer(&operands)? {
                outputs.push(OutputType { suffix: suffix.into(), ..output });
            }
        }
        Ok(outputs)
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let of = self.operands(shapes.len().saturating_sub(2)).unwrap_or_default();
        of.iter()
            .map(|operands| {
                let operands: Vec<Vec<usize>> =
                    operands.iter().map(|&index| shapes[index].clone()).collect();
                self.gemm.rule().flops(&operands)
            })
            .sum()
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        self.gemm.rule().unit(operands)
    }
}
