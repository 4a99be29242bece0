//! GEMMs by cuBLASLt: the operands' orientations and sizes, and when they are chosen.

use deepwell_ir::{DType, GemmKind, KernelCatalog, KernelRequest, Op, OperandType, ops};
use deepwell_kernels::cuda::{Architecture, CUBLASLT, CudaCatalog, cuda_target};
use deepwell_precision::{BlockShape, QuantFormat, scale_tiles};

use crate::bf16_gemm;
use crate::gemm_operands::Kind;
use crate::harness::Gpu;

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
        (&mx_op(SQUARES), &mx[..], hopper, &[], "cuda_sm90_dequantized_mxfp8_gemm"),
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
