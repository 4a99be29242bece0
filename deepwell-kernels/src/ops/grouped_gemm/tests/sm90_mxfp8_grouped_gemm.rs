//! `sm90_mxfp8_grouped_gemm.cu`: GEMMs of groups of rows on wgmma against f64 sums of the values of
//! each group's MXFP8 operands.

use deepwell_ir::{DType, GemmKind, ops};
use deepwell_kernels::cuda::Architecture;
use deepwell_kernels::ops::grouped_gemm::oracle;
use deepwell_precision::{QuantFormat, scale_tiles};
use deepwell_trials::skip;

use crate::cublaslt::{ROWS, SQUARES};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::{MxKind, MxMatrix, assert_close_to_magnitudes};

const KERNEL: &str = "cuda_sm90_mxfp8_grouped_gemm";
/// Rows of which a group has a multiple.
const ALIGN: usize = 128;
/// Elements that share a scale byte in the scales of `MxMatrix`.
const BLOCK: usize = 32;
/// As of the dense GEMM (`sm90_mxfp8_gemm.rs`), whose tiles these are.
const SHARE: f64 = 16.5 / 8192.0;

/// The GPU, if it has wgmma; other tests are skipped.
pub(crate) fn open() -> Gpu {
    let gpu = Gpu::open();
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        skip("of sm_90");
    }
    gpu
}

/// What a row holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Row {
    /// A token of a group.
    Pair,
    /// Zeros, up to the group's multiple.
    Padding,
    /// Anything, behind all groups: NaN.
    Behind,
}

/// Rows of groups, and outputs and inputs of the layer.
#[derive(Clone, Debug)]
pub(crate) struct Groups {
    align: usize,
    pub(crate) offsets: Vec<i32>,
    pub(crate) rows: Vec<Row>,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl Groups {
    /// Groups of so many tokens, in multiples of `align` rows, and rows behind them.
    pub(crate) fn new(
        align: usize,
        tokens: &[usize],
        behind: usize,
        (n, k): (usize, usize),
    ) -> Groups {
        let (mut offsets, mut rows) = (vec![0], Vec::new());
        for &count in tokens {
            let padded = count.next_multiple_of(align);
            rows.extend((0..padded).map(|row| if row < count { Row::Pair } else { Row::Padding }));
            offsets.push(rows.len() as i32);
        }
        rows.extend(vec![Row::Behind; behind]);
        Groups { align, offsets, rows, n, k }
    }

    pub(crate) fn count(&self) -> usize {
        self.offsets.len() - 1
    }

    pub(crate) fn grouped(&self) -> ops::GroupedRows {
        ops::GroupedRows::new(self.count(), self.align)
    }

    pub(crate) fn offsets_tensor(&self) -> HostTensor {
        HostTensor::i32(&[self.offsets.len()], &self.offsets)
    }

    /// A matrix of our rows and `columns`, turned around where `along` the rows.
    fn activations(&self, columns: usize, along: bool, kind: MxKind, seed: u64) -> MxMatrix {
        let rows = self.rows.len();
        let (outer, inner) = if along { (columns, rows) } else { (rows, columns) };
        let matrix = MxMatrix::new(outer, inner, ROWS, kind, seed);
        let (mut data, mut scales) = (matrix.data.bytes, matrix.plain_scales);
        let row_of = |outer: usize, inner: usize| self.rows[if along { inner } else { outer }];
        let blocks = inner.div_ceil(BLOCK);
        for (index, byte) in data.iter_mut().enumerate() {
            match row_of(index / inner, index % inner) {
                Row::Pair => {}
                Row::Padding => *byte = 0,
                Row::Behind => *byte = 0x7f,
            }
        }
        for (index, scale) in scales.iter_mut().enumerate() {
            if row_of(index / blocks, index % blocks * BLOCK) == Row::Behind {
                *scale = 0xff;
            }
        }
        MxMatrix::from_bytes(outer, inner, &data, &scales)
    }
}

fn absolute(values: &[f64]) -> Vec<f64> {
    values.iter().map(|x| x.abs()).collect()
}

/// `[rows, columns]` turned around.
fn transposed(values: &[f64], columns: usize) -> Vec<f64> {
    let rows = values.len() / columns;
    (0..values.len()).map(|index| values[index % rows * columns + index / rows]).collect()
}

/// How operands are quantized and filled.
#[derive(Clone, Copy, Debug)]
struct Numbers {
    /// The format of a weight.
    b: QuantFormat,
    kind: MxKind,
}

/// fprop, or dgrad with N and K in each other's place, which the same kernels do: rows by the
/// matrix of their group.
fn check_rows(gpu: &mut Gpu, groups: &Groups, kind: GemmKind, numbers: Numbers) {
    let (rows, n, k) = (groups.rows.len(), groups.n, groups.k);
    let a = groups.activations(k, false, numbers.kind, 1);
    let weight = |group: usize| MxMatrix::new(n, k, numbers.b, numbers.kind, 50 + 7 * group as u64);
    let stack: Vec<MxMatrix> = (0..groups.count()).map(weight).collect();
    let bytes_of = |tensor: fn(&MxMatrix) -> &HostTensor| -> Vec<u8> {
        stack.iter().flat_map(|matrix| tensor(matrix).bytes.clone()).collect()
    };
    let stacked = |shape: &[usize]| [&[stack.len()], shape].concat();
    let scale_shape = stacked(&scale_tiles::shape(n, k.div_ceil(BLOCK)));
    let b = HostTensor::bytes(DType::E4m3, &stacked(&[n, k]), &bytes_of(|matrix| &matrix.data));
    let b_scales = HostTensor::bytes(DType::E8m0, &scale_shape, &bytes_of(|m| &m.scales));
    let w: Vec<f64> = stack.iter().flat_map(|matrix| matrix.values.clone()).collect();
    let expected = oracle::forward(&a.values, &w, &groups.offsets, k, n);
    let (of_a, of_w) = (absolute(&a.values), absolute(&w));
    let magnitude = oracle::forward(&of_a, &of_w, &groups.offsets, k, n);
    let (grouped, output) = (groups.grouped(), DType::Bf16);
    let op = ops::ScaledGroupedGemm { kind, grouped, output, a: ROWS, b: numbers.b };
    let inputs = [a.data, a.scales, b, b_scales, groups.offsets_tensor()];
    let options = RunOptions { kernel: Some(KERNEL), ..RunOptions::default() };
    let out = HostTensor::output(output, &[rows, n]);
    let got = gpu.run_with(op, &inputs, &[out], options).remove(0).to_f64();
    let share = if numbers.kind == MxKind::Exact { 0.0 } else { SHARE };
    let name = format!("{:?} {n} {k} {kind:?} {numbers:?}", groups.offsets);
    assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share, output);
    for (row, values) in groups.rows.iter().zip(got.chunks(n)) {
        assert!(*row == Row::Pair || values.iter().all(|value| *value == 0.0), "{name}");
    }
}

/// wgrad: `[N, R]` by `[K, R]` over the rows of each group.
fn check_wgrad(gpu: &mut Gpu, groups: &Groups, numbers: Numbers, accumulate: bool) {
    let (n, k, count) = (groups.n, groups.k, groups.count());
    let a = groups.activations(n, true, numbers.kind, 1);
    let b = groups.activations(k, true, numbers.kind, 50);
    let rows = groups.rows.len();
    let (dy, x) = (transposed(&a.values, rows), transposed(&b.values, rows));
    let before = HostTensor::f32(&[count, n, k], &uniform(count * n * k, 5, 8.0));
    let mut expected = oracle::weight_gradient(&dy, &x, &groups.offsets, k, n);
    let (of_dy, of_x) = (absolute(&dy), absolute(&x));
    let mut magnitude = oracle::weight_gradient(&of_dy, &of_x, &groups.offsets, k, n);
    if accumulate {
        for (index, value) in before.to_f64().into_iter().enumerate() {
            expected[index] += value;
            magnitude[index] += value.abs();
        }
    }
    let (grouped, output) = (groups.grouped(), DType::Bf16);
    let op =
        ops::ScaledGroupedGemm { kind: GemmKind::Wgrad, grouped, output, a: ROWS, b: numbers.b };
    let inputs = [a.data, a.scales, b.data, b.scales, groups.offsets_tensor()];
    let zeros = HostTensor::f32(&[count, n, k], &vec![0.0; count * n * k]);
    let mut run = |out: HostTensor, accumulate| {
        let options = RunOptions { accumulate, kernel: Some(KERNEL), ..RunOptions::default() };
        gpu.run_with(op.clone(), &inputs, &[out], options).remove(0)
    };
    let got = match accumulate {
        true => run(before.clone(), true),
        false => run(HostTensor::output(DType::F32, &[count, n, k]), false),
    };
    // What is there has more bits than exact sums; adding it rounds once in FP32.
    let share = if numbers.kind == MxKind::Exact { 2f64.powi(-24) } else { SHARE };
    let name = format!("wgrad {:?} {n} {k} {numbers:?} {accumulate}", groups.offsets);
    assert_close_to_magnitudes(&name, &got.to_f64(), &expected, &magnitude, share, DType::F32);
    if !accumulate {
        // Results that are added to what is there are stored in another way.
        assert!(got == run(zeros.clone(), true), "{name}: differs from a sum");
    }
    let untouched = if accumulate { &before } else { &zeros };
    for (group, of) in groups.offsets.windows(2).enumerate() {
        let bytes = group * n * k * 4..(group + 1) * n * k * 4;
        if of[0] == of[1] {
            assert_eq!(got.bytes[bytes.clone()], untouched.bytes[bytes], "{name}: group {group}");
        }
    }
}

const EVEN: [Numbers; 2] =
    [Numbers { b: ROWS, kind: MxKind::Even }, Numbers { b: SQUARES, kind: MxKind::Even }];

/// Tokens of the groups: none at the beginning, in the middle, at the end, everywhere; around the
/// blocks of 32 and 128; all in one group; more groups than tiles. Then rows behind them, outputs
/// and inputs.
fn shapes() -> Vec<Groups> {
    vec![
        Groups::new(ALIGN, &[1], 0, (1, 16)),
        Groups::new(ALIGN, &[31, 0, 33], 128, (130, 160)),
        Groups::new(ALIGN, &[0, 127, 129, 0], 256, (40, 272)),
        Groups::new(ALIGN, &[0, 0, 0], 128, (136, 96)),
        Groups::new(ALIGN, &[0, 0, 390, 0], 0, (129, 128)),
        Groups::new(ALIGN, &[385, 0], 384, (33, 16)),
        Groups::new(ALIGN, &[0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0], 16, (17, 80)),
        Groups::new(ALIGN, &[1, 1, 1, 1, 1, 1, 1], 128, (8, 32)),
    ]
}

trial!(rows_of_groups);
fn rows_of_groups() {
    let mut gpu = open();
    for groups in shapes() {
        check_rows(&mut gpu, &groups, GemmKind::Fprop, EVEN[0]);
        check_rows(&mut gpu, &groups, GemmKind::Dgrad, EVEN[1]);
    }
}

trial!(weight_gradients_of_groups);
fn weight_gradients_of_groups() {
    let mut gpu = open();
    for groups in shapes() {
        for accumulate in [false, true] {
            check_wgrad(&mut gpu, &groups, EVEN[0], accumulate);
        }
    }
}

trial!(exact_sums_of_groups);
/// On a GPU every SM has several tiles of long sums, of groups of any size.
fn exact_sums_of_groups() {
    let mut gpu = open();
    let tokens = gpu.pick(vec![700, 0, 3, 1290, 128, 0, 257, 64, 0, 2000], vec![140, 0, 3, 257, 0]);
    let groups = Groups::new(ALIGN, &tokens, 128, gpu.pick((776, 1056), (140, 288)));
    for b in [ROWS, SQUARES] {
        check_rows(&mut gpu, &groups, GemmKind::Fprop, Numbers { b, kind: MxKind::Exact });
    }
    for accumulate in [false, true] {
        check_wgrad(&mut gpu, &groups, Numbers { b: ROWS, kind: MxKind::Exact }, accumulate);
    }
}

// Three tiles for each SM, whose stages are used more than twice: every wait sees both parities.
// Some tiles have half of the rows, some none to sum.
emulated! {
    sm90_mxfp8_grouped_gemm on Sm90a: |gpu| {
        let groups = Groups::new(ALIGN, &[290, 0, 128], 128, (376, 528));
        for numbers in EVEN {
            check_rows(gpu, &groups, GemmKind::Fprop, numbers);
        }
        for columns in [140, 160] {
            let groups = Groups::new(ALIGN, &[700, 0, 640], 128, (300, columns));
            check_wgrad(gpu, &groups, EVEN[0], false);
            check_wgrad(gpu, &groups, EVEN[0], true);
        }
    }
}
