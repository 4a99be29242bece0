//! Random elements and accumulators.

use deepwell_emulator::number::{Format, Rounding, decode, encode};

/// Uniform bits (xorshift64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    pub(crate) fn below(&mut self, count: u32) -> u32 {
        self.next() % count
    }
}

/// What elements look like.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Data {
    /// Any code.
    ElementBits,
    /// Any finite code.
    Finite,
    /// Finite, most of them zero.
    Sparse,
    /// Magnitudes within a factor of eight of each other.
    Near,
    /// Mantissas of ones: what is cut off is as much as can be.
    Ones,
    /// The largest value, now and then a small one: sums are as large as they can be.
    Largest,
}

pub(crate) const DATA: [Data; 6] =
    [Data::ElementBits, Data::Finite, Data::Sparse, Data::Near, Data::Ones, Data::Largest];

pub(crate) fn element(format: Format, data: Data, center: i32, random: &mut Random) -> u32 {
    let mask = u32::MAX >> (32 - format.bits());
    match data {
        Data::ElementBits => random.next() & mask,
        Data::Sparse if random.below(4) != 0 => random.next() & 1 << (format.bits() - 1),
        Data::Near => {
            let magnitude = (1.0 + random.below(7000) as f32 / 1000.0) * 2f32.powi(center);
            let value = if random.below(2) == 0 { magnitude } else { -magnitude };
            encode(format, value, Rounding::NearestEven, true, false)
        }
        Data::Ones => {
            let exponent = random.below(20) as i32 - 10;
            let value = (2.0 - 2f32.powi(-(format.mantissa_bits() as i32))) * 2f32.powi(exponent);
            let code = encode(format, value, Rounding::TowardZero, true, false);
            code | (random.next() & 1 << (format.bits() - 1))
        }
        Data::Largest => {
            if random.below(16) != 0 {
                let value = 1.9375 * 2f32.powi(8 + center.min(0));
                return encode(format, value, Rounding::TowardZero, true, false);
            }
            encode(
                format,
                2f32.powi(-(random.below(10) as i32)),
                Rounding::NearestEven,
                true,
                false,
            )
        }
        _ => loop {
            let code = random.next() & mask;
            if decode(format, code).is_finite() {
                break code;
            }
        },
    }
}

/// An accumulator of about a size that matters, or any.
pub(crate) fn accumulator(half: bool, data: Data, center: i32, random: &mut Random) -> u32 {
    let bits = match data {
        Data::ElementBits => random.next(),
        _ if random.below(4) == 0 => return random.next() & if half { 0x8000 } else { 1 << 31 },
        Data::Near => {
            let value = (random.next() as i32) as f32 * 2f32.powi(2 * center - 28);
            if half {
                return encode(Format::F16, value, Rounding::NearestEven, true, false);
            }
            value.to_bits()
        }
        Data::Ones if half => random.below(31) << 10 | 0x3ff | random.next() & 0x8000,
        Data::Ones => (random.below(70) + 80) << 23 | 0x7f_ffff | random.next() & 1 << 31,
        Data::Largest if half => random.below(31) << 10,
        Data::Largest => (random.below(16) + 127) << 23,
        _ => loop {
            let bits = random.next();
            if half || f32::from_bits(bits).is_finite() {
                break bits;
            }
        },
    };
    if half { bits & 0xffff } else { bits }
}
