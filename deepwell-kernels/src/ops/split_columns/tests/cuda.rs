//! `split_columns.cu`: the bits of its operands.

use deepwell_ir::{DType, ops};
use half::bf16;

use crate::harness::{Gpu, HostTensor, uniform};

fn check(gpu: &mut Gpu, rows: usize, [a, b]: [usize; 2]) {
    let what = format!("{rows} rows of {a} and {b}");
    let mut numbers: Vec<bf16> =
        uniform(rows * (a + b), 1, 4.0).into_iter().map(bf16::from_f32).collect();
    // A NaN with bits of its own.
    if let Some(last) = numbers.last_mut() {
        *last = bf16::from_bits(0xFFA5);
    }
    let tensor = |columns: usize, numbers: &[bf16]| HostTensor {
        dtype: DType::Bf16,
        shape: vec![rows, columns],
        bytes: bytemuck::cast_slice(numbers).to_vec(),
    };
    let part = |from: usize, to: usize| -> Vec<bf16> {
        numbers.chunks_exact(a + b).flat_map(|row| &row[from..to]).copied().collect()
    };
    let whole = tensor(a + b, &numbers);
    let parts = [tensor(a, &part(0, a)), tensor(b, &part(a, a + b))];
    let outputs = [a, b].map(|columns| HostTensor::output(DType::Bf16, &[rows, columns]));
    let op = ops::SplitColumns { columns: a };
    let got = gpu.run(op, std::slice::from_ref(&whole), &outputs, false, 1);
    for (got, expected) in got.iter().zip(&parts) {
        assert_eq!(got.bytes, expected.bytes, "split {what}");
    }
    let output = [HostTensor::output(DType::Bf16, &[rows, a + b])];
    let got = gpu.run(ops::JoinColumns {}, &parts, &output, false, 1);
    assert_eq!(got[0].bytes, whole.bytes, "join {what}");
}

/// No row, one, and several; parts of whole vectors, of one column, of several turns of a warp, and
/// ones whose sum alone is whole vectors.
fn check_hard(gpu: &mut Gpu) {
    for (rows, columns) in [
        (0, [8, 8]),
        (1, [1, 1]),
        (1, [8, 16]),
        (31, [4, 4]),
        (33, [3, 5]),
        (33, [512, 64]),
        (65, [7, 40]),
        (129, [33, 31]),
    ] {
        check(gpu, rows, columns);
    }
}

trial!(parts_have_the_bits_of_the_whole);
fn parts_have_the_bits_of_the_whole() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    if gpu.runs(1, 0) {
        check(&mut gpu, 16_384, [512, 64]);
    }
}

emulated! {
    split_columns on Sm90a: |gpu| {
        check_hard(gpu);
        check(gpu, 100, [256, 64]);
    }
}
