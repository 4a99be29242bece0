//! MMAs that are illegal, each with the name of its rule.

use super::bench::{Bench, Case};
use crate::decode::MmaKind;
use crate::number::Format;
use crate::numerics::Accumulate;
use crate::tcgen05::{Major, MatrixA, MmaRequest, SharedDescriptor, Swizzle};

fn check(case: Case, rule: &str, change: impl Fn(&mut MmaRequest)) {
    let mut request = Bench::new(Case { steps: 1, ..case }).requests[0];
    request.check().unwrap_or_else(|fault| panic!("{case:?} is legal, got {fault}"));
    change(&mut request);
    let fault = request.check().expect_err(rule);
    assert_eq!(fault.rule, rule, "{fault}");
}

fn f16() -> Case {
    Case::new(MmaKind::F16, 1, 128, 64)
}

fn scaled() -> Case {
    Case::new(MmaKind::Mxf8f6f4, 1, 128, 64)
}

fn fp4() -> Case {
    Case::new(MmaKind::Mxf4, 1, 128, 64)
}

#[test]
fn reserved_bits() {
    let reserved = "instruction-descriptor-reserved";
    for bit in [0, 1, 6, 23, 29] {
        check(f16(), reserved, |r| r.instruction |= 1 << bit);
    }
    for bit in [0, 1, 3, 6, 24, 25, 26, 31] {
        check(scaled(), reserved, |r| r.instruction |= 1 << bit);
    }
    for bit in [0, 1, 3, 6, 12, 24, 25, 26] {
        check(fp4(), reserved, |r| r.instruction |= 1 << bit);
    }
    check(fp4(), "instruction-descriptor-k96", |r| r.instruction |= 1 << 31);
    for case in [f16(), scaled(), fp4()] {
        check(case, "instruction-descriptor-sparse", |r| r.instruction |= 1 << 2);
    }
    for bit in [30, 31] {
        check(f16(), "instruction-descriptor-shift", |r| r.instruction |= 1 << bit);
        let case = Case { weight_stationary: true, ..f16() };
        let mut request = Bench::new(case).requests[0];
        request.instruction |= 1 << bit;
        request.check().unwrap();
    }
}

#[test]
fn types() {
    let rule = "instruction-descriptor-type";
    let with = |r: &mut MmaRequest, a: u32, b: u32| {
        r.instruction = r.instruction & !(0x3f << 7) | a << 7 | b << 10;
    };
    for code in [2, 3, 4, 5, 6, 7] {
        check(f16(), rule, |r| with(r, code, 1));
        check(f16(), rule, |r| with(r, 1, code));
    }
    for code in [0, 1, 3] {
        check(Case::new(MmaKind::Tf32, 1, 64, 8), rule, |r| with(r, code, 2));
    }
    for code in [2, 6, 7] {
        check(Case::new(MmaKind::F8f6f4, 1, 64, 16), rule, |r| with(r, code, 0));
        check(scaled(), rule, |r| with(r, 0, code));
        check(Case::new(MmaKind::I8, 1, 64, 16), rule, |r| with(r, code, 0));
    }
    for code in [0, 2, 3] {
        check(fp4(), rule, |r| with(r, 1, code));
    }
    // Accumulators.
    let accumulator = |r: &mut MmaRequest, code: u32| {
        r.instruction = r.instruction & !(3 << 4) | code << 4;
    };
    for code in [0, 2, 3] {
        check(f16(), rule, |r| accumulator(r, code));
        check(Case::new(MmaKind::Tf32, 1, 64, 8), rule, |r| accumulator(r, code));
    }
    for code in [0, 1, 3] {
        check(Case::new(MmaKind::I8, 1, 64, 16), rule, |r| accumulator(r, code));
    }
    let case = Case { a: Format::F16, b: Format::F16, accumulate: Accumulate::F16, ..f16() };
    check(case, rule, |r| with(r, 0, 1));
}

#[test]
fn options_of_kinds() {
    check(f16(), "instruction-descriptor-saturate", |r| r.instruction |= 1 << 3);
    let i8 = Case::new(MmaKind::I8, 1, 128, 32);
    for bit in [13, 14] {
        check(i8, "instruction-descriptor-negate", |r| r.instruction |= 1 << bit);
    }
    for bit in [15, 16] {
        check(fp4(), "instruction-descriptor-transpose", |r| r.instruction |= 1 << bit);
    }
    for case in [scaled(), fp4()] {
        let rule = "instruction-descriptor-scale-format";
        check(case, rule, |r| r.instruction &= !(1 << 23));
    }
    check(f16(), "mma-scale-input-d", |r| r.scale_input_d = 16);
    check(scaled(), "mma-scale-input-d", |r| r.scale_input_d = 1);
    check(i8, "mma-scale-input-d", |r| r.scale_input_d = 1);
    check(f16(), "mma-shift-a", |r| r.shift_a = true);
    check(f16(), "mma-disabled-lanes", |r| r.disabled_lanes[4] = 1);
    check(scaled(), "mma-disabled-lanes", |r| r.disabled_lanes[0] = 1);
    check(scaled(), "mma-weight-stationary", |r| r.weight_stationary = true);
}

#[test]
fn shapes() {
    let shape = |r: &mut MmaRequest, m: u32, n: u32| {
        r.instruction = r.instruction & !(0x3f << 17 | 0x1f << 24) | (n / 8) << 17 | (m / 16) << 24;
    };
    for m in [0, 16, 32, 192, 256] {
        check(f16(), "mma-shape-m", |r| shape(r, m, 64));
    }
    for n in [0, 264, 504] {
        check(f16(), "mma-shape-n", |r| shape(r, 128, n));
    }
    let pair = Case::new(MmaKind::F16, 2, 256, 64);
    check(pair, "mma-shape-m", |r| shape(r, 64, 64));
    check(pair, "mma-shape-n", |r| shape(r, 256, 72));
    check(scaled(), "mma-shape-m", |r| shape(r, 256, 64));
    check(Case::new(MmaKind::I8, 1, 128, 32), "mma-shape-n", |r| shape(r, 128, 40));
    for (kind, group, m, step) in [
        (MmaKind::F8f6f4, 1, 128, 16),
        (MmaKind::Mxf8f6f4, 2, 256, 32),
        (MmaKind::F8f6f4, 2, 256, 32),
    ] {
        let case = Case { major: [Major::K, Major::Mn], ..Case::new(kind, group, m, 64) };
        check(case, "mma-transpose-n", |r| shape(r, m, 64 + step / 2));
    }
}

#[test]
fn layouts_of_operands() {
    let swizzle = |r: &mut MmaRequest, swizzle: Swizzle| {
        let MatrixA::Shared(bits) = &mut r.a else { panic!() };
        let descriptor = SharedDescriptor::decode("A", *bits).unwrap();
        *bits = SharedDescriptor { swizzle, ..descriptor }.encode();
    };
    let atom_32 = Swizzle::Bytes128Atom32;
    let major = [Major::Mn; 2];
    check(f16(), "swizzle-major", |r| swizzle(r, atom_32));
    check(Case { major, ..f16() }, "swizzle-major", |r| swizzle(r, atom_32));
    let tf32 = Case::new(MmaKind::Tf32, 1, 128, 64);
    check(tf32, "swizzle-major", |r| swizzle(r, atom_32));
    let tf32 = Case { major, swizzle: [atom_32; 2], ..tf32 };
    for wrong in [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128] {
        check(tf32, "swizzle-major", |r| swizzle(r, wrong));
    }
    check(f16(), "shared-tile-crosses-pattern", |r| r.b += 112 >> 4);
    check(Case { major, ..f16() }, "shared-tile-crosses-pattern", |r| r.b += 16 >> 4);
    check(f16(), "shared-descriptor-version", |r| r.a = MatrixA::Shared(0));
    check(f16(), "shared-descriptor-leading-mode", |r| r.b |= 1 << 52);
    check(f16(), "shared-descriptor-swizzle", |r| r.b |= 7 << 61);
    // An address that is not cut to 18 bits.
    check(f16(), "shared-descriptor-reserved", |r| r.b |= 0x8_0400 >> 4);
}

#[test]
fn addresses_in_tensor_memory() {
    check(f16(), "tensor-lane-alignment", |r| r.d = 16 << 16);
    check(Case::new(MmaKind::F16, 1, 64, 64), "tensor-lane-alignment", |r| r.d = 32 << 16);
    check(f16(), "tensor-memory-out-of-range", |r| r.d = 449);
    check(f16(), "tensor-memory-out-of-range", |r| r.d = 512);
    // The layout with halves side by side takes half the columns.
    let pair = Case::new(MmaKind::F16, 2, 128, 256);
    check(pair, "tensor-memory-out-of-range", |r| r.d = 385);
    let in_tensor = |case| Case { a_in_tensor: true, ..case };
    check(in_tensor(f16()), "tensor-a-transpose", |r| r.instruction |= 1 << 15);
    check(in_tensor(f16()), "tensor-lane-alignment", |r| r.a = MatrixA::Tensor(16 << 16 | 256));
    check(in_tensor(f16()), "tensor-memory-out-of-range", |r| r.a = MatrixA::Tensor(505));
    check(in_tensor(f16()), "tensor-operands-overlap", |r| r.a = MatrixA::Tensor(63));
    let half = in_tensor(Case::new(MmaKind::F16, 1, 64, 64));
    check(half, "tensor-a-lane", |r| r.a = MatrixA::Tensor(16 << 16 | 256));
    let stationary = Case { weight_stationary: true, ..Case::new(MmaKind::F16, 1, 64, 64) };
    check(stationary, "tensor-a-weight-stationary", |r| r.a = MatrixA::Tensor(256));
}

#[test]
fn scales() {
    let of = |r: &mut MmaRequest| r.scales.unwrap();
    check(f16(), "mma-scales", |r| {
        r.scales = Some(crate::tcgen05::ScaleOperands { block: 32, a: 128, b: 132 });
    });
    check(scaled(), "mma-scales", |r| r.scales = None);
    check(scaled(), "scale-vector", |r| {
        r.scales = Some(crate::tcgen05::ScaleOperands { block: 16, ..of(r) });
    });
    check(fp4(), "scale-id", |r| r.instruction |= 1 << 4);
    check(fp4(), "scale-id", |r| r.instruction |= 3 << 29 & !(1 << 31));
    let nvfp4 = Case::new(MmaKind::Mxf4nvf4, 1, 128, 64);
    check(nvfp4, "scale-id", |r| r.instruction |= 2 << 4);
    check(scaled(), "tensor-lane-alignment", |r| r.scales.as_mut().unwrap().a |= 32 << 16);
    check(scaled(), "tensor-memory-out-of-range", |r| r.scales.as_mut().unwrap().a = 509);
    check(scaled(), "tensor-memory-out-of-range", |r| r.scales.as_mut().unwrap().b = 511);
    check(scaled(), "tensor-operands-overlap", |r| r.scales.as_mut().unwrap().b = 63);
    check(scaled(), "scale-address-id", |r| r.scales.as_mut().unwrap().b |= 2 << 30);
}
