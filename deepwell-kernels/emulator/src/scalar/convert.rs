//! `cvt`.

use super::half::{Half, single_from_double};
use super::ieee::{self, bits32, flush, saturate};
use super::registers::{LANES, Registers};
use super::rows::{longs1, words1};
use super::small;
use crate::decode::{Conversion, FloatRounding, IntegerRounding, Register, Source, Type};
use crate::number::{self, Format, Rounding};

/// Executes `cvt` on 32 lanes.
pub(super) fn convert(
    r: &mut Registers,
    mask: u32,
    conversion: &Conversion,
    d: Register,
    sources: &[Source],
    extra: Option<Source>,
) {
    let (to, from) = (conversion.to, conversion.from);
    if is_integer(to) && is_integer(from) {
        return integers(r, mask, conversion, d, sources[0]);
    }
    // Fast paths for the conversions of activations and gradients.
    let plain = !conversion.saturate_finite && !conversion.relu;
    let nearest = conversion.float_rounding == Some(FloatRounding::NearestEven);
    match (to, from) {
        (Type::Bf16x2 | Type::F16x2, Type::F32) if plain && nearest => {
            let half = if to == Type::F16x2 { Half::F16 } else { Half::Bf16 };
            let (a, b) = (r.row32(sources[0]), r.row32(sources[1]));
            let out: [u32; LANES] = std::array::from_fn(|lane| {
                let upper = u32::from(half.code(f32::from_bits(a[lane])));
                upper << 16 | u32::from(half.code(f32::from_bits(b[lane])))
            });
            return r.set_row32(d, &out, mask);
        }
        (Type::Bf16 | Type::F16, Type::F32)
            if plain && nearest && !conversion.saturate && !conversion.flush_subnormals =>
        {
            let half = if to == Type::F16 { Half::F16 } else { Half::Bf16 };
            return words1(r, mask, d, sources[0], |a| u32::from(half.code(f32::from_bits(a))));
        }
        (Type::F32, Type::F16) if !conversion.saturate => {
            return words1(r, mask, d, sources[0], |a| bits32(Half::F16.value(a as u16)));
        }
        // A BF16 is the upper half of an F32. NaN bits are copied unchanged, as on an H200.
        (Type::F32, Type::Bf16) if !conversion.saturate => {
            return words1(r, mask, d, sources[0], |a| a << 16);
        }
        _ => {}
    }
    if let Some(kernel) = small::Kernel::of(conversion) {
        let (a, b) = (r.row32(sources[0]), r.row32(sources[1]));
        return r.set_row32(d, &kernel.row(&a, &b), mask);
    }
    if scalar_of_32_bits(r, mask, conversion, d, sources[0]) {
        return;
    }
    if is_packed(to) || is_packed(from) || to == Type::Tf32 {
        return packed(r, mask, conversion, d, sources, extra);
    }
    let source = r.row64(sources[0]);
    let out: [u64; LANES] = if is_integer(to) {
        std::array::from_fn(|lane| float_to_integer(source[lane], conversion))
    } else if is_integer(from) {
        std::array::from_fn(|lane| integer_to_float(source[lane], conversion))
    } else {
        std::array::from_fn(|lane| float_to_float(source[lane], conversion))
    };
    r.set_row64(d, &out, mask);
}

/// Converts between single precision and 32-bit integers. Returns whether the conversion was
/// handled.
fn scalar_of_32_bits(
    r: &mut Registers,
    mask: u32,
    conversion: &Conversion,
    d: Register,
    a: Source,
) -> bool {
    let nearest = conversion.float_rounding == Some(FloatRounding::NearestEven);
    match (conversion.to, conversion.from, conversion.integer_rounding) {
        (Type::F32, Type::U32, None) if nearest && !conversion.saturate => {
            words1(r, mask, d, a, |a| (a as f32).to_bits());
        }
        (Type::F32, Type::S32, None) if nearest && !conversion.saturate => {
            words1(r, mask, d, a, |a| (a as i32 as f32).to_bits());
        }
        // Rust's conversions saturate and convert NaN to zero.
        (Type::S32, Type::F32, Some(rounding)) if !conversion.flush_subnormals => {
            words1(r, mask, d, a, |a| {
                integral(f64::from(f32::from_bits(a)), rounding) as i32 as u32
            })
        }
        (Type::U32, Type::F32, Some(rounding)) if !conversion.flush_subnormals => {
            words1(r, mask, d, a, |a| integral(f64::from(f32::from_bits(a)), rounding) as u32)
        }
        _ => return false,
    }
    true
}

fn is_integer(value_type: Type) -> bool {
    value_type.is_integer()
}

/// Whether a type packs two or four values.
fn is_packed(value_type: Type) -> bool {
    use Type as T;
    matches!(value_type, T::F16x2 | T::Bf16x2 | T::Ue8m0x2)
        || matches!(value_type, T::E4m3x2 | T::E5m2x2 | T::E3m2x2 | T::E2m3x2 | T::E2m1x2)
        || matches!(value_type, T::E4m3x4 | T::E5m2x4 | T::E3m2x4 | T::E2m3x4 | T::E2m1x4)
}

/// Returns the integer value of `value_type`.
#[inline]
fn integer(bits: u64, value_type: Type) -> i128 {
    let shift = 64 - value_type.bits();
    if value_type.is_signed() {
        i128::from((bits << shift) as i64 >> shift)
    } else {
        i128::from(bits << shift >> shift)
    }
}

/// Returns the smallest and the largest value of an integer type.
fn range(value_type: Type) -> (i128, i128) {
    let bits = value_type.bits();
    if value_type.is_signed() {
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    } else {
        (0, (1 << bits) - 1)
    }
}

fn integers(r: &mut Registers, mask: u32, conversion: &Conversion, d: Register, a: Source) {
    let (to, from) = (conversion.to, conversion.from);
    if conversion.saturate {
        let (least, most) = range(to);
        return longs1(r, mask, d, a, |a| integer(a, from).clamp(least, most) as u64);
    }
    // Extends from the source type to 64 bits, then truncates to and extends from the target type.
    let (first, second) = (64 - from.bits(), 64 - to.bits());
    match (from.is_signed(), to.is_signed()) {
        (false, false) if d.bits() <= 32 => {
            let low = u64::MAX >> first.max(second);
            words1(r, mask, d, a, |a| a & low as u32);
        }
        (false, false) => {
            let low = u64::MAX >> first.max(second);
            longs1(r, mask, d, a, |a| a & low);
        }
        (true, false) => {
            longs1(r, mask, d, a, |a| ((a << first) as i64 >> first) as u64 & u64::MAX >> second)
        }
        (false, true) => longs1(r, mask, d, a, |a| {
            let extended = a & u64::MAX >> first;
            ((extended << second) as i64 >> second) as u64
        }),
        (true, true) => longs1(r, mask, d, a, |a| {
            let extended = ((a << first) as i64 >> first) as u64;
            ((extended << second) as i64 >> second) as u64
        }),
    }
}

/// Returns the exact value of a float of a scalar type.
#[inline]
fn float_value(bits: u64, value_type: Type, flush_subnormals: bool) -> f64 {
    match value_type {
        Type::F64 => f64::from_bits(bits),
        Type::F32 => {
            let value = f32::from_bits(bits as u32);
            f64::from(if flush_subnormals { flush(value) } else { value })
        }
        Type::F16 => f64::from(Half::F16.value(bits as u16)),
        _ => f64::from(Half::Bf16.value(bits as u16)),
    }
}

#[inline]
fn integral(value: f64, rounding: IntegerRounding) -> f64 {
    match rounding {
        IntegerRounding::NearestEven => value.round_ties_even(),
        IntegerRounding::TowardZero => value.trunc(),
        IntegerRounding::Down => value.floor(),
        IntegerRounding::Up => value.ceil(),
    }
}

fn float_to_integer(bits: u64, conversion: &Conversion) -> u64 {
    let (to, from) = (conversion.to, conversion.from);
    let value = float_value(bits, from, conversion.flush_subnormals);
    if value.is_nan() {
        // NaN converts to zero, or to only the top bit set if a type has 64 bits.
        return if from == Type::F64 || to.bits() == 64 { 1 << (to.bits() - 1) } else { 0 };
    }
    let rounding = conversion.integer_rounding.unwrap_or(IntegerRounding::TowardZero);
    let (least, most) = range(to);
    // Rust's conversion saturates to 128 bits.
    (integral(value, rounding) as i128).clamp(least, most) as u64
}

fn integer_to_float(bits: u64, conversion: &Conversion) -> u64 {
    let value = integer(bits, conversion.from);
    let rounding = conversion.float_rounding.unwrap_or(FloatRounding::NearestEven);
    // A 64-bit integer is the sum of two doubles.
    let high = value as f64;
    let low = (value - high as i128) as f64;
    match conversion.to {
        Type::F64 => {
            let off = low;
            let moved = match rounding {
                FloatRounding::TowardZero if off < 0.0 && high > 0.0 => high.next_down(),
                FloatRounding::TowardZero if off > 0.0 && high < 0.0 => high.next_up(),
                FloatRounding::Down if off < 0.0 => high.next_down(),
                FloatRounding::Up if off > 0.0 => high.next_up(),
                _ => high,
            };
            moved.to_bits()
        }
        Type::F32 => {
            let single = ieee::to_single(high, low, rounding);
            u64::from(bits32(if conversion.saturate { saturate(single) } else { single }))
        }
        other => u64::from(encode_half(ieee::odd(high, low), other, conversion)),
    }
}

fn float_to_float(bits: u64, conversion: &Conversion) -> u64 {
    let (to, from) = (conversion.to, conversion.from);
    let flushes = conversion.flush_subnormals;
    if let Some(nan) = nan_with_payload(bits, conversion) {
        return nan;
    }
    let mut value = float_value(bits, from, flushes);
    if let Some(rounding) = conversion.integer_rounding {
        value = integral(value, rounding);
    }
    let rounding = conversion.float_rounding.unwrap_or(FloatRounding::NearestEven);
    match to {
        Type::F64 if conversion.saturate => {
            (if value > 0.0 { value.min(1.0) } else { 0.0 }).to_bits()
        }
        Type::F64 => value.to_bits(),
        Type::F32 => {
            let single = single_from_double(value, rounding);
            let single = if flushes { flush(single) } else { single };
            u64::from(bits32(if conversion.saturate { saturate(single) } else { single }))
        }
        other => u64::from(encode_half(value, other, conversion)),
    }
}

/// NaN results that are not canonical. If one format is binary64, a NaN becomes quiet and keeps its
/// sign and payload, as on an H200.
fn nan_with_payload(bits: u64, conversion: &Conversion) -> Option<u64> {
    if conversion.saturate || !float_value(bits, conversion.from, false).is_nan() {
        return None;
    }
    let sign = bits >> 31 & 1;
    match (conversion.from, conversion.to) {
        (Type::F32, Type::F64) => Some(sign << 63 | 0x7ff8 << 48 | (bits & 0x7f_ffff) << 29),
        (Type::F64, Type::F32) => Some(bits >> 63 << 31 | 0x7fc0_0000 | (bits >> 29 & 0x7f_ffff)),
        (Type::F64, Type::F64) => Some(bits | 1 << 51),
        (_, Type::F64) => Some(f64::NAN.to_bits()),
        _ => None,
    }
}

/// Encodes an exact or round-to-odd value as F16 or BF16.
fn encode_half(value: f64, to: Type, conversion: &Conversion) -> u32 {
    let format = if to == Type::F16 { Format::F16 } else { Format::BF16 };
    // Saturation maps NaN to zero.
    let inside = if value > 0.0 { value.min(1.0) } else { 0.0 };
    let value = if conversion.saturate { inside } else { value };
    let rounding = match conversion.float_rounding {
        Some(rounding) => number_rounding(rounding, 0),
        None => Rounding::NearestEven,
    };
    number::encode_f64(format, value, rounding, conversion.saturate_finite, conversion.relu)
}

fn number_rounding(rounding: FloatRounding, random: u32) -> Rounding {
    match rounding {
        FloatRounding::NearestEven => Rounding::NearestEven,
        FloatRounding::NearestAway => Rounding::Away,
        FloatRounding::TowardZero => Rounding::TowardZero,
        FloatRounding::Down => Rounding::Down,
        FloatRounding::Up => Rounding::Up,
        FloatRounding::Stochastic => Rounding::Stochastic(random),
    }
}

/// Returns the format of a type's parts, and the bits from part to part.
fn parts_of(value_type: Type) -> Option<(Format, u32)> {
    Some(match value_type {
        Type::F16x2 | Type::F16 => (Format::F16, 16),
        Type::Bf16x2 | Type::Bf16 => (Format::BF16, 16),
        Type::F32 => (Format::F32, 32),
        Type::Tf32 => (Format::TF32, 32),
        Type::E4m3x2 | Type::E4m3x4 => (Format::E4M3, 8),
        Type::E5m2x2 | Type::E5m2x4 => (Format::E5M2, 8),
        Type::E3m2x2 | Type::E3m2x4 => (Format::E3M2, 8),
        Type::E2m3x2 | Type::E2m3x4 => (Format::E2M3, 8),
        Type::E2m1x2 | Type::E2m1x4 => (Format::E2M1, 4),
        Type::Ue8m0x2 => (Format::UE8M0, 8),
        _ => return None,
    })
}

/// Returns the random bits of one part, counted from the uppermost. F8 and F6: each half of the
/// word serves one pair of results. F16 and BF16: each half serves one result. F4: the upper bytes
/// of both halves serve the first pair, the lower bytes the second.
fn random_of(random: u32, to: Type, part: usize, count: usize) -> u32 {
    let half = |upper: bool| if upper { random >> 16 } else { random & 0xffff };
    match (to, count) {
        (Type::E2m1x4, _) => {
            let half = half(part.is_multiple_of(2));
            if part < 2 { half >> 8 } else { half & 0xff }
        }
        (_, 4) => half(part < 2),
        _ => half(part == 0),
    }
}

fn packed(
    r: &mut Registers,
    mask: u32,
    conversion: &Conversion,
    d: Register,
    sources: &[Source],
    extra: Option<Source>,
) {
    let (to, from) = (conversion.to, conversion.from);
    let (Some((to_format, to_bits)), Some((from_format, from_bits))) =
        (parts_of(to), parts_of(from))
    else {
        return;
    };
    let count = if to == Type::Tf32 { 1 } else { (to.bits() / to_bits) as usize };
    let random = extra.map_or([0; LANES], |extra| r.row32(extra));
    let rounding = conversion.float_rounding.unwrap_or(FloatRounding::NearestEven);
    let mut out = [0u32; LANES];
    let part_mask = if from_bits == 32 { u32::MAX } else { (1 << from_bits) - 1 };
    for part in 0..count {
        // Part 0 is the uppermost.
        let place = (count - 1 - part) as u32;
        let (row, shift) = if sources.len() == count {
            (r.row32(sources[part]), 0)
        } else {
            (r.row32(sources[0]), place * from_bits)
        };
        for lane in 0..LANES {
            let code = row[lane] >> shift & part_mask;
            let value = number::decode(from_format, code);
            if rounding == FloatRounding::NearestAway && to == Type::Tf32 && value.is_nan() {
                // Only this rounding truncates a NaN's low bits, which gives an infinity if no
                // other payload bit is set.
                out[lane] = code & !0x1fff;
                continue;
            }
            let rounding = number_rounding(rounding, random_of(random[lane], to, part, count));
            let code = number::encode(
                to_format,
                value,
                rounding,
                conversion.saturate_finite,
                conversion.relu,
            );
            out[lane] |= code << (place * to_bits);
        }
    }
    r.set_row32(d, &out, mask);
}

/// `cvt.pack`.
pub(super) fn pack(
    r: &mut Registers,
    mask: u32,
    to: Type,
    from: Type,
    d: Register,
    [a, b]: [Source; 2],
    c: Option<Source>,
) {
    let (least, most) = range(to);
    let bits = to.bits();
    let low = (1u32 << bits) - 1;
    let (a, b) = (r.row32(a), r.row32(b));
    let c = c.map_or([0; LANES], |c| r.row32(c));
    let out: [u32; LANES] = std::array::from_fn(|lane| {
        let part = |value: u32| integer(u64::from(value), from).clamp(least, most) as u32 & low;
        let pair = part(a[lane]) << bits | part(b[lane]);
        if bits == 16 { pair } else { c[lane] << (2 * bits) | pair }
    });
    r.set_row32(d, &out, mask);
}
