//! MXFP8 GEMMs of operands that are dequantized to BF16 against f64 sums of what they stand for.

use deepwell_ir::{DType, GemmKind, ops};
use deepwell_kernels::cuda::Architecture;
use deepwell_kernels::ops::grouped_gemm::oracle as grouped_oracle;
use deepwell_kernels::ops::linear::oracle as linear;
use deepwell_precision::{BlockShape, Granularity, QuantFormat, scale_tiles};
use deepwell_trials::skip;

use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::{MxKind, MxMatrix, assert_close_to_magnitudes, magnitudes};
use crate::mxfp8_gemm::{
    Kernel, check, check_ends_of_scales, check_hard_numbers, check_nan_elements, multiply,
};

/// Tensor cores cut what a step of 16 along K adds below 2^-23 of its largest term, and round the
/// sum once: twice in each block of 32.
const OURS: Kernel = Kernel { name: "cuda_sm90_dequantized_mxfp8_gemm", error: (4.0, 8.0) };
/// The library's kernels are not known; they sum in FP32.
const LIBRARY: Kernel = Kernel { name: "cublaslt_dequantized_mx_gemm", error: (4.0, 8.0) };

/// The same of groups of rows.
pub(crate) const GROUPED: &str = "cuda_sm90_dequantized_grouped_gemm";

/// M, N, K: single, odd, around the scale tile of 128, the tile of 128 and 256, the vector of 8.
const SIZES: &[(usize, usize, usize)] = &[
    (1, 1, 1),
    (3, 5, 31),
    (5, 3, 33),
    (64, 32, 32),
    (127, 128, 127),
    (128, 129, 128),
    (129, 127, 136),
    (130, 136, 160),
    (257, 40, 1056),
    (136, 264, 509),
];

/// The GPU, if it is Hopper; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    gpu
}

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = open();
    for &sizes in SIZES {
        if gpu.runs(sizes.0 * sizes.1 * sizes.2, 3 << 20) {
            check(&mut gpu, OURS, sizes, QuantFormat::MXFP8, MxKind::Even);
            check_by_library(&mut gpu, sizes, QuantFormat::MXFP8, MxKind::Even);
        }
    }
}

/// What the library takes: a bias with BF16 results alone.
fn check_by_library(
    gpu: &mut Gpu,
    (rows, columns, k): (usize, usize, usize),
    spec: QuantFormat,
    kind: MxKind,
) {
    let by_rows = spec.with_shape(BlockShape::Row);
    let a = MxMatrix::new(rows, k, by_rows, kind, 1);
    let b = MxMatrix::new(columns, k, spec, kind, 50);
    let sums = linear::forward(&a.values, &b.values, None, k);
    let share = (k.div_ceil(32) as f64 * LIBRARY.error.0 + LIBRARY.error.1) * 2f64.powi(-23);
    let share = if kind == MxKind::Exact { 0.0 } else { share };
    let bias = HostTensor::bf16(&[columns], &uniform(columns, 4, 8.0));
    let before = HostTensor::f32(&[rows, columns], &uniform(rows * columns, 5, 8.0));
    for (output, has_bias, accumulate) in [
        (DType::Bf16, false, false),
        (DType::Bf16, true, false),
        (DType::F32, false, false),
        (DType::F32, false, true),
    ] {
        let mut expected = sums.clone();
        let mut magnitude = magnitudes(&a, &b, k);
        let (added, there) = (bias.to_f64(), before.to_f64());
        for (index, sum) in expected.iter_mut().enumerate() {
            let more = match (has_bias, accumulate) {
                (true, _) => added[index % columns],
                (_, true) => there[index],
                _ => 0.0,
            };
            *sum += more;
            magnitude[index] += more.abs();
        }
        let kind_of = if accumulate { GemmKind::Wgrad } else { GemmKind::Fprop };
        let stored = if accumulate { DType::Bf16 } else { output };
        let op =
            ops::ScaledGemm { kind: kind_of, output: stored, bias: has_bias, a: by_rows, b: spec };
        let out = match accumulate {
            true => before.clone(),
            false => HostTensor::output(output, &[rows, columns]),
        };
        let bias = has_bias.then_some(&bias);
        let got = multiply(gpu, LIBRARY.name, op, (&a, &b), bias, &out, accumulate);
        let name = format!("library {rows}x{columns}x{k} {output} {has_bias} {accumulate}");
        let share = share + 2f64.powi(-23);
        assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share, output);
    }
}

trial!(gemms_of_hard_numbers);
fn gemms_of_hard_numbers() {
    let mut gpu = open();
    check_hard_numbers(&mut gpu, OURS);
    for spec in [QuantFormat::MXFP8.square(), QuantFormat::MXFP8_128] {
        for kind in [MxKind::Spread, MxKind::Exact] {
            check_by_library(&mut gpu, (65, 67, 100), spec, kind);
        }
    }
}

trial!(scales_at_the_ends_of_their_range);
fn scales_at_the_ends_of_their_range() {
    let mut gpu = open();
    check_ends_of_scales(&mut gpu, OURS);
    check_ends_of_scales(&mut gpu, LIBRARY);
}

trial!(nan_elements_stay_in_their_rows);
fn nan_elements_stay_in_their_rows() {
    let mut gpu = open();
    check_nan_elements(&mut gpu, OURS);
    check_nan_elements(&mut gpu, LIBRARY);
}

/// Scales of which a BF16 holds none, some or all elements: both ends of its range and of E8M0's.
const ENDS: [u8; 12] = [0, 1, 2, 3, 4, 127, 245, 246, 247, 248, 253, 254];

/// Every finite code under the scales of [`ENDS`], in blocks of which each has another, and rows a
/// little more; those of `b` are about the reciprocals, so that results are of ordinary size and
/// each is made of products that the GEMM in BF16 has and of ones that it has not. `is_held` has
/// them all within BF16.
fn operands_at_the_ends(sizes: (usize, usize, usize), is_held: bool) -> [MxMatrix; 2] {
    let (rows, columns, k) = sizes;
    let blocks = k.div_ceil(32);
    let scale = |block: usize| match is_held {
        true => [10, 127, 242][block % 3],
        false => ENDS[(block * 5 + sizes.0) % ENDS.len()],
    };
    let matrix = |outer: usize, seed: usize, is_reciprocal: bool| {
        let scales: Vec<u8> = (0..outer * blocks)
            .map(|index| {
                let (row, block) = (index / blocks, index % blocks);
                let of = scale(block);
                let of = if is_reciprocal { 254 - of } else { of };
                of.saturating_add((row % 3) as u8).min(254)
            })
            .collect();
        let code = |index: usize| {
            let code = (index * 37 + index / 251 + seed) as u8;
            if code & 0x7f == 0x7f { 0x38 } else { code }
        };
        let data: Vec<u8> = (0..outer * k).map(code).collect();
        MxMatrix::from_bytes(outer, k, &data, &scales)
    };
    [matrix(rows, 1, false), matrix(columns, 90, true)]
}

/// Nothing is rounded on the way to BF16, whatever the scales.
fn check_unheld(gpu: &mut Gpu, kernel: Kernel, sizes: (usize, usize, usize)) {
    let (rows, columns, k) = sizes;
    for is_held in [false, true] {
        let [a, b] = operands_at_the_ends(sizes, is_held);
        let sums = linear::forward(&a.values, &b.values, None, k);
        let magnitude = magnitudes(&a, &b, k);
        let spec = QuantFormat::MXFP8;
        let before = HostTensor::f32(&[rows, columns], &uniform(rows * columns, 5, 8.0));
        for (output, accumulate) in [(DType::Bf16, false), (DType::F32, false), (DType::F32, true)]
        {
            let mut expected = sums.clone();
            if accumulate {
                expected.iter_mut().zip(before.to_f64()).for_each(|(sum, there)| *sum += there);
            }
            let out = match accumulate {
                true => before.clone(),
                false => HostTensor::output(output, &[rows, columns]),
            };
            let (kind, stored) = match accumulate {
                true => (GemmKind::Wgrad, DType::Bf16),
                false => (GemmKind::Fprop, output),
            };
            let op = ops::ScaledGemm { kind, output: stored, bias: false, a: spec, b: spec };
            let got = multiply(gpu, kernel.name, op, (&a, &b), None, &out, accumulate);
            let steps = k.div_ceil(32) as f64 * kernel.error.0 + kernel.error.1;
            let share = steps * 2f64.powi(-23);
            // A BF16 result is rounded before the rest is added, too.
            let rounded = if output == DType::Bf16 { 2f64.powi(-8) } else { 0.0 };
            let name = format!("{} {sizes:?} {is_held} {output} {accumulate}", kernel.name);
            let share = share + rounded;
            assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share, output);
        }
    }
}

trial!(elements_that_bf16_does_not_hold);
fn elements_that_bf16_does_not_hold() {
    let mut gpu = open();
    for kernel in [OURS, LIBRARY] {
        // One K that is no multiple of 8, and one of whole vectors.
        for sizes in [(137, 130, 160), (20, 150, 389)] {
            check_unheld(&mut gpu, kernel, sizes);
        }
    }
}

/// Groups of rows whose blocks have scales of which a BF16 does not hold all elements, by single
/// rows, and what a grouped GEMM makes of them. Behind the groups stands what no GEMM may read.
fn check_unheld_of_groups(gpu: &mut Gpu) {
    let groups = [32usize, 0, 160, 64];
    let offsets: Vec<i32> = groups
        .iter()
        .scan(0, |end, rows| {
            *end += *rows as i32;
            Some(*end)
        })
        .collect();
    let offsets = [&[0], &offsets[..]].concat();
    let (rows, n, k) = (256 + 32, 140, 72);
    let format = QuantFormat::MXFP8;
    let grouped = ops::GroupedRows::new(groups.len(), 32);
    let places = HostTensor::i32(&[offsets.len()], &offsets);
    let op =
        |kind| ops::ScaledGroupedGemm { kind, grouped, output: DType::Bf16, a: format, b: format };
    let absolute = |values: &[f64]| values.iter().map(|x| x.abs()).collect::<Vec<_>>();
    let options = RunOptions { kernel: Some(GROUPED), ..RunOptions::default() };

    // By rows: the matrices of the stack, each with other scales of single rows.
    let mut a = operands_at_the_ends((rows, n, k), false)[0].to_bytes();
    a.1[256 * k.div_ceil(32)..].fill(0xff);
    let a = MxMatrix::from_bytes(rows, k, &a.0, &a.1);
    let stack = operands_at_the_ends((rows, n * groups.len(), k), false)[1].to_bytes();
    let blocks = k.div_ceil(32);
    let matrices: Vec<MxMatrix> = (0..groups.len())
        .map(|group| {
            let of =
                |bytes: &[u8], width| bytes[group * n * width..(group + 1) * n * width].to_vec();
            MxMatrix::from_bytes(n, k, &of(&stack.0, k), &of(&stack.1, blocks))
        })
        .collect();
    let join = |of: fn(&MxMatrix) -> &HostTensor| -> Vec<u8> {
        matrices.iter().flat_map(|matrix| of(matrix).bytes.clone()).collect()
    };
    let stacked = |shape: &[usize]| [&[groups.len()], shape].concat();
    let b = HostTensor::bytes(DType::E4m3, &stacked(&[n, k]), &join(|matrix| &matrix.data));
    let b_scales = HostTensor::bytes(
        DType::E8m0,
        &stacked(&scale_tiles::shape(n, blocks)),
        &join(|matrix| &matrix.scales),
    );
    let w: Vec<f64> = matrices.iter().flat_map(|matrix| matrix.values.clone()).collect();
    let expected = grouped_oracle::forward(&a.values, &w, &offsets, k, n);
    let magnitude = grouped_oracle::forward(&absolute(&a.values), &absolute(&w), &offsets, k, n);
    let out = HostTensor::output(DType::Bf16, &[rows, n]);
    let inputs = [a.data, a.scales, b, b_scales, places.clone()];
    let got = gpu.run_with(op(GemmKind::Fprop), &inputs, &[out], options)[0].to_f64();
    let share = 2f64.powi(-8) + 2f64.powi(-18);
    let name = "rows of groups at the ends";
    assert_close_to_magnitudes(name, &got, &expected, &magnitude, share, DType::Bf16);

    // By groups: what stands behind them has scales that make NaN of all.
    let [dy, x] = operands_at_the_ends((n, k, rows), false).map(|matrix| {
        let (data, mut scales) = matrix.to_bytes();
        let blocks = rows / 32;
        scales.chunks_mut(blocks).for_each(|of_row| of_row[256 / 32..].fill(0xff));
        MxMatrix::from_bytes(data.len() / rows, rows, &data, &scales)
    });
    let turned = |values: &[f64]| -> Vec<f64> {
        let outer = values.len() / rows;
        (0..values.len()).map(|i| values[i % outer * rows + i / outer]).collect()
    };
    let (of_dy, of_x) = (turned(&dy.values), turned(&x.values));
    let before = HostTensor::f32(&[groups.len(), n, k], &uniform(groups.len() * n * k, 5, 8.0));
    let mut expected = grouped_oracle::weight_gradient(&of_dy, &of_x, &offsets, k, n);
    expected.iter_mut().zip(before.to_f64()).for_each(|(sum, there)| *sum += there);
    let (of_dy, of_x) = (absolute(&of_dy), absolute(&of_x));
    let magnitude = grouped_oracle::weight_gradient(&of_dy, &of_x, &offsets, k, n);
    let inputs = [dy.data, dy.scales, x.data, x.scales, places];
    let options = RunOptions { accumulate: true, ..options };
    let got = gpu.run_with(op(GemmKind::Wgrad), &inputs, &[before], options)[0].to_f64();
    let share = 2f64.powi(-18);
    let name = "weight gradients of groups at the ends";
    assert_close_to_magnitudes(name, &got, &expected, &magnitude, share, DType::F32);
}

trial!(elements_of_groups_that_bf16_does_not_hold);
fn elements_of_groups_that_bf16_does_not_hold() {
    check_unheld_of_groups(&mut open());
}

trial!(thin_results_in_parts);
/// FP32 results of odd columns over contractions that are cut into parts.
fn thin_results_in_parts() {
    let mut gpu = open();
    let (rows, columns, k) = (40, 67, 640);
    let spec = QuantFormat::MXFP8.with_granularity(Granularity::G32);
    let a = MxMatrix::new(rows, k, spec, MxKind::Exact, 1);
    let b = MxMatrix::new(columns, k, spec, MxKind::Exact, 50);
    let expected = linear::forward(&a.values, &b.values, None, k);
    for parts in [1, 2, 5] {
        let inputs = [a.data.clone(), a.scales.clone(), b.data.clone(), b.scales.clone()];
        let (kind, output) = (GemmKind::Dgrad, DType::F32);
        let op = ops::ScaledGemm { kind, output, bias: false, a: spec, b: spec };
        // What the operands take: each a multiple of 256 bytes, with a line of 256 for words.
        let matrices = [rows, columns].map(|rows| (rows * k * 2).next_multiple_of(256));
        let used = 256 + matrices.iter().sum::<usize>() + 512;
        let options = RunOptions {
            kernel: Some(OURS.name),
            workspace_bytes: Some(used + parts * rows * columns * 4),
            ..RunOptions::default()
        };
        let out = HostTensor::output(DType::F32, &[rows, columns]);
        let got = gpu.run_with(op, &inputs, &[out], options).remove(0).to_f64();
        assert_eq!(got, expected, "{parts} parts");
    }
}

emulated! {
    dequantize_operands on Sm90a: |gpu| {
        check(gpu, OURS, (390, 264, 288), QuantFormat::MXFP8, MxKind::Even);
    }
}

emulated! {
    add_unheld on Sm90a: |gpu| {
        check_unheld(gpu, OURS, (260, 140, 104));
        check_unheld_of_groups(gpu);
    }
}
