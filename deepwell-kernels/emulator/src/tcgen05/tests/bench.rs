//! A chain of MMAs with their operands in memory, and what should come out.

use super::memory::{PairMemory, Random};
use super::writer::Matrix;
use crate::decode::{MmaKind, Tcgen05Shape};
use crate::error::Fault;
use crate::number::{Format, Rounding, decode, encode};
use crate::numerics::{Accumulate, ResultMode};
use crate::tcgen05::*;

pub(super) const D: u32 = 0;
pub(super) const A: u32 = 256;
pub(super) const SCALES_A: u32 = 320;
pub(super) const SCALES_B: u32 = 384;

/// What is multiplied, and how operands are laid out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) kind: MmaKind,
    pub(super) group: u32,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) a: Format,
    pub(super) b: Format,
    pub(super) accumulate: Accumulate,
    pub(super) major: [Major; 2],
    pub(super) swizzle: [Swizzle; 2],
    pub(super) negate: [bool; 2],
    /// MMAs along K.
    pub(super) steps: u32,
    pub(super) weight_stationary: bool,
    pub(super) a_in_tensor: bool,
    /// Added to the lanes of D and of A in tensor memory.
    pub(super) lane: u32,
    pub(super) scale: Option<(Format, u32)>,
    pub(super) seed: u64,
}

impl Case {
    pub(super) fn new(kind: MmaKind, group: u32, m: u32, n: u32) -> Case {
        let (element, scale) = match kind {
            MmaKind::F16 => (Format::BF16, None),
            MmaKind::Tf32 => (Format::TF32, None),
            MmaKind::F8f6f4 => (Format::E4M3, None),
            MmaKind::I8 => (Format::S8, None),
            MmaKind::Mxf8f6f4 => (Format::E4M3, Some((Format::UE8M0, 32))),
            MmaKind::Mxf4 => (Format::E2M1, Some((Format::UE8M0, 32))),
            MmaKind::Mxf4nvf4 => (Format::E2M1, Some((Format::UE4M3, 16))),
        };
        let integer = kind == MmaKind::I8;
        Case {
            kind,
            group,
            m,
            n,
            a: element,
            b: element,
            accumulate: if integer { Accumulate::I32 } else { Accumulate::F32 },
            major: [Major::K; 2],
            swizzle: [Swizzle::Bytes128; 2],
            negate: [false; 2],
            steps: 2,
            weight_stationary: false,
            a_in_tensor: false,
            lane: 0,
            scale,
            seed: 1,
        }
    }

    pub(super) fn k(&self) -> u32 {
        k_of(self.kind) * self.steps
    }

    fn packed(&self) -> bool {
        matches!(self.kind, MmaKind::Mxf4 | MmaKind::Mxf4nvf4)
    }

    /// Scales along K of one MMA.
    fn scale_count(&self) -> u32 {
        self.scale.map_or(0, |(_, block)| k_of(self.kind) / block)
    }

    /// Instruction descriptor of one step, written from the tables of bits.
    fn instruction(&self, step: u32) -> u32 {
        let code = |format| match (self.kind, format) {
            (MmaKind::F16, Format::BF16) | (MmaKind::I8, Format::S8) => 1,
            (MmaKind::Tf32, _) => 2,
            (MmaKind::Mxf4 | MmaKind::Mxf4nvf4, _) => 1,
            (_, Format::E5M2) => 1,
            (_, Format::E2M3) => 3,
            (_, Format::E3M2) => 4,
            (_, Format::E2M1) => 5,
            _ => 0,
        };
        let major = |major| u32::from(major == Major::Mn);
        let mut bits = code(self.a) << 7
            | code(self.b) << 10
            | u32::from(self.negate[0]) << 13
            | u32::from(self.negate[1]) << 14
            | major(self.major[0]) << 15
            | major(self.major[1]) << 16
            | (self.n / 8) << 17
            | (self.m / 16) << 24;
        match self.scale {
            None => {
                bits |= match self.accumulate {
                    Accumulate::F16 => 0,
                    Accumulate::F32 => 1 << 4,
                    Accumulate::I32 => 2 << 4,
                    Accumulate::I32Saturating => 2 << 4 | 1 << 3,
                }
            }
            Some((format, _)) => {
                let id = step * self.scale_count() % 4;
                bits |= id << 4 | id << 29 | u32::from(format == Format::UE8M0) << 23;
            }
        }
        bits
    }

    /// CTA, lane and column of an element of D.
    pub(super) fn cell(&self, row: u32, column: u32) -> (u32, u32, u32) {
        let (block, lane, column) = match (self.m, self.group, self.weight_stationary) {
            (256, 2, _) => (row / 128, row % 128, column),
            (128, 2, _) => {
                let half = self.n / 2;
                (row / 64, row % 64 + if column < half { 0 } else { 64 }, column % half)
            }
            (128, 1, _) => (0, row, column),
            (64, 1, false) => (0, [0, 32, 64, 96][row as usize / 16] + row % 16, column),
            (64, 1, true) => (0, row + column / (self.n / 2) * 64, column % (self.n / 2)),
            (32, 1, true) => (0, row + column / (self.n / 4) * 32, column % (self.n / 4)),
            other => panic!("no layout {other:?}"),
        };
        (block, lane + self.lane, D + column)
    }
}

/// A case in memory.
pub(super) struct Bench {
    pub(super) case: Case,
    pub(super) memory: PairMemory,
    pub(super) requests: Vec<MmaRequest>,
    pub(super) copies: Vec<CopyRequest>,
    values: [Vec<u32>; 2],
    pub(super) scales: [Vec<u8>; 2],
}

fn random_code(random: &mut Random, format: Format) -> u32 {
    let value = random.below(9) as i32 - 4;
    match format {
        Format::U8 => (value + 4) as u32,
        Format::S8 => value as u32 & 0xff,
        _ => encode(format, value as f32 / 2.0, Rounding::NearestEven, true, false),
    }
}

fn value(format: Format, code: u32) -> f64 {
    match format {
        Format::U8 => code.into(),
        Format::S8 => f64::from(code as u8 as i8),
        _ => decode(format, code).into(),
    }
}

impl Bench {
    pub(super) fn new(case: Case) -> Bench {
        let mut random = Random(case.seed);
        let k = case.k();
        let mut draw =
            |rows, format| (0..rows * k).map(|_| random_code(&mut random, format)).collect();
        let values: [Vec<u32>; 2] = [draw(case.m, case.a), draw(case.n, case.b)];
        let mut random = Random(case.seed ^ 0xabcd);
        let mut draw = |rows: u32| {
            let count = case.scale.map_or(0, |(_, block)| rows * k / block);
            let element_bits: &[u8] = match case.scale {
                Some((Format::UE4M3, _)) => &[0x30, 0x38, 0x3c, 0x40],
                _ => &[125, 126, 127, 128],
            };
            (0..count).map(|_| element_bits[random.below(4) as usize]).collect()
        };
        let scales = [draw(case.m), draw(case.n)];
        let mut bench = Bench {
            case,
            memory: PairMemory::new(),
            requests: Vec::new(),
            copies: Vec::new(),
            values,
            scales,
        };
        let tiles = bench.place_operands();
        bench.place_scales();
        for step in 0..case.steps {
            let at = step * k_of(case.kind);
            let group = step * case.scale_count() / 4;
            bench.requests.push(MmaRequest {
                kind: case.kind,
                group: case.group,
                rank: 0,
                weight_stationary: case.weight_stationary,
                d: case.lane << 16 | D,
                a: if case.a_in_tensor {
                    MatrixA::Tensor(case.lane << 16 | (A + A_COLUMNS * step))
                } else {
                    MatrixA::Shared(tiles[0].descriptor(at).encode())
                },
                b: tiles[1].descriptor(at).encode(),
                instruction: case.instruction(step),
                scales: case.scale.map(|(_, block)| ScaleOperands {
                    block,
                    a: SCALES_A + 4 * group,
                    b: SCALES_B + 8 * group,
                }),
                accumulate: step > 0,
                scale_input_d: 0,
                disabled_lanes: [0; 8],
                shift_a: false,
            });
        }
        bench
    }

    fn place_operands(&mut self) -> [Matrix; 2] {
        let case = self.case;
        let k = case.k();
        let tile = |which: usize, rank| {
            let format = [case.a, case.b][which];
            let bits = format.bits();
            Matrix {
                rank,
                start: [0x400, 0x1_c000][which],
                swizzle: case.swizzle[which],
                major: case.major[which],
                t: if bits == 4 && case.packed() { 32 } else { 16.min(128 / bits) },
                bits,
                rows: [case.m, case.n][which] / case.group,
                k,
            }
        };
        for rank in 0..case.group {
            for which in 0..2 {
                if which == 0 && case.a_in_tensor {
                    continue;
                }
                let tile = tile(which, rank);
                let values = &self.values[which];
                let first = rank * tile.rows;
                tile.write(&mut self.memory, |row, at| values[((first + row) * k + at) as usize]);
            }
        }
        if case.a_in_tensor {
            self.place_a_in_tensor();
        }
        [tile(0, 0), tile(1, 0)]
    }

    /// A in every lane that holds a part of its row of D.
    fn place_a_in_tensor(&mut self) {
        let case = self.case;
        let k = case.k();
        let bits = case.a.bits();
        let (container, shift) = match bits {
            4 if case.packed() => (4, 0),
            4 => (8, 2),
            6 => (8, 0),
            bits => (bits, 0),
        };
        let per_word = 32 / container;
        for row in 0..case.m {
            for column in [0, case.n / 2] {
                let (block, lane, _) = case.cell(row, column);
                for word in 0..k / per_word {
                    let bits = (0..per_word).map(|i| {
                        let code = self.values[0][(row * k + word * per_word + i) as usize];
                        code << shift << (i * container)
                    });
                    let bits = bits.fold(0, |all, bits| all | bits);
                    self.memory.write_word(block, lane, A + word, bits);
                }
            }
        }
    }

    /// Copies, multiplies, and reads D back through registers: `m` x `n` elements.
    pub(super) fn run(&mut self, model: ResultMode) -> Result<Vec<f64>, Fault> {
        for request in self.copies.clone() {
            copy(&request, &mut self.memory)?;
        }
        for request in self.requests.clone() {
            mma(&request, model, &mut self.memory)?;
        }
        self.read_d()
    }

    pub(super) fn read_d(&mut self) -> Result<Vec<f64>, Fault> {
        let case = self.case;
        let mut all = vec![0.0; (case.m * case.n) as usize];
        let mut cells = std::collections::HashMap::new();
        for row in 0..case.m {
            for column in 0..case.n {
                let (block, lane, at) = case.cell(row, column);
                cells.insert((block, lane, at), (row * case.n + column) as usize);
            }
        }
        let columns = cells.keys().map(|cell| cell.2).max().unwrap() + 1;
        for rank in 0..case.group {
            for warp in 0..4 {
                for column in 0..columns {
                    // Warps of layouts that leave lanes free hold what nobody wrote.
                    let shape = if case.m == 64 && !case.weight_stationary {
                        Tcgen05Shape::S16x64b
                    } else {
                        Tcgen05Shape::S32x32b
                    };
                    if shape == Tcgen05Shape::S16x64b && column % 2 == 1 {
                        continue;
                    }
                    let access = RegisterAccess {
                        shape,
                        repeat: 1,
                        halves: false,
                        half_offset: 0,
                        address: (warp * 32 + case.lane) << 16 | column,
                        rank,
                        warp,
                        lane_bits: LaneBits::Checked,
                    };
                    let registers = load(&access, &mut self.memory)?;
                    for thread in 0..32 {
                        let (lane, column) = if shape == Tcgen05Shape::S16x64b {
                            (thread / 4 + thread % 2 * 8, column + thread / 2 % 2)
                        } else {
                            (thread, column)
                        };
                        let lane = warp * 32 + case.lane + lane;
                        if let Some(&at) = cells.get(&(rank, lane, column)) {
                            all[at] = self.element(registers[0][thread as usize]);
                        }
                    }
                }
            }
        }
        Ok(all)
    }

    fn element(&self, bits: u32) -> f64 {
        match self.case.accumulate {
            Accumulate::F16 => decode(Format::F16, bits).into(),
            Accumulate::F32 => f32::from_bits(bits).into(),
            _ => f64::from(bits as i32),
        }
    }

    /// The plain definition.
    pub(super) fn expected(&self) -> Vec<f64> {
        let case = self.case;
        let (m, n, k) = (case.m as usize, case.n as usize, case.k() as usize);
        let block = case.scale.map_or(k, |(_, block)| block as usize);
        let signs = case.negate.map(|negate| if negate { -1.0 } else { 1.0 });
        let matrix = |which: usize, rows: usize, format: Format| -> Vec<f64> {
            let scale = |row: usize, at: usize| match case.scale {
                Some((format, _)) => {
                    value(format, self.scales[which][row * (k / block) + at / block].into())
                }
                None => 1.0,
            };
            (0..rows * k)
                .map(|i| signs[which] * value(format, self.values[which][i]) * scale(i / k, i % k))
                .collect()
        };
        let (a, b) = (matrix(0, m, case.a), matrix(1, n, case.b));
        let dot = |i: usize| {
            let (row, column) = (&a[i / n * k..][..k], &b[i % n * k..][..k]);
            row.iter().zip(column).map(|(x, y)| x * y).sum()
        };
        (0..m * n).map(dot).collect()
    }

    /// That the case comes out right.
    pub(super) fn check(case: Case) {
        let mut bench = Bench::new(case);
        let expected = bench.expected();
        let found = bench.run(ResultMode::Hardware).unwrap_or_else(|fault| {
            panic!("{case:?}: {fault}");
        });
        let wrong = expected.iter().zip(&found).position(|(x, y)| x != y);
        if let Some(at) = wrong {
            panic!(
                "{case:?}: expected {} at row {} column {}, got {}",
                expected[at],
                at as u32 / case.n,
                at as u32 % case.n,
                found[at]
            );
        }
    }
}
