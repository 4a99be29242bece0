//! Modules, kernels with their parameters, launches and tensor maps.

use std::ffi::{CString, c_int, c_void};
use std::ptr;

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};

use super::error::{about, check, error};
use super::image::check_image;
use crate::runtime::cuda::driver::{
    Argument, DriverError, DriverResult, Launch, TensorMap, TensorMapElement, TensorMapSpec,
    TensorMapSwizzle,
};

/// Size of the buffer for the PTX compiler's error log.
const LOG_BYTES: usize = 4096;
/// Maximum CTAs of a portable cluster; larger clusters must be enabled per kernel.
const PORTABLE_CLUSTER_CTAS: u32 = 8;
/// Maximum dimensions of a tensor map.
const TENSOR_MAP_RANK_MAX: usize = 5;

/// A kernel of a module.
pub(super) struct Kernel {
    raw: sys::CUfunction,
    name: String,
    /// Size of each parameter in bytes.
    parameters: Vec<usize>,
    /// Dynamic shared memory allowed so far.
    shared_bytes: u32,
    takes_large_clusters: bool,
}

/// Loads a cubin or PTX into the current context.
pub(super) fn load_module(image: &[u8]) -> DriverResult<sys::CUmodule> {
    check_image(image)?;
    let mut log = vec![0u8; LOG_BYTES];
    let mut options = [
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    // The second value is a number stored as a pointer.
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), LOG_BYTES as *mut c_void];
    let mut module = ptr::null_mut();
    // SAFETY: the image was validated and is completely in memory; options and values are arrays of
    // two; the log has the given length and outlives the call.
    let code = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    check("cuModuleLoadData", code).map_err(|error| {
        let text: Vec<u8> = log.iter().copied().take_while(|&c| c != 0).collect();
        match String::from_utf8_lossy(&text).trim() {
            "" => error,
            words => DriverError { reason: format!("{}\n{words}", error.reason), ..error },
        }
    })?;
    Ok(module)
}

impl Kernel {
    /// Looks up a kernel and reads the sizes of its parameters.
    pub(super) fn find(module: sys::CUmodule, name: &str) -> DriverResult<Kernel> {
        let text = CString::new(name)
            .map_err(|_| DriverError::new("cuModuleGetFunction", "a name with a zero byte"))?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module is loaded; the name ends with zero; writes one handle.
        let code = unsafe { sys::cuModuleGetFunction(&mut raw, module, text.as_ptr()) };
        check("cuModuleGetFunction", code).map_err(about(|| format!("kernel `{name}`")))?;
        let mut parameters = Vec::new();
        loop {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the kernel is loaded; writes two sizes; the driver rejects an index past the
            // last parameter with `INVALID_VALUE`.
            let code =
                unsafe { sys::cuFuncGetParamInfo(raw, parameters.len(), &mut offset, &mut bytes) };
            match code {
                sys::CUresult::CUDA_SUCCESS => parameters.push(bytes),
                sys::CUresult::CUDA_ERROR_INVALID_VALUE => break,
                code => return Err(error("cuFuncGetParamInfo", code)),
            }
        }
        let name = name.to_string();
        Ok(Kernel { raw, name, parameters, shared_bytes: 0, takes_large_clusters: false })
    }

    /// Allows at least `bytes` of dynamic shared memory.
    pub(super) fn allow_shared(&mut self, bytes: u32) -> DriverResult<()> {
        if bytes <= self.shared_bytes {
            return Ok(());
        }
        self.set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as c_int)
            .map_err(about(|| {
                format!("kernel `{}` with {bytes} bytes of dynamic shared memory", self.name)
            }))?;
        self.shared_bytes = bytes;
        Ok(())
    }

    fn set(&self, attribute: Attribute, value: c_int) -> DriverResult<()> {
        // SAFETY: the kernel's module is loaded.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.raw, attribute, value) })
    }

    /// Number of CTAs of `threads` threads that an SM can hold.
    pub(super) fn occupancy(&self, threads: u32, shared_bytes: u32) -> DriverResult<u32> {
        let mut ctas = 0;
        // SAFETY: the kernel's module is loaded; writes one integer.
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut ctas,
                self.raw,
                threads as c_int,
                shared_bytes as usize,
            )
        })?;
        Ok(ctas.max(0) as u32)
    }

    /// Enqueues a launch after checking its arguments against the kernel's parameters: with too few
    /// arguments the driver would read out of bounds.
    pub(super) fn launch(&mut self, launch: &Launch, stream: sys::CUstream) -> DriverResult<()> {
        let describe = |name: &str| {
            format!(
                "kernel `{name}`, grid {:?}, block {:?}, cluster {:?}, {} bytes of shared memory",
                launch.grid, launch.block, launch.cluster, launch.shared_bytes
            )
        };
        let sizes: Vec<usize> = launch.arguments.iter().map(argument_bytes).collect();
        if sizes != self.parameters {
            return Err(DriverError::new(
                "cuLaunchKernelEx",
                format!(
                    "kernel `{}`: expected arguments of {:?} bytes, got {sizes:?}",
                    self.name, self.parameters
                ),
            ));
        }
        let cluster_ctas: u32 = launch.cluster.iter().product();
        if cluster_ctas > PORTABLE_CLUSTER_CTAS && !self.takes_large_clusters {
            self.set(Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
                .map_err(about(|| describe(&self.name)))?;
            self.takes_large_clusters = true;
        }
        let mut attributes = launch_attributes(launch);
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let mut arguments: Vec<*mut c_void> =
            launch.arguments.iter().map(|argument| argument_pointer(argument).cast_mut()).collect();
        // SAFETY: the kernel's module is loaded; each parameter has a pointer to a value of its
        // size in `launch`; the driver copies the values within the call.
        let code = unsafe {
            sys::cuLaunchKernelEx(&config, self.raw, arguments.as_mut_ptr(), ptr::null_mut())
        };
        check("cuLaunchKernelEx", code).map_err(about(|| describe(&self.name)))
    }
}

fn launch_attributes(launch: &Launch) -> Vec<sys::CUlaunchAttribute> {
    let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
    let mut attributes = Vec::new();
    if launch.cluster != [1, 1, 1] {
        let [x, y, z] = launch.cluster;
        let cluster = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
        attributes.push(attribute(
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            sys::CUlaunchAttributeValue { clusterDim: cluster },
        ));
    }
    if launch.programmatic {
        attributes.push(attribute(
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        ));
    }
    attributes
}

fn argument_bytes(argument: &Argument) -> usize {
    match argument {
        Argument::I32(_) | Argument::U32(_) | Argument::F32(_) => 4,
        Argument::Pointer(_) | Argument::I64(_) | Argument::U64(_) => 8,
        Argument::TensorMap(_) => size_of::<TensorMap>(),
    }
}

fn argument_pointer(argument: &Argument) -> *const c_void {
    match argument {
        Argument::Pointer(value) => ptr::from_ref(&value.0).cast(),
        Argument::I32(value) => ptr::from_ref(value).cast(),
        Argument::U32(value) => ptr::from_ref(value).cast(),
        Argument::I64(value) => ptr::from_ref(value).cast(),
        Argument::U64(value) => ptr::from_ref(value).cast(),
        Argument::F32(value) => ptr::from_ref(value).cast(),
        Argument::TensorMap(value) => ptr::from_ref(value).cast(),
    }
}

/// Encodes a tensor map with unit element strides and zero fill outside of the tensor.
pub(super) fn tensor_map(spec: &TensorMapSpec) -> DriverResult<TensorMap> {
    let rank = spec.sizes.len();
    // The driver reads arrays of `rank` entries.
    if !(1..=TENSOR_MAP_RANK_MAX).contains(&rank)
        || spec.strides_bytes.len() != rank - 1
        || spec.box_sizes.len() != rank
    {
        return Err(DriverError::new(
            "cuTensorMapEncodeTiled",
            format!(
                "expected one to {TENSOR_MAP_RANK_MAX} sizes, as many of the box and one stride \
                 less, got {spec:?}"
            ),
        ));
    }
    let element = match spec.element {
        TensorMapElement::U8 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        TensorMapElement::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        TensorMapElement::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    };
    let swizzle = match spec.swizzle {
        TensorMapSwizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        TensorMapSwizzle::Bytes32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        TensorMapSwizzle::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        TensorMapSwizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let element_strides = [1u32; TENSOR_MAP_RANK_MAX];
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: every array has `rank` entries; the address is only encoded.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            element,
            rank as u32,
            spec.base.0 as *mut c_void,
            spec.sizes.as_ptr(),
            spec.strides_bytes.as_ptr(),
            spec.box_sizes.as_ptr(),
            element_strides.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check("cuTensorMapEncodeTiled", code).map_err(about(|| format!("{spec:?}")))?;
    Ok(TensorMap(map.opaque))
}
