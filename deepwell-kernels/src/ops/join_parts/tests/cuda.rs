//! `join_parts.cu`: the bits of its operand.

use deepwell_ir::{DType, ops};

use crate::harness::{Gpu, HostTensor};
use deepwell_kernels::ops::join_parts::oracle;

/// `parts` matrices of `rows` x `columns` elements of one byte and `rest` bytes each.
fn check(gpu: &mut Gpu, parts: usize, rows: usize, columns: usize, rest: &[usize]) {
    let what = format!("{parts} parts of {rows}x{columns}x{rest:?}");
    let bytes = columns * rest.iter().product::<usize>();
    let byte = |at: usize| (at * 7 + at / 251 + at / 65_521) as u8;
    let shape = |rows: usize, columns: usize| [&[rows, columns], rest].concat();
    let dtype = if rest.is_empty() { DType::E4m3 } else { DType::E8m0 };
    let x: Vec<u8> = (0..parts * rows * bytes).map(byte).collect();
    let expected = oracle::join(&x, parts, rows, bytes);
    let x = HostTensor { dtype, shape: shape(parts * rows, columns), bytes: x };
    let joined = HostTensor::output(dtype, &shape(rows, parts * columns));
    let got = gpu.run(ops::JoinParts { parts }, &[x], &[joined], false, 1);
    assert_eq!(got[0].bytes, expected, "{what}");
}

/// No row, one, and several; one part, and numbers that are no power of two.
fn check_hard(gpu: &mut Gpu) {
    for (parts, rows, columns, rest) in [
        (2, 0, 16, &[][..]),
        (1, 3, 16, &[]),
        (2, 1, 128, &[]),
        (3, 33, 48, &[]),
        (8, 5, 128, &[]),
        (2, 3, 1, &[512]),
        (4, 2, 3, &[512]),
    ] {
        check(gpu, parts, rows, columns, rest);
    }
}

trial!(parts_stand_side_by_side);
fn parts_stand_side_by_side() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu);
    if gpu.runs(1, 0) {
        check(&mut gpu, 4, 4096, 1024, &[]);
    }
}

emulated! {
    join_parts on Sm90a: |gpu| {
        check_hard(gpu);
        check(gpu, 2, 257, 256, &[]);
    }
}
