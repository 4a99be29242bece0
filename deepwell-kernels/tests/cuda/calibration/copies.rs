//! Bulk copies of boxes to shared memory: swizzles, and what lies outside of the tensor.

use deepwell_kernels::cuda::{Argument, TensorMapElement, TensorMapSpec, TensorMapSwizzle};

use super::bench::Bench;
use super::element::Random;
use super::golden::Group;

const THREADS: usize = 128;

/// A matrix and the box that is copied of it; sizes are columns and rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) element: TensorMapElement,
    pub(super) sizes: (usize, usize),
    pub(super) boxes: (usize, usize),
    pub(super) swizzle: TensorMapSwizzle,
}

impl Case {
    pub(super) fn element_bytes(&self) -> usize {
        match self.element {
            TensorMapElement::U8 => 1,
            TensorMapElement::Bf16 => 2,
            TensorMapElement::F32 => 4,
        }
    }

    /// Bytes from a row to the next, a multiple of 16.
    pub(super) fn pitch(&self) -> usize {
        (self.sizes.0 * self.element_bytes()).next_multiple_of(16) + 16
    }

    pub(super) fn box_bytes(&self) -> usize {
        self.boxes.0 * self.boxes.1 * self.element_bytes()
    }

    pub(super) fn name(&self) -> String {
        let Case { element, sizes, boxes, swizzle } = self;
        format!("{element:?} {}x{} {swizzle:?} of {}x{}", boxes.1, boxes.0, sizes.1, sizes.0)
    }

    pub(super) fn map(&self, bench: &mut Bench, base: Argument) -> Argument {
        let Argument::Pointer(base) = base else { panic!("a tensor begins at a pointer") };
        let spec = TensorMapSpec {
            base,
            element: self.element,
            sizes: vec![self.sizes.0 as u64, self.sizes.1 as u64],
            strides_bytes: vec![self.pitch() as u64],
            box_sizes: vec![self.boxes.0 as u32, self.boxes.1 as u32],
            swizzle: self.swizzle,
        };
        Argument::TensorMap(bench.driver().tensor_map(&spec).unwrap())
    }

    /// For each byte of a box at (column, row): where it is in the box's shared memory, and where
    /// in the matrix, if it is there.
    pub(super) fn places(&self, (column, row): (i32, i32)) -> Vec<(usize, Option<usize>)> {
        let size = self.element_bytes();
        let chunks = match self.swizzle {
            TensorMapSwizzle::None => 1,
            TensorMapSwizzle::Bytes32 => 2,
            TensorMapSwizzle::Bytes64 => 4,
            TensorMapSwizzle::Bytes128 => 8,
        };
        let inside = |at: i64, size: usize| usize::try_from(at).ok().filter(|&at| at < size);
        (0..self.box_bytes())
            .map(|byte| {
                let shared = byte ^ ((byte / 128 % chunks) * 16);
                let (element, part) = (byte / size, byte % size);
                let x = i64::from(column) + (element % self.boxes.0) as i64;
                let y = i64::from(row) + (element / self.boxes.0) as i64;
                let global = inside(x, self.sizes.0).zip(inside(y, self.sizes.1));
                (shared, global.map(|(x, y)| y * self.pitch() + x * size + part))
            })
            .collect()
    }

    /// Corners of boxes: inside, over each border, and outside. Columns begin at a multiple of 16
    /// bytes; the hardware takes no others.
    pub(super) fn corners(&self) -> Vec<(i32, i32)> {
        let unit = 16 / self.element_bytes() as i32;
        let (width, height) = (self.sizes.0 as i32, self.sizes.1 as i32);
        let (across, down) = (self.boxes.0 as i32, self.boxes.1 as i32);
        let last = (width - 1) / unit * unit;
        vec![
            (0, 0),
            (unit, 5),
            (-unit, 0),
            (unit - across, 1 - down),
            (last - unit, 2),
            (unit, height - 3),
            (last, height - 1),
            (last + unit, 0),
            (-across, 0),
            (0, height + 100),
            (i32::MIN / 4, i32::MAX / 4),
        ]
    }
}

pub(super) fn cases() -> Vec<Case> {
    use TensorMapElement::{Bf16, F32, U8};
    use TensorMapSwizzle::{Bytes32, Bytes64, Bytes128, None};
    let case = |element, sizes, boxes, swizzle| Case { element, sizes, boxes, swizzle };
    vec![
        case(U8, (300, 70), (128, 32), Bytes128),
        case(U8, (300, 70), (64, 40), Bytes64),
        case(U8, (300, 70), (32, 64), Bytes32),
        case(U8, (300, 70), (256, 8), None),
        case(U8, (100, 9), (16, 3), None),
        case(Bf16, (200, 50), (64, 48), Bytes128),
        case(Bf16, (200, 50), (32, 17), Bytes64),
        case(Bf16, (200, 50), (16, 9), Bytes32),
        case(Bf16, (200, 50), (40, 24), None),
        case(F32, (100, 50), (32, 33), Bytes128),
        case(F32, (100, 50), (16, 20), Bytes64),
        case(F32, (100, 50), (8, 31), Bytes32),
        case(F32, (100, 50), (4, 50), None),
    ]
}

/// Random bytes of a matrix, its pitch included.
pub(super) fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.word() as u8).collect()
}

/// One CTA for each corner copies a box and writes its shared memory out.
fn ptx(bytes: usize) -> String {
    let mut text = format!(
        ".visible .entry run(.param .align 64 .b8 map[128], .param .u64 corners, .param .u64 out)\n\
         .reqntid {THREADS}\n{{\n\
         .reg .pred %p<3>;\n.reg .b32 %r<10>;\n.reg .b64 %q<6>;\n\
         .shared .align 1024 .b8 box[{bytes}];\n.shared .align 8 .b64 barrier;\n\
         mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\n\
         mov.u32 %r2, barrier;\nmov.u32 %r3, box;\n\
         setp.ne.u32 %p0, %r0, 0;\n@%p0 bra $ready;\n\
         mbarrier.init.shared::cta.b64 [%r2], 1;\nfence.mbarrier_init.release.cluster;\n\
         $ready:\nbar.sync 0;\n@%p0 bra $wait;\n\
         ld.param.u64 %q0, [corners];\ncvta.to.global.u64 %q0, %q0;\n\
         mul.wide.u32 %q1, %r1, 8;\nadd.s64 %q0, %q0, %q1;\n\
         ld.global.v2.b32 {{%r4, %r5}}, [%q0];\n\
         mov.b64 %q2, map;\ncvta.param.u64 %q3, %q2;\n\
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {bytes};\n\
         cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
         [%r3], [%q3, {{%r4, %r5}}], [%r2];\n\
         $wait:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;\n\
         @!%p1 bra $wait;\n\
         ld.param.u64 %q0, [out];\ncvta.to.global.u64 %q0, %q0;\n\
         mul.wide.u32 %q1, %r1, {bytes};\nadd.s64 %q0, %q0, %q1;\n\
         mov.u32 %r6, %r0;\n\
         $next:\nsetp.ge.u32 %p2, %r6, {};\n@%p2 bra $end;\n\
         shl.b32 %r7, %r6, 2;\nadd.u32 %r8, %r3, %r7;\nld.shared.b32 %r9, [%r8];\n\
         cvt.u64.u32 %q4, %r7;\nadd.s64 %q5, %q0, %q4;\nst.global.b32 [%q5], %r9;\n\
         add.u32 %r6, %r6, {THREADS};\nbra $next;\n\
         $end:\nret;\n",
        bytes / 4
    );
    text += "}\n";
    text
}

fn check(bench: &mut Bench, group: &mut Group, cases: Vec<Case>) {
    for case in cases {
        let matrix = bytes(case.pitch() * case.sizes.1, 5);
        let source = Argument::Pointer(bench.upload(&matrix));
        let corners = case.corners();
        let words: Vec<i32> = corners.iter().flat_map(|&(x, y)| [x, y]).collect();
        let words = bench.upload(bytemuck::cast_slice(&words));
        let len = case.box_bytes();
        let out = bench.output(len * corners.len());
        let map = case.map(bench, source);
        let arguments = vec![map, Argument::Pointer(words), Argument::Pointer(out)];
        let launch = (corners.len(), THREADS as u32);
        let got = bench.run(&ptx(len), launch, arguments, (out, len * corners.len()));
        for (corner, got) in corners.iter().zip(got.chunks(len)) {
            let mut expected = vec![0; len];
            for (shared, global) in case.places(*corner) {
                expected[shared] = global.map_or(0, |global| matrix[global]);
            }
            let wrong = expected.iter().zip(got).position(|(expected, got)| expected != got);
            if let Some(byte) = wrong {
                let name = case.name();
                group.complain(format!("{name} at {corner:?}: byte {byte} is another"));
            }
        }
        group.record(&case.name(), &got);
    }
}

trial!(boxes_of_tensors);
fn boxes_of_tensors() {
    let mut bench = Bench::open();
    let mut group = Group::new("copies");
    check(&mut bench, &mut group, cases());
    group.finish(&bench.properties());
}
