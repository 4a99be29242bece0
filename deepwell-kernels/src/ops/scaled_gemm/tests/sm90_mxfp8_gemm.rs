//! `sm90_mxfp8_gemm.cu`: GEMMs of MXFP8 matrices on wgmma against f64 sums of what they
//! stand for.

use deepwell_ir::{DType, GemmKind, Tile, ops};
use deepwell_kernels::cuda::Architecture;
use deepwell_kernels::ops::linear::oracle as linear;
use deepwell_precision::QuantFormat;
use deepwell_trials::skip;

use crate::cublaslt::{ROWS, SQUARES};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::{MxKind, MxMatrix, assert_close_to_magnitudes, magnitudes};
use crate::mxfp8_gemm::multiply;

const KERNEL: &str = "cuda_sm90_mxfp8_gemm";

/// Tensor cores of Hopper cut each of the 33 terms of a step of 32 (the sum so far is one) at 2^-13
/// of the largest of them, and four steps come between promotions to FP32. The largest term is at
/// most about an eighth of the sum of the magnitudes here: 4 · 33 / 8 · 2^-13.
const SHARE: f64 = 16.5 / 8192.0;

/// M, N, K: single, odd, around the tiles of 128 and 256, one below, at and above the stage of 128,
/// more stages than the pipeline has.
const SIZES: &[(usize, usize, usize)] = &[
    (1, 1, 16),
    (31, 129, 128),
    (127, 31, 112),
    (129, 255, 144),
    (255, 127, 256),
    (256, 128, 384),
    (130, 136, 1024),
    (250, 520, 1040),
    (520, 384, 272),
];

/// M and N of a tile, and the CTAs side by side of a cluster.
const TILES: [(usize, usize, usize); 4] =
    [(256, 128, 2), (256, 128, 1), (128, 128, 2), (128, 128, 1)];

fn tile((m, n, across): (usize, usize, usize)) -> Tile {
    Tile { cluster: [1, across], ..Tile::new(m, n, 128) }
}

/// The GPU, if it has wgmma; other tests are skipped.
fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    gpu
}

/// The type of the result, whether there is a bias, and whether it is added to what is there.
type Form = (DType, bool, bool);

/// Every kind of form.
const FORMS: [Form; 4] = [
    (DType::Bf16, false, false),
    (DType::Bf16, true, false),
    (DType::F32, true, false),
    (DType::F32, false, true),
];

/// What is multiplied.
#[derive(Clone, Copy)]
struct Operands {
    sizes: (usize, usize, usize),
    specs: [QuantFormat; 2],
    kind: MxKind,
}

/// A GEMM by `tile`, or by the one that it gets.
fn check(gpu: &mut Gpu, tile: Option<Tile>, operands: Operands, forms: &[Form]) {
    let Operands { sizes: (rows, columns, k), specs, kind } = operands;
    let a = MxMatrix::new(rows, k, specs[0], kind, 1);
    let b = MxMatrix::new(columns, k, specs[1], kind, 50);
    let sums = linear::forward(&a.values, &b.values, None, k);
    // Exact sums may be off by no share of them.
    let is_exact = kind == MxKind::Exact && forms.iter().all(|form| !form.1);
    let magnitude = if is_exact { vec![0.0; sums.len()] } else { magnitudes(&a, &b, k) };
    let biases = uniform(columns, 4, 8.0);
    let before = HostTensor::f32(&[rows, columns], &uniform(rows * columns, 5, 8.0));
    for &(output, has_bias, accumulate) in forms {
        let bias = HostTensor::from_f32(output, &[columns], &biases);
        let out = match accumulate {
            true => before.clone(),
            false => HostTensor::output(output, &[rows, columns]),
        };
        let mut expected = sums.clone();
        let (added, there) = (bias.to_f64(), before.to_f64());
        for (index, sum) in expected.iter_mut().enumerate() {
            *sum += if has_bias { added[index % columns] } else { 0.0 };
            *sum += if accumulate { there[index] } else { 0.0 };
        }
        // Accumulating is what the weights' gradients do, whatever the other results are in.
        let (of_layer, stored) = match accumulate {
            true => (GemmKind::Wgrad, DType::Bf16),
            false => (GemmKind::Fprop, output),
        };
        let [of_a, of_b] = specs;
        let op =
            ops::ScaledGemm { kind: of_layer, output: stored, bias: has_bias, a: of_a, b: of_b };
        let mut inputs = vec![a.data.clone(), a.scales.clone(), b.data.clone(), b.scales.clone()];
        inputs.extend(has_bias.then_some(bias));
        let options =
            RunOptions { accumulate, kernel: Some(KERNEL), tile, ..RunOptions::default() };
        let got = gpu.run_with(op, &inputs, &[out], options).remove(0).to_f64();
        let share = if kind == MxKind::Exact { 0.0 } else { SHARE };
        // One more rounding in FP32 for the bias.
        let share = share + if has_bias { 2f64.powi(-23) } else { 0.0 };
        let name = format!(
            "{rows}x{columns}x{k} {specs:?} {kind:?} {tile:?} {output} {has_bias} {accumulate}"
        );
        assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share, output);
    }
}

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = open();
    for &sizes in SIZES {
        if !gpu.runs(sizes.0 * sizes.1 * sizes.2, 20 << 20) {
            continue;
        }
        for specs in [[ROWS, SQUARES], [ROWS, ROWS]] {
            check(&mut gpu, None, Operands { sizes, specs, kind: MxKind::Even }, &FORMS);
        }
    }
}

trial!(gemms_by_every_tile);
fn gemms_by_every_tile() {
    let mut gpu = open();
    let sizes = gpu.pick((1560, 1304, 784), (300, 264, 272));
    for of in TILES {
        for (specs, kind) in [
            ([ROWS, SQUARES], MxKind::Even),
            ([ROWS, ROWS], MxKind::Even),
            ([SQUARES, ROWS], MxKind::Even),
            ([SQUARES, SQUARES], MxKind::Even),
            ([ROWS, SQUARES], MxKind::Spread),
            ([ROWS, ROWS], MxKind::Spread),
            ([ROWS, ROWS], MxKind::Exact),
        ] {
            let forms = [(DType::Bf16, false, false), (DType::F32, false, true)];
            check(&mut gpu, Some(tile(of)), Operands { sizes, specs, kind }, &forms);
        }
    }
}

trial!(gemms_of_large_matrices);
/// What no emulator runs: every SM has several tiles of long sums. Results are exact.
fn gemms_of_large_matrices() {
    let mut gpu = open();
    for (index, of) in TILES.into_iter().enumerate() {
        let sizes = gpu.pick((4096 + 8 * index, 2048 + 136 * index, 2064), (140, 136, 272));
        // One of them with each shape and with each cluster: the host's sums take most of the time.
        let specs = [[ROWS, SQUARES], [ROWS, ROWS]][(index ^ index >> 1) % 2];
        let operands = Operands { sizes, specs, kind: MxKind::Exact };
        check(&mut gpu, Some(tile(of)), operands, &[(DType::F32, false, false)]);
    }
}

trial!(scales_at_the_ends_of_their_range);
/// Factors that are no FP32 though the scaled sums are, and sums that overflow, vanish, or are NaN.
fn scales_at_the_ends_of_their_range() {
    let mut gpu = open();
    for of in TILES {
        for specs in [[ROWS, SQUARES], [ROWS, ROWS]] {
            check_ends_of_scales(&mut gpu, tile(of), specs);
        }
    }
}

/// 128 along K with scales, and 128 more whose elements are zeros: zero times a scale that is no
/// FP32 is zero.
fn check_ends_of_scales(gpu: &mut Gpu, tile: Tile, specs: [QuantFormat; 2]) {
    let ends = [0u8, 1, 63, 64, 100, 127, 128, 190, 191, 253, 254, 255];
    let k = 272;
    let blocks = k / 32 + 1;
    // Row i of a has scales ends[i] in all blocks, as row j of b, or all rows of a square.
    let matrix = |seed: u64, format: QuantFormat| {
        let apart = if format.block.is_square() { 128 } else { 1 };
        let outer = ends.len() * apart;
        let scales: Vec<u8> =
            (0..outer * blocks).map(|index| ends[index / blocks / apart]).collect();
        let mut elements = vec![0x38u8; outer * k];
        for (index, element) in elements.iter_mut().enumerate() {
            if (128..256).contains(&(index % k)) {
                *element = 0;
            } else if (index as u64 * 7 + seed).is_multiple_of(5) {
                *element = 0xb0;
            }
        }
        (outer, MxMatrix::from_bytes(outer, k, &elements, &scales))
    };
    let ((rows, a), (columns, b)) = (matrix(1, specs[0]), matrix(2, specs[1]));
    let exact = linear::forward(&a.values, &b.values, None, k);
    // What FP32 makes of it: sums are below 2^8 times the scales, so that the exact result rounds
    // to infinity, to a subnormal or to zero where FP32 does.
    let expected: Vec<f64> = exact.iter().map(|&x| f64::from(x as f32)).collect();
    assert!(expected.iter().any(|x| x.is_infinite()) && expected.iter().any(|x| x.is_nan()));
    let [of_a, of_b] = specs;
    let output = DType::F32;
    let op = ops::ScaledGemm { kind: GemmKind::Fprop, output, bias: false, a: of_a, b: of_b };
    let inputs = [a.data, a.scales, b.data, b.scales];
    let out = HostTensor::output(output, &[rows, columns]);
    let options = RunOptions { kernel: Some(KERNEL), tile: Some(tile), ..RunOptions::default() };
    let got = gpu.run_with(op, &inputs, &[out], options).remove(0).to_f64();
    for (index, (&got, &expected)) in got.iter().zip(&expected).enumerate() {
        // Few bits and one exponent a sum: exact, but for subnormal partial sums, which round to
        // multiples of 2^-149, once a stage.
        let is_same = got == expected
            || (got.is_nan() && expected.is_nan())
            || (got - expected).abs() <= 3.0 * 2f64.powi(-149);
        let (row, column) = (index / columns, index % columns);
        assert!(is_same, "{tile} {specs:?} row {row}, column {column}: {got}, expected {expected}");
    }
}

trial!(nan_elements_stay_in_their_rows);
fn nan_elements_stay_in_their_rows() {
    let mut gpu = open();
    let (rows, columns, k) = (140, 130, 144);
    let change = |matrix: MxMatrix, rows: usize, at: usize| {
        let mut elements = matrix.data.bytes.clone();
        elements[at] = 0x7f;
        MxMatrix::from_bytes(rows, k, &elements, &matrix.plain_scales)
    };
    for format in [ROWS, SQUARES] {
        let a = change(MxMatrix::new(rows, k, ROWS, MxKind::Even, 1), rows, 131 * k + 95);
        let b = MxMatrix::new(columns, k, format, MxKind::Even, 50);
        let b = change(b, columns, 3 * k - 1);
        let op = ops::ScaledGemm {
            kind: GemmKind::Dgrad,
            output: DType::F32,
            bias: false,
            a: ROWS,
            b: format,
        };
        let out = HostTensor::output(DType::F32, &[rows, columns]);
        let got = multiply(&mut gpu, KERNEL, op, (&a, &b), None, &out, false);
        for (index, value) in got.iter().enumerate() {
            let expected = index / columns == 131 || index % columns == 2;
            assert_eq!(value.is_nan(), expected, "row {}", index / columns);
        }
    }
}

// Three tiles for each SM, whose stages are used more than twice: every wait sees both parities.
emulated! {
    sm90_mxfp8_gemm on Sm90a: |gpu| {
        for (of, sizes) in [
            ((128, 128, 1), (390, 376, 528)),
            ((256, 128, 1), (760, 376, 400)),
            // The second tile of some clusters is beyond the result.
            ((128, 128, 2), (390, 360, 528)),
            ((256, 128, 2), (520, 376, 400)),
        ] {
            for specs in [[ROWS, SQUARES], [ROWS, ROWS]] {
                let forms = [(DType::Bf16, true, false), (DType::F32, false, true)];
                let operands = Operands { sizes, specs, kind: MxKind::Even };
                check(gpu, Some(tile(of)), operands, &forms);
            }
        }
    }
}
