//! MMAs without block scales.

use super::bench::{A, Bench, Case, D};
use crate::decode::MmaKind;
use crate::number::Format;
use crate::numerics::{Accumulate, ResultMode};
use crate::tcgen05::{Major, MatrixA, Swizzle};

const ALL: [Swizzle; 4] = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];

#[test]
fn every_layout_of_the_accumulator() {
    for (m, group, n) in [
        (64, 1, 8),
        (64, 1, 72),
        (64, 1, 256),
        (128, 1, 8),
        (128, 1, 16),
        (128, 1, 200),
        (128, 1, 256),
        (128, 2, 16),
        (128, 2, 96),
        (128, 2, 256),
        (256, 2, 16),
        (256, 2, 112),
        (256, 2, 256),
    ] {
        Bench::check(Case::new(MmaKind::F16, group, m, n));
    }
    for (m, n) in [(32, 64), (32, 256), (64, 128), (128, 64)] {
        let case = Case::new(MmaKind::F16, 1, m, n);
        Bench::check(Case { weight_stationary: true, ..case });
    }
    Bench::check(Case { lane: 16, ..Case::new(MmaKind::F16, 1, 64, 32) });
}

#[test]
fn every_swizzle_and_direction() {
    let kinds = [
        (MmaKind::F16, Format::F16),
        (MmaKind::F16, Format::BF16),
        (MmaKind::Tf32, Format::TF32),
        (MmaKind::F8f6f4, Format::E4M3),
        (MmaKind::F8f6f4, Format::E5M2),
        (MmaKind::F8f6f4, Format::E2M3),
        (MmaKind::F8f6f4, Format::E3M2),
        (MmaKind::F8f6f4, Format::E2M1),
        (MmaKind::I8, Format::S8),
    ];
    for (nth, (kind, format)) in kinds.into_iter().enumerate() {
        for (major_a, major_b) in [
            (Major::K, Major::K),
            (Major::Mn, Major::K),
            (Major::K, Major::Mn),
            (Major::Mn, Major::Mn),
        ] {
            for (turn, swizzle) in ALL.into_iter().enumerate() {
                let other = ALL[(turn + nth) % 4];
                let legal = |major, swizzle| {
                    if kind == MmaKind::Tf32 && major == Major::Mn {
                        Swizzle::Bytes128Atom32
                    } else {
                        swizzle
                    }
                };
                let group = 1 + nth as u32 % 2;
                let case = Case::new(kind, group, 128, 64);
                Bench::check(Case {
                    a: format,
                    b: format,
                    major: [major_a, major_b],
                    swizzle: [legal(major_a, swizzle), legal(major_b, other)],
                    steps: 3,
                    seed: turn as u64,
                    ..case
                });
            }
        }
    }
}

#[test]
fn element_types_of_8_bit_kinds_mix() {
    let formats = [Format::E4M3, Format::E5M2, Format::E2M3, Format::E3M2, Format::E2M1];
    for a in formats {
        for b in formats {
            Bench::check(Case { a, b, ..Case::new(MmaKind::F8f6f4, 1, 64, 16) });
        }
    }
    for (a, b) in [(Format::U8, Format::S8), (Format::S8, Format::U8), (Format::U8, Format::U8)] {
        Bench::check(Case { a, b, ..Case::new(MmaKind::I8, 1, 128, 48) });
    }
    Bench::check(Case { a: Format::F16, ..Case::new(MmaKind::F16, 1, 128, 16) });
}

#[test]
fn signs_and_accumulators() {
    for negate in [[true, false], [false, true], [true, true]] {
        Bench::check(Case { negate, ..Case::new(MmaKind::F16, 1, 64, 24) });
        Bench::check(Case { negate, ..Case::new(MmaKind::Tf32, 1, 128, 24) });
        Bench::check(Case { negate, ..Case::new(MmaKind::F8f6f4, 2, 256, 32) });
    }
    let half = Accumulate::F16;
    let (a, b) = (Format::F16, Format::F16);
    Bench::check(Case { a, b, accumulate: half, ..Case::new(MmaKind::F16, 1, 128, 32) });
    Bench::check(Case { accumulate: half, ..Case::new(MmaKind::F8f6f4, 2, 128, 32) });
    let saturating = Accumulate::I32Saturating;
    Bench::check(Case { accumulate: saturating, ..Case::new(MmaKind::I8, 1, 128, 32) });
}

#[test]
fn a_in_tensor_memory() {
    for (m, group) in [(64, 1), (128, 1), (128, 2), (256, 2)] {
        let in_tensor = |case: Case| Bench::check(Case { a_in_tensor: true, steps: 4, ..case });
        in_tensor(Case::new(MmaKind::F16, group, m, 64));
        in_tensor(Case::new(MmaKind::Tf32, group, m, 64));
        in_tensor(Case { a: Format::U8, ..Case::new(MmaKind::I8, group, m, 64) });
        for a in [Format::E4M3, Format::E5M2, Format::E2M3, Format::E3M2, Format::E2M1] {
            in_tensor(Case { a, ..Case::new(MmaKind::F8f6f4, group, m, 64) });
        }
    }
    let case = Case::new(MmaKind::F16, 1, 64, 64);
    Bench::check(Case { a_in_tensor: true, lane: 16, ..case });
}

#[test]
fn the_copies_of_a_in_tensor_memory_are_each_used() {
    // In the layout of M = 128 of a pair, the upper 64 lanes multiply their own copy of A.
    let case = Case { a_in_tensor: true, ..Case::new(MmaKind::F16, 2, 128, 64) };
    let mut bench = Bench::new(case);
    let expected = bench.expected();
    for column in 0..16 {
        bench.memory.write_word(1, 64 + 5, A + column, 0);
    }
    let found = bench.run(ResultMode::Hardware).unwrap();
    for (at, (x, y)) in expected.iter().zip(&found).enumerate() {
        let zeroed = at as u32 / 64 == 64 + 5 && at as u32 % 64 >= 32;
        assert_eq!(*y, if zeroed { 0.0 } else { *x }, "element {at}");
    }
}

#[test]
fn the_start_of_a_pattern_can_be_moved() {
    // All of A one 128-byte row further: the pattern begins at an odd row.
    for swizzle in [Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128] {
        let case = Case { swizzle: [swizzle, swizzle], ..Case::new(MmaKind::F16, 1, 128, 32) };
        let mut bench = Bench::new(case);
        let expected = bench.expected();
        let end = 0x1_c000;
        for offset in (0x400..end - 128).rev() {
            let byte = bench.memory.byte(0, offset);
            bench.memory.write_byte(0, offset + 128, byte);
        }
        for request in &mut bench.requests {
            let MatrixA::Shared(a) = &mut request.a else { panic!() };
            // Address and base offset.
            *a += 128 >> 4 | 1 << 49;
        }
        assert_eq!(bench.run(ResultMode::Hardware).unwrap(), expected, "{swizzle}");
        for request in &mut bench.requests {
            let MatrixA::Shared(a) = &mut request.a else { panic!() };
            *a &= !(7 << 49);
        }
        assert_ne!(bench.run(ResultMode::Hardware).unwrap(), expected, "{swizzle}");
    }
}

#[test]
fn the_accumulator_is_scaled_down() {
    for (kind, accumulate) in [
        (MmaKind::F16, Accumulate::F32),
        (MmaKind::F16, Accumulate::F16),
        (MmaKind::Tf32, Accumulate::F32),
    ] {
        let mut case = Case { accumulate, ..Case::new(kind, 1, 128, 16) };
        if accumulate == Accumulate::F16 {
            (case.a, case.b) = (Format::F16, Format::F16);
        }
        let mut bench = Bench::new(Case { steps: 1, ..case });
        let product = bench.expected();
        let added = bench.requests[0];
        bench.requests.push(crate::tcgen05::MmaRequest {
            accumulate: true,
            scale_input_d: 3,
            ..added
        });
        let expected: Vec<f64> = product.iter().map(|x| x / 8.0 + x).collect();
        assert_eq!(bench.run(ResultMode::Hardware).unwrap(), expected);
    }
}

#[test]
fn disabled_lanes_keep_what_they_have() {
    for (m, group) in [(64, 1), (128, 1), (128, 2), (256, 2)] {
        let case = Case { steps: 1, ..Case::new(MmaKind::F16, group, m, 32) };
        let mut bench = Bench::new(case);
        let expected = bench.expected();
        let mask = [0x5, 0, 0x8000_0000, 0x10, 0, 0x2, 0, 0xff];
        let words = 4 * group as usize;
        bench.requests[0].disabled_lanes[..words].copy_from_slice(&mask[..words]);
        let keeps =
            |block: u32, lane: u32| mask[(block * 4 + lane / 32) as usize] >> (lane % 32) & 1;
        for block in 0..group {
            for lane in 0..128 {
                for column in 0..32 {
                    bench.memory.write_word(block, lane, D + column, 42_f32.to_bits());
                }
            }
        }
        let found = bench.run(ResultMode::Hardware).unwrap();
        for (at, (x, y)) in expected.iter().zip(&found).enumerate() {
            let (block, lane, _) = case.cell(at as u32 / 32, at as u32 % 32);
            let x = if keeps(block, lane) == 1 { 42.0 } else { *x };
            assert_eq!(*y, x, "M {m} element {at}");
        }
    }
}

#[test]
fn the_odd_cta_may_issue_for_the_pair() {
    let mut bench = Bench::new(Case::new(MmaKind::F16, 2, 256, 32));
    let expected = bench.expected();
    for request in &mut bench.requests {
        request.rank = 1;
    }
    assert_eq!(bench.run(ResultMode::Hardware).unwrap(), expected);
}
