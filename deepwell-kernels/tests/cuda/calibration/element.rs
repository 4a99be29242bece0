//! Elements of operands: at random of every kind, and the numbers that they stand for.

/// Numbers in a fixed order, the same for the same seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0x9E37_79B9_7F4A_7C15)
    }

    pub(super) fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed >> 32) as u32
    }

    /// A number in `[0, bound)`.
    pub(super) fn below(&mut self, bound: u32) -> u32 {
        ((u64::from(self.word()) * u64::from(bound)) >> 32) as u32
    }
}

/// Type of an operand's elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Element {
    Bf16,
    F16,
    /// In 32 bits, the lowest 13 of which tensor cores ignore.
    Tf32,
    E4m3,
    E5m2,
}

/// What operands hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// Magnitudes within 2^5 of each other, around one.
    Even,
    /// Exponents over the whole range of the type, up to 2^±20.
    Wide,
    /// Neighbours in K cancel but for their last bits.
    Cancelling,
    /// Subnormal and the smallest normal numbers.
    Tiny,
    /// The largest finite numbers: sums overflow.
    Huge,
    /// Zeros of both signs between numbers.
    Zeros,
    /// NaN and infinities in a few rows.
    Special,
}

impl Kind {
    pub(super) const ALL: [Kind; 7] = [
        Kind::Even,
        Kind::Wide,
        Kind::Cancelling,
        Kind::Tiny,
        Kind::Huge,
        Kind::Zeros,
        Kind::Special,
    ];
}

impl Element {
    pub(super) fn name(self) -> &'static str {
        match self {
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
            Element::Tf32 => "tf32",
            Element::E4m3 => "e4m3",
            Element::E5m2 => "e5m2",
        }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Element::Bf16 | Element::F16 => 2,
            Element::Tf32 => 4,
            Element::E4m3 | Element::E5m2 => 1,
        }
    }

    /// Bits of the exponent and of the fraction.
    fn bits(self) -> (u32, u32) {
        match self {
            Element::Bf16 => (8, 7),
            Element::F16 => (5, 10),
            Element::Tf32 => (8, 23),
            Element::E4m3 => (4, 3),
            Element::E5m2 => (5, 2),
        }
    }

    /// The number of a code; of the bits of TF32 those that count.
    pub(super) fn decode(self, code: u32) -> f64 {
        let (exponent_bits, fraction_bits) = self.bits();
        let code = if self == Element::Tf32 { code & !0x1fff } else { code };
        let exponent = (code >> fraction_bits & ((1 << exponent_bits) - 1)) as i32;
        let fraction = code & ((1 << fraction_bits) - 1);
        let sign = if code >> (exponent_bits + fraction_bits) == 0 { 1.0 } else { -1.0 };
        let bias = (1 << (exponent_bits - 1)) - 1;
        let top = (1 << exponent_bits) - 1;
        if self == Element::E4m3 && exponent == top && fraction == 7 {
            return f64::NAN;
        }
        if self != Element::E4m3 && exponent == top {
            return if fraction == 0 { sign * f64::INFINITY } else { f64::NAN };
        }
        let unit = 2f64.powi(exponent.max(1) - bias - fraction_bits as i32);
        let hidden = if exponent == 0 { 0 } else { 1 << fraction_bits };
        sign * unit * f64::from(fraction + hidden)
    }

    /// Numbers of `bytes`, one after the other.
    pub(super) fn decode_all(self, bytes: &[u8]) -> Vec<f64> {
        let code = |chunk: &[u8]| chunk.iter().rev().fold(0, |code, &b| code << 8 | u32::from(b));
        bytes.chunks(self.bytes()).map(|chunk| self.decode(code(chunk))).collect()
    }

    fn code(self, kind: Kind, row: usize, random: &mut Random) -> u32 {
        let (exponent_bits, fraction_bits) = self.bits();
        let bias = (1i32 << (exponent_bits - 1)) - 1;
        let top = (1i32 << exponent_bits) - 1;
        // E4M3 has numbers in its highest exponent, and one NaN.
        let largest = if self == Element::E4m3 { top } else { top - 1 };
        let reach = (bias - 1).min(20);
        let (low, high) = match kind {
            Kind::Even | Kind::Zeros | Kind::Special => (bias - 4, bias),
            Kind::Cancelling => (bias, bias + 1),
            Kind::Wide => (bias - reach, (bias + reach).min(largest)),
            Kind::Tiny => (0, 2),
            Kind::Huge => (largest - 2, largest),
        };
        let exponent = low + random.below((high - low + 1) as u32) as i32;
        let mut fraction = random.below(1 << fraction_bits);
        if self == Element::E4m3 && exponent == top {
            fraction = fraction.min(6);
        }
        let sign = random.below(2) << (exponent_bits + fraction_bits);
        let is_rare = random.below(16) == 0;
        match kind {
            Kind::Zeros if random.below(2) == 0 => sign,
            Kind::Special if row % 16 == 5 && is_rare => {
                let infinite = (top as u32) << fraction_bits;
                // E4M3 has only NaN, the last code.
                let nan = infinite | ((1 << fraction_bits) - 1);
                let is_nan = self == Element::E4m3 || fraction & 1 == 0;
                sign | if is_nan { nan } else { infinite }
            }
            _ => sign | (exponent as u32) << fraction_bits | fraction,
        }
    }

    /// Elements of `[rows, k]`. Where neighbours shall cancel, the `right` operand repeats its
    /// elements and the left one negates them, but for the last bit.
    pub(super) fn matrix(
        self,
        kind: Kind,
        (rows, k): (usize, usize),
        right: bool,
        seed: u64,
    ) -> Vec<u8> {
        let (exponent_bits, fraction_bits) = self.bits();
        let sign = 1 << (exponent_bits + fraction_bits);
        let mut random = Random::new(seed);
        let mut bytes = Vec::with_capacity(rows * k * self.bytes());
        for row in 0..rows {
            let mut before = 0;
            for column in 0..k {
                let mut code = self.code(kind, row, &mut random);
                if kind == Kind::Cancelling && column % 2 == 1 {
                    code = if right { before } else { (before ^ sign) ^ (code & 1) };
                }
                before = code;
                bytes.extend_from_slice(&code.to_le_bytes()[..self.bytes()]);
            }
        }
        bytes
    }
}

/// Type of accumulators.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Sum {
    F32,
    /// Two to a word.
    F16,
}

impl Sum {
    pub(super) fn name(self) -> &'static str {
        match self {
            Sum::F32 => "f32",
            Sum::F16 => "f16",
        }
    }

    /// Sums in a register.
    pub(super) fn per_word(self) -> usize {
        match self {
            Sum::F32 => 1,
            Sum::F16 => 2,
        }
    }

    /// What the words of a block of accumulators hold before.
    pub(super) fn words(self, kind: Kind, len: usize, seed: u64) -> Vec<u32> {
        let mut random = Random::new(seed);
        let element = match self {
            Sum::F32 => Element::Tf32,
            Sum::F16 => Element::F16,
        };
        let mut word = |index: usize| match self {
            Sum::F32 => element.code(kind, index % 61, &mut random),
            Sum::F16 => {
                let low = element.code(kind, index % 61, &mut random);
                low | element.code(kind, index % 61, &mut random) << 16
            }
        };
        (0..len).map(&mut word).collect()
    }

    /// The numbers of a word.
    pub(super) fn decode(self, word: u32) -> Vec<f64> {
        match self {
            Sum::F32 => vec![f32::from_bits(word).into()],
            Sum::F16 => vec![Element::F16.decode(word & 0xffff), Element::F16.decode(word >> 16)],
        }
    }
}

/// Row and column of each number in register `index` of `lane`, as all instructions leave their
/// results: within 16 rows, eight columns for every four (F32) or two (F16) registers.
pub(super) fn places(sum: Sum, index: usize, lane: usize) -> Vec<(usize, usize)> {
    let first = index * sum.per_word();
    (first..first + sum.per_word())
        .map(|number| {
            let row = lane / 4 + number / 2 % 2 * 8;
            (row, number / 4 * 8 + lane % 4 * 2 + number % 2)
        })
        .collect()
}

/// A sum of products and what it may differ by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub(super) value: f64,
    /// Magnitudes of all that is added.
    pub(super) magnitude: f64,
}

impl Expected {
    pub(super) fn new(a: &[f64], b: &[f64], before: f64, sign: f64) -> Expected {
        let products = || a.iter().zip(b).map(|(a, b)| a * b);
        Expected {
            value: before + sign * products().sum::<f64>(),
            magnitude: before.abs() + products().map(f64::abs).sum::<f64>(),
        }
    }

    /// Whether `got` can be meant: within so much of the magnitudes that no order of the sum and
    /// no number of bits that is known of any tensor core leaves it, while a wrong element does.
    pub(super) fn allows(&self, got: f64, element: Element, sum: Sum) -> bool {
        let (largest, rounding, smallest) = match sum {
            Sum::F32 => (f64::from(f32::MAX), 2f64.powi(-22), 2f64.powi(-120)),
            Sum::F16 => (65504.0, 2f64.powi(-6), 2f64.powi(-20)),
        };
        let share = match element {
            // 13 bits below the largest of 32 products, each of which is cut.
            Element::E4m3 | Element::E5m2 => 2f64.powi(-7),
            _ => 2f64.powi(-17),
        };
        if self.value.is_nan() {
            return got.is_nan();
        }
        if self.value.is_infinite() || self.value.abs() > 2.0 * largest {
            return got.is_nan() || got.abs() >= largest;
        }
        // Partial sums may overflow.
        if self.magnitude > largest / 2.0 {
            return true;
        }
        (got - self.value).abs() <= (share + rounding) * self.magnitude + smallest
    }
}
