//! Approximate functions against an H200, whose results are kept as sums.

use super::*;

/// What an instruction is run on, 2^16 times for each block.
#[derive(Clone, Copy)]
enum Inputs {
    /// `%r1` is every number of 32 bits.
    Words,
    /// The upper half of `%l1` is.
    UpperHalves,
    /// `%r1` and `%r2` are quotients' operands, 2^28 pairs.
    Pairs,
    /// `%h1` is every number of 16 bits.
    Halves,
}

impl Inputs {
    fn blocks(self) -> u32 {
        match self {
            Inputs::Words | Inputs::UpperHalves => 1 << 16,
            Inputs::Pairs => 1 << 12,
            Inputs::Halves => 1,
        }
    }

    /// Of these each so many-th block is in the quick test.
    fn stride(self) -> usize {
        match self {
            Inputs::Words | Inputs::UpperHalves => 601,
            Inputs::Pairs => 97,
            Inputs::Halves => 1,
        }
    }
}

fn mix(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

/// Any numbers, ordinary ones, and those where quotients and reciprocals leave the normal numbers.
fn pair(index: u32) -> [u32; 2] {
    let bits =
        [index.wrapping_mul(2).wrapping_add(1), index.wrapping_mul(2).wrapping_add(0x8000_0001)]
            .map(mix);
    let [other, divisor_other] = bits.map(mix);
    let with = |bits: u32, exponent: u32| bits & 0x807f_ffff | exponent << 23;
    let [a, b] = bits;
    match index & 7 {
        0..=2 => [with(a, 119 + (other & 15)), with(b, 119 + (divisor_other & 15))],
        3 => [a & 0x7f_ffff | 127 << 23, b & 0x7f_ffff | 127 << 23],
        4 => [a, with(b, 246 + (divisor_other & 7) + (divisor_other >> 3 & 1))],
        5 => [with(a, other & 127), with(b, divisor_other & 3)],
        6 => [with(a, 20 + (other & 31)), with(b, 140 + (divisor_other & 31))],
        _ => [a, b],
    }
}

/// The sum of mixed results and places in their blocks.
fn sum(line: &str, inputs: Inputs, stride: usize) -> u32 {
    let text = format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k() {{\n\
         .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %l<8>;\n{line}\nret; }}"
    );
    let module = ptx::parse(&text).expect("the line is PTX");
    let program = decode(&module, "k", &GlobalAddresses::new()).expect("the line is known");
    let Some(Instruction::Scalar(instruction)) = program.steps.first().map(|s| &s.instruction)
    else {
        panic!("{line} is no scalar instruction")
    };
    let mut registers = Registers::new(&program);
    let mut sum = 0u32;
    // Rows of halves come first.
    let (result, operands) = match inputs {
        Inputs::Halves => (0, 1),
        _ => (8, 9),
    };
    for block in (0..inputs.blocks()).step_by(stride) {
        for first in (0..1 << 16).step_by(LANES) {
            for lane in 0..LANES {
                let index = (block << 16) + first + lane as u32;
                let [a, b] = if let Inputs::Pairs = inputs { pair(index) } else { [index; 2] };
                registers.words[operands][lane] = a;
                registers.words[operands + 1][lane] = b;
                registers.longs[1][lane] = u64::from(index) << 32;
            }
            execute(instruction, &mut registers, u32::MAX);
            for lane in 0..LANES {
                let bits = match inputs {
                    Inputs::UpperHalves => (registers.longs[0][lane] >> 32) as u32,
                    _ => registers.words[result][lane],
                };
                let place = (first + lane as u32).wrapping_mul(0x9e37_79b9);
                sum = sum.wrapping_add(mix(bits ^ place));
            }
        }
    }
    sum
}

/// Instruction, inputs, sum of some blocks, sum of all.
type Row = (&'static str, Inputs, u32, u32);

const ROWS: &[Row] = &[
    ("rcp.approx.ftz.f32 %r0, %r1;", Inputs::Words, 0xf6d6_8386, 0x0f2d_3187),
    ("rcp.approx.f32 %r0, %r1;", Inputs::Words, 0x46e1_399d, 0x0dec_5e39),
    ("rsqrt.approx.ftz.f32 %r0, %r1;", Inputs::Words, 0x4fff_3cfe, 0x8245_e040),
    ("rsqrt.approx.f32 %r0, %r1;", Inputs::Words, 0x92e3_f99c, 0x9518_5dfa),
    ("sqrt.approx.ftz.f32 %r0, %r1;", Inputs::Words, 0x3f7d_67a6, 0xfcc0_33b8),
    ("sqrt.approx.f32 %r0, %r1;", Inputs::Words, 0x7852_b81d, 0x809b_0c15),
    ("ex2.approx.ftz.f32 %r0, %r1;", Inputs::Words, 0xa603_1a0e, 0xb794_f161),
    ("ex2.approx.f32 %r0, %r1;", Inputs::Words, 0xa603_1a0e, 0xa82f_9b6a),
    ("lg2.approx.ftz.f32 %r0, %r1;", Inputs::Words, 0x074c_a429, 0xffb0_578a),
    ("lg2.approx.f32 %r0, %r1;", Inputs::Words, 0x6404_e66b, 0x33ad_5c7a),
    ("sin.approx.f32 %r0, %r1;", Inputs::Words, 0x06a5_0d09, 0x57b9_95c3),
    ("cos.approx.f32 %r0, %r1;", Inputs::Words, 0x0fee_3e80, 0x1ade_f700),
    ("tanh.approx.f32 %r0, %r1;", Inputs::Words, 0xecd6_eb03, 0xf66c_a4dc),
    ("rcp.approx.ftz.f64 %l0, %l1;", Inputs::UpperHalves, 0xa1b1_eae6, 0x2cc7_1f6e),
    ("rsqrt.approx.ftz.f64 %l0, %l1;", Inputs::UpperHalves, 0x3e54_ef65, 0x48d6_6d44),
    ("div.approx.ftz.f32 %r0, %r1, %r2;", Inputs::Pairs, 0x9643_3bd8, 0xd781_94d6),
    ("div.approx.f32 %r0, %r1, %r2;", Inputs::Pairs, 0xe245_ff02, 0x6617_ef54),
    ("div.full.ftz.f32 %r0, %r1, %r2;", Inputs::Pairs, 0x1a1b_55c3, 0x9773_e452),
    ("div.full.f32 %r0, %r1, %r2;", Inputs::Pairs, 0x2722_9504, 0xde76_c145),
    ("ex2.approx.f16 %h0, %h1;", Inputs::Halves, 0x2de0_b658, 0x2de0_b658),
    ("ex2.approx.ftz.bf16 %h0, %h1;", Inputs::Halves, 0x0551_d133, 0x0551_d133),
    ("tanh.approx.f16 %h0, %h1;", Inputs::Halves, 0xda58_0b3c, 0xda58_0b3c),
    ("tanh.approx.bf16 %h0, %h1;", Inputs::Halves, 0x53f3_44d6, 0x53f3_44d6),
];

/// Some blocks of arguments; all 2^32 of each, which take minutes, where a variable is set.
#[test]
fn approximations_are_those_of_an_h200() {
    let takes_all = std::env::var_os("DEEPWELL_ALL_APPROXIMATIONS").is_some();
    for &(line, inputs, of_some, of_all) in ROWS {
        let (stride, expected) = if takes_all { (1, of_all) } else { (inputs.stride(), of_some) };
        let found = sum(line, inputs, stride);
        assert_eq!(found, expected, "{line}: {found:#x}, expected {expected:#x}");
    }
}
