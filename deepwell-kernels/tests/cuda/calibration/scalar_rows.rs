//! The scalar instructions that are calibrated: those of our kernels, and their relatives.

use super::element::Element;
use super::scalar::{Output, Row, Words};

fn f(word: u32) -> f64 {
    f32::from_bits(word).into()
}

/// Without its sign's loss, zero for a subnormal number.
fn flushed(word: u32) -> f64 {
    if word & 0x7f80_0000 == 0 { f(word & 0x8000_0000) } else { f(word) }
}

fn half(element: Element, word: u32, lane: usize) -> f64 {
    element.decode(word >> (16 * lane) & 0xffff)
}

fn bf(word: u32, lane: usize) -> f64 {
    half(Element::Bf16, word, lane)
}

fn h(word: u32, lane: usize) -> f64 {
    half(Element::F16, word, lane)
}

/// A packed conversion takes the upper number first.
fn packed(lane: usize, [a, b, _]: [u32; 3]) -> f64 {
    f([b, a][lane])
}

/// The larger number, or the one that is one.
fn larger(a: f64, b: f64) -> f64 {
    a.max(b)
}

fn smaller(a: f64, b: f64) -> f64 {
    a.min(b)
}

/// NaN if one of two is.
fn if_numbers(a: f64, b: f64, result: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { result }
}

/// NaN stays NaN, negative numbers become zero.
fn relu(x: f64) -> f64 {
    if x < 0.0 { 0.0 } else { x }
}

/// What does not fit becomes the largest number.
fn saturated(x: f64, largest: f64) -> f64 {
    if x.is_nan() { x } else { x.clamp(-largest, largest) }
}

/// To an integer; NaN gives zero.
fn integer(x: f64, low: f64, high: f64) -> f64 {
    if x.is_nan() { 0.0 } else { x.clamp(low, high) }
}

const I32: (f64, f64) = (i32::MIN as f64, i32::MAX as f64);
const U32: (f64, f64) = (0.0, u32::MAX as f64);

/// A row whose result is off by so many ulp at most.
fn exact(
    body: &'static str,
    (inputs, output): (Words, Output),
    ulps: f64,
    reference: super::scalar::Reference,
) -> Row {
    Row { body, inputs, output, reference, ulps, absolute: 0.0 }
}

/// A row of which the ISA gives a bound only, that of any machine.
fn approximate(
    body: &'static str,
    (ulps, absolute): (f64, f64),
    reference: super::scalar::Reference,
) -> Row {
    Row { body, inputs: Words::F32, output: Output::F32, reference, ulps, absolute }
}

/// Of the smallest normal FP32: what a flush loses.
const FLUSH: f64 = f32::MIN_POSITIVE as f64;

pub(super) fn conversion_rows() -> Vec<Row> {
    use Output::{Bf16, E4m3, E5m2, F16, F32, Signed, Unsigned};
    use Words::{Codes, F32 as Floats, Integers, Pairs};
    vec![
        // To 16 bits, nearest and toward zero.
        exact("cvt.rn.bf16x2.f32 %y, %a, %b;", (Floats, Bf16), 0.5, packed),
        exact("cvt.rz.bf16x2.f32 %y, %a, %b;", (Floats, Bf16), 1.0, packed),
        exact("cvt.rn.relu.bf16x2.f32 %y, %a, %b;", (Floats, Bf16), 0.5, |l, w| relu(packed(l, w))),
        exact("cvt.rz.relu.bf16x2.f32 %y, %a, %b;", (Floats, Bf16), 1.0, |l, w| relu(packed(l, w))),
        exact("cvt.rn.f16x2.f32 %y, %a, %b;", (Floats, F16), 0.5, packed),
        exact("cvt.rz.f16x2.f32 %y, %a, %b;", (Floats, F16), 1.0, packed),
        exact("cvt.rn.relu.f16x2.f32 %y, %a, %b;", (Floats, F16), 0.5, |l, w| relu(packed(l, w))),
        exact(
            "cvt.rn.bf16.f32 %h0, %a;\ncvt.rz.bf16.f32 %h1, %b;\nmov.b32 %y, {%h0, %h1};",
            (Floats, Bf16),
            1.0,
            |l, w| f(w[l]),
        ),
        exact(
            "cvt.rn.f16.f32 %h0, %a;\ncvt.rz.f16.f32 %h1, %b;\nmov.b32 %y, {%h0, %h1};",
            (Floats, F16),
            1.0,
            |l, w| f(w[l]),
        ),
        // From 16 bits.
        exact("mov.b32 {%h0, %h1}, %a;\ncvt.f32.f16 %y, %h0;", (Pairs, F32), 0.0, |_, w| {
            h(w[0], 0)
        }),
        exact("mov.b32 {%h0, %h1}, %a;\ncvt.f32.bf16 %y, %h0;", (Pairs, F32), 0.0, |_, w| {
            bf(w[0], 0)
        }),
        // To and from 8 bits.
        exact(
            "cvt.rn.satfinite.e4m3x2.f32 %h0, %a, %b;\nmov.b32 %y, {%h0, %h0};",
            (Floats, E4m3),
            0.5,
            |l, w| saturated(packed(l, w), 448.0),
        ),
        exact(
            "cvt.rn.satfinite.e5m2x2.f32 %h0, %a, %b;\nmov.b32 %y, {%h0, %h0};",
            (Floats, E5m2),
            0.5,
            |l, w| saturated(packed(l, w), 57344.0),
        ),
        exact(
            "cvt.rn.satfinite.relu.e4m3x2.f32 %h0, %a, %b;\nmov.b32 %y, {%h0, %h0};",
            (Floats, E4m3),
            0.5,
            |l, w| relu(saturated(packed(l, w), 448.0)),
        ),
        exact(
            "cvt.rn.satfinite.relu.e5m2x2.f32 %h0, %a, %b;\nmov.b32 %y, {%h0, %h0};",
            (Floats, E5m2),
            0.5,
            |l, w| relu(saturated(packed(l, w), 57344.0)),
        ),
        exact(
            "cvt.rn.satfinite.e4m3x2.f16x2 %h0, %a;\nmov.b32 %y, {%h0, %h0};",
            (Pairs, E4m3),
            0.5,
            |l, w| saturated(h(w[0], l), 448.0),
        ),
        exact(
            "cvt.rn.satfinite.e5m2x2.f16x2 %h0, %a;\nmov.b32 %y, {%h0, %h0};",
            (Pairs, E5m2),
            0.5,
            |l, w| saturated(h(w[0], l), 57344.0),
        ),
        exact(
            "mov.b32 {%h0, %h1}, %a;\ncvt.rn.f16x2.e4m3x2 %y, %h0;",
            (Codes, F16),
            0.0,
            |l, w| Element::E4m3.decode(w[0] >> (8 * l) & 0xff),
        ),
        exact(
            "mov.b32 {%h0, %h1}, %a;\ncvt.rn.f16x2.e5m2x2 %y, %h0;",
            (Codes, F16),
            0.0,
            |l, w| Element::E5m2.decode(w[0] >> (8 * l) & 0xff),
        ),
        // To TF32, in 32 bits: a unit is 2^13 of FP32.
        // Of a NaN it drops the low bits: what is left may be an infinity.
        exact("cvt.rna.tf32.f32 %y, %a;", (Floats, F32), 4096.0, |_, w| {
            f(if f(w[0]).is_nan() { w[0] & !0x1fff } else { w[0] })
        }),
        exact("cvt.rn.tf32.f32 %y, %a;", (Floats, F32), 4096.0, |_, w| f(w[0])),
        exact("cvt.rz.tf32.f32 %y, %a;", (Floats, F32), 8192.0, |_, w| f(w[0])),
        // To and from integers.
        exact("cvt.rni.s32.f32 %y, %a;", (Floats, Signed), 0.5, |_, w| {
            integer(f(w[0]), I32.0, I32.1)
        }),
        exact("cvt.rzi.s32.f32 %y, %a;", (Floats, Signed), 1.0, |_, w| {
            integer(f(w[0]), I32.0, I32.1)
        }),
        exact("cvt.rmi.s32.f32 %y, %a;", (Floats, Signed), 1.0, |_, w| {
            integer(f(w[0]), I32.0, I32.1)
        }),
        exact("cvt.rpi.ftz.s32.f32 %y, %a;", (Floats, Signed), 1.0, |_, w| {
            integer(f(w[0]), I32.0, I32.1)
        }),
        exact("cvt.rzi.u32.f32 %y, %a;", (Floats, Unsigned), 1.0, |_, w| {
            integer(f(w[0]), U32.0, U32.1)
        }),
        exact("cvt.rn.f32.s32 %y, %a;", (Integers, F32), 0.5, |_, w| f64::from(w[0].cast_signed())),
        exact("cvt.rn.f32.u32 %y, %a;", (Integers, F32), 0.5, |_, w| f64::from(w[0])),
        exact("cvt.rz.f32.u32 %y, %a;", (Integers, F32), 1.0, |_, w| f64::from(w[0])),
        exact("cvt.rni.f32.f32 %y, %a;", (Floats, F32), 0.0, |_, w| f(w[0]).round_ties_even()),
        exact("cvt.rmi.f32.f32 %y, %a;", (Floats, F32), 0.0, |_, w| f(w[0]).floor()),
        exact(
            ".reg .f64 %wide;\ncvt.f64.f32 %wide, %a;\n\
             mul.rn.f64 %wide, %wide, 0d3FF0000010000001;\ncvt.rn.f32.f64 %y, %wide;",
            (Floats, F32),
            1.0,
            |_, w| f(w[0]),
        ),
    ]
}

pub(super) fn arithmetic_rows() -> Vec<Row> {
    use Output::{Bf16, F16, F32};
    use Words::{F32 as Floats, Pairs};
    const SINGLE: (Words, Output) = (Floats, F32);
    const BRAIN: (Words, Output) = (Pairs, Bf16);
    const HALF: (Words, Output) = (Pairs, F16);
    let mut rows = vec![
        exact("add.rn.f32 %y, %a, %b;", SINGLE, 0.51, |_, [a, b, _]| f(a) + f(b)),
        exact("add.rz.f32 %y, %a, %b;", SINGLE, 1.0, |_, [a, b, _]| f(a) + f(b)),
        exact("add.rm.f32 %y, %a, %b;", SINGLE, 1.0, |_, [a, b, _]| f(a) + f(b)),
        exact("add.rp.f32 %y, %a, %b;", SINGLE, 1.0, |_, [a, b, _]| f(a) + f(b)),
        exact("sub.rn.f32 %y, %a, %b;", SINGLE, 0.51, |_, [a, b, _]| f(a) - f(b)),
        exact("mul.rn.f32 %y, %a, %b;", SINGLE, 0.51, |_, [a, b, _]| f(a) * f(b)),
        exact("mul.rz.f32 %y, %a, %b;", SINGLE, 1.0, |_, [a, b, _]| f(a) * f(b)),
        exact("fma.rn.f32 %y, %a, %b, %c;", SINGLE, 0.51, |_, [a, b, c]| f(a).mul_add(f(b), f(c))),
        exact("fma.rz.f32 %y, %a, %b, %c;", SINGLE, 1.0, |_, [a, b, c]| f(a).mul_add(f(b), f(c))),
        exact("div.rn.f32 %y, %a, %b;", SINGLE, 0.51, |_, [a, b, _]| f(a) / f(b)),
        exact("rcp.rn.f32 %y, %a;", SINGLE, 0.51, |_, [a, ..]| 1.0 / f(a)),
        exact("sqrt.rn.f32 %y, %a;", SINGLE, 0.51, |_, [a, ..]| f(a).sqrt()),
        exact("max.f32 %y, %a, %b;", SINGLE, 0.0, |_, [a, b, _]| larger(f(a), f(b))),
        exact("min.f32 %y, %a, %b;", SINGLE, 0.0, |_, [a, b, _]| smaller(f(a), f(b))),
        exact("max.NaN.f32 %y, %a, %b;", SINGLE, 0.0, |_, [a, b, _]| {
            if_numbers(f(a), f(b), larger(f(a), f(b)))
        }),
        exact("abs.f32 %y, %a;", SINGLE, 0.0, |_, [a, ..]| f(a).abs()),
        exact("neg.f32 %y, %a;", SINGLE, 0.0, |_, [a, ..]| -f(a)),
        exact("fma.rn.bf16x2 %y, %a, %b, %c;", BRAIN, 0.51, |l, [a, b, c]| {
            bf(a, l).mul_add(bf(b, l), bf(c, l))
        }),
        exact("fma.rn.relu.bf16x2 %y, %a, %b, %c;", BRAIN, 0.51, |l, [a, b, c]| {
            relu(bf(a, l).mul_add(bf(b, l), bf(c, l)))
        }),
        exact("add.rn.bf16x2 %y, %a, %b;", BRAIN, 0.51, |l, [a, b, _]| bf(a, l) + bf(b, l)),
        exact("sub.rn.bf16x2 %y, %a, %b;", BRAIN, 0.51, |l, [a, b, _]| bf(a, l) - bf(b, l)),
        exact("mul.rn.bf16x2 %y, %a, %b;", BRAIN, 0.51, |l, [a, b, _]| bf(a, l) * bf(b, l)),
        exact("max.bf16x2 %y, %a, %b;", BRAIN, 0.0, |l, [a, b, _]| larger(bf(a, l), bf(b, l))),
        exact("min.NaN.bf16x2 %y, %a, %b;", BRAIN, 0.0, |l, [a, b, _]| {
            if_numbers(bf(a, l), bf(b, l), smaller(bf(a, l), bf(b, l)))
        }),
        exact("max.NaN.xorsign.abs.bf16x2 %y, %a, %b;", BRAIN, 0.0, |l, [a, b, _]| {
            let (a, b) = (bf(a, l), bf(b, l));
            let magnitude = larger(a.abs(), b.abs());
            let sign = if a.is_sign_negative() == b.is_sign_negative() { 1.0 } else { -1.0 };
            if_numbers(a, b, sign * magnitude)
        }),
        exact("abs.bf16x2 %y, %a;", BRAIN, 0.0, |l, [a, ..]| bf(a, l).abs()),
        exact("neg.bf16x2 %y, %a;", BRAIN, 0.0, |l, [a, ..]| -bf(a, l)),
        exact("fma.rn.f16x2 %y, %a, %b, %c;", HALF, 0.51, |l, [a, b, c]| {
            h(a, l).mul_add(h(b, l), h(c, l))
        }),
        exact("add.rn.f16x2 %y, %a, %b;", HALF, 0.51, |l, [a, b, _]| h(a, l) + h(b, l)),
        exact("mul.rn.f16x2 %y, %a, %b;", HALF, 0.51, |l, [a, b, _]| h(a, l) * h(b, l)),
        exact("max.f16x2 %y, %a, %b;", HALF, 0.0, |l, [a, b, _]| larger(h(a, l), h(b, l))),
    ];
    // Where subnormal numbers count as zero.
    let flushing = [
        exact("add.rn.ftz.f32 %y, %a, %b;", SINGLE, 0.51, |_, [a, b, _]| flushed(a) + flushed(b)),
        exact("mul.rn.ftz.f32 %y, %a, %b;", SINGLE, 0.51, |_, [a, b, _]| flushed(a) * flushed(b)),
        exact("fma.rn.ftz.f32 %y, %a, %b, %c;", SINGLE, 0.51, |_, [a, b, c]| {
            flushed(a).mul_add(flushed(b), flushed(c))
        }),
        exact("max.ftz.f32 %y, %a, %b;", SINGLE, 0.0, |_, [a, b, _]| {
            larger(flushed(a), flushed(b))
        }),
        exact("div.rn.ftz.f32 %y, %a, %b;", SINGLE, 0.51, |_, [a, b, _]| flushed(a) / flushed(b)),
        exact("sqrt.rn.ftz.f32 %y, %a;", SINGLE, 0.51, |_, [a, ..]| flushed(a).sqrt()),
    ];
    rows.extend(flushing.map(|row| Row { absolute: FLUSH, ..row }));
    rows
}

/// A quotient as `div.approx` computes it: by way of a reciprocal that is zero for divisors above
/// 2^126.
fn quotient(a: f64, b: f64) -> f64 {
    if b.abs() > 2f64.powi(126) && b.is_finite() { 0.0 * a * b.signum() } else { a / b }
}

pub(super) fn approximation_rows() -> Vec<Row> {
    let mut rows = vec![
        approximate("ex2.approx.ftz.f32 %y, %a;", (2.0, FLUSH), |_, [a, ..]| flushed(a).exp2()),
        approximate("ex2.approx.f32 %y, %a;", (2.0, FLUSH), |_, [a, ..]| f(a).exp2()),
        approximate("lg2.approx.ftz.f32 %y, %a;", (2.0, 2f64.powi(-21)), |_, [a, ..]| {
            flushed(a).log2()
        }),
        approximate("lg2.approx.f32 %y, %a;", (2.0, 2f64.powi(-21)), |_, [a, ..]| f(a).log2()),
        approximate("rcp.approx.ftz.f32 %y, %a;", (1.0, FLUSH), |_, [a, ..]| 1.0 / flushed(a)),
        approximate("rcp.approx.f32 %y, %a;", (1.0, 0.0), |_, [a, ..]| 1.0 / f(a)),
        approximate("rsqrt.approx.ftz.f32 %y, %a;", (4.0, 0.0), |_, [a, ..]| {
            1.0 / flushed(a).sqrt()
        }),
        approximate("rsqrt.approx.f32 %y, %a;", (4.0, 0.0), |_, [a, ..]| 1.0 / f(a).sqrt()),
        approximate("sqrt.approx.ftz.f32 %y, %a;", (4.0, FLUSH), |_, [a, ..]| flushed(a).sqrt()),
        approximate("sqrt.approx.f32 %y, %a;", (4.0, 0.0), |_, [a, ..]| f(a).sqrt()),
        approximate("div.full.f32 %y, %a, %b;", (2.0, FLUSH), |_, [a, b, _]| f(a) / f(b)),
        approximate("div.approx.f32 %y, %a, %b;", (2.0, FLUSH), |_, [a, b, _]| {
            quotient(f(a), f(b))
        }),
        approximate("div.approx.ftz.f32 %y, %a, %b;", (2.0, FLUSH), |_, [a, b, _]| {
            quotient(flushed(a), flushed(b))
        }),
        // A relative error of 2^-11.
        approximate("tanh.approx.f32 %y, %a;", (8192.0, 0.0), |_, [a, ..]| f(a).tanh()),
    ];
    // Two at a time, within 2^-9.9 for F16 and 2^-7 for BF16 of the value.
    let pair = |body, output, reference| Row {
        body,
        inputs: Words::Pairs,
        output,
        reference,
        ulps: 2.5,
        absolute: 2f64.powi(-20),
    };
    rows.extend([
        pair("ex2.approx.f16x2 %y, %a;", Output::F16, |l, [a, ..]| h(a, l).exp2()),
        pair("ex2.approx.ftz.bf16x2 %y, %a;", Output::Bf16, |l, [a, ..]| bf(a, l).exp2()),
        pair("tanh.approx.f16x2 %y, %a;", Output::F16, |l, [a, ..]| h(a, l).tanh()),
        pair("tanh.approx.bf16x2 %y, %a;", Output::Bf16, |l, [a, ..]| bf(a, l).tanh()),
    ]);
    rows
}
