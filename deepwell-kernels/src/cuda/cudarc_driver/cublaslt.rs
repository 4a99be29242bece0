//! [`Blas`] on cuBLASLt.
//!
//! The library stores matrices by columns, so our row-major matrices are the transposes of its
//! matrices: `outᵀ = bᵀ · aᵀ`. The library's first operand is our `b`, the second our `a`. A stored
//! matrix keeps its memory with rows and columns exchanged, and the transpose flags stay the same.
//! Scales follow their operands.

mod shape;

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::cublaslt::sys;

use self::shape::{Shape, ShapeKey};
use super::CudarcDriver;
use super::context::{Context, no_such};
use crate::runtime::cuda::blas::{Blas, Matmul, MatmulPlan};
use crate::runtime::cuda::driver::{DriverError, DriverResult, Stream};

/// Oldest version with FP8 scales per 128 elements, as `cublasLtGetVersion` writes it.
const VERSION_MIN: usize = 120_900;

/// Functions used from the library.
const FUNCTIONS: [&str; 14] = [
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetStatusName",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

struct Plan {
    shape: usize,
    matmul: Matmul,
}

/// NVIDIA's GEMM library on a device.
///
/// Supported are BF16 operands with BF16 or FP32 results, with or without a bias per column; on
/// Hopper also FP8 (E4M3) operands with FP32 scales per 128 elements along K or per square of 128
/// (not squares on both sides), both stored along K. The algorithm depends only on sizes, types and
/// alignments. Algorithms that reduce partial sums in a timing-dependent order are excluded.
pub struct CublasLt {
    plans: Vec<Plan>,
    shapes: Vec<Shape>,
    known: HashMap<ShapeKey, usize>,
    handle: sys::cublasLtHandle_t,
    version: usize,
    capability: (u32, u32),
    context: Arc<Context>,
}

// SAFETY: the library's handles belong to no thread; the context is made current in every call.
unsafe impl Send for CublasLt {}

impl CublasLt {
    /// Opens the library for the driver's device. The library may outlive the driver and keeps the
    /// driver's streams alive.
    ///
    /// # Errors
    /// No library, a version older than 12.9, or a library that fails to initialize.
    pub fn open(driver: &CudarcDriver) -> Result<CublasLt, DriverError> {
        find_library()?;
        // SAFETY: the function was found; it takes nothing and returns a constant.
        let version = unsafe { sys::cublasLtGetVersion() };
        if version < VERSION_MIN {
            return Err(DriverError::new(
                "cublasLt",
                format!(
                    "expected version {} or newer, got {}\n\
                     hint: install cuBLAS of CUDA 13 (`libcublas-13-0`) or the CUDA toolkit",
                    dotted(VERSION_MIN),
                    dotted(version)
                ),
            ));
        }
        FUNCTIONS.iter().try_for_each(|name| require(name))?;
        let context = Arc::clone(&driver.context);
        context.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: a context is current; writes one handle.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&mut handle) })?;
        Ok(CublasLt {
            plans: Vec::new(),
            shapes: Vec::new(),
            known: HashMap::new(),
            handle,
            version,
            capability: driver.properties.capability,
            context,
        })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // Destroying waits for the whole device. If this thread has an open capture, the handle
            // is leaked instead.
            // SAFETY: created once, destroyed once.
            let destroy = || unsafe { sys::cublasLtDestroy(self.handle) };
            let _ = self.context.alone("cublasLtDestroy", destroy);
        }
    }
}

impl Blas for CublasLt {
    fn version(&self) -> String {
        format!("cuBLASLt {}", dotted(self.version))
    }

    fn plan(&mut self, matmul: &Matmul) -> DriverResult<MatmulPlan> {
        self.context.enter()?;
        let key = ShapeKey::of(matmul, self.capability)?;
        let shape = match self.known.get(&key) {
            Some(&shape) => shape,
            None => {
                self.shapes.push(Shape::choose(self.handle, matmul, &key)?);
                self.known.insert(key, self.shapes.len() - 1);
                self.shapes.len() - 1
            }
        };
        self.plans.push(Plan { shape, matmul: *matmul });
        Ok(MatmulPlan(self.plans.len() - 1))
    }

    fn run(&mut self, plan: MatmulPlan, stream: Stream) -> DriverResult<()> {
        self.context.enter()?;
        let Plan { shape, matmul } =
            self.plans.get(plan.0).ok_or_else(|| no_such("matmul plan", plan.0 as u64))?;
        let shape = &self.shapes[*shape];
        shape.point_to(matmul)?;
        let stream = self.context.resolve(stream)?;
        let alpha = 1.0f32;
        let beta = if matmul.added.is_some() { 1.0f32 } else { 0.0 };
        let address = |pointer: crate::cuda::DevicePtr| pointer.0 as *mut c_void;
        // SAFETY: handle, descriptors and stream are alive; `alpha` and `beta` are read within the
        // call; the matrices are device addresses, which only the device can check.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                shape.matmul_desc(),
                ptr::from_ref(&alpha).cast(),
                address(matmul.b.pointer),
                shape.b(),
                address(matmul.a.pointer),
                shape.a(),
                ptr::from_ref(&beta).cast(),
                address(matmul.added.unwrap_or(matmul.out.pointer)),
                shape.out(),
                address(matmul.out.pointer),
                shape.out(),
                shape.algorithm(),
                address(matmul.workspace),
                matmul.workspace_bytes,
                stream.cast(),
            )
        };
        check("cublasLtMatmul", status)
    }

    fn forget_plans(&mut self) {
        self.plans.clear();
        self.known.clear();
        self.shapes.clear();
    }
}

/// `Ok` for success, else an error with the call's name and the status' name.
fn check(call: &str, status: sys::cublasStatus_t) -> DriverResult<()> {
    if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    // SAFETY: gives a constant text that ends with zero, or null.
    let name = unsafe { sys::cublasLtGetStatusName(status) };
    let name = if name.is_null() {
        format!("status {}", status as u32)
    } else {
        // SAFETY: as above.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    };
    Err(DriverError {
        out_of_memory: status == sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED,
        ..DriverError::new(call, name)
    })
}

fn dotted(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Searches for the library on the loader's path, then in CUDA toolkits.
fn find_library() -> DriverResult<()> {
    // SAFETY: loading the library runs its initializers, which take no action of their own.
    if unsafe { sys::is_culib_present() } {
        return require("cublasLtGetVersion");
    }
    let roots = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    let roots = roots.map(std::path::PathBuf::from).chain(["/usr/local/cuda".into()]);
    let mut looked_in = Vec::new();
    for folder in roots.map(|root| root.join("lib64")) {
        for name in ["libcublasLt.so.13", "libcublasLt.so.12"] {
            // SAFETY: as above. The library stays loaded, because it registers exit handlers. Once
            // loaded, the library is also found under its bare name.
            match unsafe { libloading::Library::new(folder.join(name)) } {
                Ok(library) => std::mem::forget(library),
                Err(_) => continue,
            }
            // SAFETY: as above.
            if unsafe { sys::is_culib_present() } {
                return require("cublasLtGetVersion");
            }
        }
        looked_in.push(format!("`{}`", folder.display()));
    }
    Err(DriverError::new(
        "cublasLt",
        format!(
            "looked for `libcublasLt.so.13` on the loader's path and in {}, and found none\n\
             hint: install cuBLAS of CUDA 13 (`libcublas-13-0`) or the CUDA toolkit, and name its \
             folder in `LD_LIBRARY_PATH`",
            looked_in.join(", ")
        ),
    ))
}

fn require(name: &str) -> DriverResult<()> {
    // SAFETY: the library was found; the symbol is only looked up, not called.
    match unsafe { sys::culib().get::<*mut c_void>(name.as_bytes()) } {
        Ok(_) => Ok(()),
        Err(_) => Err(DriverError::new(
            "cublasLt",
            format!(
                "expected the function `{name}` in the library, and it is not there\n\
                 hint: install cuBLAS of CUDA 13 (`libcublas-13-0`)"
            ),
        )),
    }
}
