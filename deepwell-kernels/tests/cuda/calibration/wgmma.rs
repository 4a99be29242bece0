//! `wgmma`: every type, accumulator, source and layout that our kernels may use.

use deepwell_kernels::cuda::Argument;

use super::bench::Bench;
use super::element::{Expected, Kind, places};
use super::golden::Group;
use super::wgmma_cases::{Case, cases};
use super::wgmma_ptx::{ROWS, STEP_BYTES, THREADS};

/// The operands of a case, of one kind.
struct Given {
    a: Vec<u8>,
    b: Vec<u8>,
    /// Accumulators in the order of registers, a word for each thread.
    before: Vec<u32>,
}

fn given(case: &Case, kind: Kind, seed: u64) -> Given {
    let row_bytes = case.steps * STEP_BYTES;
    let k = |bytes: usize| row_bytes / bytes;
    let words = case.kernel().registers() * THREADS;
    Given {
        a: case.a.matrix(kind, (ROWS, k(case.a.bytes())), false, seed),
        b: case.b.matrix(kind, (case.columns, k(case.b.bytes())), true, seed + 1),
        before: case.sum.words(kind, words, seed + 2),
    }
}

/// What is wrong with the first element that cannot be right.
fn check(case: &Case, given: &Given, got: &[u32]) -> Option<String> {
    let row_bytes = case.steps * STEP_BYTES;
    let a = case.a.decode_all(&given.a);
    let b = case.b.decode_all(&given.b);
    let k = row_bytes / case.a.bytes();
    let sign = if case.negated.0 == case.negated.1 { 1.0 } else { -1.0 };
    for (index, (&word, &before)) in got.iter().zip(&given.before).enumerate() {
        let (register, thread) = (index / THREADS, index % THREADS);
        let numbers = case.sum.decode(word).into_iter().zip(case.sum.decode(before));
        let places = places(case.sum, register, thread % 32);
        for ((got, before), (row, column)) in numbers.zip(places) {
            let row = thread / 32 * 16 + row;
            let of = |values: &[f64], line: usize| values[line * k..][..k].to_vec();
            let before = if case.adds { before } else { 0.0 };
            let expected = Expected::new(&of(&a, row), &of(&b, column), before, sign);
            if !expected.allows(got, case.a, case.sum) {
                return Some(format!("[{row}, {column}] is {got}, meant is {expected:?}"));
            }
        }
    }
    None
}

trial!(mmas_of_warpgroups);
fn mmas_of_warpgroups() {
    let mut bench = Bench::open();
    let mut group = Group::new("wgmma");
    for case in cases() {
        let kernel = case.kernel();
        let blocks: Vec<Given> = Kind::ALL
            .iter()
            .enumerate()
            .map(|(index, &kind)| given(&case, kind, 100 * index as u64))
            .collect();
        let (mut a, mut b, mut before) = (Vec::new(), Vec::new(), Vec::new());
        for block in &blocks {
            match (case.a_layout, &kernel.a_image) {
                (Some(layout), Some(image)) => {
                    a.extend(layout.lay_out(&block.a, ROWS, image.bytes));
                }
                _ => a.extend(&block.a),
            }
            let len = kernel.b_image.bytes;
            b.extend(case.b_layout.lay_out(&block.b, case.columns, len));
            before.extend(block.before.iter().flat_map(|word| word.to_le_bytes()));
        }
        let bytes = before.len();
        let (a, b, before) = (bench.upload(&a), bench.upload(&b), bench.upload(&before));
        let after = bench.output(bytes);
        let arguments = [a, b, before, after].map(Argument::Pointer).to_vec();
        let launch = (blocks.len(), THREADS as u32);
        let got = bench.run(&kernel.ptx(), launch, arguments, (after, bytes));
        for pointer in [a, b, before, after] {
            bench.driver().free(pointer).unwrap();
        }
        let of_block = bytes / blocks.len();
        for ((kind, given), got) in Kind::ALL.iter().zip(&blocks).zip(got.chunks(of_block)) {
            let name = format!("{} {kind:?}", case.name());
            if let Some(wrong) = check(&case, given, &bytemuck::pod_collect_to_vec(got)) {
                group.complain(format!("{name}: {wrong}"));
            }
            group.record(&name, got);
        }
    }
    group.finish(&bench.properties());
}
