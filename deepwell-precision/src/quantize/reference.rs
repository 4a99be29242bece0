//! Reference quantization, one element at a time, for tests of the vector kernels.

use crate::quantize::MxSpec;
use crate::{BlockShape, ElementFormat, Overflow, QuantStats, Rounding, ScaleRule};
use crate::{e4m3, e5m2, e8m0};

/// Quantizes the `outer` x `contraction` matrix whose element (o, k) is `at(o, k)`: the source or,
/// if `by_column`, its transpose.
pub(super) fn quantize(
    at: impl Fn(usize, usize) -> f32,
    (outer, contraction): (usize, usize),
    by_column: bool,
    spec: &MxSpec,
    data: &mut [u8],
    scales: &mut [u8],
) -> QuantStats {
    let mut stats = QuantStats { elements: (outer * contraction) as u64, ..Default::default() };
    let group = spec.granularity.elements();
    let group_outer = match spec.block {
        BlockShape::Row => 1,
        BlockShape::Square => group,
    };
    let encode = |x| spec.element.encode(x, Rounding::NearestEven, Overflow::Saturate);
    let (element_max, exponent_max) = match spec.element {
        ElementFormat::E4M3 => (e4m3::MAX, 8),
        ElementFormat::E5M2 => (e5m2::MAX, 15),
        ElementFormat::E3M2 => (28.0, 4),
        ElementFormat::E2M3 => (7.5, 2),
        ElementFormat::E2M1 => (6.0, 2),
    };
    let blocks = contraction.div_ceil(32);
    for outer_start in (0..outer).step_by(group_outer) {
        let outer_end = (outer_start + group_outer).min(outer);
        for k_start in (0..contraction).step_by(group) {
            let k_end = (k_start + group).min(contraction);
            let indices = || {
                (outer_start..outer_end).flat_map(move |o| (k_start..k_end).map(move |k| (o, k)))
            };
            // The order of bits is finite, infinity, NaN.
            let mut amax_bits = 0;
            for (o, k) in indices() {
                let x = at(o, k).abs();
                amax_bits = amax_bits.max(x.to_bits());
                if x.is_finite() {
                    stats.amax = stats.amax.max(x);
                } else {
                    stats.nonfinite += 1;
                }
            }
            let amax = f32::from_bits(amax_bits);
            // The columns of the source in sequence, or a single row along K.
            let (height, width) = (outer_end - outer_start, k_end - k_start);
            let (elements, run): (Vec<f32>, usize) = if by_column || height == 1 {
                (indices().map(|(o, k)| at(o, k)).collect(), width)
            } else {
                let columns = k_start..k_end;
                let of_column = |k| (outer_start..outer_end).map(move |o| (o, k));
                (columns.flat_map(of_column).map(|(o, k)| at(o, k)).collect(), height)
            };
            let code = e8m0::from_block(&elements, run, spec.element, spec.scale_rule);
            let wanted_below_range = match spec.scale_rule {
                // 2^-128.
                ScaleRule::Rceil | ScaleRule::MinError => {
                    amax / element_max <= f32::from_bits(0x0020_0000)
                }
                ScaleRule::OcpFloor => amax < 2.0_f32.powi(exponent_max - 127),
            };
            stats.scale_clamps += u64::from(amax > 0.0 && wanted_below_range);
            let reciprocal = e8m0::reciprocal(code);
            for (o, k) in indices() {
                let x = at(o, k);
                let scaled = x * reciprocal;
                let element = encode(scaled);
                data[o * contraction + k] = element;
                scales[o * blocks + k / 32] = code;
                stats.underflows += u64::from(x != 0.0 && spec.element.decode(element) == 0.0);
                stats.saturations += u64::from(
                    spec.scale_rule != ScaleRule::Rceil
                        && x.is_finite()
                        && scaled.abs() > element_max,
                );
            }
        }
    }
    stats
}
