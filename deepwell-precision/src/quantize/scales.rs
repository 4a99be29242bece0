//! Computes scale codes and factors of many groups from their largest magnitudes.

use super::lanes::{Element, INFINITY_BITS};
use crate::ScaleRule;
use crate::e8m0::{self, finite_scale};

/// Scales and factors of many amaxes; returns the number of clamped scales.
#[inline(always)]
pub(super) fn finite_scales<E: Element>(
    amax: &[u32],
    rule: ScaleRule,
    codes: &mut [u8],
    reciprocals: &mut [f32],
) -> u64 {
    let mut clamps = 0_u32;
    for ((&amax, code), reciprocal) in amax.iter().zip(codes).zip(reciprocals) {
        let scale = finite_scale(amax, E::CONSTANTS, rule);
        *code = scale.code as u8;
        // A finite amax has a scale of at most 2^126, so this is a normal number.
        *reciprocal = f32::from_bits((254 - scale.code) << 23);
        clamps += u32::from(scale.clamped);
    }
    u64::from(clamps)
}

/// [`finite_scales`] for amaxes with NaN or infinities.
#[inline(never)]
#[cold]
pub(super) fn any_scales<E: Element>(
    amax: &[u32],
    rule: ScaleRule,
    codes: &mut [u8],
    reciprocals: &mut [f32],
) -> u64 {
    let mut clamps = 0;
    for ((&amax, code), reciprocal) in amax.iter().zip(codes).zip(reciprocals) {
        *code = e8m0::from_amax_for(f32::from_bits(amax), E::FORMAT, rule);
        *reciprocal = e8m0::reciprocal(*code);
        let clamped = amax < INFINITY_BITS && finite_scale(amax, E::CONSTANTS, rule).clamped;
        clamps += u64::from(clamped);
    }
    clamps
}
