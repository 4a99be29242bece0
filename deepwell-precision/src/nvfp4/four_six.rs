//! Selection of a block scale that maps the block's largest magnitude to 4 or to 6.
//!
//! E2M1 has no value between 4 and 6, so a block whose elements lie near 5/6 of its largest
//! magnitude loses less with the largest magnitude at 4. The block scale is then half as large
//! again. Source: "Four Over Six", arXiv 2512.02010.

use super::kernel::{Constants, Scales};
use super::{BLOCK, ScaleOrder};
use crate::dequantize::decode_e4m3;
use crate::quantize::lanes::{E2m1, INFINITY_BITS, encode_lane};
use crate::{QuantStats, Source, e2m1, ue4m3};

/// Replaces scales of the blocks of a row by scales that map to 4, where the sum of squared errors
/// is smaller. `amax` are the blocks' largest magnitudes, as bits.
pub(super) fn four_or_six<S: Source>(
    row: &[S],
    amax: &[u32],
    constants: &Constants,
    scales: &mut Scales,
    totals: &mut QuantStats,
) {
    for (i, block) in row.chunks(BLOCK).enumerate() {
        if amax[i] >= INFINITY_BITS {
            continue;
        }
        let base = f32::from_bits(amax[i]) / e2m1::MAX * constants.encode_scale;
        let (code, factor) = constants.scale(base * 1.5);
        let six = error(block, scales.bytes[i], scales.factors[i], constants);
        // Ties keep 6, and so does an error that is not a number.
        if error(block, code, factor, constants) < six {
            totals.scale_clamps -= u64::from(scales.bytes[i] == 0 && code != 0 && amax[i] != 0);
            (scales.bytes[i], scales.factors[i]) = (code, factor);
        }
    }
}

/// Sum of squared errors of a block in f32, in the order of the elements.
fn error<S: Source>(block: &[S], scale: u8, factor: f32, constants: &Constants) -> f32 {
    let spec = &constants.spec;
    let (scale, largest) = (decode_e4m3(scale), e2m1::MAX * spec.bound.value());
    block.iter().fold(0.0, |sum, x| {
        let x = x.to_f32();
        let element = e2m1::decode(encode_lane::<E2m1, true>(x, factor, &mut 0, &mut 0));
        let difference = element * scale * spec.amax / largest - x;
        sum + difference * difference
    })
}

impl Constants {
    /// Scale byte for the unrounded block scale `wanted`, and the factor on elements.
    #[inline(always)]
    pub(super) fn scale(&self, wanted: f32) -> (u8, f32) {
        // Non-negative numbers, including infinity, have the order of their bits.
        let wanted = f32::from_bits(wanted.to_bits().min(ue4m3::MAX.to_bits()));
        let code = encode_lane::<crate::quantize::lanes::E4m3, false>(wanted, 1.0, &mut 0, &mut 0);
        let finite = |x: f32| f32::from_bits(x.to_bits().min(f32::MAX.to_bits()));
        let factor = match self.spec.order {
            ScaleOrder::Deepwell if code == 0 => 0.0,
            ScaleOrder::Deepwell => finite(self.encode_scale / decode_e4m3(code)),
            ScaleOrder::Te => finite(1.0 / (decode_e4m3(code) * self.decode_scale)),
        };
        (code, factor)
    }
}
