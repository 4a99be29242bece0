//! MMAs with block scales, which come from tiles of 128 rows and 4 scales by copies.

use super::bench::{Bench, Case, SCALES_A, SCALES_B};
use crate::decode::MmaKind;
use crate::number::Format;
use crate::numerics::ResultMode;
use crate::tcgen05::{Major, Swizzle};

#[test]
fn scales_of_every_kind_and_layout() {
    for (m, group) in [(128, 1), (128, 2), (256, 2)] {
        for n in [16, 48, 64, 128, 192, 256] {
            Bench::check(Case { steps: 4, ..Case::new(MmaKind::Mxf8f6f4, group, m, n) });
            Bench::check(Case { steps: 4, ..Case::new(MmaKind::Mxf4, group, m, n) });
            Bench::check(Case { steps: 4, ..Case::new(MmaKind::Mxf4nvf4, group, m, n) });
        }
        for block in [16, 32] {
            let case = Case::new(MmaKind::Mxf4nvf4, group, m, 64);
            Bench::check(Case { scale: Some((Format::UE8M0, block)), steps: 3, ..case });
        }
    }
    Bench::check(Case { steps: 4, ..Case::new(MmaKind::Mxf8f6f4, 1, 128, 8) });
}

#[test]
fn swizzles_directions_and_types() {
    let formats = [Format::E4M3, Format::E5M2, Format::E2M3, Format::E3M2, Format::E2M1];
    let swizzles = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
    for (nth, a) in formats.into_iter().enumerate() {
        for (turn, swizzle) in swizzles.into_iter().enumerate() {
            let b = formats[(nth + turn) % 5];
            let major = if turn % 2 == 0 { [Major::Mn, Major::K] } else { [Major::K, Major::Mn] };
            let case = Case::new(MmaKind::Mxf8f6f4, 2, 256, 64);
            Bench::check(Case { a, b, major, swizzle: [swizzle, swizzles[nth % 4]], ..case });
            let case = Case { a, b, a_in_tensor: true, ..Case::new(MmaKind::Mxf8f6f4, 1, 128, 64) };
            Bench::check(case);
        }
    }
    for swizzle in swizzles {
        for kind in [MmaKind::Mxf4, MmaKind::Mxf4nvf4] {
            let case = Case::new(kind, 2, 256, 64);
            Bench::check(Case { swizzle: [swizzle; 2], steps: 4, ..case });
            Bench::check(Case { a_in_tensor: true, ..case });
        }
    }
}

#[test]
fn copies_of_scales_have_to_agree() {
    for (column, lane) in [(SCALES_A + 2, 32 + 7), (SCALES_B + 1, 96 + 31)] {
        let mut bench = Bench::new(Case { steps: 1, ..Case::new(MmaKind::Mxf8f6f4, 1, 128, 64) });
        bench.run(ResultMode::Hardware).unwrap();
        bench.copies.clear();
        let word = bench.memory.word(0, lane, column).unwrap();
        bench.memory.write_word(0, lane, column, word ^ 0x100);
        bench.run(ResultMode::Hardware).unwrap();
        bench.memory.write_word(0, lane, column, word ^ 1);
        let fault = bench.run(ResultMode::Hardware).unwrap_err();
        assert_eq!(fault.rule, "scale-copies-differ");
    }
}

#[test]
fn the_upper_bits_of_an_address_may_repeat_the_byte() {
    let mut bench = Bench::new(Case { steps: 4, ..Case::new(MmaKind::Mxf8f6f4, 1, 128, 64) });
    let expected = bench.expected();
    for (step, request) in bench.requests.iter_mut().enumerate() {
        let scales = request.scales.as_mut().unwrap();
        scales.a |= (step as u32) << 30;
        scales.b |= (step as u32) << 30;
    }
    assert_eq!(bench.run(ResultMode::Hardware).unwrap(), expected);
    bench.requests[1].scales.as_mut().unwrap().b ^= 3 << 30;
    assert_eq!(bench.run(ResultMode::Hardware).unwrap_err().rule, "scale-address-id");
}
