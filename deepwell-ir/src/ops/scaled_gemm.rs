//! The GEMM of two quantized matrices with their scales.

use deepwell_precision::{Block, ElementFormat, GemmKind, QuantFormat, ScaleFormat};
use serde::{Deserialize, Serialize};

use super::quantize::planes_of;
use super::{Axis, Check, product};
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, OpError, Shape, Storage};

/// `out[M, N] = a[M, K] · b[N, K]ᵀ (+ bias)` with FP32 accumulation: the planes of a, the planes of
/// b, each quantized along K (, bias `[N]`) → `[M, N]`. Planes are as in [`Storage::planes`].
///
/// All three GEMMs of a linear layer have this form if each operand is quantized along the
/// contraction axis. Wgrad accumulates into FP32; fprop and dgrad write the activation type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScaledGemm {
    /// GEMM of the linear layer.
    pub kind: GemmKind,
    /// Storage type of the result of fprop and dgrad.
    pub output: DType,
    /// Whether a last operand is added to each row.
    pub bias: bool,
    /// Quantization format of `a`. Some kernels require scale blocks larger than the stored blocks.
    pub a: QuantFormat,
    /// Quantization format of `b`.
    pub b: QuantFormat,
}

impl ScaledGemm {
    /// Input index of the data of `b`; the scales follow.
    pub fn b_input(&self) -> usize {
        Storage::plane_count(&self.a)
    }

    /// Number of inputs that are operand planes. The bias, if present, is the next input.
    pub fn plane_inputs(&self) -> usize {
        self.b_input() + Storage::plane_count(&self.b)
    }
}

impl OpRule for ScaledGemm {
    fn name(&self) -> &'static str {
        "scaled_gemm"
    }

    fn attributes(&self) -> String {
        let mut text = self.kind.name().to_string();
        if self.bias {
            text += " bias";
        }
        // MXFP8 and the format's own blocks are the default and not printed.
        text += &families(&self.a, &self.b);
        if self.a.hadamard.is_some() {
            text += " hadamard";
        }
        let [a, b] = [self.a.block, self.b.block];
        if [a, b].iter().any(|&block| block != Block::row(self.a.scale.stored_every() as u16)) {
            text += &format!(" blocks={a}*{b}");
        }
        text
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let planes = ["", "_scale", "_tensor_scale"];
        let names = |operand: &str, count: usize| -> Vec<String> {
            planes[..count].iter().map(|plane| format!("{operand}{plane}")).collect()
        };
        let mut names =
            [names("a", Storage::plane_count(&self.a)), names("b", Storage::plane_count(&self.b))]
                .concat();
        if self.bias {
            names.push("bias".to_string());
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let check = Check::count(self.name(), inputs, &names)?;
        operands_multiply(&check, &self.a, &self.b)?;
        let (a, b) = (check.rank(0, 2)?, check.rank(self.b_input(), 2)?);
        for (first, format, data) in [(0, self.a, a), (self.b_input(), self.b, b)] {
            check.planes(first, &planes_of(&check, format, Axis::Row, [data[0], data[1]])?)?;
        }
        check.shape(self.b_input(), &Shape(vec![b[0], a[1]]))?;
        if self.bias {
            check.shape(self.plane_inputs(), &Shape(vec![b[0]]))?;
            check.dtype(self.plane_inputs(), self.output)?;
        }
        let shape = Shape(vec![a[0], b[0]]);
        Ok(vec![match self.kind {
            GemmKind::Wgrad => OutputType::accumulator("dw", shape),
            _ => OutputType::activation("", shape, self.output),
        }])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0]) * shapes[self.b_input()][0] as u64
    }

    fn unit(&self, _operands: &[DType]) -> MathUnit {
        unit_of(&self.a)
    }
}

/// Checks that one GEMM may read operands in both formats.
pub(super) fn operands_multiply(
    check: &Check<'_>,
    a: &QuantFormat,
    b: &QuantFormat,
) -> Result<(), OpError> {
    match a.multiplies_with(b) {
        true => Ok(()),
        false if a.is_mx() == b.is_mx() => {
            Err(check.error("operands with one transform", format!("{a} and {b}")))
        }
        false => {
            Err(check.error("operands of one format", format!("{} and {}", a.name(), b.name())))
        }
    }
}

/// The formats of both operands, after a space: one name if they are equal, nothing for MXFP8.
pub(super) fn families(a: &QuantFormat, b: &QuantFormat) -> String {
    match (a.is_of_family(b), a.is_of_family(&QuantFormat::MXFP8)) {
        (true, true) => String::new(),
        (true, false) => format!(" {}", a.name()),
        (false, _) => format!(" {}*{}", a.name(), b.name()),
    }
}

/// Unit that multiplies operands of a format. All MX formats share one, `kind::mxf8f6f4` of
/// Blackwell: it takes any two element formats at the rate of MXFP8.
pub(super) fn unit_of(format: &QuantFormat) -> MathUnit {
    match (format.element, format.scale) {
        (ElementFormat::E2M1, ScaleFormat::Ue4m3(_)) => MathUnit::Nvfp4,
        _ => MathUnit::Mxfp8,
    }
}
