//! GEMMs by cuBLASLt: the operands' orientations and sizes, and when they are chosen.

use deepwell_ir::ops::{Epilogue, Fused};
use deepwell_ir::{DType, GemmKind, KernelCatalog, KernelRequest, Op, OperandType, ops};
use deepwell_kernels::cuda::{Architecture, CUBLASLT, CudaCatalog, cuda_target};
use deepwell_kernels::ops::linear::oracle as linear;
use deepwell_precision::{BlockShape, QuantFormat, scale_tiles};

use crate::bf16_gemm;
use crate::compare::assert_close;
use crate::gemm_operands::{Kind, gemm_tolerance};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::{MxKind, MxMatrix, assert_close_to_magnitudes, magnitudes};

pub(crate) const ROWS: QuantFormat = QuantFormat::MXFP8_128;
pub(crate) const SQUARES: QuantFormat = ROWS.square();

trial!(bf16_gemms_of_any_size);
fn bf16_gemms_of_any_size() {
    let mut gpu = Gpu::open();
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
        if gpu.runs(sizes.0 * sizes.1 * sizes.2, bf16_gemm::EMULATED_WORK) {
            bf16_gemm::check(&mut gpu, "cublaslt_linear", sizes, Kind::Uniform);
        }
    }
    for kind in [Kind::Integers, Kind::Cancelling, Kind::WideRange] {
        bf16_gemm::check(&mut gpu, "cublaslt_linear", (130, 136, 200), kind);
    }
}

/// A GEMM and the sum of its result and a matrix, which is all that it gives.
fn with_sum(core: impl Into<Op>) -> Op {
    let epilogue = vec![Epilogue::Residual { of: 0 }];
    Fused { core: Box::new(core.into()), epilogue, skipped: vec![0] }.into()
}

/// A sum and its terms: `expected` has the products, and a bias.
fn check_sum(gpu: &mut Gpu, core: Op, inputs: &[HostTensor], kernel: &str, expected: &Expected) {
    let Expected { name, products, rows, columns, tolerance } = expected;
    let added = HostTensor::bf16(&[*rows, *columns], &uniform(rows * columns, 6, 8.0));
    let sums: Vec<f64> = products.iter().zip(added.to_f64()).map(|(a, b)| a + b).collect();
    let out = HostTensor::output(DType::Bf16, &[*rows, *columns]);
    let inputs = [inputs, &[added]].concat();
    let options = RunOptions { kernel: Some(kernel), ..RunOptions::default() };
    let got = gpu.run_with(with_sum(core), &inputs, &[out], options).remove(0).to_f64();
    tolerance(&format!("{name} and a matrix"), &got, &sums);
}

struct Expected<'a> {
    name: String,
    products: Vec<f64>,
    rows: usize,
    columns: usize,
    tolerance: Comparison<'a>,
}

/// Of what is named: what came, and what was expected.
type Comparison<'a> = &'a dyn Fn(&str, &[f64], &[f64]);

fn check_bf16_sums(gpu: &mut Gpu, (rows, columns, k): (usize, usize, usize)) {
    let kind = Kind::Uniform;
    let a = HostTensor::bf16(&[rows, k], &kind.values(rows * k, 1));
    let bias = HostTensor::bf16(&[columns], &uniform(columns, 4, 8.0));
    for (name, has_bias, is_dgrad) in
        [("fprop", false, false), ("fprop and bias", true, false), ("dgrad", false, true)]
    {
        let shape = if is_dgrad { [k, columns] } else { [columns, k] };
        let b = HostTensor::bf16(&shape, &kind.values(columns * k, 2));
        let mut inputs = vec![a.clone(), b.clone()];
        inputs.extend(has_bias.then(|| bias.clone()));
        let of_bias = has_bias.then(|| bias.to_f64());
        let (core, products): (Op, _) = match is_dgrad {
            true => (
                ops::LinearDgrad {}.into(),
                linear::data_gradient(&a.to_f64(), &b.to_f64(), columns),
            ),
            false => (
                ops::Linear { bias: has_bias }.into(),
                linear::forward(&a.to_f64(), &b.to_f64(), of_bias.as_deref(), k),
            ),
        };
        let tolerance = |name: &str, got: &[f64], expected: &[f64]| match has_bias {
            // Rounded to BF16 with its bias before the matrix is added: an H100, 3 x 5 x 7.
            true => {
                let magnitude = vec![16.0; expected.len()];
                let share = 2f64.powi(-9);
                assert_close_to_magnitudes(name, got, expected, &magnitude, share, DType::Bf16);
            }
            false => {
                assert_close(name, got, expected, gemm_tolerance(DType::Bf16, k, kind, 16.0));
            }
        };
        let name = format!("{name} {rows} {columns} {k}");
        let expected = Expected { name, products, rows, columns, tolerance: &tolerance };
        check_sum(gpu, core, &inputs, "cublaslt_linear_residual", &expected);
    }
}

fn check_mx_sums(gpu: &mut Gpu, (rows, columns, k): (usize, usize, usize)) {
    let a = MxMatrix::new(rows, k, ROWS, MxKind::Exact, 1);
    let b = MxMatrix::new(columns, k, SQUARES, MxKind::Exact, 50);
    let magnitude: Vec<f64> = magnitudes(&a, &b, k).iter().map(|size| size + 8.0).collect();
    let inputs = [a.data.clone(), a.scales.clone(), b.data.clone(), b.scales.clone()];
    for (kind, has_bias) in [(GemmKind::Dgrad, false), (GemmKind::Fprop, true)] {
        let bias = HostTensor::bf16(&[columns], &uniform(columns, 4, 8.0));
        let of_bias = has_bias.then(|| bias.to_f64());
        let products = linear::forward(&a.values, &b.values, of_bias.as_deref(), k);
        let core: Op =
            ops::ScaledGemm { kind, output: DType::Bf16, bias: has_bias, a: ROWS, b: SQUARES }
                .into();
        // The matrix is rounded in FP32; a bias in BF16, as above.
        let tolerance = |name: &str, got: &[f64], expected: &[f64]| {
            let share = if has_bias { 2f64.powi(-9) } else { 2f64.powi(-22) };
            assert_close_to_magnitudes(name, got, expected, &magnitude, share, DType::Bf16);
        };
        let name = format!("mx {kind:?} {rows} {columns} {k}");
        let expected = Expected { name, products, rows, columns, tolerance: &tolerance };
        let mut inputs = inputs.to_vec();
        inputs.extend(has_bias.then_some(bias));
        check_sum(gpu, core, &inputs, "cublaslt_mx_gemm_residual", &expected);
    }
}

trial!(gemms_with_a_matrix_added);
fn gemms_with_a_matrix_added() {
    let mut gpu = Gpu::open();
    let is_hopper = gpu.target().arch == Architecture::Sm90a.target_name();
    for sizes in [(1, 1, 1), (3, 5, 7), (129, 136, 72), (257, 264, 512), (1024, 2048, 256)] {
        if gpu.runs(sizes.0 * sizes.1 * sizes.2, bf16_gemm::EMULATED_WORK) {
            check_bf16_sums(&mut gpu, sizes);
        }
    }
    for sizes in [(8, 8, 16), (64, 128, 128), (136, 264, 640), (1024, 2048, 256)] {
        if is_hopper && gpu.runs(sizes.0 * sizes.1 * sizes.2, bf16_gemm::EMULATED_WORK) {
            check_mx_sums(&mut gpu, sizes);
        }
    }
}

trial!(the_library_is_preferred_where_it_may_and_can);
/// Needs no GPU: which kernel a GEMM gets.
fn the_library_is_preferred_where_it_may_and_can() {
    let operand = |dtype, shape: [usize; 2]| OperandType { dtype, shape: shape.to_vec() };
    let scales = |rows: usize, k: usize| OperandType {
        dtype: DType::E8m0,
        shape: scale_tiles::shape(rows, k / 32).to_vec(),
    };
    let (m, n, k) = (64, 256, 512);
    let linear =
        [operand(DType::Bf16, [m, k]), operand(DType::Bf16, [n, k]), operand(DType::Bf16, [m, n])];
    let mx = [
        operand(DType::E4m3, [m, k]),
        scales(m, k),
        operand(DType::E4m3, [n, k]),
        scales(n, k),
        operand(DType::Bf16, [m, n]),
    ];
    let mx_op = |b: QuantFormat| -> Op {
        let (kind, output) = (GemmKind::Fprop, DType::Bf16);
        ops::ScaledGemm { kind, output, bias: false, a: b.with_shape(BlockShape::Row), b }.into()
    };
    let linear_op: Op = ops::Linear { bias: false }.into();
    let (hopper, blackwell) = (Architecture::Sm90a, Architecture::Sm100a);
    for (op, operands, architecture, libraries, expected) in [
        (&linear_op, &linear[..], hopper, &[CUBLASLT][..], "cublaslt_linear"),
        (&linear_op, &linear[..], blackwell, &[CUBLASLT], "cublaslt_linear"),
        (&linear_op, &linear[..], hopper, &[], "cuda_sm90_bf16_gemm"),
        (&linear_op, &linear[..], blackwell, &[], "cuda_sm100_bf16_gemm"),
        (&mx_op(SQUARES), &mx[..], hopper, &[CUBLASLT], "cublaslt_mx_gemm"),
        (&mx_op(SQUARES), &mx[..], hopper, &[], "cuda_sm90_mxfp8_gemm"),
        (&mx_op(SQUARES), &mx[..], blackwell, &[CUBLASLT], "cuda_sm100_mxfp8_gemm"),
        (&mx_op(SQUARES), &mx[..], Architecture::Sm120a, &[CUBLASLT], "cuda_sm120_mxfp8_gemm"),
        (&mx_op(QuantFormat::MXFP8), &mx[..], hopper, &[CUBLASLT], "cublaslt_dequantized_mx_gemm"),
        (&mx_op(QuantFormat::MXFP8), &mx[..], hopper, &[], "cuda_sm90_dequantized_mxfp8_gemm"),
    ] {
        let request = KernelRequest { op, operands, input_count: operands.len() - 1 };
        let target = cuda_target(architecture, 132, libraries);
        let chosen = CudaCatalog.select(&request, &target).unwrap().choice.kernel;
        assert_eq!(chosen, expected, "{} on {architecture:?} with {libraries:?}", op.name());
    }
}
