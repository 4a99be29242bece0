//! Vector code for [`ScaleRule::MinError`], as defined in [`crate::min_error`], for many scales.
//!
//! [`ScaleRule::MinError`]: crate::ScaleRule::MinError

use super::lanes::Element;
use super::tile::TILE_COLS;
use crate::min_error::{LANES, is_smaller, sum_of_lanes};
use crate::{BLOCK, Source};

const _: () = assert!(LANES == BLOCK);

/// Factor of the scale one below `code`, or of `code` itself if it is 0.
#[inline(always)]
fn factor_below(code: u8) -> f32 {
    f32::from_bits((254 - u32::from(code.saturating_sub(1))) << 23)
}

/// Squared error of one element under a factor. Adding and subtracting 2^(e + 23 - m) rounds to a
/// unit of the code, see [`super::lanes`].
#[inline(always)]
fn error_lane<E: Element>(x: f32, factor: f32) -> f32 {
    let magnitude = (x * factor).to_bits() & 0x7FFF_FFFF;
    let clipped = magnitude.min(E::MAX_BITS);
    let binade = clipped.max(E::MIN_NORMAL_BITS) & 0x7F80_0000;
    let magic = f32::from_bits(binade + (E::SHIFT << 23));
    let rounded = (f32::from_bits(clipped) + magic) - magic;
    let difference = f32::from_bits(magnitude) - rounded;
    difference * difference
}

/// Chooses the scales of groups of `group_blocks` neighbouring blocks of one row, given their RCEIL
/// scales and factors. Non-finite groups keep their scale: their sums are not finite, and
/// comparisons are false.
#[inline(always)]
pub(super) fn refine_row<S: Source, E: Element>(
    blocks: &[[S; BLOCK]],
    group_blocks: usize,
    codes: &mut [u8],
    factors: &mut [f32],
) {
    let groups = blocks.chunks(group_blocks);
    let scales = codes.chunks_mut(group_blocks).zip(factors.chunks_mut(group_blocks));
    for (group, (codes, factors)) in groups.zip(scales) {
        let below = factor_below(codes[0]);
        let (mut larger, mut smaller) = ([0.0; LANES], [0.0; LANES]);
        for block in group {
            for lane in 0..LANES {
                let x = block[lane].to_f32();
                larger[lane] += error_lane::<E>(x, factors[0]);
                smaller[lane] += error_lane::<E>(x, below);
            }
        }
        if is_smaller(sum_of_lanes(smaller), sum_of_lanes(larger)) {
            codes.fill(codes[0].saturating_sub(1));
            factors.fill(below);
        }
    }
}

/// Chooses the scales of the columns of a tile, or of its squares.
#[inline(always)]
pub(super) fn refine_columns<E: Element, const G: usize>(
    values: &[[f32; TILE_COLS]; G],
    is_square: bool,
    codes: &mut [u8; TILE_COLS],
    factors: &mut [f32; TILE_COLS],
) {
    let below = codes.map(factor_below);
    let larger = errors_of_columns::<E, G>(values, factors);
    let smaller = errors_of_columns::<E, G>(values, &below);
    if !is_square {
        for column in 0..TILE_COLS {
            if is_smaller(smaller[column], larger[column]) {
                codes[column] = codes[column].saturating_sub(1);
                factors[column] = below[column];
            }
        }
        return;
    }
    for first in (0..TILE_COLS).step_by(G) {
        let square = first..first + G;
        let [smaller, larger] = [&smaller[square.clone()], &larger[square.clone()]].map(sum_of_run);
        if is_smaller(smaller, larger) {
            let code = codes[first].saturating_sub(1);
            codes[square.clone()].fill(code);
            factors[square].fill(below[first]);
        }
    }
}

/// The errors of `G` rows of each column, added in lanes.
#[inline(always)]
fn errors_of_columns<E: Element, const G: usize>(
    values: &[[f32; TILE_COLS]; G],
    factors: &[f32; TILE_COLS],
) -> [f32; TILE_COLS] {
    let mut lanes = [[0.0; TILE_COLS]; LANES];
    for rows in values.as_chunks::<LANES>().0 {
        for (sums, row) in lanes.iter_mut().zip(rows) {
            for column in 0..TILE_COLS {
                sums[column] += error_lane::<E>(row[column], factors[column]);
            }
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        let (sums, others) = lanes.split_at_mut(half);
        for (sums, others) in sums.iter_mut().zip(others) {
            for column in 0..TILE_COLS {
                sums[column] += others[column];
            }
        }
        half /= 2;
    }
    lanes[0]
}

/// Adds terms, a multiple of the lanes in number, as a run.
#[inline(always)]
fn sum_of_run(terms: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for terms in terms.as_chunks::<LANES>().0 {
        for (lane, term) in lanes.iter_mut().zip(terms) {
            *lane += term;
        }
    }
    sum_of_lanes(lanes)
}

#[cfg(test)]
mod tests {
    use crate::random::SplitMix64;
    use crate::{
        ElementFormat, Granularity, QuantFormat, ScaleRule, dequantize_rows, quantize_rows,
        scales_len,
    };

    const ROWS: usize = 256;
    const COLS: usize = 1024;

    /// Normally distributed numbers; one in `outlier_every`, if any, is 100 times as large.
    fn gaussian(outlier_every: Option<usize>) -> Vec<f32> {
        let mut random = SplitMix64(7);
        let mut unit = || ((random.draw() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        (0..ROWS * COLS)
            .map(|index| {
                let (radius, angle) =
                    ((-2.0 * unit().ln()).sqrt(), core::f64::consts::TAU * unit());
                let is_outlier = outlier_every.is_some_and(|every| index.is_multiple_of(every));
                (radius * angle.cos() * if is_outlier { 100.0 } else { 1.0 }) as f32
            })
            .collect()
    }

    fn squared_error(src: &[f32], format: &QuantFormat) -> f64 {
        let mut data = vec![0; ROWS * COLS];
        let mut scales = vec![0; scales_len(ROWS, COLS)];
        let mut back = vec![0.0_f32; ROWS * COLS];
        quantize_rows(src, ROWS, COLS, format, &mut data, &mut scales).unwrap();
        dequantize_rows(&data, &scales, ROWS, COLS, format, &mut back).unwrap();
        src.iter().zip(&back).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum()
    }

    /// Error reduction of the rule, against RCEIL and against the floor rule. In E4M3 negligible:
    /// an element has the same relative error under both scales unless it is subnormal.
    #[test]
    fn what_it_saves_on_normal_numbers() {
        use ElementFormat::{E2M1, E2M3, E3M2, E4M3, E5M2};
        use Granularity::{G32, G128};
        for (element, granularity, outlier_every, of_rceil, of_floor) in [
            (E4M3, G32, None, 1.0, 0.81059),
            (E4M3, G128, None, 1.0, 0.97610),
            (E4M3, G32, Some(64), 1.0, 0.40779),
            (E5M2, G32, None, 1.0, 0.95628),
            (E3M2, G32, None, 1.0, 0.95628),
            (E2M3, G32, None, 0.99267, 0.98699),
            (E2M1, G32, None, 0.93619, 0.93954),
            (E2M1, G128, None, 0.81802, 0.99906),
            (E2M1, G32, Some(64), 0.99212, 0.65971),
        ] {
            let src = gaussian(outlier_every);
            let format = QuantFormat::mx(element).with_granularity(granularity);
            let [rceil, floor, least] =
                [ScaleRule::Rceil, ScaleRule::OcpFloor, ScaleRule::MinError]
                    .map(|rule| squared_error(&src, &format.with_scale_rule(rule)));
            let what = alloc::format!("{element} {granularity} {outlier_every:?}");
            let is_close = |got: f64, expected: f64| (got / expected - 1.0).abs() < 1e-4;
            assert!(least <= rceil, "{what}");
            assert!(is_close(least / rceil, of_rceil), "{what}: {} of rceil", least / rceil);
            assert!(is_close(least / floor, of_floor), "{what}: {} of floor", least / floor);
        }
    }
}
