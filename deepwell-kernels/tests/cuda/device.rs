//! Which device tests run on: the first GPU, or an emulated one.

use deepwell_kernels::cuda::{Architecture, CudarcDriver, Driver};
use deepwell_trials::skip;

use crate::harness::Gpu;

/// Set where a missing GPU is a failure.
const REQUIRE_VARIABLE: &str = "DEEPWELL_REQUIRE_GPU";
/// Names an emulated device to run on; large tests take long there.
const DEVICE_VARIABLE: &str = "DEEPWELL_TEST_DEVICE";

/// The emulated architecture that stands for the GPU, `emulated:sm90` for example.
pub(crate) fn emulated_architecture() -> Option<Architecture> {
    let name = std::env::var(DEVICE_VARIABLE).ok()?;
    let architecture = name.strip_prefix("emulated:").and_then(Architecture::of_short_name);
    Some(architecture.unwrap_or_else(|| {
        let known = Architecture::ALL.map(Architecture::short_name).join(", ");
        panic!("{DEVICE_VARIABLE}: expected `emulated:` and one of {known}, got `{name}`")
    }))
}

/// The driver of the first GPU; where there is none, the test is skipped.
pub(crate) fn open_driver() -> CudarcDriver {
    find_driver().unwrap_or_else(|reason| skip(reason))
}

/// The driver of the first GPU, or why there is none.
///
/// # Panics
/// If one is required.
pub(crate) fn find_driver() -> Result<CudarcDriver, String> {
    if emulated_architecture().is_some() {
        return Err("of a real driver".to_string());
    }
    let required = std::env::var_os(REQUIRE_VARIABLE).is_some();
    CudarcDriver::open(0).map_err(|error| {
        assert!(!required, "{REQUIRE_VARIABLE} is set, and there is no GPU: {error}");
        error.to_string()
    })
}

/// Skips the test where there are fewer GPUs.
pub(crate) fn need_gpus(count: usize) {
    drop(open_driver());
    for index in 1..count {
        if let Err(error) = CudarcDriver::open(index) {
            skip(format!("of {count} GPUs: {error}"));
        }
    }
}

/// The emulated device that the environment names, or the first GPU; where there is neither, an
/// emulated one, if tests are built with it.
pub(crate) fn open_driver_or_emulated(architecture: Architecture) -> Box<dyn Driver> {
    if let Some(named) = emulated_architecture() {
        return present::driver(named);
    }
    match find_driver() {
        Ok(driver) => Box::new(driver),
        Err(_) if present::IS_BUILT => present::driver(architecture),
        Err(reason) => skip(reason),
    }
}

/// As [`Gpu::open`]; where there is none, an emulated device of so many SMs, if tests are built
/// with it.
pub(crate) fn open_gpu_or_emulated(architecture: Architecture, sm_count: u32) -> Gpu {
    match Gpu::find() {
        Err(_) if present::IS_BUILT => present::find(architecture, Some(sm_count)),
        found => found,
    }
    .unwrap_or_else(|reason| skip(reason))
}

/// The emulated device, or why its kernels are not compiled.
pub(crate) fn find_emulated(architecture: Architecture) -> Result<Gpu, String> {
    present::find(architecture, None)
}

#[cfg(feature = "emulated")]
pub(crate) use present::emulate;

#[cfg(feature = "emulated")]
mod present {
    use std::path::Path;

    use deepwell_kernels::cuda::emulator::launch::Settings;
    use deepwell_kernels::cuda::{
        Architecture, CudaBackend, Driver, EmulatedDriver, EmulatedLaunches, KernelImages,
        cuda_target,
    };

    use crate::harness::{Gpu, Watch};
    use crate::ptx;

    pub(super) const IS_BUILT: bool = true;

    /// CTAs of an SM, where they fit: kernels whose CTAs wait for each other take long rows
    /// only with many.
    const CTAS_PER_SM: u32 = 8;

    /// An emulated device, and what is launched on it.
    pub(crate) struct Emulated {
        pub(crate) gpu: Gpu,
        pub(crate) launches: EmulatedLaunches,
    }

    fn typed_driver(architecture: Architecture, defaults: Settings) -> EmulatedDriver {
        let driver = EmulatedDriver::from_environment(architecture, defaults);
        driver.unwrap_or_else(|error| panic!("{error}"))
    }

    pub(super) fn driver(architecture: Architecture) -> Box<dyn Driver> {
        let defaults = Settings { ctas_per_sm: CTAS_PER_SM, ..Settings::default() };
        Box::new(typed_driver(architecture, defaults))
    }

    pub(super) fn find(architecture: Architecture, sm_count: Option<u32>) -> Result<Gpu, String> {
        ptx::of_file("add", architecture)?;
        let defaults = Settings::default();
        let sm_count = sm_count.unwrap_or(defaults.sm_count);
        let settings = Settings { sm_count, ctas_per_sm: CTAS_PER_SM, ..defaults };
        Ok(emulate_with(architecture, settings, None).gpu)
    }

    /// A device of so many CTAs for each SM; its launches are written below `record`, if given.
    pub(crate) fn emulate(
        architecture: Architecture,
        ctas_per_sm: u32,
        record: Option<&Path>,
    ) -> Emulated {
        emulate_with(architecture, Settings { ctas_per_sm, ..Settings::default() }, record)
    }

    /// Kernels are chosen as though there were no library; those that call one get the host's
    /// GEMMs.
    fn emulate_with(
        architecture: Architecture,
        settings: Settings,
        record: Option<&Path>,
    ) -> Emulated {
        let driver = typed_driver(architecture, settings);
        if let Some(folder) = record {
            driver.record_to(folder);
        }
        let (launches, tracker) = (driver.launches(), driver.tracker());
        let target = cuda_target(architecture, driver.properties().sm_count as usize, &[]);
        let images = KernelImages::discover().into_ptx();
        let blas = Box::new(driver.blas());
        let backend = CudaBackend::new(Box::new(driver), Some(blas), images).unwrap();
        let watch: Watch = Box::new(move |on| tracker.set(on));
        Emulated { gpu: Gpu::new(backend, target, Some(watch)), launches }
    }
}

#[cfg(not(feature = "emulated"))]
mod present {
    use deepwell_kernels::cuda::{Architecture, Driver};

    use crate::harness::Gpu;

    pub(super) const IS_BUILT: bool = false;

    pub(super) fn driver(architecture: Architecture) -> Box<dyn Driver> {
        panic!(
            "{} is set to {architecture:?}: build with the feature `emulated`",
            super::DEVICE_VARIABLE
        );
    }

    pub(super) fn find(architecture: Architecture, _: Option<u32>) -> Result<Gpu, String> {
        driver(architecture);
        unreachable!("there is no driver without the feature")
    }
}
