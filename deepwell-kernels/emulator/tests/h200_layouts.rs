//! Where matrix instructions find and leave their elements, as one H200 does it.
//!
//! Each line of the golden files is one instruction with its operands and a hash of the registers
//! or bytes that the hardware left. Elements are small integers, so that every sum is exact and the
//! hash depends on layouts alone. Inputs come from a generator that is written down here and in
//! the program that ran there (driver 580.159, PTX of CUDA 13.0).

use deepwell_emulator::decode::{MatrixElement, MatrixShape, MmaShape, Type};
use deepwell_emulator::error::Fault;
use deepwell_emulator::numerics::ResultMode;
use deepwell_emulator::place::{Memory, Place};
use deepwell_emulator::warp_mma::fragment::gather_accumulator;
use deepwell_emulator::warp_mma::{
    LANES, MatrixAccess, Row, WarpMmaForm, load_matrix, store_matrix, transpose_matrix,
};
use deepwell_emulator::wgmma::{Descriptor, MatrixA, Swizzle, WarpFragments, WgmmaForm};

/// Shared memory of one CTA.
struct Shared(Vec<u8>);

impl Shared {
    fn range(&self, place: Place, bytes: usize) -> Result<std::ops::Range<usize>, Fault> {
        match place {
            Place::Shared { rank: 0, offset } if offset as usize + bytes <= self.0.len() => {
                Ok(offset as usize..offset as usize + bytes)
            }
            _ => Err(Fault::new("test-memory", format!("{place} is not there"))),
        }
    }
}

impl Memory for Shared {
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), Fault> {
        let range = self.range(place, bytes.len())?;
        bytes.copy_from_slice(&self.0[range]);
        Ok(())
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), Fault> {
        let range = self.range(place, bytes.len())?;
        self.0[range].copy_from_slice(bytes);
        Ok(())
    }
}

/// Number `index` of a stream.
fn mix(index: u64, seed: u64) -> u64 {
    let mut z = index.wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The code of an integer from -4 to 4; for integers of 8 bits any byte.
fn code(element: Type, random: u64) -> u32 {
    let value = (random % 9) as i32 - 4;
    let (exponent_bits, mantissa_bits, bias) = match element {
        Type::S8 | Type::U8 => return (random >> 8) as u32 & 0xff,
        Type::S32 => return (value * 1000 + 7) as u32,
        Type::F16 => (5, 10, 15),
        Type::Bf16 => (8, 7, 127),
        Type::Tf32 | Type::F32 => (8, 23, 127),
        Type::E4m3 => (4, 3, 7),
        Type::E5m2 => (5, 2, 15),
        other => panic!("no element_bits of {other}"),
    };
    let sign = u32::from(value < 0) << (exponent_bits + mantissa_bits);
    let magnitude = match value.unsigned_abs() {
        0 => return sign,
        1 => bias << mantissa_bits,
        2 => (bias + 1) << mantissa_bits,
        3 => (bias + 1) << mantissa_bits | 1 << (mantissa_bits - 1),
        _ => (bias + 2) << mantissa_bits,
    };
    sign | magnitude
}

/// Bytes filled with bit patterns.
fn fill(bytes: &mut [u8], element: Type, seed: u64) {
    let size = element.bytes() as usize;
    for (index, target) in bytes.chunks_exact_mut(size).enumerate() {
        let code = code(element, mix(index as u64, seed));
        target.copy_from_slice(&code.to_le_bytes()[..size]);
    }
}

fn filled(bytes: usize, element: Type, seed: u64) -> Vec<u8> {
    let mut target = vec![0; bytes];
    fill(&mut target, element, seed);
    target
}

fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn word(bytes: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(bytes[4 * index..4 * index + 4].try_into().expect("four bytes"))
}

/// Registers of a warp from memory in which each thread has `stride` words, its first being word
/// `first`.
fn rows(bytes: &[u8], first: usize, stride: usize, count: usize) -> Vec<Row> {
    (0..count)
        .map(|register| std::array::from_fn(|lane| word(bytes, first + lane * stride + register)))
        .collect()
}

/// The words of all lanes, lane after lane, `stride` words each.
fn words(registers: &[Row], stride: usize) -> Vec<u8> {
    (0..LANES)
        .flat_map(|lane| {
            (0..stride).map(move |index| registers.get(index).map_or(0, |row| row[lane]))
        })
        .flat_map(u32::to_le_bytes)
        .collect()
}

fn name(text: &str) -> Type {
    Type::from_name(text).unwrap_or_else(|| panic!("no type {text}"))
}

fn check_wgmma(line: &str) {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (a, b, d) = match fields[1] {
        "f16" => ("f16", "f16", "f32"),
        "f16h" => ("f16", "f16", "f16"),
        "e4e5" => ("e4m3", "e5m2", "f32"),
        "e5e4h" => ("e5m2", "e4m3", "f16"),
        "s8" => ("s8", "s8", "s32"),
        "u8s8" => ("u8", "s8", "s32"),
        other => (other, other, "f32"),
    };
    let (a, b, d) = (name(a), name(b), name(d));
    let number = |index: usize| fields[index].parse::<u64>().expect("a number");
    let bits = |index: usize| u64::from_str_radix(fields[index], 16).expect("a descriptor");
    let negated = number(6);
    let form = WgmmaForm {
        shape: MmaShape { m: 64, n: number(2) as u32, k: 32 / a.bytes() },
        a,
        b,
        d,
        a_in_registers: number(3) == 1,
        saturate: false,
        negate_a: negated == 1,
        negate_b: negated == 2,
        transpose_a: number(4) == 1,
        transpose_b: number(5) == 1,
    };
    let seed = number(10);
    let mut memory = Shared(filled(48 * 1024, b, seed));
    if a != b {
        fill(&mut memory.0[..16384], a, seed + 50_000);
    }
    let (a_registers, d_registers) = form.registers();
    let a_bytes = filled(2048, a, seed + 60_000);
    let d_bytes = filled(128 * d_registers * 4, d, seed + 70_000);
    let mut warps: Vec<WarpFragments> = (0..4)
        .map(|warp| WarpFragments {
            warp: warp as u32,
            a: rows(&a_bytes, warp * LANES * 4, 4, a_registers),
            d: rows(&d_bytes, warp * LANES * d_registers, d_registers, d_registers),
        })
        .collect();
    let a_place = if form.a_in_registers { MatrixA::Registers } else { MatrixA::Shared(bits(7)) };
    let accumulate = number(9) == 1;
    let mode = ResultMode::Hardware;
    form.run(mode, 0, a_place, bits(8), accumulate, &mut warps, &mut memory)
        .unwrap_or_else(|fault| panic!("{line}: {fault}"));
    let came = hash(warps.iter().flat_map(|warp| words(&warp.d, d_registers)));
    assert_eq!(format!("{came:016x}"), fields[12], "{line}");
}

#[test]
fn wgmma_finds_its_elements_as_the_h200_does() {
    let golden = include_str!("golden/h200_wgmma_layouts.txt");
    assert!(golden.lines().count() > 600);
    golden.lines().for_each(check_wgmma);
}

fn check_mma(fields: &[&str]) {
    let k = fields[1].strip_prefix("m16n8k").expect("a shape").parse().expect("a number");
    let (d, a, b) = (name(fields[2]), name(fields[3]), name(fields[4]));
    let seed: u64 = fields[5].parse().expect("a seed");
    let form = WarpMmaForm {
        shape: MmaShape { m: 16, n: 8, k },
        a,
        b,
        d,
        kind: None,
        saturate: false,
        scales: None,
    };
    let (a_registers, b_registers, d_registers) = form.registers();
    let a_rows = rows(&filled(512, a, seed), 0, 4, a_registers);
    let b_rows = rows(&filled(256, b, seed + 60_000), 0, 2, b_registers);
    let c_rows = rows(&filled(512, d, seed + 70_000), 0, 4, d_registers);
    let d_rows = form
        .run(90, ResultMode::Hardware, &a_rows, &b_rows, &c_rows, None)
        .unwrap_or_else(|fault| panic!("{fields:?}: {fault}"));
    assert_eq!(format!("{:016x}", hash(words(&d_rows, 4))), fields[7], "{fields:?}");
}

/// 32 different multiples of 16 below 4096, as a shuffle of 256 numbers begins.
fn shuffled_rows(seed: u64) -> [(u32, u32); LANES] {
    let mut order: Vec<u32> = (0..256).collect();
    for last in (1..256).rev() {
        order.swap(last, (mix(last as u64, seed + 1) % (last as u64 + 1)) as usize);
    }
    std::array::from_fn(|lane| (0, 16 * order[lane]))
}

fn check_matrix(fields: &[&str]) {
    let seed: u64 = fields[1].parse().expect("a seed");
    let image = filled(4096, Type::S8, seed);
    let access = |count| MatrixAccess {
        shape: MatrixShape::M8n8,
        count,
        transpose: fields[0].ends_with('t'),
        element: MatrixElement::B16,
    };
    let count = fields[0].chars().nth(2).and_then(|digit| digit.to_digit(10)).unwrap_or(0);
    let came = match &fields[0][..2] {
        "ld" => {
            let mut memory = Shared(image);
            let registers = load_matrix(access(count), &shuffled_rows(seed), &mut memory);
            words(&registers.expect("a legal load"), 4)
        }
        "st" => {
            let mut memory = Shared(vec![0xee; 4096]);
            let registers = rows(&image, 0, 4, count as usize);
            store_matrix(access(count), &shuffled_rows(seed), &registers, &mut memory)
                .expect("a legal store");
            memory.0
        }
        _ => words(&[transpose_matrix(&rows(&image, 0, 4, 1)[0])], 1),
    };
    assert_eq!(format!("{:016x}", hash(came)), fields[3], "{fields:?}");
}

#[test]
fn warp_matrices_lie_as_on_the_h200() {
    let golden = include_str!("golden/h200_warp_matrices.txt");
    assert_eq!(golden.lines().count(), 78);
    for line in golden.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if fields[0] == "mma" { check_mma(&fields) } else { check_matrix(&fields) }
    }
}

/// Rows of 128 bytes as a copy with the swizzle of 128 bytes leaves them.
fn swizzled(rows: &[u8]) -> Vec<u8> {
    let mut target = vec![0; rows.len()];
    for (index, chunk) in rows.chunks_exact(16).enumerate() {
        let at = index / 8 * 8 + ((index % 8) ^ (index / 8 % 8));
        target[16 * at..16 * at + 16].copy_from_slice(chunk);
    }
    target
}

/// Four chained instructions over 128 bytes of K, the descriptors moving on by 32 bytes each.
fn check_chain(element: Type, [a, b, d]: [&[u8]; 3]) {
    let form = WgmmaForm {
        shape: MmaShape { m: 64, n: 64, k: 32 / element.bytes() },
        a: element,
        b: element,
        d: Type::F32,
        a_in_registers: false,
        saturate: false,
        negate_a: false,
        negate_b: false,
        transpose_a: false,
        transpose_b: false,
    };
    let mut memory = Shared([swizzled(a), swizzled(b)].concat());
    let descriptor = |start| {
        let swizzle = Swizzle::Bytes128;
        Descriptor { start, leading_bytes: 0, stride_bytes: 1024, base_offset: 0, swizzle }.encode()
    };
    let mut warps =
        [0, 1, 2, 3].map(|warp| WarpFragments { warp, a: Vec::new(), d: vec![[0; LANES]; 32] });
    for step in 0..4 {
        let (a, b) = (descriptor(32 * step), descriptor(8192 + 32 * step));
        let mode = ResultMode::Hardware;
        form.run(mode, 0, MatrixA::Shared(a), b, step > 0, &mut warps, &mut memory)
            .expect("a legal form");
    }
    let sums = warps.iter().flat_map(|warp| gather_accumulator(&warp.d, 32, 64));
    for (index, sum) in sums.enumerate() {
        assert_eq!(sum, word(d, index), "{element} at {}, {}", index / 64, index % 64);
    }
}

#[test]
fn chains_of_mmas_give_the_bits_of_the_h200() {
    macro_rules! golden {
        ($kind:literal, $inputs:literal) => {
            [
                &include_bytes!(concat!("golden/h200_wgmma_", $kind, "_", $inputs, "_a.bin"))[..],
                &include_bytes!(concat!("golden/h200_wgmma_", $kind, "_", $inputs, "_b.bin"))[..],
                &include_bytes!(concat!("golden/h200_wgmma_", $kind, "_", $inputs, "_d.bin"))[..],
            ]
        };
    }
    check_chain(Type::E4m3, golden!("fp8", "small"));
    check_chain(Type::E4m3, golden!("fp8", "wide"));
    check_chain(Type::E4m3, golden!("fp8", "cancel"));
    check_chain(Type::E4m3, golden!("fp8", "sub"));
    check_chain(Type::Bf16, golden!("bf16", "small"));
    check_chain(Type::Bf16, golden!("bf16", "wide"));
    check_chain(Type::Bf16, golden!("bf16", "cancel"));
    check_chain(Type::Bf16, golden!("bf16", "sub"));
}
