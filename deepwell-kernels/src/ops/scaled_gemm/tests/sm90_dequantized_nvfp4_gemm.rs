//! NVFP4 GEMMs on Hopper against f64 sums of the numbers that the operands stand for.

use deepwell_ir::ops::Axis;
use deepwell_ir::{DType, GemmKind, Tile, ops};
use deepwell_kernels::cuda::Architecture;
use deepwell_kernels::ops::linear::oracle as linear;
use deepwell_kernels::ops::scaled_gemm::nvfp4::Planes;
use deepwell_precision::nvfp4::BLOCK;
use deepwell_precision::{QuantFormat, scale_tiles};
use deepwell_trials::skip;

use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::assert_close_to_magnitudes;
use crate::quantize_nvfp4::Quantized;
use crate::sm90_bf16_grouped_gemm::of_nvfp4;

const KERNEL: &str = "cuda_sm90_dequantized_nvfp4_gemm";

/// An operand `[rows, k]` and its numbers.
pub(crate) struct Operand {
    pub(crate) inputs: [HostTensor; 3],
    pub(crate) values: Vec<f64>,
}

impl Operand {
    /// Magnitudes vary by rows and by blocks; `nan` puts NaNs into the first and the last block of
    /// a row.
    pub(crate) fn new(rows: usize, k: usize, format: QuantFormat, seed: u64, nan: bool) -> Operand {
        let mut x = uniform(rows * k, seed, 1.0);
        for (index, x) in x.iter_mut().enumerate() {
            *x *= 2.0_f32.powi((index / k * 5 % 7 + index % k / BLOCK * 3 % 5) as i32 - 6);
        }
        if nan {
            x[rows / 2 * k] = f32::NAN;
            x[rows / 2 * k + k - 1] = f32::NAN;
        }
        let none = (None, None);
        let operand = Quantized::new(&x, [rows, k], &format, Axis::Row, None, none);
        let Quantized { data, scales, tensor_scale, .. } = &operand;
        Operand::of_planes([rows, k], data, scales, *tensor_scale)
    }

    /// Of packed data, and scales in tiles.
    pub(crate) fn of_planes(
        [rows, k]: [usize; 2],
        data: &[u8],
        scales: &[u8],
        tensor_scale: f32,
    ) -> Operand {
        // Exact: without the tensor scale, in FP32.
        let mut values = vec![0f32; rows * k];
        Planes::whole(data, scales, 1.0, k).dequantize_rows(&mut values);
        let scale = f64::from(tensor_scale);
        let values = values.iter().map(|&x| f64::from(x) * scale).collect();
        let tiles = scale_tiles::shape(rows, k.div_ceil(BLOCK));
        let inputs = [
            HostTensor::bytes(DType::E2m1, &[rows, k], data),
            HostTensor::bytes(DType::Ue4m3, &tiles, scales),
            HostTensor::f32(&[1], &[tensor_scale]),
        ];
        Operand { inputs, values }
    }
}

fn absolute(values: &[f64]) -> Vec<f64> {
    values.iter().map(|x| x.abs()).collect()
}

/// How a kernel is called, and the share of the magnitudes of a sum that it may be off by.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) kernel: &'a str,
    pub(crate) tile: Option<Tile>,
    pub(crate) share: f64,
    pub(crate) workspace_bytes: Option<usize>,
}

/// The GEMM, the type of its result, and whether there is a bias. Wgrad adds to what is there.
pub(crate) type Form = (GemmKind, DType, bool);

/// Every form of a result.
pub(crate) const FORMS: [Form; 4] = [
    (GemmKind::Fprop, DType::Bf16, false),
    (GemmKind::Fprop, DType::Bf16, true),
    (GemmKind::Dgrad, DType::F32, false),
    (GemmKind::Wgrad, DType::F32, false),
];

/// One GEMM in some forms of its result.
pub(crate) fn check_forms(
    gpu: &mut Gpu,
    case: Case<'_>,
    [m, n, k]: [usize; 3],
    nan: bool,
    forms: &[Form],
) {
    let format = QuantFormat::NVFP4;
    let (a, b) =
        (Operand::new(m, k, format, 3, nan), Operand::new(n, k, format.square(), 70, false));
    let sums = linear::forward(&a.values, &b.values, None, k);
    let sizes = linear::forward(&absolute(&a.values), &absolute(&b.values), None, k);
    let bias = uniform(n, 4, 8.0);
    let before = HostTensor::f32(&[m, n], &uniform(m * n, 5, 8.0));
    for &(kind, output, has_bias) in forms {
        let is_wgrad = kind == GemmKind::Wgrad;
        let stored = if is_wgrad { DType::Bf16 } else { output };
        let b_format = format.square();
        let op = ops::ScaledGemm { kind, output: stored, bias: has_bias, a: format, b: b_format };
        let bias = HostTensor::from_f32(output, &[n], &bias);
        let mut inputs = [a.inputs.clone(), b.inputs.clone()].concat();
        inputs.extend(has_bias.then(|| bias.clone()));
        let (added, there) = (bias.to_f64(), before.to_f64());
        let added = |index: usize| match (has_bias, is_wgrad) {
            (true, _) => added[index % n],
            (_, true) => there[index],
            _ => 0.0,
        };
        let expected: Vec<f64> = sums.iter().enumerate().map(|(i, x)| x + added(i)).collect();
        let magnitudes: Vec<f64> =
            sizes.iter().enumerate().map(|(i, x)| x + added(i).abs()).collect();
        let out = if is_wgrad { before.clone() } else { HostTensor::output(output, &[m, n]) };
        let options = RunOptions {
            accumulate: is_wgrad,
            kernel: Some(case.kernel),
            tile: case.tile,
            workspace_bytes: case.workspace_bytes,
            ..RunOptions::default()
        };
        let got = gpu.run_with(op, &inputs, &[out], options).remove(0).to_f64();
        let what = format!("{m}x{n}x{k} {kind} {output} {has_bias} {:?}", case.tile);
        let is_of_nan = |index: &usize| nan && index / n == m / 2;
        let (mut kept, mut reference, mut bounds) = (got.clone(), expected, magnitudes);
        for index in (0..m * n).filter(is_of_nan) {
            assert!(got[index].is_nan(), "{what}: {index}");
            (kept[index], reference[index], bounds[index]) = (0.0, 0.0, 0.0);
        }
        assert_close_to_magnitudes(&what, &kept, &reference, &bounds, case.share, output);
    }
}

/// One GEMM in every form of its result; `parts` of a contraction that is cut.
pub(crate) fn check(gpu: &mut Gpu, [m, n, k]: [usize; 3], nan: bool, parts: Option<usize>) {
    // Tensor cores cut what a step of 16 along K adds below 2^-23 of its largest term, and round
    // the sum once; then two factors and their product are rounded.
    let share = (k.div_ceil(16) as f64 * 2.0 + 12.0) * 2f64.powi(-23);
    let rows = |rows: usize| (rows * k.next_multiple_of(8) * 2).next_multiple_of(256);
    let workspace_bytes = parts.map(|parts| 256 + rows(m) + rows(n) + parts * m * n * 4);
    let case = Case { kernel: KERNEL, tile: None, share, workspace_bytes };
    check_forms(gpu, case, [m, n, k], nan, &FORMS);
}

trial!(gemms_of_any_size);
fn gemms_of_any_size() {
    let mut gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    for sizes in [
        [1, 1, 1],
        [3, 5, 31],
        [5, 3, 33],
        [64, 32, 32],
        [127, 128, 127],
        [128, 129, 128],
        [129, 127, 136],
        [130, 136, 160],
        [257, 40, 1056],
        [136, 264, 509],
        [1024, 768, 512],
    ] {
        if gpu.runs(sizes.iter().product(), 3 << 20) {
            check(&mut gpu, sizes, false, None);
        }
    }
    // A scale that is NaN makes its row NaN, and no other, also behind the end of rows.
    check(&mut gpu, [20, 24, 45], true, None);
    for parts in [2, 5] {
        check(&mut gpu, [40, 67, 640], false, Some(parts));
    }
}

// A matrix, and a stack of matrices that end within a tile.
emulated! {
    dequantize_nvfp4_operands on Sm90a: |gpu| {
        check(gpu, [390, 264, 280], true, None);
        of_nvfp4(&[128, 0, 130], 128).check_rows(gpu, GemmKind::Dgrad, [145, 141]);
    }
}
