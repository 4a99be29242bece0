//! Measured rates of this machine: memory, GEMMs, launches.

use std::time::Instant;

use deepwell_ir::ops::Axis;
use deepwell_ir::{DType, GemmKind, Instance, ops};
use deepwell_kernels::{KernelError, SingleCall};
use deepwell_precision::{PrecisionPolicy, QuantFormat};
use deepwell_probe::{Hardware, NumberFormat, measure_memory_bandwidth, measure_triad};
use serde::{Deserialize, Serialize};

use super::cases::planes;
use super::device_copy::{FLOATS, copied_gbps};
use super::timer::{Timer, percentile};
use deepwell_trainer::{Device, OpenDevice, TrainError};

/// One GEMM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GemmRate {
    /// Format of the operands.
    pub format: NumberFormat,
    /// Rows and columns of the result, length of the sums.
    pub shape: [usize; 3],
    /// The kernel.
    pub kernel: String,
    /// 10¹² FLOP per second, at `2 x m x n x k` FLOP per GEMM; from the median of the samples.
    pub tflops: f64,
    /// The device's known dense peak, 10¹² FLOP per second.
    pub peak_tflops: Option<f64>,
}

impl GemmRate {
    /// Fraction of the peak, if a peak is known.
    pub fn peak_share(&self) -> Option<f64> {
        self.peak_tflops.filter(|&peak| peak > 0.0).map(|peak| self.tflops / peak)
    }
}

/// Time to start work on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LaunchTimes {
    /// Microseconds from a launch on an idle GPU until the host knows that the work is done.
    pub round_trip_us: f64,
    /// Microseconds between consecutive launches on a stream.
    pub in_stream_us: f64,
    /// Microseconds between launches in a captured graph.
    pub in_graph_us: f64,
}

/// Measured rates of a CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuMeasurements {
    /// GB/s of a copy, read and written bytes, on all usable cores.
    pub copy_gbps: f64,
    /// GB/s of STREAM's triad, with STREAM's byte count.
    pub triad_gbps: f64,
    /// Whether the buffers fit in the caches; then the rates describe the caches more than the
    /// memory.
    pub fits_in_cache: bool,
    /// GEMMs.
    pub gemms: Vec<GemmRate>,
    /// Failed measurements, with their reasons.
    pub failures: Vec<String>,
}

/// Measured rates of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuMeasurements {
    /// Index of the GPU.
    pub index: usize,
    /// GB/s of a memcpy on the device, bytes read plus bytes written.
    pub copy_gbps: Option<f64>,
    /// GB/s of the memory according to the datasheet.
    pub memory_gbps: Option<f64>,
    /// Times of launches.
    pub launches: Option<LaunchTimes>,
    /// GEMMs.
    pub gemms: Vec<GemmRate>,
    /// Failed measurements, with their reasons.
    pub failures: Vec<String>,
}

/// Size of a GEMM on a CPU: 2.1 GFLOP.
const CPU_SIZE: usize = 1024;
/// Sizes of a GEMM on a GPU: 1.1 TFLOP, far more tiles than SMs.
const GPU_SIZE: usize = 8192;
/// Samples of each GEMM.
const SAMPLES: usize = 10;
/// Number of launches timed together.
const LAUNCHES: usize = 1000;

/// Measures the CPU: takes less than a few seconds and at most 512 MiB.
pub fn measure_cpu(hardware: &Hardware) -> CpuMeasurements {
    let copy = measure_memory_bandwidth(&hardware.cpu);
    let mut measured = CpuMeasurements {
        copy_gbps: copy.gbps,
        triad_gbps: measure_triad(&hardware.cpu).gbps,
        fits_in_cache: copy.fits_in_cache,
        gemms: Vec::new(),
        failures: Vec::new(),
    };
    let mut open = match Device::Cpu.open(hardware) {
        Ok(open) => open,
        Err(error) => {
            measured.failures.push(error.to_string());
            return measured;
        }
    };
    let peak = |format| Some(hardware.cpu.peak_gflops(format) / 1e3).filter(|&peak| peak > 0.0);
    let mut timer = Timer::new(&mut open, hardware, SAMPLES);
    for (format, dtype) in [(NumberFormat::Fp32, DType::F32), (NumberFormat::Bf16, DType::Bf16)] {
        match rate(&mut timer, format, CPU_SIZE, &linear(dtype, CPU_SIZE), peak(format)) {
            Ok(gemm) => measured.gemms.push(gemm),
            Err(error) => measured.failures.push(format!("{format}: {error}")),
        }
    }
    measured
}

/// Measures one GPU. Failed measurements are listed in the result.
///
/// # Errors
/// The GPU does not exist or does not start.
pub fn measure_gpu(index: usize, hardware: &Hardware) -> Result<GpuMeasurements, TrainError> {
    let device = Device::Cuda(index);
    let mut open = device.open(hardware)?;
    Ok(measure_open(&mut open, index, hardware, (GPU_SIZE, FLOATS)))
}

/// `size` is the size of the GEMMs, `floats` that of the memcpy.
fn measure_open(
    open: &mut OpenDevice,
    index: usize,
    hardware: &Hardware,
    (size, floats): (usize, usize),
) -> GpuMeasurements {
    let gpu = hardware.gpus.get(index);
    let mut measured = GpuMeasurements {
        index,
        memory_gbps: gpu.map(|gpu| gpu.hbw_gbps).filter(|&gbps| gbps > 0.0),
        ..GpuMeasurements::default()
    };
    match copied_gbps(open, hardware, floats) {
        Ok(gbps) => measured.copy_gbps = Some(gbps),
        Err(error) => measured.failures.push(format!("copy: {error}")),
    }
    let mut timer = Timer::new(open, hardware, SAMPLES);
    match launches(&mut timer) {
        Ok(times) => measured.launches = Some(times),
        Err(error) => measured.failures.push(format!("launches: {error}")),
    }
    // Tensor cores without block scales run formats of one scale per 128 elements as plain FP8.
    let of_blocks = |policy: &PrecisionPolicy| (policy.activation_format(), policy.weight_format());
    let coarse = PrecisionPolicy::preset("mxfp8-128").map(|policy| of_blocks(&policy));
    let fine = of_blocks(&PrecisionPolicy::mxfp8());
    let mut calls = vec![(NumberFormat::Bf16, linear(DType::Bf16, size))];
    calls.extend(coarse.ok().map(|specs| (NumberFormat::Fp8, scaled_gemm(specs, size))));
    calls.push((NumberFormat::Mxfp8, scaled_gemm(fine, size)));
    for (format, call) in calls {
        let peak = gpu.and_then(|gpu| gpu.peak_tflops(format));
        match rate(&mut timer, format, size, &call, peak) {
            Ok(gemm) => measured.gemms.push(gemm),
            Err(error) => measured.failures.push(format!("{format}: {error}")),
        }
    }
    measured
}

fn linear(dtype: DType, size: usize) -> SingleCall {
    let matrix = || (dtype, vec![size, size]);
    SingleCall::new(ops::Linear { bias: false }, &[matrix(), matrix()], &[matrix()])
}

fn scaled_gemm((a, b): (QuantFormat, QuantFormat), size: usize) -> SingleCall {
    let op = ops::ScaledGemm { kind: GemmKind::Fprop, output: DType::Bf16, bias: false, a, b };
    let inputs = [planes(a, Axis::Row, size, size), planes(b, Axis::Row, size, size)].concat();
    SingleCall::new(op, &inputs, &[(DType::Bf16, vec![size, size])])
}

fn rate(
    timer: &mut Timer<'_>,
    format: NumberFormat,
    size: usize,
    call: &SingleCall,
    peak_tflops: Option<f64>,
) -> Result<GemmRate, String> {
    let timing = timer.time(call)?;
    let tflops = call.cost().flops as f64 / timing.time_s / 1e12;
    Ok(GemmRate { format, shape: [size; 3], kernel: timing.kernel, tflops, peak_tflops })
}

/// Times an op with almost no work.
fn launches(timer: &mut Timer<'_>) -> Result<LaunchTimes, String> {
    let row = || (DType::Bf16, vec![1, 256]);
    let call = SingleCall::new(ops::Add {}, &[row(), row()], &[row()]);
    let in_graph_us = timer.time(&call)?.time_s * 1e6;
    let selection = call
        .select(timer.device.catalog.as_ref(), &timer.device.target)
        .map_err(|error| error.to_string())?;
    let program = call.program(selection.choice, timer.device.target.clone(), 1);
    let backend = timer.device.backend.as_mut();
    let mut times = || -> Result<(f64, f64), KernelError> {
        backend.allocate(program.arena.bytes)?;
        let prepared = backend.prepare(&program, &program.calls[0], Instance::ONLY)?;
        let mut round_trips = Vec::with_capacity(LAUNCHES);
        for _ in 0..LAUNCHES {
            let begin = Instant::now();
            backend.enqueue(prepared)?;
            backend.synchronize()?;
            round_trips.push(begin.elapsed().as_secs_f64());
        }
        let begin = Instant::now();
        for _ in 0..LAUNCHES {
            backend.enqueue(prepared)?;
        }
        backend.synchronize()?;
        let in_stream = begin.elapsed().as_secs_f64() / LAUNCHES as f64;
        Ok((percentile(&round_trips, 0.5), in_stream))
    };
    let times = times();
    let forgotten = timer.device.backend.forget_prepared();
    let (round_trip_s, in_stream_s) = times.map_err(|error| error.to_string())?;
    forgotten.map_err(|error| error.to_string())?;
    Ok(LaunchTimes {
        round_trip_us: round_trip_s * 1e6,
        in_stream_us: in_stream_s * 1e6,
        in_graph_us,
    })
}

#[cfg(test)]
mod tests {
    use deepwell_kernels::cuda::{Blas, CudaBackend, FakeDriver, KernelImages};

    use super::*;

    /// On a driver that runs nothing, every measurement is attempted and ends as a number or a
    /// failure.
    #[test]
    fn a_gpu_is_measured_part_by_part() {
        let hardware = Hardware::preset("h200-x2").unwrap();
        let driver = FakeDriver::h200();
        let blas: Box<dyn Blas> = Box::new(driver.blas());
        let backend =
            CudaBackend::new(Box::new(driver), Some(blas), KernelImages::empty()).unwrap();
        let device = Device::Cuda(0);
        let target = device.target(&hardware).unwrap();
        let mut open = OpenDevice { backend: Box::new(backend), catalog: device.catalog(), target };
        let measured = measure_open(&mut open, 0, &hardware, (1024, 1 << 14));
        assert!(measured.copy_gbps > Some(0.0), "{measured:?}");
        assert_eq!(measured.memory_gbps, Some(hardware.gpus[0].hbw_gbps));
        let gemm = &measured.gemms[0];
        assert_eq!((gemm.format, gemm.peak_tflops), (NumberFormat::Bf16, Some(989.0)));
        assert!(gemm.peak_share() > Some(0.0));
        assert!(measured.launches.is_some_and(|times| times.in_graph_us > 0.0), "{measured:?}");
        assert_eq!(measured.gemms.len() + measured.failures.len(), 3, "{measured:?}");
    }

    #[test]
    fn shares_need_a_peak() {
        let mut gemm = GemmRate {
            format: NumberFormat::Bf16,
            shape: [1, 1, 1],
            kernel: String::new(),
            tflops: 3.0,
            peak_tflops: Some(4.0),
        };
        assert_eq!(gemm.peak_share(), Some(0.75));
        gemm.peak_tflops = Some(0.0);
        assert_eq!(gemm.peak_share(), None);
        gemm.peak_tflops = None;
        assert_eq!(gemm.peak_share(), None);
    }
}
