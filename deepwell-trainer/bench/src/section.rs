//! The sections of the benchmark.

use clap::ValueEnum;
use deepwell_probe::Hardware;
use serde::{Deserialize, Serialize};

use super::cases::{Case, cases_of};
use super::row::{Row, RowEvent};
use super::timer::{Timer, Timing};
use super::{Settings, device_copy};
use super::{model, moe};
use deepwell_trainer::TrainError;

/// A part of the benchmark.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Section {
    /// GEMMs in BF16 and MXFP8.
    Gemm,
    /// GEMMs of the experts of mixtures, in BF16 and MXFP8.
    Experts,
    /// Forward and backward of a layer of experts, beside a dense one.
    Moe,
    /// Block quantization along rows, columns and both.
    Quantize,
    /// Attention and its gradients.
    Attention,
    /// Norms and activations, alone and with the quantization of what they give.
    Norms,
    /// AdamW and the norm of the gradients, over all parameters of the model.
    Optimizer,
    /// One training step, op by op.
    Transformer,
    /// The forward pass of the model with its loss: tokens a second.
    Forward,
    /// Training steps of the model: tokens a second.
    Train,
    /// Predicted and measured peak of memory.
    Memory,
}

impl Section {
    /// All sections, in the order they run.
    pub const ALL: [Section; 11] = [
        Section::Gemm,
        Section::Experts,
        Section::Moe,
        Section::Quantize,
        Section::Attention,
        Section::Norms,
        Section::Optimizer,
        Section::Transformer,
        Section::Forward,
        Section::Train,
        Section::Memory,
    ];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Section::Gemm => "gemm",
            Section::Experts => "experts",
            Section::Moe => "moe",
            Section::Quantize => "quantize",
            Section::Attention => "attention",
            Section::Norms => "norms",
            Section::Optimizer => "optimizer",
            Section::Transformer => "transformer",
            Section::Forward => "forward",
            Section::Train => "train",
            Section::Memory => "memory",
        }
    }

    /// Whether the section runs whole steps of a model rather than single kernels.
    pub const fn is_of_model(self) -> bool {
        matches!(self, Section::Transformer | Section::Forward | Section::Train | Section::Memory)
    }
}

/// Measures sections in this process. Failures of single measurements are rows.
///
/// Memory is measured most exactly in a process that has not used the device before.
///
/// # Errors
/// The device, model or precision is unknown.
pub fn run_sections(
    settings: &Settings,
    hardware: &Hardware,
    sections: &[Section],
    on_event: &mut dyn FnMut(RowEvent),
) -> Result<(), TrainError> {
    let hardware = match settings.copy_gbps {
        Some(gbps) => device_copy::with_bandwidth(hardware, settings.device, gbps),
        None => hardware.clone(),
    };
    let of_model: Vec<Section> =
        sections.iter().copied().filter(|section| section.is_of_model()).collect();
    if !of_model.is_empty() {
        model::run(settings, &hardware, &of_model, on_event)?;
    }
    let of_kernels: Vec<Section> =
        sections.iter().copied().filter(|section| !section.is_of_model()).collect();
    if of_kernels.is_empty() {
        return Ok(());
    }
    let mut device = settings.device.open(&hardware)?;
    let mut timer = Timer::new(&mut device, &hardware, settings.iterations);
    for section in of_kernels {
        if section == Section::Moe {
            moe::run(settings, &mut timer, on_event)?;
            continue;
        }
        for case in cases_of(section, settings, &hardware)? {
            on_event(RowEvent::Note(format!(
                "{}: {} {} {}",
                section.name(),
                case.what,
                case.shape,
                case.dtype
            )));
            for row in measure(&mut timer, section, &case, &settings.kernels) {
                on_event(RowEvent::Row(Box::new(row)));
            }
        }
    }
    Ok(())
}

/// Returns the row of a case; with `kernels` a row for each matching kernel and tile. The first row
/// has the peer tasks.
fn measure(timer: &mut Timer<'_>, section: Section, case: &Case, kernels: &[String]) -> Vec<Row> {
    timer.routing = case.routing;
    let row = Row {
        shape: case.shape.clone(),
        dtype: case.dtype.clone(),
        ..Row::new(section, case.what.clone())
    };
    let choices = match timer.choice(&case.call) {
        Ok(choice) if kernels.is_empty() => vec![choice],
        Ok(_) => timer.choices(&case.call),
        Err(failure) => return vec![Row { failure: Some(failure), ..row }],
    };
    let is_named = |name: &str| kernels.iter().any(|part| name.contains(part.as_str()));
    let mut rows: Vec<Row> = choices
        .into_iter()
        .filter(|choice| kernels.is_empty() || is_named(&choice.kernel))
        .map(|choice| {
            let row = Row { kernel: choice.kernel.clone(), ..row.clone() };
            match timer.time_with(&case.call, choice) {
                Ok(timing) => timed(row, case, timing),
                Err(failure) => Row { failure: Some(failure), ..row },
            }
        })
        .collect();
    if let Some(first) = rows.first_mut() {
        first.peer_tasks = case.peers.clone();
    }
    rows
}

fn timed(mut row: Row, case: &Case, timing: Timing) -> Row {
    let cost = case.call.cost();
    let (work, unit) = match case.is_matrix {
        true => (cost.flops as f64 / 1e12, "TFLOP/s"),
        false => (cost.bytes() as f64 / 1e9, "GB/s"),
    };
    row.kernel = timing.kernel;
    row.time_s = Some(timing.time_s);
    row.spread_s = Some(timing.spread_s);
    row.rate = Some(work / timing.time_s);
    row.rate_unit = unit.to_string();
    row.roofline_s = Some(timing.roofline_s);
    row.bound = timing.bound.name().to_string();
    row.roofline_share = Some(timing.roofline_s / timing.time_s);
    row.with_detail("copies of the operands", timing.copies)
        .with_detail("samples", timing.samples)
        .with_detail("calls of a sample", timing.calls_per_sample)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use deepwell_kernels::cuda::{CudaBackend, FakeDriver, KernelImages};

    use super::*;
    use crate::fill::Pool;
    use deepwell_trainer::{Device, OpenDevice};

    /// The driver computes nothing, so the test only shows that each case has a kernel, and that
    /// the kernel can be prepared over every copy, captured and replayed.
    #[test]
    fn every_case_can_be_recorded_on_a_gpu() {
        let mut hardware = Hardware::preset("h200-x2").unwrap();
        // Operand copies fill twice the cache: a small cache needs few.
        for gpu in &mut hardware.gpus {
            gpu.l2_bytes = Some(4 << 20);
        }
        let device = Device::Cuda(0);
        let mut kernels = BTreeSet::new();
        for precision in ["mxfp8", "mxfp8-128"] {
            let settings = Settings {
                device,
                model: "parity-3m".to_string(),
                precision: precision.to_string(),
                beside_bf16: true,
                batch_size: 2,
                seq_len: 256,
                iterations: 1,
                copy_gbps: None,
                kernels: Vec::new(),
                mixtures: Vec::new(),
                mixture_tokens: 0,
            };
            let driver = FakeDriver::h200();
            let blas: Box<dyn deepwell_kernels::cuda::Blas> = Box::new(driver.blas());
            let images = KernelImages::empty();
            let backend = CudaBackend::new(Box::new(driver), Some(blas), images).unwrap();
            let target = device.target(&hardware).unwrap();
            let mut open =
                OpenDevice { backend: Box::new(backend), catalog: device.catalog(), target };
            let mut timer = Timer::new(&mut open, &hardware, 1);
            timer.warm_up = Duration::ZERO;
            // Contents do not matter here.
            timer.pool = Pool::of(4099, 1);
            let is_of_cases =
                |section: &Section| !section.is_of_model() && *section != Section::Moe;
            for section in Section::ALL.into_iter().filter(is_of_cases) {
                let mut cases = cases_of(section, &settings, &hardware).unwrap();
                // Cases from the size tables would fill this machine's memory.
                cases.retain(|case| case.call.bytes() < 64 << 20);
                assert!(!cases.is_empty(), "{}", section.name());
                for case in cases {
                    let chosen = timer.choice(&case.call).unwrap();
                    let of = |timer: &mut _, kernels: &[&str]| {
                        let kernels: Vec<String> = kernels.iter().map(|&k| k.into()).collect();
                        measure(timer, section, &case, &kernels)
                    };
                    let rows = of(&mut timer, &[]);
                    assert!(rows.len() == 1 && rows[0].kernel.starts_with(&chosen.kernel));
                    for row in [rows, of(&mut timer, &["cublaslt_mx", "sm90"])].concat() {
                        assert_eq!(row.failure, None, "{} {} {}", row.what, row.shape, row.dtype);
                        assert!(row.roofline_share.is_some_and(|share| share > 0.0), "{row:?}");
                        kernels.insert(row.kernel);
                    }
                }
            }
        }
        for kernel in ["cublaslt_mx_gemm", "cuda_sm90_mxfp8_gemm 256x128 in clusters of 1x2"] {
            assert!(kernels.contains(kernel), "{kernels:?}");
        }
    }
}
