//! Descriptors and the algorithm of GEMMs that differ only in the addresses of their matrices.

use std::ffi::c_void;
use std::ptr;

use cudarc::cublaslt::sys::{
    self, cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulMatrixScale_t as ScaleMode,
    cublasLtMatmulPreferenceAttributes_t as Preferred,
};
use deepwell_ir::DType;

use super::check;
use crate::runtime::cuda::blas::{BlockScales, Matmul, Matrix};
use crate::runtime::cuda::driver::{DevicePtr, DriverError, DriverResult};

/// Maximum alignment reported to the library: the alignment of values in an arena, so that the
/// algorithm does not depend on the address of a value.
const ALIGNMENT_MAX: u32 = 64;

/// Placeholder for the library's answer.
const NO_ALGORITHM: sys::cublasLtMatmulAlgo_t = sys::cublasLtMatmulAlgo_t { data: [0; 8] };

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct MatrixKey {
    dtype: DType,
    leading: usize,
    alignment: u32,
}

impl MatrixKey {
    fn of(matrix: &Matrix) -> MatrixKey {
        let Matrix { pointer, dtype, leading, .. } = *matrix;
        MatrixKey { dtype, leading, alignment: alignment_of(pointer) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Scaling {
    None,
    Row128,
    Square128,
}

impl Scaling {
    fn of(scales: Option<BlockScales>) -> Scaling {
        match scales {
            None => Scaling::None,
            Some(BlockScales::Row128(_)) => Scaling::Row128,
            Some(BlockScales::Square128(_)) => Scaling::Square128,
        }
    }
}

/// Everything that the choice of an algorithm depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ShapeKey {
    sizes: (usize, usize, usize),
    a: MatrixKey,
    b: MatrixKey,
    out: MatrixKey,
    transposed: (bool, bool),
    /// Alignment of the added matrix.
    added: Option<u32>,
    has_bias: bool,
    scaling: (Scaling, Scaling),
    workspace_bytes: usize,
}

impl ShapeKey {
    /// The key of a GEMM, if the library supports the GEMM on a device.
    pub(super) fn of(matmul: &Matmul, capability: (u32, u32)) -> DriverResult<ShapeKey> {
        matmul.check()?;
        let refuse = |reason: String| Err(DriverError::new("cublasLtMatmul", reason));
        let Matmul { a, b, out, .. } = matmul;
        let operands_fit = a.dtype == b.dtype && matches!(a.dtype, DType::Bf16 | DType::E4m3);
        if !operands_fit || !matches!(out.dtype, DType::Bf16 | DType::F32) {
            return refuse(format!(
                "expected bf16 or e4m3 operands and a bf16 or f32 result, got {}, {} and {}",
                a.dtype, b.dtype, out.dtype
            ));
        }
        let scaling = (
            Scaling::of(matmul.scales.map(|(a, _)| a)),
            Scaling::of(matmul.scales.map(|(_, b)| b)),
        );
        if matmul.scales.is_some() {
            if capability != (9, 0) {
                return refuse(format!(
                    "expected compute capability 9.0 for scales per 128 elements, got {}.{}",
                    capability.0, capability.1
                ));
            }
            if matmul.a_transposed || !matmul.b_transposed {
                return refuse(
                    "expected fp8 operands stored along the contraction: `a` as [m, k] and `b` as \
                     [n, k]"
                        .to_string(),
                );
            }
            if scaling == (Scaling::Square128, Scaling::Square128) {
                return refuse("expected scales per square on one side at most".to_string());
            }
        }
        Ok(ShapeKey {
            sizes: matmul.sizes(),
            a: MatrixKey::of(a),
            b: MatrixKey::of(b),
            out: MatrixKey::of(out),
            transposed: (matmul.a_transposed, matmul.b_transposed),
            added: matmul.added.map(alignment_of),
            has_bias: matmul.bias.is_some(),
            scaling,
            workspace_bytes: matmul.workspace_bytes,
        })
    }
}

fn alignment_of(pointer: DevicePtr) -> u32 {
    1 << pointer.0.trailing_zeros().min(ALIGNMENT_MAX.trailing_zeros())
}

macro_rules! descriptors {
    ($($name:ident($raw:ty) is destroyed by $destroy:ident;)*) => {
        $(struct $name($raw);

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: created once, destroyed once; needs no context.
                let _ = unsafe { sys::$destroy(self.0) };
            }
        })*
    };
}

descriptors! {
    Layout(sys::cublasLtMatrixLayout_t) is destroyed by cublasLtMatrixLayoutDestroy;
    MatmulDesc(sys::cublasLtMatmulDesc_t) is destroyed by cublasLtMatmulDescDestroy;
    Preference(sys::cublasLtMatmulPreference_t) is destroyed by cublasLtMatmulPreferenceDestroy;
}

impl Layout {
    /// Describes our row-major matrix as a column-major matrix of the library.
    fn of(matrix: &Matrix) -> DriverResult<Layout> {
        let (rows, columns) = (matrix.columns as u64, matrix.rows as u64);
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle.
        check("cublasLtMatrixLayoutCreate", unsafe {
            let leading = matrix.leading as i64;
            sys::cublasLtMatrixLayoutCreate(
                &mut raw,
                data_type(matrix.dtype)?,
                rows,
                columns,
                leading,
            )
        })?;
        Ok(Layout(raw))
    }
}

impl MatmulDesc {
    fn new() -> DriverResult<MatmulDesc> {
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle.
        check("cublasLtMatmulDescCreate", unsafe {
            sys::cublasLtMatmulDescCreate(
                &mut raw,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType_t::CUDA_R_32F,
            )
        })?;
        Ok(MatmulDesc(raw))
    }

    fn set<T: Copy>(&self, attribute: Attribute, value: T) -> DriverResult<()> {
        // SAFETY: the descriptor is alive; the value is read within the call, with its own size,
        // which the library compares with the attribute's size.
        check("cublasLtMatmulDescSetAttribute", unsafe {
            sys::cublasLtMatmulDescSetAttribute(
                self.0,
                attribute,
                ptr::from_ref(&value).cast(),
                size_of::<T>(),
            )
        })
    }
}

impl Preference {
    fn new() -> DriverResult<Preference> {
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle.
        check("cublasLtMatmulPreferenceCreate", unsafe {
            sys::cublasLtMatmulPreferenceCreate(&mut raw)
        })?;
        Ok(Preference(raw))
    }

    fn set<T: Copy>(&self, attribute: Preferred, value: T) -> DriverResult<()> {
        // SAFETY: as for a GEMM's attributes.
        check("cublasLtMatmulPreferenceSetAttribute", unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(
                self.0,
                attribute,
                ptr::from_ref(&value).cast(),
                size_of::<T>(),
            )
        })
    }
}

fn data_type(dtype: DType) -> DriverResult<sys::cudaDataType_t> {
    match dtype {
        DType::Bf16 => Ok(sys::cudaDataType_t::CUDA_R_16BF),
        DType::F32 => Ok(sys::cudaDataType_t::CUDA_R_32F),
        DType::E4m3 => Ok(sys::cudaDataType_t::CUDA_R_8F_E4M3),
        other => Err(DriverError::new("cublasLt", format!("has no type for {other}"))),
    }
}

/// `cublasOperation_t`, missing in the bindings of this library: `CUBLAS_OP_N` and `CUBLAS_OP_T`.
fn operation(transposed: bool) -> i32 {
    i32::from(transposed)
}

/// A GEMM with a chosen algorithm.
pub(super) struct Shape {
    matmul_desc: MatmulDesc,
    a: Layout,
    b: Layout,
    out: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Shape {
    /// Describes a GEMM and takes the library's first heuristic proposal.
    pub(super) fn choose(
        handle: sys::cublasLtHandle_t,
        matmul: &Matmul,
        key: &ShapeKey,
    ) -> DriverResult<Shape> {
        let matmul_desc = MatmulDesc::new()?;
        matmul_desc.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, operation(matmul.b_transposed))?;
        matmul_desc.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, operation(matmul.a_transposed))?;
        if matmul.bias.is_some() {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            matmul_desc.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
            let dtype = data_type(matmul.out.dtype)?;
            matmul_desc.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, dtype)?;
        }
        for (attribute, scaling) in [
            (Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, key.scaling.1),
            (Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, key.scaling.0),
        ] {
            let mode = match scaling {
                Scaling::None => continue,
                Scaling::Row128 => ScaleMode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                Scaling::Square128 => ScaleMode::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
            };
            matmul_desc.set(attribute, mode)?;
        }
        let a = Layout::of(&matmul.a)?;
        let b = Layout::of(&matmul.b)?;
        let out = Layout::of(&matmul.out)?;
        let mut shape = Shape { matmul_desc, a, b, out, algorithm: NO_ALGORITHM };
        // The heuristic may check that pointers are set.
        shape.point_to(matmul)?;
        shape.algorithm = shape.propose(handle, key)?;
        Ok(shape)
    }

    fn propose(
        &self,
        handle: sys::cublasLtHandle_t,
        key: &ShapeKey,
    ) -> DriverResult<sys::cublasLtMatmulAlgo_t> {
        // Split-K is allowed for FP32 results: a weight gradient has few tiles and a long K. The
        // library reduces the partial sums in a fixed order, independent of timing.
        let schemes = match key.out.dtype {
            DType::F32 => sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_MASK,
            _ => sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE,
        };
        let preference = Preference::new()?;
        for (attribute, value) in [
            (Preferred::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes as u32),
            (Preferred::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b.alignment),
            (Preferred::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a.alignment),
            (
                Preferred::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                key.added.unwrap_or(key.out.alignment),
            ),
            (Preferred::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.out.alignment),
        ] {
            preference.set(attribute, value)?;
        }
        let workspace = Preferred::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        preference.set(workspace, key.workspace_bytes as u64)?;
        let mut result = sys::cublasLtMatmulHeuristicResult_t {
            algo: NO_ALGORITHM,
            workspaceSize: 0,
            state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let mut proposal_count = 0;
        // SAFETY: handle and descriptors are alive; writes at most a result and a count.
        check("cublasLtMatmulAlgoGetHeuristic", unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.matmul_desc.0,
                self.b.0,
                self.a.0,
                self.out.0,
                self.out.0,
                preference.0,
                1,
                &mut result,
                &mut proposal_count,
            )
        })?;
        if proposal_count == 0 {
            return Err(DriverError::new(
                "cublasLtMatmulAlgoGetHeuristic",
                format!("no algorithm for {key:?}"),
            ));
        }
        check("cublasLtMatmulAlgoGetHeuristic", result.state)?;
        Ok(result.algo)
    }

    /// Sets the addresses of bias and scales in the descriptor.
    pub(super) fn point_to(&self, matmul: &Matmul) -> DriverResult<()> {
        let address = |pointer: DevicePtr| pointer.0 as *const c_void;
        if let Some(bias) = matmul.bias {
            self.matmul_desc.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, address(bias))?;
        }
        if let Some((a, b)) = matmul.scales {
            let place = |scales: BlockScales| match scales {
                BlockScales::Row128(pointer) | BlockScales::Square128(pointer) => address(pointer),
            };
            self.matmul_desc.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, place(b))?;
            self.matmul_desc.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, place(a))?;
        }
        Ok(())
    }

    pub(super) fn matmul_desc(&self) -> sys::cublasLtMatmulDesc_t {
        self.matmul_desc.0
    }

    /// The layout of our `a`, the library's second operand.
    pub(super) fn a(&self) -> sys::cublasLtMatrixLayout_t {
        self.a.0
    }

    /// The layout of our `b`, the library's first operand.
    pub(super) fn b(&self) -> sys::cublasLtMatrixLayout_t {
        self.b.0
    }

    pub(super) fn out(&self) -> sys::cublasLtMatrixLayout_t {
        self.out.0
    }

    pub(super) fn algorithm(&self) -> &sys::cublasLtMatmulAlgo_t {
        &self.algorithm
    }
}
