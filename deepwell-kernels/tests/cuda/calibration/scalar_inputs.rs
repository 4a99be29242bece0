//! Operands of scalar instructions: what is special in all combinations, ties of roundings, and
//! bits of any kind.

use super::element::Random;

/// What a thread's three words hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Words {
    /// An FP32.
    F32,
    /// Two 16-bit floats, or anything else: all bits are meant.
    Pairs,
    /// Two codes of 8 bits, every pair once.
    Codes,
    /// Integers of 32 bits.
    Integers,
}

/// Words that each operand has.
pub(super) const COUNT: usize = 1 << 14;
/// Bytes of an operand.
pub(super) const BYTES: usize = 4 * COUNT;

const SPECIAL_F32: [u32; 32] = [
    0x0000_0000, // zeros
    0x8000_0000,
    0x3f80_0000, // ones
    0xbf80_0000,
    0x7f80_0000, // infinities
    0xff80_0000,
    0x7fc0_0000, // NaNs, quiet and signalling, with and without a payload
    0xffc0_1234,
    0x7f80_0001,
    0xffbf_ffff,
    0x0000_0001, // subnormal numbers
    0x8000_0001,
    0x007f_ffff,
    0x807f_ffff,
    0x0040_0000,
    0x0080_0000, // the smallest and the largest normal numbers
    0x8080_0000,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x477f_e000, // 65504, 65519.996 and 65520: where F16 ends
    0x477f_efff,
    0x477f_f000,
    0x43e0_0000, // 448, 463.99997, 464 and 480: where E4M3 ends
    0x43e7_ffff,
    0x43e8_0000,
    0x43f0_0000,
    0x4760_0000, // 57344 and 61440: where E5M2 ends
    0x4770_0000,
    0x7f7f_8000, // where BF16 ends
    0x3f00_0000, // a half
    0x4f00_0000, // 2^31
    0xcf00_0001,
];

const SPECIAL_HALVES: [u32; 20] = [
    0x0000, 0x8000, 0x3c00, 0xbc00, 0x3f80, 0xbf80, 0x7c00, 0xfc00, 0x7f80, 0xff80, 0x7e00, 0x7fc0,
    0x7c01, 0xffff, 0x0001, 0x8001, 0x03ff, 0x0400, 0x7bff, 0x7f7f,
];

/// Bits below the last one that a format of 16 or 8 bits keeps: nothing, half a unit, and its
/// neighbours.
fn tie(random: &mut Random) -> u32 {
    let below = [13, 16, 20, 21][random.below(4) as usize];
    let half = 1u32 << (below - 1);
    let rest = [0, half - 1, half, half + 1, 1, 2 * half - 1][random.below(6) as usize];
    let kept = random.below(1 << (23 - below)) << below;
    let exponent = 127 - 20 + random.below(37);
    random.below(2) << 31 | exponent << 23 | kept | rest
}

fn f32_of(index: usize, random: &mut Random) -> [u32; 3] {
    let specials = SPECIAL_F32.len();
    if index < specials * specials {
        let of = |index: usize| SPECIAL_F32[index % specials];
        return [of(index / specials), of(index), of(index * 7 + index / specials)];
    }
    let mut near = |reach: u32| {
        let exponent = 127 - reach + random.below(2 * reach + 1);
        random.below(2) << 31 | exponent << 23 | random.below(1 << 23)
    };
    match index % 5 {
        0 => [near(2), near(2), near(4)],
        1 => [near(30), near(30), near(60)],
        // A sum, or a product and a sum, that cancels but for the last bits.
        2 => {
            let a = near(3);
            let c = random.below(4);
            [a, (a ^ 0x8000_0000).wrapping_add(c), 0x3f80_0000 + c]
        }
        3 => [tie(random), tie(random), tie(random)],
        _ => [random.word(), random.word(), random.word()],
    }
}

fn pairs_of(index: usize, random: &mut Random) -> [u32; 3] {
    let specials = SPECIAL_HALVES.len();
    let mut half = || match random.below(4) {
        0 => SPECIAL_HALVES[random.below(specials as u32) as usize],
        // Around one, as BF16 and as F16.
        1 => random.below(2) << 15 | (0x3e00 + random.below(0x300)),
        2 => random.below(2) << 15 | (0x3800 + random.below(0x800)),
        _ => random.below(1 << 16),
    };
    if index < specials * specials {
        let (high, low) = (SPECIAL_HALVES[index / specials], SPECIAL_HALVES[index % specials]);
        return [high | low << 16, low | high << 16, half() | half() << 16];
    }
    // Every code at least twice in the rest.
    let code = (index * 4 + index % 4) as u32 & 0xffff;
    [code | half() << 16, half() | half() << 16, half() | half() << 16]
}

/// The three operands, one after the other.
pub(super) fn words(kind: Words) -> [Vec<u32>; 3] {
    let mut random = Random::new(77);
    let mut operands = [(); 3].map(|()| Vec::with_capacity(COUNT));
    for index in 0..COUNT {
        let word = match kind {
            Words::F32 => f32_of(index, &mut random),
            Words::Pairs => pairs_of(index, &mut random),
            Words::Codes => {
                let low = index as u32 & 0xff;
                let high = (index as u32 >> 6) & 0xfc | index as u32 & 3;
                [low | high << 8, random.word(), random.word()]
            }
            Words::Integers => {
                let shift = index as u32 % 32;
                [random.word() >> shift, random.word(), random.word()]
            }
        };
        for (operand, word) in operands.iter_mut().zip(word) {
            operand.push(word);
        }
    }
    operands
}
