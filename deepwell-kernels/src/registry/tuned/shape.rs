//! Classes of comparable requests, and the distance between the sizes of two requests.

use deepwell_ir::{DType, GemmKind, KernelRequest, Op};

/// Maximum ratio, up or down, between each size of a request and of a row that serves it. Between
/// two tiles of 128 a GEMM of 1024 rows differs by 1.125.
pub const NEAREST: f64 = 1.25;

/// Sizes of a request, comparable among requests of the same op, attributes and element types.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sizes(Vec<usize>);

impl Sizes {
    /// M, N and K of a GEMM; rows, N and K of a grouped GEMM; sequences and tokens of an attention;
    /// all operand sizes of any other op.
    pub(super) fn of(request: &KernelRequest<'_>) -> Sizes {
        let shape = |index: usize| request.operands[index].shape.as_slice();
        let size = |index: usize, axis: usize| shape(index).get(axis).copied().unwrap_or(0);
        let last = |index: usize| shape(index).last().copied().unwrap_or(0);
        Sizes(match request.op.leading() {
            Op::Linear(_) => vec![size(0, 0), size(1, 0), size(0, 1)],
            Op::LinearDgrad(_) => vec![size(0, 0), size(1, 1), size(0, 1)],
            Op::LinearWgrad(_) => vec![size(0, 1), size(1, 1), size(0, 0)],
            Op::ScaledGemm(op) => vec![size(0, 0), size(op.b_input(), 0), size(0, 1)],
            Op::GroupedGemm(_) => vec![size(0, 0), size(1, 1), size(1, 2)],
            Op::GroupedGemmDgrad(_) => vec![size(0, 0), size(1, 2), size(1, 1)],
            Op::GroupedGemmWgrad(_) => vec![size(0, 0), last(0), last(1)],
            Op::ScaledGroupedGemm(op) => match op.kind {
                GemmKind::Wgrad => vec![last(0), size(0, 0), size(op.b_input(), 0)],
                _ => vec![size(0, 0), size(op.b_input(), 1), last(0)],
            },
            // The sums of exponentials, `[sequences, heads, tokens]`, show how rows form sequences.
            Op::Attention(_) | Op::AttentionBackward(_) => {
                let is_sums = |dtype: DType, rank: usize| dtype == DType::F32 && rank == 3;
                let mut operands = request.operands.iter();
                let sums = operands.find(|of| is_sums(of.dtype, of.shape.len()));
                sums.map_or_else(Vec::new, |of| vec![of.shape[0], of.shape[2]])
            }
            _ => request.operands.iter().flat_map(|of| of.shape.iter().copied()).collect(),
        })
    }

    /// The largest ratio between corresponding sizes, 1 if all are equal; `None` if the sizes are
    /// not comparable.
    pub(super) fn distance(&self, other: &Sizes) -> Option<f64> {
        if self.0.len() != other.0.len() {
            return None;
        }
        let quotient = |(&a, &b): (&usize, &usize)| match (a.min(b), a.max(b)) {
            (least, most) if least == most => 1.0,
            (least, most) => most as f64 / least as f64,
        };
        Some(self.0.iter().zip(&other.0).map(quotient).fold(1.0, f64::max))
    }

    /// `16384,2048,2048`.
    pub(super) fn text(&self) -> String {
        let sizes: Vec<String> = self.0.iter().map(usize::to_string).collect();
        sizes.join(",")
    }
}
