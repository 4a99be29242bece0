//! `mma.sync`: what our kernels multiply with, and its neighbours.

use deepwell_kernels::cuda::Argument;

use super::bench::Bench;
use super::element::{Element, Expected, Kind, Sum, places};
use super::golden::Group;

const ROWS: usize = 16;
const COLUMNS: usize = 8;
const LANES: usize = 32;
/// MMAs of each kind of numbers.
const TILES: usize = 16;

/// One instruction.
#[derive(Clone, Copy, Debug)]
struct Case {
    a: Element,
    b: Element,
    sum: Sum,
    k: usize,
}

impl Case {
    fn opcode(self) -> String {
        let Case { a, b, sum, k } = self;
        let sum = sum.name();
        let (a, b) = (a.name(), b.name());
        format!("mma.sync.aligned.m16n8k{k}.row.col.{sum}.{a}.{b}.{sum}")
    }

    /// Words of a row.
    fn words(self) -> usize {
        self.k * self.a.bytes() / 4
    }

    /// Registers of A, B and the sums.
    fn registers(self) -> [usize; 3] {
        let per_half = self.words() / 4;
        [2 * per_half, per_half, 4 / self.sum.per_word()]
    }

    /// A kernel of one warp for each MMA, whose operands are in the order of registers.
    fn ptx(self) -> String {
        let [a, b, sums] = self.registers();
        let mut text = String::from(
            ".visible .entry run(.param .u64 a, .param .u64 b, \
             .param .u64 before, .param .u64 after)\n\
             .reqntid 32\n{\n\
             .reg .b32 %r<4>;\n.reg .b32 %a<4>;\n.reg .b32 %b<4>;\n.reg .b32 %c<4>;\n\
             .reg .b32 %d<4>;\n.reg .b64 %q<4>;\n\
             mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\n",
        );
        let list = |name: &str, len: usize| {
            let names: Vec<String> = (0..len).map(|index| format!("%{name}{index}")).collect();
            format!("{{{}}}", names.join(", "))
        };
        let mut place = |parameter: &str, name: &str, len: usize, is_store: bool| {
            text += &format!(
                "mad.lo.u32 %r2, %r1, {}, %r0;\nld.param.u64 %q0, [{parameter}];\n\
                 cvta.to.global.u64 %q0, %q0;\nmul.wide.u32 %q1, %r2, 4;\n\
                 add.s64 %q0, %q0, %q1;\n",
                len * LANES
            );
            for index in 0..len {
                let address = format!("[%q0+{}]", 4 * LANES * index);
                text += &match is_store {
                    false => format!("ld.global.b32 %{name}{index}, {address};\n"),
                    true => format!("st.global.b32 {address}, %{name}{index};\n"),
                };
            }
            if parameter == "before" {
                text += &format!(
                    "{} {}, {}, {}, {};\n",
                    self.opcode(),
                    list("d", sums),
                    list("a", a),
                    list("b", b),
                    list("c", sums)
                );
            }
        };
        place("a", "a", a, false);
        place("b", "b", b, false);
        place("before", "c", sums, false);
        place("after", "d", sums, true);
        text + "ret;\n}\n"
    }

    /// A `[rows, k]` matrix in the order of registers: word t of row g, the row eight below
    /// (if there is one), and both again four words on.
    fn fragments(self, matrix: &[u8], rows: usize) -> Vec<u8> {
        let halves = rows / 8;
        let words = self.words();
        let mut bytes = Vec::with_capacity(matrix.len());
        for register in 0..halves * words / 4 {
            for lane in 0..LANES {
                let row = lane / 4 + register % halves * 8;
                let word = lane % 4 + register / halves * 4;
                bytes.extend_from_slice(&matrix[4 * (row * words + word)..][..4]);
            }
        }
        bytes
    }

    fn check(self, a: &[u8], b: &[u8], before: &[u32], got: &[u32]) -> Option<String> {
        let (a, b) = (self.a.decode_all(a), self.b.decode_all(b));
        for (index, (&word, &before)) in got.iter().zip(before).enumerate() {
            let numbers = self.sum.decode(word).into_iter().zip(self.sum.decode(before));
            let places = places(self.sum, index / LANES, index % LANES);
            for ((got, before), (row, column)) in numbers.zip(places) {
                let a = &a[row * self.k..][..self.k];
                let b = &b[column * self.k..][..self.k];
                let expected = Expected::new(a, b, before, 1.0);
                if !expected.allows(got, self.a, self.sum) {
                    return Some(format!("[{row}, {column}] is {got}, meant is {expected:?}"));
                }
            }
        }
        None
    }
}

fn cases() -> Vec<Case> {
    use Element::{Bf16, E4m3, E5m2, F16, Tf32};
    let case = |a, b, sum, k| Case { a, b, sum, k };
    vec![
        case(Bf16, Bf16, Sum::F32, 16),
        case(Bf16, Bf16, Sum::F32, 8),
        case(F16, F16, Sum::F32, 16),
        case(F16, F16, Sum::F32, 8),
        case(F16, F16, Sum::F16, 16),
        case(F16, F16, Sum::F16, 8),
        case(Tf32, Tf32, Sum::F32, 8),
        case(Tf32, Tf32, Sum::F32, 4),
        case(E4m3, E4m3, Sum::F32, 32),
        case(E5m2, E5m2, Sum::F32, 32),
        case(E4m3, E5m2, Sum::F32, 32),
        case(E5m2, E4m3, Sum::F32, 32),
    ]
}

trial!(mmas_of_warps);
fn mmas_of_warps() {
    let mut bench = Bench::open();
    let mut group = Group::new("warp_mma");
    for case in cases() {
        let mut matrices = Vec::new();
        let (mut a, mut b, mut before) = (Vec::new(), Vec::new(), Vec::new());
        for (index, &kind) in Kind::ALL.iter().enumerate() {
            for tile in 0..TILES {
                let seed = 1000 + 100 * index as u64 + 4 * tile as u64;
                let left = case.a.matrix(kind, (ROWS, case.k), false, seed);
                let right = case.b.matrix(kind, (COLUMNS, case.k), true, seed + 1);
                let words = case.sum.words(kind, case.registers()[2] * LANES, seed + 2);
                a.extend(case.fragments(&left, ROWS));
                b.extend(case.fragments(&right, COLUMNS));
                before.extend(words.iter().flat_map(|word| word.to_le_bytes()));
                matrices.push((left, right, words));
            }
        }
        let bytes = before.len();
        let (a, b, before) = (bench.upload(&a), bench.upload(&b), bench.upload(&before));
        let after = bench.output(bytes);
        let arguments = [a, b, before, after].map(Argument::Pointer).to_vec();
        let launch = (matrices.len(), LANES as u32);
        let got = bench.run(&case.ptx(), launch, arguments, (after, bytes));
        let of_kind = bytes / Kind::ALL.len();
        for (index, (kind, got)) in Kind::ALL.iter().zip(got.chunks(of_kind)).enumerate() {
            let name = format!("{} {kind:?}", case.opcode());
            for (tile, got) in got.chunks(of_kind / TILES).enumerate() {
                let (a, b, before) = &matrices[index * TILES + tile];
                let got: Vec<u32> = bytemuck::pod_collect_to_vec(got);
                if let Some(wrong) = case.check(a, b, before, &got) {
                    group.complain(format!("{name}: tile {tile}: {wrong}"));
                }
            }
            group.record(&name, got);
        }
    }
    group.finish(&bench.properties());
}
