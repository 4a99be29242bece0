//! `bf16_grouped_gemm.cu`: the GEMMs of groups against their definition in f64.

use deepwell_ir::ops::{GroupedGemm, GroupedGemmDgrad, GroupedGemmWgrad, GroupedRows};
use deepwell_ir::{DType, Op};
use deepwell_kernels::ops::grouped_gemm::oracle;

use crate::compare::assert_close;
use crate::gemm_operands::{Kind, gemm_tolerance};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

const KERNEL: &str = "cuda_bf16_grouped_gemm";

/// Rows of each group: none, one, around a block and a tile, all in one group (the first, one
/// between, the last), and more groups than rows or than a warp has lanes.
const GROUPS: &[&[usize]] = &[
    &[0, 0, 0],
    &[1],
    &[31, 0, 33, 1],
    &[0, 129, 0],
    &[130, 0, 0, 0],
    &[0, 0, 127],
    &[2; 40],
    &[0, 1, 0, 0, 1, 0, 0],
];

/// First rows of groups, and where the last ends.
pub(crate) fn offsets_of(groups: &[usize]) -> Vec<i32> {
    let mut end = 0;
    let ends = groups.iter().map(|rows| {
        end += *rows as i32;
        end
    });
    [0].into_iter().chain(ends).collect()
}

/// All three GEMMs of a layer with `n` outputs and `k` inputs, with `behind` rows that no group
/// has.
fn check(gpu: &mut Gpu, groups: &[usize], behind: usize, [n, k]: [usize; 2], kind: Kind) {
    let offsets = offsets_of(groups);
    let end = *offsets.last().expect("a group") as usize;
    let (count, rows) = (groups.len(), end + behind);
    let grouped = GroupedRows::new(count, 1);
    // What no group has is not read.
    let rows_of = |columns: usize, seed: u64| {
        let mut values = kind.values(rows * columns, seed);
        values[end * columns..].fill(f32::NAN);
        HostTensor::bf16(&[rows, columns], &values)
    };
    let (x, dy) = (rows_of(k, 1), rows_of(n, 3));
    let w = HostTensor::bf16(&[count, n, k], &kind.values(count * n * k, 2));
    let before = HostTensor::f32(&[count, n, k], &uniform(count * n * k, 5, 8.0));
    let places = HostTensor::i32(&[count + 1], &offsets);
    let numbers = |tensor: &HostTensor| tensor.to_f64();
    let mut run = |op: Op, given: [&HostTensor; 2], output: &HostTensor, accumulate: bool| {
        let given = [given[0].clone(), given[1].clone(), places.clone()];
        let options = RunOptions { accumulate, kernel: Some(KERNEL), ..RunOptions::default() };
        gpu.run_with(op, &given, std::slice::from_ref(output), options).remove(0).to_f64()
    };
    let name = |what: &str| format!("{what} of {groups:?} + {behind}, {n}x{k} {kind:?}");

    let y = HostTensor::output(DType::Bf16, &[rows, n]);
    let expected = oracle::forward(&numbers(&x), &numbers(&w), &offsets, k, n);
    let got = run(GroupedGemm { grouped }.into(), [&x, &w], &y, false);
    assert_close(&name("fprop"), &got, &expected, gemm_tolerance(DType::Bf16, k, kind, 0.0));
    assert!(got[end * n..].iter().all(|&y| y == 0.0), "{}", name("rows behind"));

    let dx = HostTensor::output(DType::Bf16, &[rows, k]);
    let expected = oracle::data_gradient(&numbers(&dy), &numbers(&w), &offsets, k, n);
    let got = run(GroupedGemmDgrad { grouped }.into(), [&dy, &w], &dx, false);
    assert_close(&name("dgrad"), &got, &expected, gemm_tolerance(DType::Bf16, n, kind, 0.0));

    for accumulate in [false, true] {
        let mut expected = oracle::weight_gradient(&numbers(&dy), &numbers(&x), &offsets, k, n);
        if accumulate {
            expected.iter_mut().zip(numbers(&before)).for_each(|(sum, there)| *sum += there);
        }
        let op = GroupedGemmWgrad { grouped };
        let got = run(op.into(), [&dy, &x], &before, accumulate);
        let longest = groups.iter().copied().max().unwrap_or(0);
        let tolerance = gemm_tolerance(DType::F32, longest, kind, 8.0);
        assert_close(&name("wgrad"), &got, &expected, tolerance);
        // Of a group without rows it is 0, or what was there, to the bit.
        let there = numbers(&before);
        for group in (0..count).filter(|&group| groups[group] == 0) {
            for index in group * n * k..(group + 1) * n * k {
                let nothing = if accumulate { there[index] } else { 0.0 };
                assert_eq!(got[index].to_bits(), nothing.to_bits(), "{}", name("no rows"));
            }
        }
    }
}

fn check_hard(gpu: &mut Gpu) {
    for (index, groups) in GROUPS.iter().enumerate() {
        let sizes = [[40, 72], [8, 24], [33, 16], [16, 7]][index % 4];
        check(gpu, groups, [0, 1, 130][index % 3], sizes, Kind::Uniform);
    }
    check(gpu, &[33, 0, 65], 0, [24, 40], Kind::Integers);
}

trial!(gemms_of_any_groups);
fn gemms_of_any_groups() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    for kind in [Kind::Uniform, Kind::Cancelling, Kind::WideRange] {
        if gpu.runs(1, 0) {
            check(&mut gpu, &[257, 0, 1000, 31, 128], 300, [392, 1032], kind);
            check(&mut gpu, &[257, 0, 100, 31, 128], 3, [131, 265], kind);
        }
    }
}

// Tiles of more than one group on each SM, in every stage of the pipeline.
emulated! {
    bf16_grouped_gemm on Sm90a: |gpu| {
        check_hard(gpu);
        for sizes in [[136, 264], [131, 265]] {
            check(gpu, &[140, 0, 33], 70, sizes, Kind::Uniform);
        }
    }
}
