//! The scale rule MIN_ERROR by its definition: which of two exponents gives the smaller error.
//!
//! The first candidate is the exponent `c` of RCEIL, under which nothing saturates, the second is
//! `c - 1`, under which what lies above the largest element becomes the largest element, and small
//! elements are twice as fine. A larger exponent than `c` is never better: it makes no element
//! finer. The second candidate is taken where its error is smaller; a tie leaves `c`, as do `c = 0`
//! and a block that is not finite.
//!
//! The result is the same to the bit wherever it is computed, for all arithmetic is in f32, to
//! nearest even, without contraction:
//!
//! - the error of an element under a scale is `d * d`, with `d = y - q`, `y = x * 2^-exponent` and
//!   `q` the number that `y` is rounded to;
//! - the errors of a run of elements are added in 32 lanes, element i in lane i mod 32 in the order
//!   of i, and then the lanes pairwise: lanes 0 to 15 take lanes 16 to 31, 0 to 7 take 8 to 15, and
//!   so on; what is not there counts as zero;
//! - a block along K is one run. The columns of the source within a square block are a run each,
//!   whichever way it is quantized, and their sums are added as a run of elements is;
//! - the sums are in squares of two units, so `c - 1` is taken where its sum is less than 4 times
//!   that of `c`.

use crate::e8m0;
use crate::{ElementFormat, Overflow, Rounding};

/// Lanes in which the errors of a run are added.
pub(crate) const LANES: usize = 32;

/// The lanes added pairwise, halves first.
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

/// The terms of a run added as the rule says.
fn sum_of_run(terms: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0.0; LANES];
    for (index, term) in terms.enumerate() {
        lanes[index % LANES] += term;
    }
    sum_of_lanes(lanes)
}

/// Whether a sum of errors under the smaller exponent is less than one under the larger, each in
/// squares of its own unit.
#[inline(always)]
pub(crate) fn is_smaller(smaller_exponent: f32, larger_exponent: f32) -> bool {
    smaller_exponent < 4.0 * larger_exponent
}

/// The scale of a finite block whose scale by RCEIL is `rceil`; its elements one run after the
/// other.
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
