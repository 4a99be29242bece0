//! The elements of a quantized operand once more, rounded at random.

use deepwell_precision::QuantFormat;
use serde::{Deserialize, Serialize};

use super::quantize::planes_of;
use super::{Axis, Check, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, OpError, PlaneType, Shape, Storage};

/// x `[R, C]`, the scales of x quantized along an axis (and the tensor scale, where the format has
/// one), key u64 `[2]` → the data, `[R, C]` rowwise and
/// `[C, R]` columnwise, each element rounded away from zero with a probability that makes its
/// expectation the scaled value.
///
/// Scales, and the counters that guards look at, are those of the [`super::Quantize`] before it,
/// which need not know of chance and may be fused with the op that makes x.
///
/// The random word of an element is that of [`deepwell_precision::Philox`] at its row-major index
/// in the operand, under the seed `key[0]`, in a stream that the step `key[1]` (its low 32 bits)
/// and the name of the call ([`StochasticRound::stream`]) tell apart. So a step repeats its bits on
/// any number of threads and when a run is resumed, and no two operands share theirs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StochasticRound {
    /// How; elements are rounded at random.
    pub format: QuantFormat,
    /// Along which axis, [`Axis::Row`] or [`Axis::Column`].
    pub axis: Axis,
}

impl StochasticRound {
    /// Which input the key is: the last.
    pub fn key_input(&self) -> usize {
        Storage::plane_count(&self.format)
    }

    /// The stream of a call without its step: a hash of the call's name in the upper 32 bits.
    pub fn stream(call: &str) -> u64 {
        // FNV-1a.
        let hash = call
            .bytes()
            .fold(0x811C_9DC5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        u64::from(hash) << 32
    }
}

impl OpRule for StochasticRound {
    fn name(&self) -> &'static str {
        "stochastic_round"
    }

    fn attributes(&self) -> String {
        format!("axis={} {}", self.axis.name(), self.format)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let mut names = vec!["x", "scales", "key"];
        if self.key_input() == 3 {
            names.insert(2, "tensor_scale");
        }
        let check = Check::count(self.name(), inputs, &names)?;
        check.same_float(&[0])?;
        check.dtype(self.key_input(), DType::U64)?;
        check.shape(self.key_input(), &Shape::new([2]))?;
        let x = check.rank(0, 2)?;
        if !self.format.is_stochastic() {
            return Err(check.error("stochastic rounding", self.format.to_string()));
        }
        let mut planes = planes_of(&check, self.format, self.axis, [x[0], x[1]])?;
        let PlaneType { dtype, shape, .. } = planes.remove(0);
        check.planes(1, &planes)?;
        Ok(vec![OutputType { suffix: "".into(), shape, dtype, kind: OutputKind::Copy }])
    }

    /// A multiplication, a comparison and an addition for each element; the random bits are no
    /// floating-point operations.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        3 * product(&shapes[0])
    }
}
