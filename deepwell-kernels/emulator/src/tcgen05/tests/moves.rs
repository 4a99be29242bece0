//! Copies from shared memory, and accesses from registers.

use super::memory::{PairMemory, Random};
use super::writer::Matrix;
use crate::decode::{Tcgen05CopyFormat, Tcgen05CopyShape, Tcgen05Shape};
use crate::tcgen05::*;

const SHAPES: [Tcgen05Shape; 5] = [
    Tcgen05Shape::S32x32b,
    Tcgen05Shape::S16x64b,
    Tcgen05Shape::S16x128b,
    Tcgen05Shape::S16x256b,
    Tcgen05Shape::S16x32bx2,
];

fn access(shape: Tcgen05Shape, repeat: u32, warp: u32) -> RegisterAccess {
    RegisterAccess {
        shape,
        repeat,
        halves: false,
        half_offset: repeat * 2,
        address: (warp % 4 * 32) << 16 | 8,
        rank: 0,
        warp,
        lane_bits: LaneBits::Checked,
    }
}

/// Lane (in the warp's 32) and column (from the first) of the word that a thread has in a
/// register, from the figures' rule: a warp's threads go along a row of the base shape two words,
/// four words or four pairs of words at a time, then to the next row.
fn figure(shape: Tcgen05Shape, repeat: u32, thread: u32, register: u32) -> (u32, u32) {
    match shape {
        Tcgen05Shape::S32x32b => (thread, register),
        Tcgen05Shape::S16x32bx2 if thread < 16 => (thread, register),
        Tcgen05Shape::S16x32bx2 => (thread - 16, 2 * repeat + register),
        Tcgen05Shape::S16x64b => {
            let (quad, in_quad) = (thread / 4, thread % 4);
            // Even threads have rows 0 to 7, odd threads rows 8 to 15.
            let (lane, word) = [(0, 0), (8, 0), (0, 1), (8, 1)][in_quad as usize];
            (quad + lane, register * 2 + word)
        }
        Tcgen05Shape::S16x128b => {
            let (tile, lower) = (register / 2, register % 2);
            (thread / 4 + lower * 8, tile * 4 + thread % 4)
        }
        Tcgen05Shape::S16x256b => {
            let (tile, which) = (register / 4, register % 4);
            (thread / 4 + which / 2 * 8, tile * 8 + thread % 4 * 2 + which % 2)
        }
    }
}

#[test]
fn registers_hold_what_the_figures_say() {
    for shape in SHAPES {
        for repeat in [1_u32, 2, 4, 8, 16, 32, 64, 128] {
            let warp = repeat.ilog2() + 1;
            let access = access(shape, repeat, warp);
            if access.registers() > 128 {
                assert_eq!(access.check().unwrap_err().rule, "tensor-access-repeat");
                continue;
            }
            let mut memory = PairMemory::new();
            for lane in 0..32 {
                for column in 0..512 {
                    let lane = warp % 4 * 32 + lane;
                    memory.write_word(0, lane, column, lane << 16 | column);
                }
            }
            let registers = load(&access, &mut memory).unwrap();
            for (register, lanes) in registers.iter().enumerate() {
                for (thread, &word) in lanes.iter().enumerate() {
                    let (lane, column) = figure(shape, repeat, thread as u32, register as u32);
                    let expected = (warp % 4 * 32 + lane) << 16 | (8 + column);
                    assert_eq!(word, expected, "{shape:?} x{repeat} r{register} t{thread}");
                }
            }
        }
    }
}

#[test]
fn stores_are_the_inverse_of_loads() {
    let mut random = Random(7);
    for shape in SHAPES {
        for (halves, repeat) in [(false, 4), (true, 4), (false, 1), (true, 1), (true, 16)] {
            let access = RegisterAccess {
                halves,
                half_offset: 100,
                // The upper 16 lanes, where the shape allows it.
                address: (if shape == Tcgen05Shape::S32x32b { 64 } else { 80 }) << 16 | 3,
                rank: 1,
                ..access(shape, repeat, 6)
            };
            let mut memory = PairMemory::new();
            let count = access.registers() as usize;
            let registers: WarpRegisters =
                (0..count).map(|_| [0; 32].map(|_: u32| random.below(u32::MAX))).collect();
            store(&access, &registers, &mut memory).unwrap();
            assert_eq!(load(&access, &mut memory).unwrap(), registers, "{shape:?}");
            let fault = store(&access, &registers[1..], &mut memory).unwrap_err();
            assert_eq!(fault.rule, "tensor-access-registers");
        }
    }
}

#[test]
fn packed_halves_come_from_neighboring_columns() {
    let mut memory = PairMemory::new();
    for column in 0..16 {
        memory.write_word(0, 3, column, 0xdead_0000 | column);
        memory.write_word(0, 5, column, 0);
    }
    for lane in 0..32 {
        for column in 0..16 {
            memory.write_word(0, lane, column, 0xdead_0000 | lane << 8 | column);
        }
    }
    let packed = RegisterAccess { halves: true, address: 0, ..access(Tcgen05Shape::S32x32b, 8, 0) };
    let registers = load(&packed, &mut memory).unwrap();
    for (register, lanes) in registers.iter().enumerate() {
        let (low, high) = (2 * register as u32, 2 * register as u32 + 1);
        assert_eq!(lanes[3], 0x300 | low | (0x300 | high) << 16);
    }
    store(&packed, &registers, &mut memory).unwrap();
    assert_eq!(memory.word(0, 3, 7).unwrap(), 0x307);
}

#[test]
fn illegal_accesses_have_names() {
    let plain = access(Tcgen05Shape::S32x32b, 8, 1);
    let rows = [
        (RegisterAccess { repeat: 3, ..plain }, "tensor-access-repeat"),
        (RegisterAccess { address: 0, ..plain }, "tensor-lane-of-another-warp"),
        (RegisterAccess { address: 64 << 16, ..plain }, "tensor-lane-of-another-warp"),
        (RegisterAccess { address: 48 << 16, ..plain }, "tensor-lane-alignment"),
        (RegisterAccess { address: 32 << 16 | 505, ..plain }, "tensor-memory-out-of-range"),
        (RegisterAccess { address: 200 << 16, ..plain }, "tensor-memory-out-of-range"),
        (
            RegisterAccess { shape: Tcgen05Shape::S16x64b, address: 40 << 16, ..plain },
            "tensor-lane-alignment",
        ),
        (
            RegisterAccess { shape: Tcgen05Shape::S16x32bx2, half_offset: 500, ..plain },
            "tensor-memory-out-of-range",
        ),
    ];
    for (access, rule) in rows {
        assert_eq!(access.check().unwrap_err().rule, rule, "{access:?}");
    }
    let ignored = RegisterAccess { lane_bits: LaneBits::Ignored, address: 5, ..plain };
    let plan = ignored.check().unwrap();
    assert_eq!(plan.extents().collect::<Vec<_>>(), [(32, 32, 5, 8)]);
}

/// Lanes that get row `row`, from the warps that a multicast names.
fn lanes_of(shape: Tcgen05CopyShape, row: u32) -> Vec<u32> {
    let warps = |warps: [u32; 2]| warps.map(|warp| warp * 32 + row % 32).to_vec();
    match (shape, row / 32) {
        (Tcgen05CopyShape::Rows64Bits128Warps02And13, 0) => warps([0, 2]),
        (Tcgen05CopyShape::Rows64Bits128Warps02And13, _) => warps([1, 3]),
        (Tcgen05CopyShape::Rows64Bits128Warps01And23, 0) => warps([0, 1]),
        (Tcgen05CopyShape::Rows64Bits128Warps01And23, _) => warps([2, 3]),
        (Tcgen05CopyShape::Rows32Bits128AllWarps, _) => (0..4).map(|w| w * 32 + row).collect(),
        (Tcgen05CopyShape::Rows4Bits256, _) => vec![row * 32],
        _ => vec![row],
    }
}

#[test]
fn copies_of_every_shape_and_format() {
    let shapes = [
        (Tcgen05CopyShape::Rows128Bits256, 128, 2),
        (Tcgen05CopyShape::Rows128Bits128, 128, 1),
        (Tcgen05CopyShape::Rows64Bits128Warps02And13, 64, 1),
        (Tcgen05CopyShape::Rows64Bits128Warps01And23, 64, 1),
        (Tcgen05CopyShape::Rows32Bits128AllWarps, 32, 1),
        (Tcgen05CopyShape::Rows4Bits256, 4, 2),
    ];
    let formats = [
        (Tcgen05CopyFormat::Same, 8, 0),
        (Tcgen05CopyFormat::B6, 6, 0),
        (Tcgen05CopyFormat::B4, 4, 2),
    ];
    let swizzles = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
    for (shape, rows, chunks) in shapes {
        for (nth, (format, bits, shift)) in formats.into_iter().enumerate() {
            for (turn, swizzle) in swizzles.into_iter().enumerate() {
                let group = 1 + (nth + turn) as u32 % 2;
                let mut memory = PairMemory::new();
                let mut random = Random(turn as u64);
                let k = chunks * 16;
                let element_bits: Vec<u32> =
                    (0..group * rows * k).map(|_| random.below(1 << bits)).collect();
                let matrix = |rank| Matrix {
                    rank,
                    start: 0x800,
                    swizzle,
                    major: Major::K,
                    t: 16,
                    bits,
                    rows,
                    k,
                };
                for rank in 0..group {
                    matrix(rank).write(&mut memory, |row, at| {
                        element_bits[((rank * rows + row) * k + at) as usize]
                    });
                }
                let lane = if shape == Tcgen05CopyShape::Rows4Bits256 { 31 } else { 0 };
                let request = CopyRequest {
                    group,
                    rank: group - 1,
                    shape,
                    format,
                    target: lane << 16 | 40,
                    descriptor: matrix(0).descriptor(0).encode(),
                };
                let plan = copy(&request, &mut memory).unwrap();
                assert_eq!(plan.columns(), (40, chunks * 4));
                for rank in 0..group {
                    for row in 0..rows {
                        for word in 0..chunks * 4 {
                            let expected = (0..4).fold(0, |all, i| {
                                let at = (rank * rows + row) * k + word * 4 + i;
                                all | element_bits[at as usize] << shift << (8 * i)
                            });
                            for to in lanes_of(shape, row) {
                                let found = memory.word(rank, lane + to, 40 + word).unwrap();
                                assert_eq!(found, expected, "{request:?} row {row} lane {to}");
                            }
                        }
                    }
                }
                if group == 1 {
                    assert!(memory.word(1, lane, 40).is_err(), "only one CTA was asked for");
                }
            }
        }
    }
}

#[test]
fn illegal_copies_have_names() {
    let descriptor = SharedDescriptor {
        start: 0,
        leading: 128,
        stride: 128,
        base_offset: 0,
        swizzle: Swizzle::None,
    };
    let plain = CopyRequest {
        group: 1,
        rank: 0,
        shape: Tcgen05CopyShape::Rows32Bits128AllWarps,
        format: Tcgen05CopyFormat::Same,
        target: 0,
        descriptor: descriptor.encode(),
    };
    let with = |swizzle, start| SharedDescriptor { swizzle, start, ..descriptor }.encode();
    let rows = [
        (CopyRequest { target: 16 << 16, ..plain }, "tensor-lane-alignment"),
        (CopyRequest { target: 509, ..plain }, "tensor-memory-out-of-range"),
        (CopyRequest { target: 512, ..plain }, "tensor-memory-out-of-range"),
        (
            CopyRequest { shape: Tcgen05CopyShape::Rows4Bits256, target: 32 << 16, ..plain },
            "tensor-lane-alignment",
        ),
        (CopyRequest { descriptor: 0, ..plain }, "shared-descriptor-version"),
        (CopyRequest { descriptor: with(Swizzle::Bytes128Atom32, 0), ..plain }, "swizzle-major"),
        (
            CopyRequest {
                descriptor: with(Swizzle::Bytes32, 16),
                shape: Tcgen05CopyShape::Rows128Bits256,
                ..plain
            },
            "shared-tile-crosses-pattern",
        ),
    ];
    for (request, rule) in rows {
        assert_eq!(request.check().unwrap_err().rule, rule, "{request:?}");
    }
    assert_eq!(plain.check().unwrap().bytes_shared(), 512);
}
