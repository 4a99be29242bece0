//! MMAs by definition, one output at a time, in integers.
//!
//! Everything here is written for being obviously right: significands and exponents are taken from
//! the fields of the bits, shifts lose bits where they should, and sums are 128-bit integers, or
//! integers of 2048 bits for exact ones.

use deepwell_emulator::number::{Format, Specials};

/// A finite number: `significand * 2^(exponent - fraction)`, where the significand of a normal
/// number has `fraction` bits after its first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number {
    pub(crate) significand: i128,
    pub(crate) exponent: i32,
    pub(crate) fraction: i32,
}

/// Any number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    Finite(Number),
    Infinity { negative: bool },
    Nan,
}

/// Takes a code apart.
pub(crate) fn take_apart(format: Format, code: u32) -> Value {
    let fraction = format.mantissa_bits();
    let field_max = (1u32 << format.exponent_bits()) - 1;
    let code = if format == Format::TF32 { code >> 13 } else { code };
    let mantissa = code & ((1 << fraction) - 1);
    let field = code >> fraction & field_max;
    let negative = format.is_signed() && code >> (fraction + format.exponent_bits()) & 1 == 1;
    match format.specials() {
        Specials::InfinityAndNan if field == field_max => {
            return if mantissa == 0 { Value::Infinity { negative } } else { Value::Nan };
        }
        Specials::Nan if field == field_max && mantissa == (1 << fraction) - 1 => {
            return Value::Nan;
        }
        _ => {}
    }
    if format == Format::UE8M0 {
        return Value::Finite(Number { significand: 1, exponent: code as i32 - 127, fraction: 0 });
    }
    let (significand, exponent) = match field {
        0 => (mantissa, 1 - format.bias()),
        _ => (mantissa | 1 << fraction, field as i32 - format.bias()),
    };
    let significand = i128::from(significand) * if negative { -1 } else { 1 };
    Value::Finite(Number { significand, exponent, fraction: fraction as i32 })
}

fn times(a: Value, b: Value) -> Value {
    match (a, b) {
        (Value::Nan, _) | (_, Value::Nan) => Value::Nan,
        (Value::Finite(a), Value::Finite(b)) => Value::Finite(Number {
            significand: a.significand * b.significand,
            exponent: a.exponent + b.exponent,
            fraction: a.fraction + b.fraction,
        }),
        (Value::Infinity { negative }, Value::Finite(finite))
        | (Value::Finite(finite), Value::Infinity { negative }) => match finite.significand {
            0 => Value::Nan,
            significand => Value::Infinity { negative: negative != (significand < 0) },
        },
        (Value::Infinity { negative: a }, Value::Infinity { negative: b }) => {
            Value::Infinity { negative: a != b }
        }
    }
}

/// What the sum of terms is if not all are finite.
fn special(terms: &[Value]) -> Option<Value> {
    let infinite = |sign| {
        terms.iter().any(|term| matches!(term, Value::Infinity { negative } if *negative == sign))
    };
    if terms.iter().any(|term| matches!(term, Value::Nan)) || infinite(true) && infinite(false) {
        return Some(Value::Nan);
    }
    [true, false]
        .into_iter()
        .find(|&negative| infinite(negative))
        .map(|negative| Value::Infinity { negative })
}

/// How a sum is formed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum {
    pub(crate) fraction_bits: i32,
    pub(crate) mantissa_bits: u32,
    pub(crate) half: bool,
}

impl Sum {
    fn format(&self) -> Format {
        if self.half { Format::F16 } else { Format::F32 }
    }

    /// One step: products of elements, with their scales, and the accumulator.
    pub(crate) fn step(
        &self,
        products: &[[(Format, u32); 2]],
        scales: [(Format, u32); 2],
        bits: u32,
    ) -> u32 {
        let scale =
            times(take_apart(scales[0].0, scales[0].1), take_apart(scales[1].0, scales[1].1));
        let terms = products
            .iter()
            .map(|[a, b]| times(times(take_apart(a.0, a.1), take_apart(b.0, b.1)), scale));
        let terms: Vec<Value> = terms.chain([take_apart(self.format(), bits)]).collect();
        self.sum(&terms, true)
    }

    /// One step of FP4: groups of 16 products, each with its scales.
    pub(crate) fn step_grouped(&self, groups: &[(i128, [(Format, u32); 2])], bits: u32) -> u32 {
        let terms = groups.iter().map(|(quarters, scales)| {
            let [a, b] = scales.map(|(format, code)| match take_apart(format, code) {
                Value::Finite(scale) if scale.significand == 0 => {
                    Value::Finite(Number { exponent: -126, ..scale })
                }
                other => other,
            });
            match times(a, b) {
                Value::Finite(scale) => Value::Finite(Number {
                    significand: quarters * scale.significand,
                    exponent: scale.exponent,
                    fraction: scale.fraction + 2,
                }),
                other => other,
            }
        });
        let accumulator = take_apart(Format::F32, bits);
        // A zero accumulator has no part in the largest exponent, groups that are zero have.
        let zero = matches!(accumulator, Value::Finite(number) if number.significand == 0);
        let mut terms: Vec<Value> = terms.collect();
        if !zero {
            terms.push(accumulator);
        }
        self.sum(&terms, false)
    }

    fn sum(&self, terms: &[Value], zeros_have_no_part: bool) -> u32 {
        if let Some(special) = special(terms) {
            return match special {
                Value::Infinity { negative } => infinity(self.half, negative),
                _ if self.half => 0x7fff,
                _ => 0x7fff_ffff,
            };
        }
        let numbers = || {
            terms.iter().map(|term| match term {
                Value::Finite(number) => *number,
                _ => unreachable!("special terms were dealt with"),
            })
        };
        let counted = numbers().filter(|n| !zeros_have_no_part || n.significand != 0);
        let Some(largest) = counted.map(|n| n.exponent).max() else { return 0 };
        let sum: i128 = numbers()
            .map(|n| cut(n.significand, self.fraction_bits - n.fraction + n.exponent - largest))
            .sum();
        round(sum, largest - self.fraction_bits, self.half, self.mantissa_bits)
    }
}

/// `significand * 2^shift`, toward zero.
fn cut(significand: i128, shift: i32) -> i128 {
    let magnitude = significand.abs();
    let cut = match shift {
        0.. if magnitude == 0 => 0,
        0.. => magnitude << shift,
        -126..0 => magnitude >> -shift,
        _ => 0,
    };
    cut * significand.signum()
}

fn infinity(half: bool, negative: bool) -> u32 {
    match (half, negative) {
        (false, false) => 0x7f80_0000,
        (false, true) => 0xff80_0000,
        (true, false) => 0x7c00,
        (true, true) => 0xfc00,
    }
}

/// The accumulator of `sum * 2^power`.
fn round(sum: i128, power: i32, half: bool, mantissa_bits: u32) -> u32 {
    if sum == 0 {
        return 0;
    }
    let magnitude = sum.unsigned_abs();
    let (mantissa, exponent_min, exponent_max) =
        if half { (10, -14, 15) } else { (mantissa_bits as i32, -126, 127) };
    let leading = power + 127 - magnitude.leading_zeros() as i32;
    let last = leading.max(exponent_min) - mantissa;
    // In units of the last bit.
    let shift = last - power;
    let steps = if shift <= 0 {
        magnitude << -shift
    } else if shift > 126 {
        0
    } else {
        let (kept, rest) = (magnitude >> shift, magnitude & ((1 << shift) - 1));
        let tie = 1 << (shift - 1);
        kept + u128::from(half && (rest > tie || rest == tie && kept & 1 == 1))
    };
    let value_bits = 128 - steps.leading_zeros() as i32;
    if steps == 0 {
        return 0;
    }
    if last + value_bits - 1 > exponent_max {
        return infinity(half, sum < 0);
    }
    // The exponent field counts from the least exponent; a subnormal number has no implicit bit.
    let field = (last + mantissa - exponent_min) as u32;
    let stored = if half { 10 } else { 23 };
    let steps = (steps as u32) << (stored - mantissa);
    let sign = if sum < 0 { 1 << (if half { 15 } else { 31 }) } else { 0 };
    ((field << stored) + steps) | sign
}

/// An exact sum: an integer of 2048 bits, in two's complement, in units of 2^-1024.
pub(crate) struct Exact([u32; 64]);

impl Exact {
    pub(crate) fn new() -> Exact {
        Exact([0; 64])
    }

    fn add_limb(&mut self, mut index: usize, limb: u32) {
        let mut carry = limb;
        while carry != 0 && index < self.0.len() {
            let (sum, over) = self.0[index].overflowing_add(carry);
            self.0[index] = sum;
            carry = over.into();
            index += 1;
        }
    }

    fn negate(&mut self) {
        self.0 = self.0.map(|limb| !limb);
        self.add_limb(0, 1);
    }

    /// Adds a product, or the accumulator.
    pub(crate) fn add(&mut self, values: &[Value]) {
        let product = values.iter().copied().reduce(times).unwrap();
        let Value::Finite(number) = product else { panic!("only finite numbers are added") };
        let position = (number.exponent - number.fraction + 1024) as usize;
        let negative = number.significand < 0;
        if negative {
            self.negate();
        }
        for bit in 0..127 {
            if number.significand.unsigned_abs() >> bit & 1 == 1 {
                let place = position + bit;
                self.add_limb(place / 32, 1 << (place % 32));
            }
        }
        if negative {
            self.negate();
        }
    }

    /// The nearest binary32, ties to even.
    pub(crate) fn into_f32(mut self) -> f32 {
        let negative = self.0[63] >> 31 == 1;
        if negative {
            self.negate();
        }
        let bit = |place: i32| place >= 0 && self.0[place as usize / 32] >> (place % 32) & 1 == 1;
        let Some(top) = (0..2048).rev().find(|&place| bit(place)) else { return 0.0 };
        let last = (top - 23).max(1024 - 149);
        let mut steps =
            (last..=top).rev().fold(0u32, |steps, place| steps << 1 | u32::from(bit(place)));
        let rest = (0..last - 1).any(bit);
        steps += u32::from(bit(last - 1) && (rest || steps & 1 == 1));
        let magnitude = f64::from(steps) * 2f64.powi(last - 1024);
        // Exact, or beyond the range.
        if negative { -magnitude as f32 } else { magnitude as f32 }
    }
}
