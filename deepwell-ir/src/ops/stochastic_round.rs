//! The elements of a quantized copy once more, rounded at random.

use serde::{Deserialize, Serialize};

use super::quantize::scales_shape;
use super::{Axis, Check, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, OpError, Shape};

/// x `[R, C]`, the scales of a copy of x, key u64 `[2]` → data of that copy, `[R, C]` rowwise and
/// `[C, R]` columnwise, each element rounded away from zero with a probability that makes its
/// expectation the scaled value.
///
/// Scales, and the counters that guards look at, are those of the [`super::Quantize`] before it,
/// which need not know of chance and may be fused with the op that makes x.
///
/// The random word of an element is that of [`deepwell_precision::Philox`] at its row-major index
/// in the copy, under the seed `key[0]`, in a stream that the step `key[1]` (its low 32 bits) and
/// the name of the call ([`StochasticRound::stream`]) tell apart. So a step repeats its bits on any
/// number of threads and when a run is resumed, and no two copies share theirs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StochasticRound {
    /// Which copy, [`Axis::Row`] or [`Axis::Column`].
    pub axis: Axis,
}

impl StochasticRound {
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
        format!("axis={}", self.axis.name())
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "scales", "key"])?;
        check.same_float(&[0])?;
        check.dtype(1, DType::E8m0)?;
        check.dtype(2, DType::U64)?;
        check.shape(2, &Shape::new([2]))?;
        let x = check.rank(0, 2)?;
        let (outer, depth) = match self.axis {
            Axis::Row => (x[0], x[1]),
            Axis::Column => (x[1], x[0]),
            Axis::Both => return Err(check.error("axis row or column", "both")),
        };
        check.shape(1, &Shape(scales_shape(outer, depth)))?;
        Ok(vec![OutputType {
            suffix: "".into(),
            shape: Shape(vec![outer, depth]),
            dtype: DType::E4m3,
            kind: OutputKind::Copy,
        }])
    }

    /// A multiplication, a comparison and an addition for each element; the random bits are no
    /// floating-point operations.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        3 * product(&shapes[0])
    }
}
