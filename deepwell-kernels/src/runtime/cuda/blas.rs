//! GEMMs by a vendor's library: an optional capability, next to [`Driver`](super::driver::Driver).

use deepwell_ir::DType;

use super::driver::{DevicePtr, DriverError, DriverResult, Stream};

/// A matrix in device memory, stored by rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// First element.
    pub pointer: DevicePtr,
    /// Element type.
    pub dtype: DType,
    /// Stored rows.
    pub rows: usize,
    /// Stored columns.
    pub columns: usize,
    /// Elements from one row to the next.
    pub leading: usize,
}

/// FP32 scales of an FP8 operand, quantized along K, with K along the rows of the operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockScales {
    /// A scale per row and 128 columns, `[K/128, rows]` row-major.
    Row128(DevicePtr),
    /// A scale per 128 rows and 128 columns, `[rows/128, K/128 rounded up to 4]` row-major.
    Square128(DevicePtr),
}

/// `out = op(a) · op(b) (+ added) (+ bias)`, `[m, k] · [k, n]`, with FP32 accumulation, rounded
/// once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matmul {
    /// Left operand as stored.
    pub a: Matrix,
    /// Whether the GEMM reads `aᵀ`.
    pub a_transposed: bool,
    /// Right operand as stored.
    pub b: Matrix,
    /// Whether the GEMM reads `bᵀ`.
    pub b_transposed: bool,
    /// Result.
    pub out: Matrix,
    /// A matrix to add, of the result's type and layout; the result's own pointer to accumulate.
    pub added: Option<DevicePtr>,
    /// A bias `[n]` of the result's type, added to each row.
    pub bias: Option<DevicePtr>,
    /// Scales of `a` and `b`, for FP8.
    pub scales: Option<(BlockScales, BlockScales)>,
    /// Scratch.
    pub workspace: DevicePtr,
    /// Length of the scratch.
    pub workspace_bytes: usize,
}

impl Matmul {
    /// M, N and K.
    pub fn sizes(&self) -> (usize, usize, usize) {
        let (m, k) = if self.a_transposed {
            (self.a.columns, self.a.rows)
        } else {
            (self.a.rows, self.a.columns)
        };
        let n = if self.b_transposed { self.b.rows } else { self.b.columns };
        (m, n, k)
    }

    /// Checks that the matrices fit each other, and that scales are given if and only if operands
    /// are FP8.
    ///
    /// # Errors
    /// Empty matrices, mismatched sizes, overlapping rows, scales without FP8 or the reverse.
    pub fn check(&self) -> DriverResult<()> {
        let refuse = |reason: String| Err(DriverError::new("matmul", reason));
        let (m, n, k) = self.sizes();
        let k_of_b = if self.b_transposed { self.b.columns } else { self.b.rows };
        if k != k_of_b {
            return refuse(format!("expected one contraction, got {k} of `a` and {k_of_b} of `b`"));
        }
        if (self.out.rows, self.out.columns) != (m, n) {
            let (rows, columns) = (self.out.rows, self.out.columns);
            return refuse(format!("expected a result of [{m}, {n}], got [{rows}, {columns}]"));
        }
        if m == 0 || n == 0 || k == 0 {
            return refuse(format!("expected sizes of at least 1, got m {m}, n {n}, k {k}"));
        }
        for (name, matrix) in [("a", &self.a), ("b", &self.b), ("out", &self.out)] {
            if matrix.leading < matrix.columns {
                return refuse(format!(
                    "expected rows of `{name}` at least {} elements apart, got {}",
                    matrix.columns, matrix.leading
                ));
            }
        }
        let is_fp8 = self.a.dtype == DType::E4m3 && self.b.dtype == DType::E4m3;
        if is_fp8 != self.scales.is_some() {
            return refuse(format!(
                "expected scales with `e4m3` operands and only there, got {} and {} {} scales",
                self.a.dtype,
                self.b.dtype,
                if self.scales.is_some() { "with" } else { "without" }
            ));
        }
        Ok(())
    }
}

/// A GEMM with a chosen algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulPlan(pub usize);

/// A library of GEMMs.
pub trait Blas: Send {
    /// Name and version of the library.
    fn version(&self) -> String;

    /// Chooses an algorithm, deterministically by sizes and types; the result of the algorithm does
    /// not depend on timing.
    ///
    /// # Errors
    /// Sizes, types or alignments that the library does not support.
    fn plan(&mut self, matmul: &Matmul) -> DriverResult<MatmulPlan>;

    /// Enqueues a GEMM.
    ///
    /// # Errors
    /// An error of the library.
    fn run(&mut self, plan: MatmulPlan, stream: Stream) -> DriverResult<()>;

    /// Forgets all plans.
    fn forget_plans(&mut self);
}
