//! MXFP8 GEMMs at granularity 128 on cuBLASLt, on Hopper.
//!
//! On each side the library supports one FP32 scale per 128 elements of a row, or per 128 x 128
//! elements, but not squares on both sides. The call has two steps: the scales in the library's
//! layout, then the GEMM.
//!
//! Source of the limits: NVIDIA's cuBLAS documentation, "Tensor Core Usage", "128-element 1D and
//! 128x128 2D Block Scaling For FP8 Data Types" and "cublasLtMatmul()".

use deepwell_ir::ops::ScaledGemm;
use deepwell_ir::{DType, KernelRequest, Op, Target};

use super::expand_scales::{Expansion, expand, expanded_bytes};
use super::operand;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::architecture::CUBLASLT;
use crate::runtime::cuda::blas::{Matmul, Matrix};
use crate::runtime::cuda::launch::gemm::{
    LIBRARY_ALIGNMENT_BYTES, LIBRARY_SCRATCH_BYTES, added_to, align_for_library, extents_fit,
    not_empty,
};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::epilogue::EpilogueSet;
use crate::runtime::predict::{CUBLASLT_FP8, Rates};

/// Rows of FP8 are aligned to 16 bytes.
const K_MULTIPLE: usize = 16;
/// Rows of the result are aligned to 16 bytes, also in BF16; FP32 scales per row require multiples
/// of 4.
const SIDE_MULTIPLE: usize = 8;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[SPEC, SPEC.name("cublaslt_mx_gemm_residual").epilogue(|_| EpilogueSet::RESIDUAL)];

const SPEC: CudaKernelSpec = CudaKernelSpec::new("cublaslt_mx_gemm", &["scaled_gemm"], prepare)
    .architectures(&[Architecture::Sm90a])
    .library(CUBLASLT)
    .reject(reject)
    .predict(|request, target| Rates::of(target).roofline_s(request, CUBLASLT_FP8))
    .workspace_bytes(workspace_bytes);

fn gemm_of(op: &Op) -> Option<&ScaledGemm> {
    match op.leading() {
        Op::ScaledGemm(op) => Some(op),
        _ => None,
    }
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let gemm = gemm_of(request.op)?;
    let specs = [gemm.a, gemm.b];
    let (a, b) = (&request.operands[operand::A].shape, &request.operands[operand::B].shape);
    let output = request.operands[request.input_count].dtype;
    for (name, spec) in ["a", "b"].into_iter().zip(specs) {
        if spec.block.k != 128 {
            let elements = usize::from(spec.block.k);
            return Some(format!(
                "takes one scale for 128 elements, `{name}` has one for {elements}"
            ));
        }
    }
    if specs.iter().all(|spec| spec.block.is_square()) {
        return Some("takes scales per square on one side only".to_string());
    }
    if !matches!(output, DType::Bf16 | DType::F32) {
        return Some(format!("gives bf16 or f32, not {output}"));
    }
    let bias = gemm.bias.then(|| &request.operands[operand::BIAS]);
    if bias.is_some_and(|bias| (bias.dtype, output) != (DType::Bf16, DType::Bf16)) {
        return Some("adds a bias in bf16 to a result in bf16 only".to_string());
    }
    if !a[1].is_multiple_of(K_MULTIPLE) {
        return Some(format!("takes a contraction in multiples of {K_MULTIPLE}, not {}", a[1]));
    }
    for (name, side) in [("rows", a[0]), ("columns", b[0])] {
        if !side.is_multiple_of(SIDE_MULTIPLE) {
            return Some(format!("gives {name} in multiples of {SIDE_MULTIPLE}, not {side}"));
        }
    }
    not_empty(request, &[0, 2]).or_else(|| extents_fit(request, &[0, 2]))
}

/// Workspace: the scales of both sides, then the library's scratch.
fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let (a, b) = (&request.operands[operand::A].shape, &request.operands[operand::B].shape);
    let [of_a, of_b] = gemm_of(request.op).map(|op| [op.a, op.b]).unwrap_or_default();
    LIBRARY_ALIGNMENT_BYTES
        + expanded_bytes(a[0], a[1], of_a)
        + expanded_bytes(b[0], b[1], of_b)
        + LIBRARY_SCRATCH_BYTES
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some(op) = gemm_of(&call.call.op) else {
        return Err(call.refuse(format!("expected scaled_gemm, got {}", call.call.op.name())));
    };
    let (a, b, out) = (call.input(operand::A), call.input(operand::B), call.output(0));
    let (rows, columns, k) = (a.shape[0], b.shape[0], a.shape[1]);
    let a_target = align_for_library(call.workspace().0);
    let b_target = a_target.offset(expanded_bytes(rows, k, op.a));
    let workspace = b_target.offset(expanded_bytes(columns, k, op.b));
    let a_scales = Expansion {
        source: call.input(operand::A_SCALES).pointer,
        target: a_target,
        rows,
        spec: op.a,
    };
    let b_scales = Expansion {
        source: call.input(operand::B_SCALES).pointer,
        target: b_target,
        rows: columns,
        spec: op.b,
    };
    let data = |pointer, rows| Matrix { pointer, dtype: DType::E4m3, rows, columns: k, leading: k };
    let out = Matrix { pointer: out.pointer, dtype: out.dtype, rows, columns, leading: columns };
    let matmul = Matmul {
        a: data(a.pointer, rows),
        a_transposed: false,
        b: data(b.pointer, columns),
        b_transposed: true,
        out,
        added: added_to(call, &out),
        bias: op.bias.then(|| call.input(operand::BIAS).pointer),
        scales: Some((a_scales.scales(), b_scales.scales())),
        workspace,
        workspace_bytes: LIBRARY_SCRATCH_BYTES,
    };
    Ok(vec![expand(device, [&a_scales, &b_scales], k)?, device.matmul(&matmul)?])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::{GemmKind, OperandType};

    use deepwell_precision::{QuantFormat, scale_tiles};

    use super::*;

    const ROWS: QuantFormat = QuantFormat::MXFP8_128;
    const SQUARES: QuantFormat = ROWS.square();
    const FINE: QuantFormat = QuantFormat::MXFP8;

    struct Case {
        sizes: (usize, usize, usize),
        specs: [QuantFormat; 2],
        output: DType,
        bias: Option<DType>,
    }

    const SOUND: Case =
        Case { sizes: (64, 256, 704), specs: [ROWS, SQUARES], output: DType::Bf16, bias: None };

    fn with_request<R>(case: &Case, read: impl FnOnce(&KernelRequest<'_>) -> R) -> R {
        let (m, n, k) = case.sizes;
        let [a, b] = case.specs;
        let op: Op = ScaledGemm {
            kind: GemmKind::Fprop,
            output: case.output,
            bias: case.bias.is_some(),
            a,
            b,
        }
        .into();
        let operand = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
        let mut operands = vec![
            operand(DType::E4m3, &[m, k]),
            operand(DType::E8m0, &scale_tiles::shape(m, k.div_ceil(32))),
            operand(DType::E4m3, &[n, k]),
            operand(DType::E8m0, &scale_tiles::shape(n, k.div_ceil(32))),
        ];
        operands.extend(case.bias.map(|dtype| operand(dtype, &[n])));
        let input_count = operands.len();
        operands.push(operand(case.output, &[m, n]));
        read(&KernelRequest { op: &op, operands: &operands, input_count })
    }

    #[test]
    fn what_the_library_does_not_take_is_refused_with_the_reason() {
        let check = |case: Case, expected: Option<&str>| {
            let reason = with_request(&case, reject);
            assert_eq!(reason.as_deref(), expected);
        };
        check(SOUND, None);
        check(Case { specs: [ROWS, ROWS], output: DType::F32, ..SOUND }, None);
        check(Case { specs: [SQUARES, ROWS], ..SOUND }, None);
        check(Case { bias: Some(DType::Bf16), ..SOUND }, None);
        check(
            Case { specs: [FINE, SQUARES], ..SOUND },
            Some("takes one scale for 128 elements, `a` has one for 32"),
        );
        check(
            Case { specs: [ROWS, FINE], ..SOUND },
            Some("takes one scale for 128 elements, `b` has one for 32"),
        );
        check(
            Case { specs: [SQUARES, SQUARES], ..SOUND },
            Some("takes scales per square on one side only"),
        );
        check(
            Case { output: DType::F32, bias: Some(DType::F32), ..SOUND },
            Some("adds a bias in bf16 to a result in bf16 only"),
        );
        check(
            Case { sizes: (64, 256, 712), ..SOUND },
            Some("takes a contraction in multiples of 16, not 712"),
        );
        check(
            Case { sizes: (60, 256, 704), ..SOUND },
            Some("gives rows in multiples of 8, not 60"),
        );
        check(
            Case { sizes: (64, 252, 704), ..SOUND },
            Some("gives columns in multiples of 8, not 252"),
        );
        check(Case { sizes: (64, 256, 0), ..SOUND }, Some("takes no empty matrices"));
    }

    #[test]
    fn scratch_holds_both_scales_and_what_the_library_wants() {
        let target = Target::cpu(1, Vec::new());
        let bytes = with_request(&SOUND, |request| workspace_bytes(request, &target));
        // 64 rows by 6 groups; 2 rows of squares by 6 groups, rounded up to 8.
        assert_eq!(bytes, 256 + 64 * 6 * 4 + 256 + (32 << 20));
    }
}
