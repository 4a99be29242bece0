//! Stochastic rounding of the elements of a quantized operand.

use deepwell_precision::QuantFormat;
use serde::{Deserialize, Serialize};

use super::quantize::{grouped_planes_of, groups_of, planes_of};
use super::{Axis, Check, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, OpError, PlaneType, Shape, Storage};

/// x `[R, C]`, the scales of x quantized along an axis (and the tensor scale, if the format has
/// one), key u64 `[2]` → the data, `[R, C]` rowwise and `[C, R]` columnwise. Each element is
/// rounded away from zero with a probability that makes the expectation equal to the scaled value.
/// As of [`super::Quantize`], a last input amax f32 `[1]` says that x is a slice of a tensor, and a
/// last input offsets i32 `[G + 1]` that its rows are in groups.
///
/// Scales, and the counters that guards read, come from the preceding [`super::Quantize`], which
/// rounds to nearest and may be fused with the op that produces x.
///
/// The random word of an element is [`deepwell_precision::Philox`] at the element's row-major index
/// in the operand, with seed `key[0]`, which differs for each micro-batch and data-parallel rank,
/// and a stream given by the step `key[1]` (low 32 bits) and the name of the call
/// ([`StochasticRound::stream`]). A step is therefore reproducible bit for bit with any number of
/// threads and after a resume, and no two operands share random words.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StochasticRound {
    /// Quantization format; elements are rounded stochastically.
    pub format: QuantFormat,
    /// Quantization axis, [`Axis::Row`] or [`Axis::Column`].
    pub axis: Axis,
    /// Columns of the whole tensor that x has, if x is a slice; random words are then those of the
    /// elements' indices in the whole operand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<PartOfColumns>,
}

/// One of several equal parts of the columns of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartOfColumns {
    /// Place among the parts.
    pub place: usize,
    /// Number of parts.
    pub parts: usize,
}

impl StochasticRound {
    /// Input index of the key.
    pub fn key_input(&self) -> usize {
        Storage::plane_count(&self.format)
    }

    /// Stream of a call without the step: a hash of the call's name in the upper 32 bits.
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
            if inputs.len() > names.len() {
                names.push("amax or offsets");
            }
        }
        let check = Check::count(self.name(), inputs, &names)?;
        check.same_float(&[0])?;
        check.dtype(self.key_input(), DType::U64)?;
        check.shape(self.key_input(), &Shape::new([2]))?;
        let x = check.rank(0, 2)?;
        if !self.format.is_stochastic() {
            return Err(check.error("stochastic rounding", self.format.to_string()));
        }
        let shape = [x[0], x[1]];
        let mut planes = match groups_of(&check, self.key_input() + 1)? {
            Some(groups) => grouped_planes_of(&check, self.format, self.axis, groups, shape)?,
            None => planes_of(&check, self.format, self.axis, shape)?,
        };
        let PlaneType { dtype, shape, .. } = planes.remove(0);
        check.planes(1, &planes)?;
        Ok(vec![OutputType { suffix: "".into(), shape, dtype, kind: OutputKind::Copy }])
    }

    /// One multiplication, comparison and addition per element; random bits are not floating-point
    /// operations.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        3 * product(&shapes[0])
    }
}
