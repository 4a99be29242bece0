//! Rows of instructions, operands and results.

use super::{LANES, Registers, execute};
use crate::decode::{FloatRounding, GlobalAddresses, Instruction, decode};
use crate::number::{Format, Rounding, encode_f64};
use crate::ptx;

mod agreement;
mod approximate;

/// Runs one line on `%r1`.. (32 bits), `%h1`.. (16 bits), `%l1`.. (64 bits) and `%p1`.., and gives
/// the registers.
fn run(line: &str, words: &[u32], longs: &[u64], predicates: &[bool]) -> Registers {
    let text = format!(
        ".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k() {{\n\
         .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %l<8>;\n{line}\nret; }}"
    );
    let module = ptx::parse(&text).expect("the line is PTX");
    let program = decode(&module, "k", &GlobalAddresses::new()).expect("the line is known");
    let mut registers = Registers::new(&program);
    for (index, word) in words.iter().enumerate() {
        // Rows of halves come first.
        registers.words[1 + index] = [word & 0xffff; LANES];
        registers.words[8 + 1 + index] = [*word; LANES];
    }
    for (index, long) in longs.iter().enumerate() {
        registers.longs[1 + index] = [*long; LANES];
    }
    for (index, predicate) in predicates.iter().enumerate() {
        registers.predicates[1 + index] = if *predicate { u32::MAX } else { 0 };
    }
    for step in &program.steps {
        if let Instruction::Scalar(instruction) = &step.instruction {
            execute(instruction, &mut registers, u32::MAX);
        }
    }
    registers
}

fn word(line: &str, words: &[u32]) -> u32 {
    run(line, words, &[], &[]).words[8][17]
}

fn half(line: &str, words: &[u32]) -> u32 {
    run(line, words, &[], &[]).words[0][17]
}

fn long(line: &str, longs: &[u64]) -> u64 {
    run(line, &[], longs, &[]).longs[0][17]
}

fn check(line: &str, words: &[u32], expected: u32) {
    let found = word(line, words);
    assert_eq!(found, expected, "{line} of {words:x?}: {found:#x}, expected {expected:#x}");
}

const NAN: u32 = 0x7fff_ffff;
const ONE: u32 = 0x3f80_0000;
const SIGNALING: u32 = 0x7f80_0001;

#[test]
fn integers_of_32_bits() {
    let rows: &[(&str, &[u32], u32)] = &[
        ("add.s32 %r0, %r1, %r2;", &[u32::MAX, 2], 1),
        ("add.sat.s32 %r0, %r1, %r2;", &[0x7fff_ffff, 1], 0x7fff_ffff),
        ("sub.sat.s32 %r0, %r1, %r2;", &[0x8000_0000, 1], 0x8000_0000),
        ("mul.lo.s32 %r0, %r1, %r2;", &[0x8000_0001, 3], 0x8000_0003),
        ("mul.hi.s32 %r0, %r1, %r2;", &[u32::MAX, 5], u32::MAX),
        ("mul.hi.u32 %r0, %r1, %r2;", &[u32::MAX, 5], 4),
        ("mul24.lo.s32 %r0, %r1, %r2;", &[0xff_ffff, 3], (-3i32) as u32),
        ("mul24.hi.u32 %r0, %r1, %r2;", &[0xff_ffff, 0x10_0000], 0x0fff_fff0),
        ("mad.lo.s32 %r0, %r1, %r2, %r3;", &[7, 6, u32::MAX], 41),
        ("mad.hi.sat.s32 %r0, %r1, %r2, %r3;", &[0x7fff_ffff, 4, 0x7fff_ffff], 0x7fff_ffff),
        ("div.s32 %r0, %r1, %r2;", &[(-7i32) as u32, 2], (-3i32) as u32),
        ("rem.s32 %r0, %r1, %r2;", &[(-7i32) as u32, 2], (-1i32) as u32),
        ("div.s32 %r0, %r1, %r2;", &[0x8000_0000, u32::MAX], 0x8000_0000),
        ("div.u32 %r0, %r1, %r2;", &[7, 0], u32::MAX),
        ("rem.u32 %r0, %r1, %r2;", &[7, 0], u32::MAX),
        ("min.s32 %r0, %r1, %r2;", &[u32::MAX, 1], u32::MAX),
        ("min.u32 %r0, %r1, %r2;", &[u32::MAX, 1], 1),
        ("max.relu.s32 %r0, %r1, %r2;", &[u32::MAX, 0x8000_0000], 0),
        ("abs.s32 %r0, %r1;", &[0x8000_0000], 0x8000_0000),
        ("neg.s32 %r0, %r1;", &[5], (-5i32) as u32),
        ("shl.b32 %r0, %r1, %r2;", &[1, 32], 0),
        ("shl.b32 %r0, %r1, %r2;", &[1, 31], 0x8000_0000),
        ("shr.u32 %r0, %r1, %r2;", &[0x8000_0000, 40], 0),
        ("shr.s32 %r0, %r1, %r2;", &[0x8000_0000, 40], u32::MAX),
        ("shf.l.wrap.b32 %r0, %r1, %r2, %r3;", &[0x8000_0000, 1, 33], 3),
        ("shf.l.clamp.b32 %r0, %r1, %r2, %r3;", &[0x1234_5678, 1, 99], 0x1234_5678),
        ("shf.r.clamp.b32 %r0, %r1, %r2, %r3;", &[0x1234_5678, 7, 99], 7),
        ("shf.r.wrap.b32 %r0, %r1, %r2, %r3;", &[0x1234_5678, 7, 4], 0x7123_4567),
        ("bfe.u32 %r0, %r1, %r2, %r3;", &[0xabcd_1234, 8, 12], 0xd12),
        ("bfe.s32 %r0, %r1, %r2, %r3;", &[0xabcd_1234, 8, 12], 0xffff_fd12),
        ("bfe.s32 %r0, %r1, %r2, %r3;", &[0x8000_0000, 28, 12], 0xffff_fff8),
        ("bfe.u32 %r0, %r1, %r2, %r3;", &[u32::MAX, 4, 0], 0),
        ("bfe.u32 %r0, %r1, %r2, %r3;", &[u32::MAX, 40, 4], 0),
        ("bfi.b32 %r0, %r1, %r2, %r3, %r4;", &[0xff, 0, 4, 4], 0xf0),
        ("bfi.b32 %r0, %r1, %r2, %r3, %r4;", &[0xff, 1, 28, 99], 0xf000_0001),
        ("bfi.b32 %r0, %r1, %r2, %r3, %r4;", &[0xff, 1, 32, 4], 1),
        ("bfind.u32 %r0, %r1;", &[0x10], 4),
        ("bfind.u32 %r0, %r1;", &[0], u32::MAX),
        ("bfind.s32 %r0, %r1;", &[u32::MAX], u32::MAX),
        ("bfind.shiftamt.s32 %r0, %r1;", &[0xffff_ff00], 24),
        ("clz.b32 %r0, %r1;", &[0], 32),
        ("popc.b32 %r0, %r1;", &[0xf0f0], 8),
        ("brev.b32 %r0, %r1;", &[1], 0x8000_0000),
        ("not.b32 %r0, %r1;", &[0xff], 0xffff_ff00),
        ("cnot.b32 %r0, %r1;", &[0], 1),
        ("lop3.b32 %r0, %r1, %r2, %r3, 0xE8;", &[0b1100, 0b1010, 0b0110], 0b1110),
        ("lop3.b32 %r0, %r1, %r2, %r3, 0x3C;", &[0b1100, 0b1010, 0b0110], 0b0110),
        ("prmt.b32 %r0, %r1, %r2, 0x5410;", &[0x3322_1100, 0x7766_5544], 0x5544_1100),
        ("prmt.b32 %r0, %r1, %r2, 0xBA98;", &[0x80ff_7f01, 0], 0xffff_0000),
        ("prmt.b32.f4e %r0, %r1, %r2, %r3;", &[0x3322_1100, 0x7766_5544, 1], 0x4433_2211),
        ("prmt.b32.b4e %r0, %r1, %r2, %r3;", &[0x3322_1100, 0x7766_5544, 1], 0x6677_0011),
        ("prmt.b32.rc8 %r0, %r1, %r2, %r3;", &[0x3322_1100, 0, 2], 0x2222_2222),
        ("prmt.b32.ecl %r0, %r1, %r2, %r3;", &[0x3322_1100, 0, 1], 0x3322_1111),
        ("prmt.b32.ecr %r0, %r1, %r2, %r3;", &[0x3322_1100, 0, 1], 0x1111_1100),
        ("prmt.b32.rc16 %r0, %r1, %r2, %r3;", &[0x3322_1100, 0, 1], 0x3322_3322),
        ("sad.s32 %r0, %r1, %r2, %r3;", &[(-5i32) as u32, 3, 1], 9),
        ("dp4a.s32.u32 %r0, %r1, %r2, %r3;", &[0xff01_0203, 0x0102_0304, 100], 119),
        ("dp2a.lo.u32.u32 %r0, %r1, %r2, %r3;", &[0x0003_0002, 0x0504_0302, 1], 14),
        ("dp2a.hi.u32.u32 %r0, %r1, %r2, %r3;", &[0x0003_0002, 0x0504_0302, 1], 24),
        ("fns.b32 %r0, %r1, 0, 3;", &[0b1011_0000], 7),
        ("fns.b32 %r0, %r1, 4, -1;", &[0b1011_0000], 4),
        ("bmsk.clamp.b32 %r0, %r1, %r2;", &[4, 8], 0xff0),
        ("szext.wrap.s32 %r0, %r1, %r2;", &[0x80, 8], 0xffff_ff80),
        ("selp.b32 %r0, %r1, %r2, 1;", &[3, 4], 3),
        ("slct.s32.s32 %r0, %r1, %r2, %r3;", &[3, 4, u32::MAX], 4),
        ("add.u16x2 %r0, %r1, %r2;", &[0xffff_0001, 0x0001_ffff], 0),
        ("max.s16x2 %r0, %r1, %r2;", &[0xffff_0001, 0x0001_ffff], 0x0001_0001),
        ("min.u16x2 %r0, %r1, %r2;", &[0xffff_0001, 0x0001_ffff], 0x0001_0001),
        ("cvt.pack.sat.s8.s32.b32 %r0, %r1, %r2, %r3;", &[200, (-200i32) as u32, 0xab], 0xab_7f80),
    ];
    rows.iter().for_each(|(line, words, expected)| check(line, words, *expected));
}

#[test]
fn integers_of_other_widths() {
    let rows: &[(&str, &[u32], u32)] = &[
        ("add.s16 %h0, %h1, %h2;", &[0xffff, 2], 1),
        ("mul.lo.u16 %h0, %h1, %h2;", &[0x100, 0x101], 0x100),
        ("mul.hi.s16 %h0, %h1, %h2;", &[0xffff, 5], 0xffff),
        ("shr.s16 %h0, %h1, %r2;", &[0x8000, 20], 0xffff),
        ("shr.u16 %h0, %h1, %r2;", &[0x8000, 15], 1),
        ("min.s16 %h0, %h1, %h2;", &[0x8000, 1], 0x8000),
        ("not.b16 %h0, %h1;", &[0xff], 0xff00),
        ("neg.s16 %h0, %h1;", &[1], 0xffff),
        ("div.s16 %h0, %h1, -2;", &[7], 0xfffd),
        ("cvt.s8.s32 %h0, %r1;", &[0x80], 0xff80),
        ("cvt.u8.s32 %h0, %r1;", &[0xfff], 0xff),
        ("cvt.sat.s8.s32 %h0, %r1;", &[0x80], 0x7f),
    ];
    for (line, words, expected) in rows {
        assert_eq!(half(line, words), *expected, "{line} of {words:x?}");
    }
    let rows: &[(&str, &[u64], u64)] = &[
        ("mul.hi.s64 %l0, %l1, %l2;", &[u64::MAX, 5], u64::MAX),
        ("mul.hi.u64 %l0, %l1, %l2;", &[u64::MAX, 5], 4),
        ("mad.lo.s64 %l0, %l1, %l2, %l1;", &[3, 5], 18),
        ("shl.b64 %l0, %l1, 64;", &[1], 0),
        ("shr.s64 %l0, %l1, 99;", &[1 << 63], u64::MAX),
        ("bfe.s64 %l0, %l1, 60, 4;", &[1 << 63], (-8i64) as u64),
        ("bfi.b64 %l0, %l1, %l2, 60, 4;", &[0xf, 1], 0xf000_0000_0000_0001),
        ("div.s64 %l0, %l1, %l2;", &[(-9i64) as u64, 2], (-4i64) as u64),
        ("rem.u64 %l0, %l1, %l2;", &[9, 4], 1),
        ("min.s64 %l0, %l1, %l2;", &[u64::MAX, 1], u64::MAX),
        ("mul.wide.s32 %l0, -3, 5;", &[], (-15i64) as u64),
        ("mul.wide.u32 %l0, 0xffffffff, 5;", &[], 0x4_ffff_fffb),
        ("cvt.s64.s32 %l0, -3;", &[], (-3i64) as u64),
        ("cvt.u64.u32 %l0, -3;", &[], 0xffff_fffd),
        (
            "{ .reg .b32 a, b; mov.b64 {a, b}, %l1; mov.b64 %l0, {b, a}; }",
            &[7 << 32 | 9],
            9 << 32 | 7,
        ),
        ("{ add.cc.u64 %l3, %l1, %l2; addc.u64 %l0, 0, 0; }", &[u64::MAX, 1], 1),
        ("{ sub.cc.u64 %l3, %l1, %l2; subc.u64 %l0, 0, 0; }", &[0, 1], u64::MAX),
        ("{ mad.lo.cc.u64 %l3, %l1, %l2, %l1; madc.hi.u64 %l0, %l1, %l2, 0; }", &[u64::MAX, 3], 3),
    ];
    for (line, longs, expected) in rows {
        assert_eq!(long(line, longs), *expected, "{line} of {longs:x?}");
    }
    // 32 bits wide, in two words.
    check("mul.wide.s16 %r0, %h1, %h2;", &[0xffff, 3], (-3i32) as u32);
    check("{ .reg .b64 t; mov.b64 t, {%r1, %r2}; mov.b64 {_, %r0}, t; }", &[7, 9], 9);
    check(
        "{ .reg .b16 a, b; mov.b32 {a, b}, %r1; mov.b32 %r0, {b, a}; }",
        &[0x1234_5678],
        0x5678_1234,
    );
}

#[test]
fn single_precision() {
    let subnormal = 1;
    let f = |value: f32| value.to_bits();
    let rows: &[(&str, &[u32], u32)] = &[
        ("add.f32 %r0, %r1, %r2;", &[SIGNALING, ONE], NAN),
        ("add.f32 %r0, %r1, %r2;", &[f(f32::INFINITY), f(f32::NEG_INFINITY)], NAN),
        ("add.rz.f32 %r0, %r1, %r2;", &[ONE, subnormal], ONE),
        ("add.rp.f32 %r0, %r1, %r2;", &[ONE, subnormal], ONE + 1),
        ("add.rm.f32 %r0, %r1, %r2;", &[ONE, ONE | 1 << 31], 1 << 31),
        ("add.rn.f32 %r0, %r1, %r2;", &[ONE, ONE | 1 << 31], 0),
        ("add.rz.f32 %r0, %r1, %r2;", &[f(f32::MAX), f(f32::MAX)], f(f32::MAX)),
        ("add.rp.f32 %r0, %r1, %r2;", &[f(f32::MAX), subnormal], f(f32::INFINITY)),
        ("add.ftz.f32 %r0, %r1, %r2;", &[subnormal, subnormal], 0),
        ("add.f32 %r0, %r1, %r2;", &[subnormal, subnormal], 2),
        ("mul.ftz.f32 %r0, %r1, %r2;", &[0x0080_0000, f(-0.5)], 1 << 31),
        ("add.sat.f32 %r0, %r1, %r2;", &[ONE, ONE], ONE),
        ("add.sat.f32 %r0, %r1, %r2;", &[SIGNALING, ONE], 0),
        ("sub.f32 %r0, %r1, %r2;", &[f(1.0), f(3.0)], f(-2.0)),
        ("mul.rp.f32 %r0, %r1, %r2;", &[subnormal, f(0.25)], 1),
        ("mul.rz.f32 %r0, %r1, %r2;", &[subnormal, f(0.75)], 0),
        (
            "fma.rn.f32 %r0, %r1, %r2, %r3;",
            &[f(1.0 + f32::EPSILON), f(1.0 - f32::EPSILON), f(-1.0)],
            f(-f32::EPSILON * f32::EPSILON),
        ),
        // Fused: the product's error is what is left.
        (
            "mul.f32 %r4, %r1, %r2; sub.f32 %r0, %r3, %r4;",
            &[f(1.0 + f32::EPSILON), f(1.0 - f32::EPSILON), ONE],
            f(f32::EPSILON * f32::EPSILON),
        ),
        (
            "mul.f32 %r4, %r1, %r2; sub.f32 %r0, %r4, %r3;",
            &[f(1.0 + f32::EPSILON), f(1.0 - f32::EPSILON), ONE],
            f(-f32::EPSILON * f32::EPSILON),
        ),
        ("div.rn.f32 %r0, %r1, %r2;", &[ONE, 0], f(f32::INFINITY)),
        ("div.rz.f32 %r0, %r1, %r2;", &[f(2.0), f(3.0)], 0x3f2a_aaaa),
        ("div.rp.f32 %r0, %r1, %r2;", &[f(1.0), f(3.0)], 0x3eaa_aaab),
        ("div.approx.f32 %r0, %r1, %r2;", &[f(1.0), f(1e38)], 0),
        ("div.full.f32 %r0, %r1, %r2;", &[f(1e38), f(1e38)], ONE),
        ("sqrt.rm.f32 %r0, %r1;", &[f(2.0)], 0x3fb5_04f3),
        ("sqrt.rp.f32 %r0, %r1;", &[f(2.0)], 0x3fb5_04f4),
        ("sqrt.rn.f32 %r0, %r1;", &[f(-1.0)], NAN),
        ("rcp.rn.f32 %r0, %r1;", &[1 << 31], f(f32::NEG_INFINITY)),
        ("min.f32 %r0, %r1, %r2;", &[SIGNALING, ONE], ONE),
        ("min.NaN.f32 %r0, %r1, %r2;", &[ONE, SIGNALING], NAN),
        ("min.f32 %r0, %r1, %r2;", &[SIGNALING, SIGNALING], NAN),
        ("min.f32 %r0, %r1, %r2;", &[0, 1 << 31], 1 << 31),
        ("max.f32 %r0, %r1, %r2;", &[1 << 31, 0], 0),
        ("max.xorsign.abs.f32 %r0, %r1, %r2;", &[f(-3.0), f(2.0)], f(-3.0)),
        ("max.f32 %r0, %r1, %r2, %r3;", &[f(-3.0), f(2.0), f(5.0)], f(5.0)),
        ("max.abs.f32 %r0, %r1, %r2, %r3;", &[f(-7.0), f(2.0), f(5.0)], f(7.0)),
        ("abs.f32 %r0, %r1;", &[f(-3.0)], f(3.0)),
        // Of a NaN an H200 gives the canonical one.
        ("abs.f32 %r0, %r1;", &[SIGNALING], NAN),
        ("neg.f32 %r0, %r1;", &[SIGNALING], NAN),
        ("neg.ftz.f32 %r0, %r1;", &[subnormal], 1 << 31),
        ("copysign.f32 %r0, %r1, %r2;", &[f(-1.0), f(3.0)], f(-3.0)),
        ("ex2.approx.ftz.f32 %r0, %r1;", &[f(-1.0)], f(0.5)),
        ("ex2.approx.ftz.f32 %r0, %r1;", &[f(-140.0)], 0),
        ("ex2.approx.f32 %r0, %r1;", &[f(-140.0)], 1 << 9),
        ("ex2.approx.f32 %r0, %r1;", &[f(-149.0)], 1),
        ("ex2.approx.f32 %r0, %r1;", &[f(f32::NEG_INFINITY)], 0),
        ("ex2.approx.f32 %r0, %r1;", &[SIGNALING], NAN),
        ("ex2.approx.f32 %r0, %r1;", &[f(128.0)], f(f32::INFINITY)),
        ("lg2.approx.f32 %r0, %r1;", &[f(8.0)], f(3.0)),
        ("lg2.approx.f32 %r0, %r1;", &[f(-8.0)], NAN),
        ("rsqrt.approx.f32 %r0, %r1;", &[f(4.0)], f(0.5)),
        ("tanh.approx.f32 %r0, %r1;", &[f(f32::INFINITY)], ONE),
        ("slct.f32.f32 %r0, %r1, %r2, %r3;", &[f(1.0), f(2.0), 1 << 31], f(1.0)),
        ("set.lt.u32.f32 %r0, %r1, %r2;", &[f(1.0), f(2.0)], u32::MAX),
        ("set.ltu.f32.f32 %r0, %r1, %r2;", &[NAN, f(2.0)], ONE),
        ("mov.f32 %r0, 0f3F800000;", &[], ONE),
        ("mov.f32 %r0, 1.5;", &[], f(1.5)),
        ("add.f32.bf16 %r0, %h1, %r2;", &[0x3f80, f(0.25)], f(1.25)),
        ("fma.rn.f32.f16 %r0, %h1, %h2, %r3;", &[0x3c00, 0x4000, f(0.5)], f(2.5)),
    ];
    rows.iter().for_each(|(line, words, expected)| check(line, words, *expected));
}

#[test]
fn half_precision() {
    let rows: &[(&str, &[u32], u32)] = &[
        ("add.rn.bf16x2 %r0, %r1, %r2;", &[0x3f80_4000, 0x3f80_3f80], 0x4000_4040),
        ("mul.rn.bf16x2 %r0, %r1, %r2;", &[0x3f81_0001, 0x3f81_3f00], 0x3f82_0000),
        ("fma.rn.relu.bf16x2 %r0, %r1, %r2, %r3;", &[0x3f80_bf80, 0x3f80_3f80, 0], 0x3f80_0000),
        ("add.f16x2 %r0, %r1, %r2;", &[0x7bff_3c00, 0x7bff_3c00], 0x7c00_4000),
        ("add.ftz.f16x2 %r0, %r1, %r2;", &[0x0001_3c00, 0x0001_0000], 0x0000_3c00),
        ("add.sat.f16x2 %r0, %r1, %r2;", &[0xbc00_3c00, 0x0000_3c00], 0x0000_3c00),
        ("fma.rn.f16x2 %r0, %r1, %r2, %r3;", &[0x3c01_3c00, 0x3c01_0000, 0x8000_7e00], 0x3c02_7fff),
        (
            "fma.rn.oob.f16x2 %r0, %r1, %r2, %r3;",
            &[0x7fff_3c00, 0x3c00_3c00, 0x3c00_3c00],
            0x3c00_4000,
        ),
        ("max.NaN.xorsign.abs.bf16x2 %r0, %r1, %r2;", &[0xc000_3f80, 0x3f80_7fc0], 0xc000_7fff),
        ("min.bf16x2 %r0, %r1, %r2;", &[0xc000_3f80, 0x3f80_7fc0], 0xc000_3f80),
        ("abs.bf16x2 %r0, %r1;", &[0xc000_8000], 0x4000_0000),
        ("abs.bf16x2 %r0, %r1;", &[0x7fc0_ff80], 0x7fff_7f80),
        ("neg.bf16x2 %r0, %r1;", &[0x7f80_ff81], 0xff80_7fff),
        ("neg.f16x2 %r0, %r1;", &[0xc000_8000], 0x4000_0000),
        ("ex2.approx.f16x2 %r0, %r1;", &[0x3c00_0000], 0x4000_3c00),
        ("tanh.approx.bf16x2 %r0, %r1;", &[0x7f80_0000], 0x3f80_0000),
        ("set.gt.u32.f16x2 %r0, %r1, %r2;", &[0x3c00_0000, 0x0000_3c00], 0xffff_0000),
        ("set.gt.bf16x2.bf16x2 %r0, %r1, %r2;", &[0x3c00_0000, 0x0000_3c00], 0x3f80_0000),
    ];
    rows.iter().for_each(|(line, words, expected)| check(line, words, *expected));
}

#[test]
fn conversions() {
    let f = |value: f32| value.to_bits();
    let rows: &[(&str, &[u32], u32)] = &[
        ("cvt.rn.f32.s32 %r0, %r1;", &[0x7fff_ffff], f(2147483648.0)),
        ("cvt.rz.f32.s32 %r0, %r1;", &[0x7fff_ffff], 0x4eff_ffff),
        ("cvt.rp.f32.u32 %r0, %r1;", &[0x0100_0001], 0x4b80_0001),
        ("cvt.rzi.s32.f32 %r0, %r1;", &[f(-1.9)], u32::MAX),
        ("cvt.rni.s32.f32 %r0, %r1;", &[f(2.5)], 2),
        ("cvt.rmi.s32.f32 %r0, %r1;", &[f(-1.1)], (-2i32) as u32),
        ("cvt.rpi.u32.f32 %r0, %r1;", &[f(1.1)], 2),
        ("cvt.rzi.u32.f32 %r0, %r1;", &[f(-5.0)], 0),
        ("cvt.rzi.s32.f32 %r0, %r1;", &[f(1e20)], 0x7fff_ffff),
        ("cvt.rzi.s32.f32 %r0, %r1;", &[NAN], 0),
        ("cvt.rni.f32.f32 %r0, %r1;", &[f(3.5)], f(4.0)),
        ("cvt.sat.f32.f32 %r0, %r1;", &[f(3.5)], ONE),
        ("cvt.ftz.f32.f32 %r0, %r1;", &[1 << 31 | 1], 1 << 31),
        ("cvt.f32.f16 %r0, %h1;", &[0x0001], f(5.960_464_5e-8)),
        ("cvt.f32.bf16 %r0, %h1;", &[0x4049], 0x4049_0000),
        ("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", &[f(1.0), f(2.0)], 0x3f80_4000),
        ("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", &[0x3f80_8000, 0x3f81_8000], 0x3f80_3f82),
        ("cvt.rz.bf16x2.f32 %r0, %r1, %r2;", &[0x3f80_ffff, 0xbf81_8000], 0x3f80_bf81),
        ("cvt.rn.relu.bf16x2.f32 %r0, %r1, %r2;", &[f(-1.0), f(2.0)], 0x4000),
        ("cvt.rn.f16x2.f32 %r0, %r1, %r2;", &[f(65520.0), f(65519.0)], 0x7c00_7bff),
        ("cvt.rn.satfinite.f16x2.f32 %r0, %r1, %r2;", &[f(1e9), f(1.0)], 0x7bff_3c00),
        ("cvt.rna.tf32.f32 %r0, %r1;", &[0x3f80_1000], 0x3f80_2000),
        // NaNs as an H200 gives them.
        ("cvt.rna.tf32.f32 %r0, %r1;", &[0xffbf_ffff], 0xffbf_e000),
        ("cvt.rna.tf32.f32 %r0, %r1;", &[SIGNALING], 0x7f80_0000),
        ("cvt.rn.tf32.f32 %r0, %r1;", &[SIGNALING], 0x7fff_e000),
        ("cvt.f32.bf16 %r0, %h1;", &[0x7f81], 0x7f81_0000),
        ("cvt.f32.bf16 %r0, %h1;", &[0xffff], 0xffff_0000),
        ("cvt.f32.f16 %r0, %h1;", &[0xfe01], NAN),
        (
            "{ .reg .f64 t; cvt.f64.f32 t, %r1; cvt.rn.f32.f64 %r0, t; }",
            &[0xffbf_ffff],
            0xffff_ffff,
        ),
        (
            "cvt.rs.bf16x2.f32 %r0, %r1, %r2, %r3;",
            &[0x3f80_8000, 0x3f80_8000, 0x8000_7fff],
            0x3f81_3f80,
        ),
        (
            "cvt.rs.satfinite.e4m3x4.f32 %r0, {%r1, %r2, %r1, %r2}, %r3;",
            &[f(1.0), f(448.0), 0],
            0x387e_387e,
        ),
        ("cvt.rn.f16x2.e4m3x2 %r0, %h1;", &[0x387e], 0x3c00_5f00),
        ("cvt.rn.f16x2.e5m2x2 %r0, %h1;", &[0x3cfc], 0x3c00_fc00),
        ("cvt.rn.bf16x2.ue8m0x2 %r0, %h1;", &[0x7f00], 0x3f80_0040),
        (
            "{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %r1, %r2; mov.b32 %r0, {t, t, t, t}; }",
            &[f(6.0), f(-0.5)],
            0x7979_7979,
        ),
    ];
    rows.iter().for_each(|(line, words, expected)| check(line, words, *expected));
    let rows: &[(&str, &[u32], u32)] = &[
        ("cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2;", &[f(1e9), f(-1.0)], 0x7eb8),
        ("cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2;", &[NAN, f(0.0)], 0x7f00),
        ("cvt.rn.satfinite.e5m2x2.f32 %h0, %r1, %r2;", &[f(1e9), f(-1.0)], 0x7bbc),
        ("cvt.rn.satfinite.relu.e4m3x2.f16x2 %h0, %r1;", &[0xbc00_3c00], 0x0038),
        ("cvt.rn.satfinite.e2m3x2.f32 %h0, %r1, %r2;", &[f(7.5), f(-9.0)], 0x1f3f),
        ("cvt.rn.satfinite.e3m2x2.f32 %h0, %r1, %r2;", &[f(28.0), f(1.0)], 0x1f0c),
        ("cvt.rp.satfinite.ue8m0x2.f32 %h0, %r1, %r2;", &[f(1.5), f(1.0)], 0x807f),
        ("cvt.rz.ue8m0x2.f32 %h0, %r1, %r2;", &[f(1.5), f(0.25)], 0x7f7d),
        ("cvt.rn.bf16.f32 %h0, %r1;", &[SIGNALING], 0x7fff),
        ("cvt.rn.f16.f32 %h0, %r1;", &[f(1.0 / 3.0)], 0x3555),
        ("cvt.rz.f16.f32 %h0, %r1;", &[f(65535.0)], 0x7bff),
        ("cvt.rn.f16.s32 %h0, %r1;", &[2049], 0x6800),
        ("cvt.rni.s16.f16 %h0, %h1;", &[0x4100], 2),
    ];
    for (line, words, expected) in rows {
        assert_eq!(half(line, words), *expected, "{line} of {words:x?}");
    }
    let rows: &[(&str, &[u64], u64)] = &[
        ("cvt.rn.f64.s64 %l0, %l1;", &[(1 << 53) + 1], 9007199254740992.0f64.to_bits()),
        ("cvt.rp.f64.u64 %l0, %l1;", &[(1 << 53) + 1], 9007199254740994.0f64.to_bits()),
        ("cvt.rzi.s64.f64 %l0, %l1;", &[f64::NAN.to_bits()], 1 << 63),
        ("cvt.rzi.f64.f64 %l0, %l1;", &[(-2.7f64).to_bits()], (-2.0f64).to_bits()),
        (
            "{ .reg .f32 t; cvt.rn.f32.f64 t, %l1; cvt.f64.f32 %l0, t; }",
            &[0.1f64.to_bits()],
            f64::from(0.1f32).to_bits(),
        ),
        (
            "{ .reg .f32 t; cvt.rm.f32.f64 t, %l1; cvt.f64.f32 %l0, t; }",
            &[1.0f64.next_down().to_bits()],
            f64::from(1.0f32.next_down()).to_bits(),
        ),
        ("fma.rn.f64 %l0, %l1, %l2, %l2;", &[3.0f64.to_bits(), 2.0f64.to_bits()], 8.0f64.to_bits()),
        ("add.rp.f64 %l0, %l1, %l2;", &[1.0f64.to_bits(), 1], 1.0f64.next_up().to_bits()),
        (
            "mul.rz.f64 %l0, %l1, %l1;",
            &[1.0f64.next_up().to_bits()],
            1.0f64.next_up().next_up().to_bits(),
        ),
        (
            "fma.rm.f64 %l0, %l1, %l1, %l2;",
            &[1.0f64.next_up().to_bits(), 0],
            1.0f64.next_up().next_up().to_bits(),
        ),
        ("div.rz.f64 %l0, %l1, %l2;", &[2.0f64.to_bits(), 3.0f64.to_bits()], 0x3fe5_5555_5555_5555),
        ("rcp.approx.ftz.f64 %l0, %l1;", &[4.0f64.to_bits()], 0.25f64.to_bits()),
        (
            "fma.rn.f32x2 %l0, %l1, %l1, %l1;",
            &[u64::from(f(3.0)) << 32 | u64::from(f(2.0))],
            u64::from(f(12.0)) << 32 | u64::from(f(6.0)),
        ),
        ("min.f64 %l0, %l1, %l2;", &[f64::NAN.to_bits(), 1.0f64.to_bits()], 1.0f64.to_bits()),
    ];
    for (line, longs, expected) in rows {
        assert_eq!(long(line, longs), *expected, "{line} of {longs:x?}");
    }
}

#[test]
fn predicates() {
    // (line, words, predicates %p1.., expected %p0 and %p7).
    let one = ONE;
    type Row<'a> = (&'a str, &'a [u32], &'a [bool], bool, bool);
    let rows: &[Row<'_>] = &[
        ("setp.lt.s32 %p0|%p7, %r1, %r2;", &[u32::MAX, 1], &[], true, false),
        ("setp.lt.u32 %p0|%p7, %r1, %r2;", &[u32::MAX, 1], &[], false, true),
        ("setp.hi.u32 %p0, %r1, %r2;", &[u32::MAX, 1], &[], true, false),
        ("setp.ge.and.s32 %p0|%p7, %r1, %r2, %p1;", &[3, 1], &[false], false, false),
        ("setp.ge.or.s32 %p0|%p7, %r1, %r2, !%p1;", &[3, 1], &[false], true, true),
        ("setp.ne.f32 %p0, %r1, %r2;", &[NAN, one], &[], false, false),
        ("setp.neu.f32 %p0, %r1, %r2;", &[NAN, one], &[], true, false),
        ("setp.nan.f32 %p0, %r1, %r2;", &[NAN, one], &[], true, false),
        ("setp.num.f32 %p0, %r1, %r2;", &[one, one], &[], true, false),
        ("setp.eq.ftz.f32 %p0, %r1, %r2;", &[1, 0], &[], true, false),
        ("setp.gt.bf16x2 %p0|%p7, %r1, %r2;", &[0x3f80_0000, 0x0000_3f80], &[], false, true),
        ("setp.lt.s16 %p0, %h1, 0;", &[0x8000], &[], true, false),
        ("setp.eq.s16 %p0, %h1, -1;", &[0xffff], &[], true, false),
        ("setp.eq.s64 %p0, 5, 5;", &[], &[], true, false),
        ("xor.pred %p0, %p1, %p2;", &[], &[true, false], true, false),
        ("not.pred %p0, %p1;", &[], &[false], true, false),
        ("mov.pred %p0, !%p1;", &[], &[false], true, false),
        ("testp.subnormal.f32 %p0, %r1;", &[1], &[], true, false),
        ("testp.normal.f32 %p0, %r1;", &[1], &[], false, false),
    ];
    for (line, words, predicates, first, second) in rows {
        let registers = run(line, words, &[], predicates);
        assert_eq!(registers.predicates[0] != 0, *first, "{line} of {words:x?}");
        assert_eq!(registers.predicates[7] != 0, *second, "{line} of {words:x?}, second");
    }
}

#[test]
fn only_lanes_of_the_mask_change() {
    let text = ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k() {\n\
        .reg .b32 %r<3>; add.s32 %r0, %r1, %r2; ret; }";
    let module = ptx::parse(text).expect("PTX");
    let program = decode(&module, "k", &GlobalAddresses::new()).expect("known");
    let Instruction::Scalar(add) = &program.steps[0].instruction else { panic!("an addition") };
    let mut registers = Registers::new(&program);
    registers.words[1] = std::array::from_fn(|lane| lane as u32);
    registers.words[2] = [100; LANES];
    execute(add, &mut registers, 0x8000_0005);
    for lane in 0..LANES {
        let expected = if [0, 2, 31].contains(&lane) { 100 + lane as u32 } else { 0 };
        assert_eq!(registers.words[0][lane], expected, "lane {lane}");
    }
}
