//! Products by cuBLASLt: the operands' orientations, the layouts of scales that `expand_scales.cu`
//! makes for them, accumulation.

use deepwell_ir::{DType, KernelCatalog, KernelRequest, Op, OperandType, Product, ops};
use deepwell_kernels::cuda::{Architecture, CUBLASLT, CudaCatalog, cuda_target};
use deepwell_kernels::oracle::linear;
use deepwell_precision::{BlockShape, Granularity, MxSpec};

use crate::bf16_gemm;
use crate::harness::{Gpu, HostTensor, uniform};
use crate::mx::{MxKind, MxMatrix, assert_close_to_magnitudes, magnitudes};
use crate::mxfp8_gemm::multiply;
use crate::products::Kind;

const ROWS: MxSpec = MxSpec {
    element: deepwell_precision::ElementFormat::E4M3,
    scale_rule: deepwell_precision::ScaleRule::Rceil,
    granularity: Granularity::G128,
    block: BlockShape::Row,
};
const SQUARES: MxSpec = MxSpec { block: BlockShape::Square, ..ROWS };

#[test]
fn bf16_products_of_any_size() {
    let Some(mut gpu) = Gpu::open() else { return };
    for sizes in [
        (1, 1, 1),
        (3, 5, 7),
        (8, 8, 8),
        (127, 128, 65),
        (129, 136, 72),
        (130, 131, 133),
        (257, 264, 2049),
        (512, 384, 1024),
    ] {
        bf16_gemm::check(&mut gpu, "cublaslt_linear", sizes, Kind::Uniform);
    }
    for kind in [Kind::Integers, Kind::Cancelling, Kind::WideRange] {
        bf16_gemm::check(&mut gpu, "cublaslt_linear", (130, 136, 200), kind);
    }
}

/// Tensor cores of Hopper cut each of the 33 terms of a step of 32 (the sum so far is one) at 2^-13
/// of the largest of them, and four steps come between promotions to FP32. The largest term is at
/// most about an eighth of the sum of the magnitudes here: 4 · 33 / 8 · 2^-13.
const SHARE: f64 = 16.5 / 8192.0;

/// Rows, columns, depth: depths that 128 does not divide, and whose groups of 128 four does not
/// divide; sides that 128 does not divide.
const SIZES: &[(usize, usize, usize)] = &[
    (8, 8, 16),
    (16, 128, 128),
    (64, 256, 704),
    (128, 128, 512),
    (136, 264, 640),
    (248, 1040, 400),
    (640, 384, 1152),
];

#[test]
fn fp8_products_with_scales_for_128() {
    let Some(mut gpu) = Gpu::open() else { return };
    let kernel = "cublaslt_mx_gemm";
    if gpu.target().arch != Architecture::Sm90a.target_name() {
        eprintln!("skipped: {kernel} is for Hopper");
        return;
    }
    for &(rows, columns, depth) in SIZES {
        for (specs, kind) in [
            ([ROWS, SQUARES], MxKind::Even),
            ([ROWS, ROWS], MxKind::Even),
            ([SQUARES, ROWS], MxKind::Even),
            ([ROWS, SQUARES], MxKind::Spread),
            ([ROWS, ROWS], MxKind::Exact),
        ] {
            let a = MxMatrix::new(rows, depth, specs[0], kind, 1);
            let b = MxMatrix::new(columns, depth, specs[1], kind, 50);
            let product = linear::forward(&a.values, &b.values, None, depth);
            let magnitude = magnitudes(&a, &b, depth);
            let share = if kind == MxKind::Exact { 0.0 } else { SHARE };
            let op = |product, output, bias| {
                let [a, b] = specs;
                ops::MxGemm { product, output, bias, a, b }
            };
            let name = |what: &str| format!("{what} {rows} {columns} {depth} {kind:?} {specs:?}");

            let bias = HostTensor::bf16(&[columns], &uniform(columns, 4, 8.0));
            for has_bias in [false, true] {
                let out = HostTensor::output(DType::Bf16, &[rows, columns]);
                let mut expected = product.clone();
                if has_bias {
                    let bias = bias.to_f64();
                    for sums in expected.chunks_mut(columns) {
                        sums.iter_mut().zip(&bias).for_each(|(sum, bias)| *sum += bias);
                    }
                }
                let op = op(Product::Fprop, DType::Bf16, has_bias);
                let bias = has_bias.then_some(&bias);
                let got = multiply(&mut gpu, kernel, op, (&a, &b), bias, &out, false);
                let name = name(&format!("bf16 bias {has_bias}"));
                // One more rounding in FP32 for the bias.
                let share = share + if has_bias { 2f64.powi(-23) } else { 0.0 };
                let output = DType::Bf16;
                assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share, output);
            }

            let before = HostTensor::f32(&[rows, columns], &uniform(rows * columns, 5, 8.0));
            for accumulate in [false, true] {
                let mut expected = product.clone();
                if accumulate {
                    let before = before.to_f64();
                    expected.iter_mut().zip(before).for_each(|(sum, there)| *sum += there);
                }
                let op = op(Product::Wgrad, DType::Bf16, false);
                let got = multiply(&mut gpu, kernel, op, (&a, &b), None, &before, accumulate);
                let name = name(&format!("f32 accumulate {accumulate}"));
                assert_close_to_magnitudes(&name, &got, &expected, &magnitude, share, DType::F32);
            }
        }
    }
}

/// Needs no GPU: which kernel a product gets.
#[test]
fn the_library_is_preferred_where_it_may_and_can() {
    let operand = |dtype, shape: [usize; 2]| OperandType { dtype, shape: shape.to_vec() };
    let (m, n, k) = (64, 256, 512);
    let linear =
        [operand(DType::Bf16, [m, k]), operand(DType::Bf16, [n, k]), operand(DType::Bf16, [m, n])];
    let mx = [
        operand(DType::E4m3, [m, k]),
        operand(DType::E8m0, [m, k / 32]),
        operand(DType::E4m3, [n, k]),
        operand(DType::E8m0, [n, k / 32]),
        operand(DType::Bf16, [m, n]),
    ];
    let mx_op = |b| -> Op {
        let (product, output) = (Product::Fprop, DType::Bf16);
        ops::MxGemm { product, output, bias: false, a: MxSpec { block: BlockShape::Row, ..b }, b }
            .into()
    };
    let linear_op: Op = ops::Linear { bias: false }.into();
    let (hopper, blackwell) = (Architecture::Sm90a, Architecture::Sm100a);
    for (op, operands, architecture, libraries, expected) in [
        (&linear_op, &linear[..], hopper, &[CUBLASLT][..], "cublaslt_linear"),
        (&linear_op, &linear[..], blackwell, &[CUBLASLT], "cublaslt_linear"),
        (&linear_op, &linear[..], hopper, &[], "cuda_bf16_gemm"),
        (&mx_op(SQUARES), &mx[..], hopper, &[CUBLASLT], "cublaslt_mx_gemm"),
        (&mx_op(SQUARES), &mx[..], hopper, &[], "cuda_mxfp8_gemm"),
        (&mx_op(SQUARES), &mx[..], blackwell, &[CUBLASLT], "cuda_mxfp8_gemm"),
        (&mx_op(MxSpec::default()), &mx[..], hopper, &[CUBLASLT], "cuda_mxfp8_gemm"),
    ] {
        let request = KernelRequest { op, operands, input_count: operands.len() - 1 };
        let target = cuda_target(architecture, 132, libraries);
        let chosen = CudaCatalog.select(&request, &target).unwrap().choice.kernel;
        assert_eq!(chosen, expected, "{} on {architecture:?} with {libraries:?}", op.name());
    }
}
