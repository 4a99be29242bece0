//! Block quantization of a matrix to both operands that its GEMMs read.

use serde::{Deserialize, Serialize};

use super::quantize::planes_of;
use super::{Axis, Check, Quantize, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, OpError, PlaneType, Shape, Storage};

/// x `[R, C]`, and a key u64 `[2]` if an operand is rounded stochastically → the planes of the
/// rowwise operand and its counters, then the planes of the columnwise operand and its counters.
///
/// One op in the place of up to four: a [`Quantize`] along each axis, and a
/// [`super::StochasticRound`] of each operand. The formats differ, as only one operand has a
/// Hadamard transform, a selection of 4 or 6, or a rounding of its own. All outputs equal those of
/// the separate ops, bit for bit. The counters are those of rounding to nearest. x is a whole
/// tensor, and the formats have a tensor scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantizeOperands {
    /// The rowwise operand; its format may round stochastically.
    pub row: Quantize,
    /// The columnwise operand; its format may round stochastically.
    pub column: Quantize,
    /// Stream of random words of each operand ([`super::StochasticRound::stream`]); `None` for an
    /// operand that is rounded to nearest.
    pub streams: [Option<u64>; 2],
}

impl QuantizeOperands {
    /// The operands, in output order.
    pub fn operands(&self) -> [&Quantize; 2] {
        [&self.row, &self.column]
    }

    /// Whether the op has a key.
    pub fn has_key(&self) -> bool {
        self.streams.iter().any(Option::is_some)
    }

    /// Number of outputs of one operand.
    pub fn outputs_of_operand(&self) -> usize {
        self.row.output_count()
    }
}

impl OpRule for QuantizeOperands {
    fn name(&self) -> &'static str {
        "quantize_operands"
    }

    fn attributes(&self) -> String {
        format!("row {}; column {}", self.row.format, self.column.format)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = &["x", "key"][..1 + usize::from(self.has_key())];
        let check = Check::count(self.name(), inputs, names)?;
        check.same_float(&[0])?;
        if self.has_key() {
            check.dtype(1, DType::U64)?;
            check.shape(1, &Shape::new([2]))?;
        }
        let x = check.rank(0, 2)?;
        let mut outputs = Vec::new();
        let axes = [Axis::Row, Axis::Column];
        for ((quantize, axis), stream) in self.operands().into_iter().zip(axes).zip(self.streams) {
            let format = quantize.format;
            if quantize.axis != axis || Storage::plane_count(&format) != 3 {
                let expected = format!("a format with a tensor scale, axis {}", axis.name());
                return Err(check.error(expected, quantize.attributes()));
            }
            if format.is_stochastic() != stream.is_some() {
                let expected = "a stream for an operand that is rounded stochastically, only";
                return Err(check.error(expected, format!("{stream:?} for {format}")));
            }
            for PlaneType { plane, dtype, shape } in planes_of(&check, format, axis, [x[0], x[1]])?
            {
                let prefix = if axis == Axis::Column { "col" } else { "row" };
                let suffix = format!("{prefix}{}", plane.suffix()).into();
                outputs.push(OutputType { suffix, shape, dtype, kind: OutputKind::Copy });
            }
            outputs.push(OutputType {
                suffix: format!("{}.stats", axis.name()).into(),
                shape: Shape(vec![Quantize::STATISTICS.into()]),
                dtype: DType::U64,
                kind: OutputKind::Copy,
            });
        }
        Ok(outputs)
    }

    fn result_count(&self) -> usize {
        2 * self.outputs_of_operand()
    }

    /// Amax, scaling and rounding for each element and operand; a stochastic rounding adds two
    /// operations. Random bits are not floating-point operations.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let rounded = self.streams.iter().flatten().count() as u64;
        (3 * 2 + 2 * rounded) * product(&shapes[0])
    }
}
