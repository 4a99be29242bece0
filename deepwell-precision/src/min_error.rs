//! Reference definition of the scale rule MIN_ERROR: the one of two exponents with the smaller
//! error.
//!
//! The first candidate is the exponent `c` of RCEIL, which saturates nothing. The second is `c -
//! 1`: larger values saturate to the largest element, and small elements are twice as fine. An
//! exponent larger than `c` is never better, as no element becomes finer. The second candidate is
//! taken if its error is smaller; a tie keeps `c`, as do `c = 0` and a block that is not finite.
//!
//! The result is bit-identical on all backends, because all arithmetic is in f32, to nearest even,
//! without contraction:
//!
//! - the error of an element under a scale is `d * d`, with `d = y - q`, `y = x * 2^-exponent` and
//!   `q` the rounded value of `y`;
//! - the errors of a run of elements are added in 32 lanes, element i in lane i mod 32 in the order
//!   of i, and then the lanes pairwise: lanes 0 to 15 take lanes 16 to 31, 0 to 7 take 8 to 15, and
//!   so on; missing elements count as zero;
//! - a block along K is one run. In a square block each column of the source is a run, for both
//!   directions of quantization, and the sums of the runs are added like a run of elements;
//! - the two sums are in units whose squares differ by a factor of 4, so `c - 1` is taken if its
//!   sum is less than 4 times that of `c`.

use crate::e8m0;
use crate::{ElementFormat, Overflow, Rounding};

/// Lanes in which the errors of a run are added.
pub(crate) const LANES: usize = 32;

/// Adds the lanes pairwise, halves first.
#[inline(always)]
pub(crate) fn sum_of_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Adds the terms of a run in the order of the rule.
fn sum_of_run(terms: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0.0; LANES];
    for (index, term) in terms.enumerate() {
        lanes[index % LANES] += term;
    }
    sum_of_lanes(lanes)
}

/// Whether the error sum under the smaller exponent is less than the sum under the larger exponent,
/// each in squares of its own unit.
#[inline(always)]
pub(crate) fn is_smaller(smaller_exponent: f32, larger_exponent: f32) -> bool {
    smaller_exponent < 4.0 * larger_exponent
}

/// Scale of a finite block whose RCEIL scale is `rceil`; its runs are contiguous.
pub(crate) fn scale(elements: &[f32], run: usize, element: ElementFormat, rceil: u8) -> u8 {
    let Some(smaller) = rceil.checked_sub(1) else { return rceil };
    let error = |scale: u8| {
        let reciprocal = e8m0::reciprocal(scale);
        let of_element = |x: &f32| {
            let scaled = x * reciprocal;
            let code = element.encode(scaled, Rounding::NearestEven, Overflow::Saturate);
            let difference = scaled - element.decode(code);
            difference * difference
        };
        let runs = elements.chunks(run.max(1)).map(|run| sum_of_run(run.iter().map(of_element)));
        sum_of_run(runs)
    };
    if is_smaller(error(smaller), error(rceil)) { smaller } else { rceil }
}
