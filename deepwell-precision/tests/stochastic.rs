//! The counter-based generator against published vectors, and rounding with its bits.

use deepwell_precision::{ElementFormat, Overflow, Philox, Rounding, philox};

/// `philox4x32 10` of the known-answer vectors of Random123.
#[test]
fn known_answers() {
    for (counter, key, expected) in [
        ([0; 4], [0; 2], [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]),
        (
            [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
            [0xA409_3822, 0x299F_31D0],
            [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1],
        ),
    ] {
        assert_eq!(philox::block(counter, key), expected);
    }
    let stream = Philox { seed: 0x299F_31D0_A409_3822, stream: 0x0370_7344_1319_8A2E };
    let index = 0x85A3_08D3_243F_6A88_u64.wrapping_mul(4);
    assert_eq!(stream.word(index >> 2 << 2), philox_word(&stream, index));
}

/// The word by the definition of the address.
fn philox_word(stream: &Philox, index: u64) -> u32 {
    let at = index / 4;
    let split = |x: u64| [x as u32, (x >> 32) as u32];
    let counter = [split(at)[0], split(at)[1], split(stream.stream)[0], split(stream.stream)[1]];
    philox::block(counter, split(stream.seed))[(index % 4) as usize]
}

/// All bf16 inputs with the extreme bits: a value of the format stays, and the two codes are those
/// of rounding toward zero and away from it.
#[test]
fn extreme_bits_give_the_neighbours() {
    for &element in ElementFormat::ALL {
        for bits in 0..=u16::MAX {
            let x = f32::from_bits(u32::from(bits) << 16);
            let down = element.encode(x, Rounding::TowardZero, Overflow::Saturate);
            let kept = element.encode_stochastic(x, u32::MAX);
            assert_eq!(kept, down, "{element} {x:e}");
            let away = element.encode_stochastic(x, 0);
            let value = element.decode(down);
            // Less than 2^-32 of the spacing, below which no bits round away.
            let too_small = x.abs() < element.decode(1) * 2.0_f32.powi(-32);
            if x.is_nan() || x == value || x.abs() > element.max() || too_small {
                assert_eq!(away, down, "{element} {x:e}");
            } else {
                assert_eq!(away, down + 1, "{element} {x:e}");
            }
        }
    }
}

/// The mean of n draws strays from x by more than 5 standard errors once in 1.7 million tries, and
/// the bits are fixed; the spacing bounds the deviation of one draw by half.
#[test]
fn the_mean_is_the_value() {
    let draws = 100_000_u64;
    for (stream, (x, spacing)) in
        [(0.1, 0.5), (-0.3, 0.5), (1.2, 0.5), (2.9, 1.0), (-5.3, 2.0), (0.01, 0.5)]
            .iter()
            .enumerate()
    {
        let philox = Philox { seed: 7, stream: stream as u64 };
        let sum: f64 = (0..draws)
            .map(|i| ElementFormat::E2M1.encode_stochastic(*x, philox.word(i)))
            .map(|code| f64::from(ElementFormat::E2M1.decode(code)))
            .sum();
        let mean = sum / draws as f64;
        let bound = 5.0 * spacing / 2.0 / (draws as f64).sqrt();
        assert!((mean - f64::from(*x)).abs() < bound, "{x}: mean {mean}");
    }
}
