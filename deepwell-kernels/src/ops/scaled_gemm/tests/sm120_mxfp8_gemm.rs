//! `sm120_mxfp8_gemm.cu`: MXFP8 GEMMs on tensor cores that apply scales of blocks, against f64 sums
//! of what they stand for.

use deepwell_ir::{DType, GemmKind, ops};
use deepwell_kernels::ops::linear::oracle as linear;
use deepwell_precision::QuantFormat;
use deepwell_trials::skip;

use crate::harness::{Gpu, HostTensor};
use crate::mx::{MxKind, MxMatrix};
use crate::mxfp8_gemm::{
    Kernel, check_ends_of_scales, check_hard_numbers, check_nan_elements, check_sizes, multiply,
};

/// A step of 32 sums 33 terms, of which the sum so far is one; each is cut below 2^-25 of the
/// largest, and then their sum below 2^-23 of itself: 33 / 4 + 1.
pub(crate) const KERNEL: Kernel = Kernel { name: "cuda_sm120_mxfp8_gemm", error: (9.25, 0.0) };

/// The GPU, if its tensor cores apply scales in `mma.sync`; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != "blackwell-sm120" {
        skip("of sm_120");
    }
    gpu
}

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = open();
    check_sizes(&mut gpu, KERNEL);
}

trial!(gemms_of_hard_numbers);
fn gemms_of_hard_numbers() {
    let mut gpu = open();
    check_hard_numbers(&mut gpu, KERNEL);
}

trial!(scales_at_the_ends_of_their_range);
fn scales_at_the_ends_of_their_range() {
    let mut gpu = open();
    check_ends_of_scales(&mut gpu, KERNEL);
}

trial!(nan_elements_stay_in_their_rows);
fn nan_elements_stay_in_their_rows() {
    let mut gpu = open();
    check_nan_elements(&mut gpu, KERNEL);
}

/// A GEMM of `rows` by `columns` with these scales, of elements that give one exact sum: it tells
/// which scale each lane gives to which row, column and step.
fn check_places(gpu: &mut Gpu, rows: usize, columns: usize, k: usize) {
    let blocks = k / 32;
    // Ones in one element of each block, zeros elsewhere: an element of the result is the sum over
    // blocks of the products of their scales.
    let matrix = |outer: usize, scale: &dyn Fn(usize, usize) -> u8| {
        let data: Vec<u8> =
            (0..outer * k).map(|index| if index % 32 == 5 { 0x38 } else { 0 }).collect();
        let scales: Vec<u8> =
            (0..outer * blocks).map(|index| scale(index / blocks, index % blocks)).collect();
        MxMatrix::from_bytes(outer, k, &data, &scales)
    };
    // Scales of rows differ in the rows of a fragment and in steps, and so do those of columns; the
    // factors of an element lie within 2^20 of each other, so that sums are exact.
    let a = matrix(rows, &|row, block| (117 + (row * 5 + block * 3) % 11) as u8);
    let b = matrix(columns, &|column, block| (122 + (column * 3 + block * 7) % 10) as u8);
    let expected = linear::forward(&a.values, &b.values, None, k);
    let spec = QuantFormat::MXFP8;
    let (kind, output) = (GemmKind::Fprop, DType::F32);
    let op = ops::ScaledGemm { kind, output, bias: false, a: spec, b: spec };
    let out = HostTensor::output(output, &[rows, columns]);
    let got = multiply(gpu, KERNEL.name, op, (&a, &b), None, &out, false);
    for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let (row, column) = (index / columns, index % columns);
        assert_eq!(got, expected, "row {row}, column {column} of {rows}x{columns}x{k}");
    }
}

trial!(each_row_column_and_step_has_its_own_scale);
fn each_row_column_and_step_has_its_own_scale() {
    let mut gpu = open();
    for (rows, columns, k) in [(128, 128, 128), (131, 70, 224)] {
        check_places(&mut gpu, rows, columns, k);
    }
}

trial!(nan_scales_stay_in_their_rows);
/// A scale that is NaN makes its row or column NaN, also where all elements of its block are zeros,
/// and nothing else; so it is in every step of a stage.
fn nan_scales_stay_in_their_rows() {
    let mut gpu = open();
    let (rows, columns, k) = (70, 40, 288);
    let (blocks, spec) = (k / 32, QuantFormat::MXFP8);
    for block in 0..blocks {
        let (nan_row, nan_column) = (block * 7 + 3, block * 4 + 2);
        let change = |matrix: MxMatrix, outer: usize, at: usize| {
            let (mut data, mut scales) = (matrix.data.bytes, matrix.plain_scales);
            scales[at * blocks + block] = 0xff;
            data[at * k + block * 32..][..32].fill(0);
            MxMatrix::from_bytes(outer, k, &data, &scales)
        };
        let a = change(MxMatrix::new(rows, k, spec, MxKind::Even, 1), rows, nan_row);
        let b = change(MxMatrix::new(columns, k, spec, MxKind::Even, 50), columns, nan_column);
        let (kind, output) = (GemmKind::Dgrad, DType::F32);
        let op = ops::ScaledGemm { kind, output, bias: false, a: spec, b: spec };
        let out = HostTensor::output(output, &[rows, columns]);
        let got = multiply(&mut gpu, KERNEL.name, op, (&a, &b), None, &out, false);
        for (index, value) in got.iter().enumerate() {
            let expected = index / columns == nan_row || index % columns == nan_column;
            assert_eq!(value.is_nan(), expected, "block {block}, row {}", index / columns);
        }
    }
}

emulated! {
    sm120_mxfp8_gemm on Sm120a: |gpu| {
        for sizes in [(390, 264, 416), (140, 140, 150)] {
            crate::mxfp8_gemm::check(gpu, KERNEL, sizes, QuantFormat::MXFP8, MxKind::Even);
        }
    }
}
