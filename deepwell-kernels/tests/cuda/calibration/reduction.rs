//! Bulk copies from shared memory that store or add: every operation and type, and boxes that
//! reach over the tensor's far borders.

use deepwell_kernels::cuda::{Argument, DriverError, TensorMapElement};

use super::bench::Bench;
use super::copies::{self, Case};
use super::element::Element;
use super::golden::Group;
use super::scalar_inputs::{BYTES, Words, words};

const THREADS: usize = 128;
/// What one CTA reduces.
const BLOCK_BYTES: usize = 8192;

/// A reduction of words, or of halves of words.
struct Row {
    operation: &'static str,
    words: Words,
    /// Of number `lane` of two words; `None` where all bits are known.
    combine: fn(u32, u32) -> u32,
    /// The numbers of a word and of the meant one, where they are floats; otherwise all bits.
    floats: Option<fn(u32) -> Vec<f64>>,
    /// What a sum may be off, in parts of it.
    share: f64,
}

fn singles(word: u32) -> Vec<f64> {
    vec![f32::from_bits(word).into()]
}

fn brains(word: u32) -> Vec<f64> {
    vec![Element::Bf16.decode(word & 0xffff), Element::Bf16.decode(word >> 16)]
}

fn halves(word: u32) -> Vec<f64> {
    vec![Element::F16.decode(word & 0xffff), Element::F16.decode(word >> 16)]
}

fn of_pairs(a: u32, b: u32, combine: fn(f32, f32) -> f32, is_brain: bool) -> u32 {
    let half = |shift: u32| {
        let (a, b) = ((a >> shift) as u16, (b >> shift) as u16);
        let result = if is_brain {
            let from = |bits| half::bf16::from_bits(bits).to_f32();
            half::bf16::from_f32(combine(from(a), from(b))).to_bits()
        } else {
            let from = |bits| half::f16::from_bits(bits).to_f32();
            half::f16::from_f32(combine(from(a), from(b))).to_bits()
        };
        u32::from(result) << shift
    };
    half(0) | half(16)
}

fn rows() -> Vec<Row> {
    let floats = |operation, words, combine, floats: fn(u32) -> Vec<f64>, share| Row {
        operation,
        words,
        combine,
        floats: Some(floats),
        share,
    };
    let integers = |operation, combine| Row {
        operation,
        words: Words::Integers,
        combine,
        floats: None,
        share: 0.0,
    };
    vec![
        floats(
            "add.f32",
            Words::F32,
            |a, b| (f32::from_bits(a) + f32::from_bits(b)).to_bits(),
            singles,
            2f64.powi(-22),
        ),
        floats(
            "add.noftz.bf16",
            Words::Pairs,
            |a, b| of_pairs(a, b, |a, b| a + b, true),
            brains,
            2f64.powi(-7),
        ),
        floats(
            "add.noftz.f16",
            Words::Pairs,
            |a, b| of_pairs(a, b, |a, b| a + b, false),
            halves,
            2f64.powi(-10),
        ),
        floats("min.bf16", Words::Pairs, |a, b| of_pairs(a, b, f32::min, true), brains, 0.0),
        floats("max.bf16", Words::Pairs, |a, b| of_pairs(a, b, f32::max, true), brains, 0.0),
        floats("max.f16", Words::Pairs, |a, b| of_pairs(a, b, f32::max, false), halves, 0.0),
        integers("add.u32", u32::wrapping_add),
        integers("min.u32", Ord::min),
        integers("max.s32", |a, b| a.cast_signed().max(b.cast_signed()).cast_unsigned()),
        integers("xor.b32", |a, b| a ^ b),
        integers("inc.u32", |a, b| if a >= b { 0 } else { a + 1 }),
    ]
}

impl Row {
    fn check(&self, before: u32, source: u32, got: u32) -> bool {
        let meant = (self.combine)(before, source);
        let Some(floats) = self.floats else { return got == meant };
        floats(meant).into_iter().zip(floats(got)).all(|(meant, got)| {
            // Subnormal operands and sums may be flushed.
            let allowed = self.share * meant.abs() + 2.0 * f64::from(f32::MIN_POSITIVE);
            meant == got || (meant.is_nan() && got.is_nan()) || (meant - got).abs() <= allowed
        })
    }
}

/// One CTA for each 8 KiB: to shared memory, and by `copy` from there.
fn ptx(parameters: &str, bytes: usize, copy: &str) -> String {
    format!(
        ".visible .entry run({parameters})\n.reqntid {THREADS}\n{{\n\
         .reg .pred %p<2>;\n.reg .b32 %r<10>;\n.reg .b64 %q<8>;\n\
         .shared .align 1024 .b8 box[{bytes}];\n\
         mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\nmov.u32 %r3, box;\n\
         mul.wide.u32 %q1, %r1, {bytes};\n\
         ld.param.u64 %q0, [source];\ncvta.to.global.u64 %q0, %q0;\nadd.s64 %q0, %q0, %q1;\n\
         mov.u32 %r6, %r0;\n\
         $next:\nsetp.ge.u32 %p0, %r6, {};\n@%p0 bra $filled;\n\
         shl.b32 %r7, %r6, 2;\nadd.u32 %r8, %r3, %r7;\n\
         cvt.u64.u32 %q4, %r7;\nadd.s64 %q5, %q0, %q4;\nld.global.b32 %r9, [%q5];\n\
         st.shared.b32 [%r8], %r9;\nadd.u32 %r6, %r6, {THREADS};\nbra $next;\n\
         $filled:\nfence.proxy.async.shared::cta;\nbar.sync 0;\n\
         setp.ne.u32 %p1, %r0, 0;\n@%p1 bra $end;\n\
         {copy}\n\
         cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n\
         $end:\nret;\n}}\n",
        bytes / 4
    )
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn rows_of_bytes(bench: &mut Bench, group: &mut Group) {
    for row in rows() {
        let [before, given, _] = words(row.words);
        let (source, target) = (bench.upload(&bytes_of(&given)), bench.upload(&bytes_of(&before)));
        let copy = format!(
            "ld.param.u64 %q2, [target];\ncvta.to.global.u64 %q2, %q2;\nadd.s64 %q2, %q2, %q1;\n\
             cp.reduce.async.bulk.global.shared::cta.bulk_group.{} [%q2], [%r3], {BLOCK_BYTES};",
            row.operation
        );
        let text = ptx(".param .u64 source, .param .u64 target", BLOCK_BYTES, &copy);
        if !bench.announce(format!("reduces {}", row.operation)) {
            continue;
        }
        let arguments = [source, target].map(Argument::Pointer).to_vec();
        let launch = (BYTES / BLOCK_BYTES, THREADS as u32);
        let got = bench.run(&text, launch, arguments, (target, BYTES));
        let results: Vec<u32> = bytemuck::pod_collect_to_vec(&got);
        let operands = before.iter().zip(&given);
        let wrong = operands
            .zip(&results)
            .position(|((&before, &source), &got)| !row.check(before, source, got));
        if let Some(index) = wrong {
            group.complain(format!(
                "{}: word {index} of {:#010x} and {:#010x} is {:#010x}",
                row.operation, before[index], given[index], results[index]
            ));
        }
        group.record(row.operation, &got);
    }
}

/// Launches a kernel that stores or adds a box of bytes `given` at `corner` of a matrix, and gives
/// the matrix.
fn store(
    bench: &mut Bench,
    case: &Case,
    adds: bool,
    corner: (i32, i32),
    (matrix, given): (&[u8], &[u8]),
) -> Result<Vec<u8>, DriverError> {
    let with_map = ".param .align 64 .b8 map[128], .param .u64 source, .param .u64 corner";
    let how = if adds {
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    } else {
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    };
    let copy = format!(
        "ld.param.u64 %q2, [corner];\ncvta.to.global.u64 %q2, %q2;\n\
         ld.global.v2.b32 {{%r4, %r5}}, [%q2];\n\
         mov.b64 %q3, map;\ncvta.param.u64 %q6, %q3;\n\
         {how} [%q6, {{%r4, %r5}}], [%r3];"
    );
    let (source, target) = (bench.upload(given), bench.upload(matrix));
    let at = bench.upload(bytemuck::cast_slice(&[corner.0, corner.1]));
    let map = case.map(bench, Argument::Pointer(target));
    let arguments = vec![map, Argument::Pointer(source), Argument::Pointer(at)];
    bench.launch(&ptx(with_map, given.len(), &copy), (1, THREADS as u32), arguments)?;
    let mut got = vec![0; matrix.len()];
    bench.driver().download(&mut got, target)?;
    for pointer in [source, target, at] {
        bench.driver().free(pointer)?;
    }
    Ok(got)
}

/// Boxes that a tensor map takes apart, stored or added. None begins before the tensor: the CUDA
/// programming guide allows that to loads alone.
fn boxes(bench: &mut Bench, group: &mut Group, adds: bool) {
    // There is no sum of bytes.
    let takes = |case: &Case| !adds || case.element != TensorMapElement::U8;
    for case in copies::cases().into_iter().filter(takes) {
        let name = format!("{} {}", if adds { "adds" } else { "stores" }, case.name());
        let (len, bytes) = (case.box_bytes(), case.pitch() * case.sizes.1);
        let matrix = copies::bytes(bytes, 6);
        let given = copies::bytes(len, 7);
        let mut all = Vec::new();
        for corner in case.corners().into_iter().filter(|&(x, y)| x >= 0 && y >= 0) {
            if !bench.announce(format!("{name} at {corner:?}")) {
                continue;
            }
            let got = store(bench, &case, adds, corner, (&matrix, &given));
            let got = got.unwrap_or_else(|error| panic!("{name} at {corner:?}: {error}"));
            let mut stored = matrix.clone();
            // A store goes on to the end of the 16 bytes in which a row ends; so an H200 has it.
            let size = case.element_bytes();
            let row_elements = (case.sizes.0 * size).next_multiple_of(16) / size;
            let reached = match adds {
                true => case,
                false => Case { sizes: (row_elements, case.sizes.1), ..case },
            };
            for (shared, global) in reached.places(corner) {
                if let Some(global) = global {
                    stored[global] = given[shared];
                }
            }
            let is_right = if adds { is_sum(&case, &matrix, &stored, &got) } else { stored == got };
            if !is_right {
                group.complain(format!("{name} at {corner:?} is another"));
            }
            all.extend(got);
        }
        group.record(&name, &all);
    }
}

/// Whether what was stored over a matrix was added: bytes that both have were not reached, or
/// hold a sum all the same.
fn is_sum(case: &Case, matrix: &[u8], stored: &[u8], got: &[u8]) -> bool {
    let (size, pitch) = (case.element_bytes(), case.pitch());
    let code = |bytes: &[u8]| bytes.iter().rev().fold(0, |code, &b| code << 8 | u32::from(b));
    (0..matrix.len()).step_by(size).all(|at| {
        let of = |bytes: &[u8]| code(&bytes[at..at + size]);
        let (before, source, got) = (of(matrix), of(stored), of(got));
        if at % pitch >= case.sizes.0 * size {
            return before == got;
        }
        let is_brain = case.element == TensorMapElement::Bf16;
        let float = |code: u32| {
            if is_brain { Element::Bf16.decode(code) } else { f32::from_bits(code).into() }
        };
        if before == source {
            return true;
        }
        let meant = float(before) + float(source);
        let (share, largest) =
            if is_brain { (2f64.powi(-7), 3.38e38) } else { (2f64.powi(-22), 3.4e38) };
        let got = float(got);
        (meant.is_nan() && got.is_nan())
            || (meant.abs() > largest && got.abs() > largest)
            || meant == got
            || (meant - got).abs() <= share * meant.abs() + 2.0 * f64::from(f32::MIN_POSITIVE)
    })
}

fn compare(name: &'static str, fill: impl FnOnce(&mut Bench, &mut Group)) {
    let mut bench = Bench::open();
    let mut group = Group::new(name);
    fill(&mut bench, &mut group);
    group.finish(&bench.properties());
}

trial!(words_are_reduced);
fn words_are_reduced() {
    compare("reductions", rows_of_bytes);
}

trial!(boxes_are_stored);
fn boxes_are_stored() {
    compare("stores", |bench, group| boxes(bench, group, false));
}

trial!(boxes_are_added);
fn boxes_are_added() {
    compare("sums", |bench, group| boxes(bench, group, true));
}
