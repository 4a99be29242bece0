//! Planted bugs: each has to change the result or to be a fault.

use super::bench::{Bench, Case};
use crate::decode::MmaKind;
use crate::numerics::ResultMode;
use crate::tcgen05::{CopyRequest, Major, MatrixA, MmaRequest, SharedDescriptor, Swizzle};

type Plant = fn(&mut MmaRequest);
type PlantCopy = fn(&mut CopyRequest);

fn with_a(request: &mut MmaRequest, change: impl Fn(&mut SharedDescriptor)) {
    let MatrixA::Shared(bits) = &mut request.a else { panic!("A is in tensor memory") };
    let mut descriptor = SharedDescriptor::decode("A", *bits).unwrap();
    change(&mut descriptor);
    *bits = descriptor.encode();
}

fn with_b(request: &mut MmaRequest, change: impl Fn(&mut SharedDescriptor)) {
    let mut descriptor = SharedDescriptor::decode("B", request.b).unwrap();
    change(&mut descriptor);
    request.b = descriptor.encode();
}

/// Runs the case with the bug in its second MMA.
fn check(case: Case, name: &str, plant: Plant) {
    let mut bench = Bench::new(case);
    let expected = bench.expected();
    plant(&mut bench.requests[1]);
    if let Ok(found) = bench.run(ResultMode::Hardware) {
        assert_ne!(found, expected, "{name} goes unnoticed in {case:?}");
    }
}

const ALL: &[(&str, Plant)] = &[
    ("stride of A", |r| with_a(r, |d| d.stride += 16)),
    ("stride of A halved", |r| with_a(r, |d| d.stride /= 2)),
    ("stride of B", |r| with_b(r, |d| d.stride += 128)),
    ("stride of B zero", |r| with_b(r, |d| d.stride = 0)),
    ("start of A", |r| with_a(r, |d| d.start += 16)),
    ("start of A by a row", |r| with_a(r, |d| d.start += 128)),
    ("start of B", |r| with_b(r, |d| d.start -= 32)),
    ("K not advanced", |r| with_b(r, |d| d.start -= 32)),
    ("no version", |r| r.b &= !(1 << 46)),
    ("D's column", |r| r.d += 1),
    ("D's lane", |r| r.d += 32 << 16),
    ("D overwritten", |r| r.accumulate = false),
    ("N", |r| r.instruction ^= 1 << 18),
    ("M", |r| r.instruction ^= 3 << 27),
    ("A's type", |r| r.instruction ^= 1 << 7),
    ("B's type", |r| r.instruction ^= 1 << 10),
    ("sign of A", |r| r.instruction ^= 1 << 13),
    ("direction of A", |r| r.instruction ^= 1 << 15),
    ("direction of B", |r| r.instruction ^= 1 << 16),
    ("sparse", |r| r.instruction ^= 1 << 2),
    ("group", |r| r.group ^= 3),
];

const LEADING: &[(&str, Plant)] = &[
    ("leading of A", |r| with_a(r, |d| d.leading += 16)),
    ("leading of A zero", |r| with_a(r, |d| d.leading = 0)),
    ("leading of B", |r| with_b(r, |d| d.leading *= 2)),
    ("leading and stride swapped", |r| {
        with_b(r, |d| std::mem::swap(&mut d.leading, &mut d.stride));
    }),
];

const SCALES: &[(&str, Plant)] = &[
    ("byte of A's scales", |r| r.instruction ^= 1 << 29),
    ("byte of B's scales", |r| r.instruction ^= 1 << 4),
    ("other byte of B's scales", |r| r.instruction ^= 2 << 4),
    ("column of A's scales", |r| r.scales.as_mut().unwrap().a += 1),
    ("column of B's scales", |r| r.scales.as_mut().unwrap().b += 4),
    ("A's scales for B's", |r| {
        let scales = r.scales.as_mut().unwrap();
        std::mem::swap(&mut scales.a, &mut scales.b);
    }),
    ("lane of scales", |r| r.scales.as_mut().unwrap().a += 32 << 16),
    ("format of scales", |r| r.instruction ^= 1 << 23),
    ("block of scales", |r| r.scales.as_mut().unwrap().block ^= 16 | 32),
    ("no scales", |r| r.scales = None),
];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, group, m) in [
        (MmaKind::F16, 1, 64),
        (MmaKind::F16, 1, 128),
        (MmaKind::F16, 2, 128),
        (MmaKind::F8f6f4, 2, 256),
        (MmaKind::Mxf8f6f4, 1, 128),
        (MmaKind::Mxf8f6f4, 2, 256),
        (MmaKind::Mxf4nvf4, 2, 256),
    ] {
        for swizzle in [Swizzle::None, Swizzle::Bytes64, Swizzle::Bytes128] {
            let case = Case::new(kind, group, m, 128);
            cases.push(Case { swizzle: [swizzle; 2], ..case });
        }
    }
    cases
}

#[test]
fn descriptors_and_addresses() {
    for case in cases() {
        for (name, plant) in ALL {
            check(case, name, *plant);
        }
        let plain = case.swizzle[0] == Swizzle::None;
        if plain {
            LEADING.iter().for_each(|(name, plant)| check(case, name, *plant));
        }
        if case.scale.is_some() {
            SCALES.iter().for_each(|(name, plant)| check(case, name, *plant));
        }
    }
    // MN-major matrices of more than one atom use both offsets with a swizzle, too.
    for swizzle in [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes128] {
        let case = Case::new(MmaKind::F16, 1, 128, 128);
        let case = Case { swizzle: [swizzle; 2], major: [Major::Mn; 2], ..case };
        LEADING.iter().for_each(|(name, plant)| check(case, name, *plant));
    }
}

#[test]
fn every_swizzle_for_every_other() {
    let all = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
    for swizzle in all {
        for wrong in all.into_iter().chain([Swizzle::Bytes128Atom32]) {
            if wrong == swizzle {
                continue;
            }
            for major in [Major::K, Major::Mn] {
                let case = Case::new(MmaKind::F16, 1, 128, 64);
                let case = Case { swizzle: [swizzle; 2], major: [major; 2], ..case };
                for which in 0..2 {
                    let mut bench = Bench::new(case);
                    let expected = bench.expected();
                    for request in &mut bench.requests {
                        if which == 0 {
                            with_a(request, |descriptor| descriptor.swizzle = wrong);
                        } else {
                            with_b(request, |descriptor| descriptor.swizzle = wrong);
                        }
                    }
                    if let Ok(found) = bench.run(ResultMode::Hardware) {
                        assert_ne!(found, expected, "{swizzle} taken for {wrong}, {major:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn copies_of_scales() {
    let plants: &[(&str, PlantCopy)] = &[
        ("stride", |c| c.descriptor += 1 << 32),
        ("start", |c| c.descriptor += 1),
        ("swizzle", |c| c.descriptor |= 4 << 61),
        ("column", |c| c.target += 1),
        ("lane", |c| c.target += 32 << 16),
        ("group", |c| c.group ^= 3),
    ];
    for (group, m) in [(1, 128), (2, 256), (2, 128)] {
        for nth in 0..2 {
            for (name, plant) in plants {
                let case = Case { steps: 4, ..Case::new(MmaKind::Mxf8f6f4, group, m, 128) };
                let mut bench = Bench::new(case);
                let expected = bench.expected();
                plant(&mut bench.copies[nth]);
                if let Ok(found) = bench.run(ResultMode::Hardware) {
                    assert_ne!(found, expected, "{name} of copy {nth}, M {m}");
                }
            }
        }
    }
}
