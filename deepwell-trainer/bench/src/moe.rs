//! The section `moe`: forward and backward of an MoE layer, call by call and as a whole, compared
//! with a dense layer of equal FLOPs.

use deepwell_ir::{Call, Op, Phase};
use deepwell_plan::roofline;
use deepwell_probe::Hardware;

use super::cases::{is_gemm, what_text};
use super::choices::Choices;
use super::expert_gemms::Load;
use super::layer::{Layer, MixtureSize, is_of_layer, step};
use super::layer_time::LayerTime;
use super::peer_task::PeerTask;
use super::row::{Row, RowEvent};
use super::timer::{Timer, percentile};
use super::{Section, Settings};
use deepwell_trainer::TrainError;

/// Runs the section.
///
/// # Errors
/// The precision is unknown.
pub(super) fn run(
    settings: &Settings,
    timer: &mut Timer<'_>,
    on_event: &mut dyn FnMut(RowEvent),
) -> Result<(), TrainError> {
    for &size in &settings.mixtures {
        for precision in settings.precisions() {
            let shape = format!("{} tokens, {size}", settings.mixture_tokens);
            on_event(RowEvent::Note(format!("moe: {precision} {shape}")));
            let named = |row: Row| Row {
                shape: match row.shape.as_str() {
                    "" => shape.clone(),
                    more => format!("{shape} {more}"),
                },
                dtype: precision.to_string(),
                ..row
            };
            let (rows, failure) = rows_of(settings, size, precision, timer);
            let failed = failure.map(|failure| Row::failed(Section::Moe, "layer", failure));
            for row in rows.into_iter().chain(failed) {
                on_event(RowEvent::Row(Box::new(named(row))));
            }
        }
    }
    Ok(())
}

/// Rows of a size in a precision, and the failure that ended them early.
fn rows_of(
    settings: &Settings,
    size: MixtureSize,
    precision: &str,
    timer: &mut Timer<'_>,
) -> (Vec<Row>, Option<String>) {
    let mut rows = Vec::new();
    let failure = measure(settings, size, precision, timer, &mut rows).err();
    (rows, failure)
}

fn measure(
    settings: &Settings,
    size: MixtureSize,
    precision: &str,
    timer: &mut Timer<'_>,
    rows: &mut Vec<Row>,
) -> Result<(), String> {
    let tokens = settings.mixture_tokens;
    let lowered = |layer| {
        let device = &*timer.device;
        step(layer, size, tokens, precision, device.catalog.as_ref(), &device.target)
            .map_err(|error| error.to_string())
    };
    let (mixture, dense) = (lowered(Layer::Mixture)?, lowered(Layer::Dense)?);
    let weights = |call: &Call| is_of_layer(call) && call.phase == Phase::Weights;
    let weights_s = LayerTime::of(timer, &mixture, weights, None)?.whole_s();
    let mut balanced_s = None;
    for load in Load::ALL {
        let routing = Choices::of(load, size, tokens);
        let time = LayerTime::of(timer, &mixture, is_of_pass, Some(&routing))?;
        let mut row = time.whole_row(Layer::Mixture, timer.hardware, weights_s);
        if let Some(balanced_s) = balanced_s {
            let more = 100.0 * (time.whole_s() / balanced_s - 1.0);
            row = row.with_detail("over balanced", format!("{more:+.1} %"));
        }
        let fp8 = precision != "bf16";
        row.peer_tasks = [false, true]
            .into_iter()
            .filter(|&of_peer| fp8 || !of_peer)
            .map(|fp8| PeerTask::MoeLayer {
                tokens,
                hidden: size.hidden,
                width: size.width,
                top_k: size.top_k,
                pairs: routing.load.clone(),
                fp8,
            })
            .collect();
        row.shape = load.name().to_string();
        rows.push(row);
        if balanced_s.is_none() {
            balanced_s = Some(time.whole_s());
            rows.extend(time.call_rows(timer.hardware));
        }
    }
    let weights_s = LayerTime::of(timer, &dense, weights, None)?.whole_s();
    let time = LayerTime::of(timer, &dense, is_of_pass, None)?;
    let mut row = time.whole_row(Layer::Dense, timer.hardware, weights_s);
    if let Some(balanced_s) = balanced_s {
        let times = format!("{:.2}", balanced_s / time.whole_s());
        row = row.with_detail("the mixture takes, times as long", times);
    }
    rows.push(row);
    Ok(())
}

/// Whether a call is of the layer's forward or backward pass.
fn is_of_pass(call: &Call) -> bool {
    is_of_layer(call) && matches!(call.phase, Phase::Forward | Phase::Backward)
}

impl LayerTime {
    fn whole_row(&self, layer: Layer, hardware: &Hardware, weights_s: f64) -> Row {
        let calls = &self.program.calls;
        let time_s = self.whole_s();
        let of_gemms: u64 =
            calls.iter().filter(|call| is_gemm(&call.op)).map(|call| call.cost.flops).sum();
        let roofline_s: f64 =
            calls.iter().map(|call| roofline(&self.program, call, hardware).0).sum();
        let sum_s = self.sum_s(|_| true);
        let share = |part_s: f64| format!("{:.1} %", 100.0 * part_s / sum_s);
        let us = |time_s: f64| format!("{:.1}", time_s * 1e6);
        let gemms_s = self.sum_s(is_gemm);
        let activation_s = self.sum_s(is_activation);
        Row {
            kernel: format!("{} calls", calls.len()),
            time_s: Some(time_s),
            spread_s: Some((percentile(&self.samples_s, 0.1), percentile(&self.samples_s, 0.9))),
            rate: Some(of_gemms as f64 / time_s / 1e12),
            rate_unit: "TFLOP/s".to_string(),
            roofline_s: Some(roofline_s),
            bound: "roofline".to_string(),
            roofline_share: Some(roofline_s / time_s),
            ..Row::new(Section::Moe, layer.name())
        }
        .with_detail("forward us", us(self.forward_s))
        .with_detail("backward us", us(time_s - self.forward_s))
        .with_detail("sum of the calls us", us(sum_s))
        .with_detail("GEMMs", share(gemms_s))
        .with_detail("activation", share(activation_s))
        .with_detail("all else", share(sum_s - gemms_s - activation_s))
        .with_detail("weights by themselves, once a step, us", us(weights_s))
    }

    fn call_rows(&self, hardware: &Hardware) -> Vec<Row> {
        let sum_s = self.sum_s(|_| true);
        let calls = self.program.calls.iter().zip(&self.calls_s);
        calls
            .map(|(call, &time_s)| {
                let (work, unit) = match is_gemm(&call.op) {
                    true => (call.cost.flops as f64 / 1e12, "TFLOP/s"),
                    false => (call.cost.bytes() as f64 / 1e9, "GB/s"),
                };
                let (roofline_s, bound) = roofline(&self.program, call, hardware);
                let tile =
                    call.choice.tile.as_ref().map_or(String::new(), |tile| format!(" {tile}"));
                Row {
                    kernel: format!("{}{tile}", call.choice.kernel),
                    shape: call.name.clone(),
                    time_s: Some(time_s),
                    rate: Some(work / time_s),
                    rate_unit: unit.to_string(),
                    roofline_s: Some(roofline_s),
                    bound: bound.name().to_string(),
                    roofline_share: Some(roofline_s / time_s),
                    ..Row::new(Section::Moe, what_text(&call.op))
                }
                .with_detail("share of the layer", format!("{:.1} %", 100.0 * time_s / sum_s))
            })
            .collect()
    }
}

fn is_activation(op: &Op) -> bool {
    matches!(
        op.leading(),
        Op::SwiGlu(_) | Op::SwiGluBackward(_) | Op::ExpertSwiGlu(_) | Op::ExpertSwiGluBackward(_)
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use deepwell_kernels::cuda::{Blas, CudaBackend, FakeDriver, KernelImages};

    use super::*;
    use deepwell_trainer::{Device, OpenDevice};

    fn settings(device: Device, precision: &str) -> Settings {
        Settings {
            device,
            model: "moe-micro".to_string(),
            precision: precision.to_string(),
            beside_bf16: true,
            batch_size: 1,
            seq_len: 64,
            iterations: 1,
            copy_gbps: None,
            kernels: Vec::new(),
            mixtures: vec!["8x128x128x2".parse().unwrap()],
            mixture_tokens: 192,
        }
    }

    /// Checks for both passes with all of their calls, both loads, the dense layer and the peers.
    fn check_rows(rows: &[Row], precision: &str) {
        let failed: Vec<&Row> = rows.iter().filter(|row| row.failure.is_some()).collect();
        assert!(failed.is_empty(), "{failed:?}");
        let find = |dtype: &str, what: &str| {
            let is_it = |row: &&Row| row.dtype == dtype && row.what.contains(what);
            rows.iter().find(is_it).unwrap_or_else(|| panic!("no {what} in {dtype}"))
        };
        for dtype in ["bf16", precision] {
            let gemm = if dtype == "bf16" { "grouped_gemm_dgrad" } else { "gemm dgrad" };
            for what in
                ["route", "dispatch", "permute", "expert_swiglu_backward", "unpermute", gemm]
            {
                assert!(find(dtype, what).time_s > Some(0.0), "{what}");
            }
            let layer_rows: Vec<&Row> =
                rows.iter().filter(|row| row.dtype == dtype && row.what == "moe layer").collect();
            assert_eq!(layer_rows.len(), 2, "balanced and skewed");
            assert!(
                layer_rows[0].shape.ends_with("balanced") && layer_rows[1].shape.ends_with("zipf")
            );
            let detail = |name: &str| layer_rows[1].details.iter().any(|(known, _)| known == name);
            assert!(detail("over balanced") && detail("all else"), "{:?}", layer_rows[1].details);
            assert_eq!(layer_rows[0].peer_tasks.len(), if dtype == "bf16" { 1 } else { 2 });
            assert!(find(dtype, "dense layer").rate > Some(0.0));
        }
    }

    fn rows(settings: &Settings, timer: &mut Timer<'_>) -> Vec<Row> {
        let mut rows = Vec::new();
        let mut take = |event| {
            if let RowEvent::Row(row) = event {
                rows.push(*row);
            }
        };
        run(settings, timer, &mut take).unwrap();
        rows
    }

    /// The router is looked at where something computes.
    #[test]
    fn a_processor_times_the_layer() {
        let hardware = deepwell_probe::probe();
        let settings = settings(Device::Cpu, "mxfp8");
        let mut open = settings.device.open(&hardware).unwrap();
        let mut timer = Timer::new(&mut open, &hardware, 1);
        check_rows(&rows(&settings, &mut timer), "mxfp8");
    }

    /// A router with other choices invalidates the measurement.
    #[test]
    fn another_load_than_the_one_asked_for_is_refused() {
        let hardware = deepwell_probe::probe();
        let settings = settings(Device::Cpu, "bf16");
        let mut open = settings.device.open(&hardware).unwrap();
        let (size, tokens) = (settings.mixtures[0], settings.mixture_tokens);
        let lowered =
            step(Layer::Mixture, size, tokens, "bf16", open.catalog.as_ref(), &open.target);
        let mut timer = Timer::new(&mut open, &hardware, 1);
        let mut routing = Choices::of(Load::Balanced, size, tokens);
        routing.load.swap(0, 1);
        routing.load[0] += 1;
        let refused = LayerTime::of(&mut timer, &lowered.unwrap(), is_of_pass, Some(&routing));
        assert!(refused.err().unwrap().contains("expected the router to load experts with"));
    }

    /// On a driver that computes nothing, each call has a kernel and can be prepared and captured.
    #[test]
    fn a_gpu_records_the_layer() {
        let hardware = Hardware::preset("h200-x2").unwrap();
        for precision in ["mxfp8", "mxfp8-128"] {
            let settings = settings(Device::Cuda(0), precision);
            let driver = FakeDriver::h200();
            let blas: Box<dyn Blas> = Box::new(driver.blas());
            let backend =
                CudaBackend::new(Box::new(driver), Some(blas), KernelImages::empty()).unwrap();
            let target = settings.device.target(&hardware).unwrap();
            let catalog = settings.device.catalog();
            let mut open = OpenDevice { backend: Box::new(backend), catalog, target };
            let mut timer = Timer::new(&mut open, &hardware, 1);
            timer.warm_up = Duration::ZERO;
            for layer in [Layer::Mixture, Layer::Dense] {
                let (size, tokens) = (settings.mixtures[0], settings.mixture_tokens);
                let device = &*timer.device;
                let catalog = device.catalog.as_ref();
                let target = &device.target;
                let lowered = step(layer, size, tokens, precision, catalog, target).unwrap();
                let time = LayerTime::of(&mut timer, &lowered, is_of_pass, None).unwrap();
                assert!(time.program.calls.len() > 8 && time.whole_s() > 0.0);
                let row = time.whole_row(layer, &hardware, 0.0);
                assert!(row.roofline_share.is_some_and(|share| share > 0.0), "{row:?}");
            }
        }
    }
}
