//! `sm90_bf16_grouped_gemm.cu`: the three GEMMs of groups of rows on wgmma against f64 sums.

use deepwell_ir::{DType, GemmKind, Op, ops};
use deepwell_kernels::ops::grouped_gemm::oracle;
use deepwell_precision::QuantFormat;

use crate::compare::assert_close;
use crate::dequantized_gemm::GROUPED;
use crate::gemm_operands::{Kind, gemm_tolerance};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::MxKind;
use crate::mxfp8_grouped_gemm::{Case, check_hard};
use crate::nvfp4_grouped_gemm::{self as nvfp4, bf16_share, check_all};
use crate::sm90_mxfp8_grouped_gemm::{Groups, Row, open};

const KERNEL: &str = "cuda_sm90_bf16_grouped_gemm";

/// Numbers of the rows of pairs, zeros up to the groups' multiple, NaN behind them.
fn activations(groups: &Groups, columns: usize, kind: Kind, seed: u64) -> HostTensor {
    let mut values = kind.values(groups.rows.len() * columns, seed);
    for (row, values) in groups.rows.iter().zip(values.chunks_mut(columns)) {
        match row {
            Row::Pair => {}
            Row::Padding => values.fill(0.0),
            Row::Behind => values.fill(f32::NAN),
        }
    }
    HostTensor::bf16(&[groups.rows.len(), columns], &values)
}

/// All three GEMMs.
fn check(gpu: &mut Gpu, groups: &Groups, kind: Kind) {
    let (rows, n, k, count) = (groups.rows.len(), groups.n, groups.k, groups.count());
    let x = activations(groups, k, kind, 1);
    let dy = activations(groups, n, kind, 3);
    let w = HostTensor::bf16(&[count, n, k], &kind.values(count * n * k, 2));
    let (offsets, grouped) = (&groups.offsets, groups.grouped());
    let mut run = |op: Op, a: &HostTensor, b: &HostTensor, out: &HostTensor, accumulate: bool| {
        let inputs = [a.clone(), b.clone(), groups.offsets_tensor()];
        let options = RunOptions { accumulate, kernel: Some(KERNEL), ..RunOptions::default() };
        gpu.run_with(op, &inputs, std::slice::from_ref(out), options).remove(0)
    };
    let name = |what: &str| format!("{what} {offsets:?} {n} {k} {kind:?}");
    let zero_elsewhere = |what: &str, got: &[f64], columns: usize| {
        for (row, values) in groups.rows.iter().zip(got.chunks(columns)) {
            assert!(*row == Row::Pair || values.iter().all(|x| *x == 0.0), "{}", name(what));
        }
    };

    let y = HostTensor::output(DType::Bf16, &[rows, n]);
    let got = run(ops::GroupedGemm { grouped }.into(), &x, &w, &y, false).to_f64();
    let expected = oracle::forward(&x.to_f64(), &w.to_f64(), offsets, k, n);
    assert_close(&name("fprop"), &got, &expected, gemm_tolerance(DType::Bf16, k, kind, 0.0));
    zero_elsewhere("fprop", &got, n);

    let dx = HostTensor::output(DType::Bf16, &[rows, k]);
    let got = run(ops::GroupedGemmDgrad { grouped }.into(), &dy, &w, &dx, false).to_f64();
    let expected = oracle::data_gradient(&dy.to_f64(), &w.to_f64(), offsets, k, n);
    assert_close(&name("dgrad"), &got, &expected, gemm_tolerance(DType::Bf16, n, kind, 0.0));
    zero_elsewhere("dgrad", &got, k);

    let before = HostTensor::f32(&[count, n, k], &uniform(count * n * k, 5, 8.0));
    for accumulate in [false, true] {
        let out = match accumulate {
            true => before.clone(),
            false => HostTensor::output(DType::F32, &[count, n, k]),
        };
        let got = run(ops::GroupedGemmWgrad { grouped }.into(), &dy, &x, &out, accumulate);
        let mut expected = oracle::weight_gradient(&dy.to_f64(), &x.to_f64(), offsets, k, n);
        if accumulate {
            expected.iter_mut().zip(before.to_f64()).for_each(|(sum, there)| *sum += there);
        }
        let longest = offsets.windows(2).map(|of| (of[1] - of[0]) as usize).max().unwrap_or(0);
        let tolerance = gemm_tolerance(DType::F32, longest, kind, 8.0);
        assert_close(&name("wgrad"), &got.to_f64(), &expected, tolerance);
        let zeros = HostTensor::f32(&[count, n, k], &vec![0.0; count * n * k]);
        let untouched = if accumulate { &before } else { &zeros };
        for (group, of) in offsets.windows(2).enumerate() {
            let bytes = group * n * k * 4..(group + 1) * n * k * 4;
            if of[0] == of[1] {
                assert_eq!(got.bytes[bytes.clone()], untouched.bytes[bytes], "group {group}");
            }
        }
    }
}

/// Alignment, tokens of the groups, rows behind them, outputs and inputs.
type Shape = (usize, &'static [usize], usize, (usize, usize));

/// As the shapes of the MXFP8 kernels, and groups of less than a stage along K.
const SHAPES: &[Shape] = &[
    (16, &[1], 0, (8, 8)),
    (32, &[31, 0, 33], 32, (136, 72)),
    (16, &[0, 127, 129, 0], 48, (40, 264)),
    (32, &[0, 0, 0], 32, (72, 48)),
    (128, &[0, 0, 390, 0], 0, (128, 136)),
    (48, &[1, 290, 95], 0, (24, 64)),
    (16, &[0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0], 3, (16, 200)),
    (32, &[1, 1, 1, 1, 1, 1, 1], 32, (8, 32)),
];

trial!(gemms_of_groups);
fn gemms_of_groups() {
    let mut gpu = open();
    for &(align, tokens, behind, sizes) in SHAPES {
        check(&mut gpu, &Groups::new(align, tokens, behind, sizes), Kind::Uniform);
    }
}

trial!(exact_sums_of_groups);
/// On a GPU every SM has several tiles of long sums, of groups of any size.
fn exact_sums_of_groups() {
    let mut gpu = open();
    let tokens = gpu.pick(vec![700, 0, 3, 1290, 128, 0, 257, 64, 0, 2000], vec![140, 0, 3, 257, 0]);
    let groups = Groups::new(32, &tokens, 64, gpu.pick((776, 1040), (136, 264)));
    check(&mut gpu, &groups, Kind::Integers);
}

trial!(dequantized_operands_of_groups);
/// The same kernels, and the gradient of K-major operands, on MXFP8 of any granularity.
fn dequantized_operands_of_groups() {
    let mut gpu = open();
    check_hard(&mut gpu, GROUPED, None, [[40, 96], [32, 48], [33, 40], [36, 160]], 32);
}

/// The same kernels on NVFP4 operands.
pub(crate) fn of_nvfp4(groups: &[usize], behind: usize) -> nvfp4::Case<'_> {
    let kernel = "cuda_sm90_dequantized_nvfp4_grouped_gemm";
    nvfp4::Case { kernel, groups, behind, tile: None, share: bf16_share }
}

trial!(nvfp4_operands_of_groups);
fn nvfp4_operands_of_groups() {
    let mut gpu = open();
    check_all(&mut gpu, of_nvfp4(&[], 0), 1);
    if gpu.runs(1, 0) {
        let case = of_nvfp4(&[700, 0, 3, 1290, 128, 0, 257, 64, 0, 2000], 384);
        case.check_rows(&mut gpu, GemmKind::Fprop, [1032, 776]);
        case.check_wgrad(&mut gpu, [776, 1032]);
    }
}

trial!(rows_of_a_group_stay_its_own);
/// NaN and infinity in the rows and the matrix of one group reach no other, though tiles read
/// across the ends of groups and of matrices.
fn rows_of_a_group_stay_its_own() {
    let mut gpu = open();
    let groups = Groups::new(16, &[48, 80, 32], 0, (40, 24));
    let (n, k, grouped) = (groups.n, groups.k, groups.grouped());
    let (rows, offsets) = (groups.rows.len(), &groups.offsets);
    let of_second = offsets[1] as usize..offsets[2] as usize;
    let poison = |mut values: Vec<f32>, elements: std::ops::Range<usize>| {
        values[elements].fill(f32::NAN);
        values
    };
    let activations = |columns: usize, seed: u64| {
        let elements = of_second.start * columns..of_second.end * columns;
        poison(uniform(rows * columns, seed, 1.0), elements)
    };
    let x = HostTensor::bf16(&[rows, k], &activations(k, 1));
    let dy = HostTensor::bf16(&[rows, n], &activations(n, 2));
    let w = HostTensor::bf16(&[3, n, k], &poison(uniform(3 * n * k, 3, 1.0), n * k..2 * n * k));
    let wgrad = HostTensor::output(DType::F32, &[3, n, k]);
    for (op, a, b, out, second) in [
        (
            Op::from(ops::GroupedGemm { grouped }),
            &x,
            &w,
            HostTensor::output(DType::Bf16, &[rows, n]),
            of_second.start * n..of_second.end * n,
        ),
        (
            ops::GroupedGemmDgrad { grouped }.into(),
            &dy,
            &w,
            HostTensor::output(DType::Bf16, &[rows, k]),
            of_second.start * k..of_second.end * k,
        ),
        (ops::GroupedGemmWgrad { grouped }.into(), &dy, &x, wgrad, n * k..2 * n * k),
    ] {
        let inputs = [a.clone(), b.clone(), groups.offsets_tensor()];
        let options = RunOptions { kernel: Some(KERNEL), ..RunOptions::default() };
        let got = gpu.run_with(op.clone(), &inputs, &[out], options).remove(0).to_f64();
        for (index, value) in got.iter().enumerate() {
            assert_eq!(value.is_nan(), second.contains(&index), "{} {index}", op.name());
        }
    }
}

// Three tiles for each SM, whose stages are used more than twice: every wait sees both parities.
// Some tiles have half of the rows, some none to sum, and a group ends within a stage.
emulated! {
    sm90_bf16_grouped_gemm on Sm90a: |gpu| {
        check(gpu, &Groups::new(32, &[290, 0, 330], 32, (264, 264)), Kind::Uniform);
        // Operands of the gradient along their rows. The last tile has more than eight rows, so
        // that the stride from eight rows to the next counts.
        Case {
            groups: &[320, 0, 352],
            behind: 32,
            sizes: [280, 264],
            spec: QuantFormat::MXFP8,
            kind: MxKind::Even,
            kernel: GROUPED,
            tile: None,
        }
        .check(gpu);
        // Sums that are multiplied by the scales of their groups.
        let case = of_nvfp4(&[290, 0, 330], 128);
        case.check_rows(gpu, GemmKind::Fprop, [264, 264]);
        case.check_wgrad(gpu, [264, 264]);
    }
}
