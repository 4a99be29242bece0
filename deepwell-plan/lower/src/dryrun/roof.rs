//! Roofline times of calls, from the rates of a device and of its links.

use std::collections::HashMap;

use deepwell_ir::{Call, EventId, Instance, MathUnit, Op, ProcessGroup, Program, StreamId};
use deepwell_probe::{Endpoint, Gpu, Hardware, NumberFormat};

use super::{Bound, ExpertRoom};
use crate::gpu::gpu_of;

/// GB/s in each direction of 16 lanes of PCI Express 5, for GPUs of unknown links.
const PCIE_5_GBPS: f64 = 63.0;

/// Rates of a device in the units of the roofline.
#[derive(Clone, Debug)]
pub(super) struct Roof {
    f32_flops_per_s: f64,
    bf16_flops_per_s: f64,
    mxfp8_flops_per_s: f64,
    nvfp4_flops_per_s: f64,
    bytes_per_s: f64,
    /// Bandwidth to the other ranks of each group of the target.
    link_bytes_per_s: Vec<f64>,
    /// Bandwidth to and from host memory, in each direction.
    host_bytes_per_s: f64,
    /// Pairs of balanced routing relative to the capacity of experts' rows: grouped GEMMs compute
    /// only the rows present.
    expert_rows_share: f64,
}

impl Roof {
    /// The rates of the device of `program`, one of `programs`.
    pub(super) fn of(hardware: &Hardware, program: &Program, programs: &[Program]) -> Roof {
        let target = &program.target;
        let roof = match gpu_of(hardware, target) {
            Some(gpu) => Roof::of_gpu(gpu),
            None => Roof::of_cpu(hardware),
        };
        let groups = target.ranks.groups.iter();
        let link = |group| match gpu_of(hardware, target) {
            Some(gpu) => link_gbps(hardware, gpu, &other_gpus(group, program, programs)) * 1e9,
            // CPU ranks are threads and communicate through memory.
            None => roof.bytes_per_s,
        };
        let link_bytes_per_s = groups.map(link).collect();
        Roof { link_bytes_per_s, expert_rows_share: even_share(program), ..roof }
    }

    fn of_gpu(gpu: &Gpu) -> Roof {
        let tflops = |format| gpu.peak_tflops(format);
        let f32_rate = tflops(NumberFormat::Fp32).unwrap_or(1.0);
        let bf16 = tflops(NumberFormat::Bf16).unwrap_or(f32_rate);
        let mxfp8 = tflops(NumberFormat::Mxfp8).or(tflops(NumberFormat::Fp8));
        Roof {
            f32_flops_per_s: f32_rate * 1e12,
            bf16_flops_per_s: bf16 * 1e12,
            mxfp8_flops_per_s: mxfp8.unwrap_or(bf16) * 1e12,
            nvfp4_flops_per_s: tflops(NumberFormat::Nvfp4).unwrap_or(bf16) * 1e12,
            bytes_per_s: gpu.hbw_gbps * 1e9,
            link_bytes_per_s: Vec::new(),
            host_bytes_per_s: gpu.pcie.as_ref().map_or(PCIE_5_GBPS, |pcie| pcie.gbps) * 1e9,
            expert_rows_share: 1.0,
        }
    }

    fn of_cpu(hardware: &Hardware) -> Roof {
        let cpu = &hardware.cpu;
        Roof {
            f32_flops_per_s: cpu.peak_gflops(NumberFormat::Fp32) * 1e9,
            bf16_flops_per_s: cpu.peak_gflops(NumberFormat::Bf16) * 1e9,
            mxfp8_flops_per_s: cpu.peak_gflops(NumberFormat::Mxfp8) * 1e9,
            nvfp4_flops_per_s: cpu.peak_gflops(NumberFormat::Nvfp4) * 1e9,
            bytes_per_s: cpu.memory_gbps_or_assumed() * 1e9,
            link_bytes_per_s: Vec::new(),
            host_bytes_per_s: cpu.memory_gbps_or_assumed() * 1e9,
            expert_rows_share: 1.0,
        }
    }

    /// Least time of one run of a call, at the best share of peak measured for this kind of kernel.
    pub(super) fn time(&self, call: &Call, instance: Instance) -> (f64, Bound) {
        self.time_at(call, instance, call.peak_share)
    }

    /// Least time of one run of a call by the datasheet, for any kernel.
    pub(super) fn datasheet_time(&self, call: &Call, instance: Instance) -> (f64, Bound) {
        self.time_at(call, instance, 1.0)
    }

    /// Least time of one run of a call at a share of its unit's peak.
    fn time_at(&self, call: &Call, instance: Instance, peak_share: f64) -> (f64, Bound) {
        let cost = call.cost_in(instance);
        let rate = match call.unit {
            MathUnit::F32 => self.f32_flops_per_s,
            MathUnit::Bf16 => self.bf16_flops_per_s,
            MathUnit::Mxfp8 => self.mxfp8_flops_per_s,
            MathUnit::Nvfp4 => self.nvfp4_flops_per_s,
        };
        let link_bytes_per_s = match &call.op {
            Op::Collective(op) => self.link_bytes_per_s.get(op.group.index()).copied(),
            Op::HostCopy(_) => Some(self.host_bytes_per_s),
            _ => None,
        };
        let link_s = link_bytes_per_s.map_or(0.0, |rate| cost.bytes_on_link as f64 / rate);
        // Bytes of weights are scaled by the same share, so that the time stays a lower bound.
        let rows_share = if is_grouped_gemm(&call.op) { self.expert_rows_share } else { 1.0 };
        let memory_s = rows_share * cost.bytes() as f64 / self.bytes_per_s;
        let compute_s = rows_share * cost.flops as f64 / (peak_share * rate);
        if compute_s > memory_s && compute_s > link_s {
            (compute_s, Bound::Compute)
        } else if link_s > memory_s {
            (link_s, Bound::Link)
        } else {
            (memory_s, Bound::Memory)
        }
    }

    /// Least time of the runs of a call in a step.
    pub(super) fn step_time(&self, call: &Call, runs: usize) -> (f64, Bound) {
        let [first, other] =
            [true, false].map(|is_first| self.time(call, Instance { is_first, ..Instance::ONLY }));
        match runs {
            0 => (0.0, first.1),
            1 => first,
            _ => (first.0 + other.0 * (runs - 1) as f64, other.1),
        }
    }

    /// Least time of a step, with the bodies in sequence.
    pub(super) fn program_time_s(&self, program: &Program) -> f64 {
        self.bodies_time_s(program, &|call, instance| self.time(call, instance).0)
    }

    /// [`Roof::program_time_s`] with collectives that take no time.
    pub(super) fn computing_time_s(&self, program: &Program) -> f64 {
        self.bodies_time_s(program, &|call, instance| match call.op {
            Op::Collective(_) => 0.0,
            _ => self.time(call, instance).0,
        })
    }

    fn bodies_time_s(&self, program: &Program, time_s: &dyn Fn(&Call, Instance) -> f64) -> f64 {
        let of_body = |(body, runs): (&deepwell_ir::Body, usize)| {
            let calls = &program.calls[body.calls.clone()];
            let run_s = |is_first, is_last| {
                calls_time_s(calls, Instance { is_first, is_last, ..Instance::ONLY }, time_s)
            };
            match runs {
                0 => 0.0,
                1 => run_s(true, true),
                _ => {
                    let between = run_s(false, false) * (runs - 2) as f64;
                    run_s(true, false) + between + run_s(false, true)
                }
            }
        };
        program.bodies.iter().zip(program.runs_per_step()).map(of_body).sum()
    }

    /// Least time of one run of the calls of a body: serial within a stream, with overlapping
    /// streams that wait for each other's events.
    pub(super) fn body_time_s(&self, calls: &[Call], instance: Instance) -> f64 {
        calls_time_s(calls, instance, &|call, instance| self.time(call, instance).0)
    }
}

/// Least time of the calls of an instance of a body, where each call takes `time_s`: the end of the
/// last stream, or the sum of all compute if larger, because streams share a device. Collectives
/// and copies to and from the host use links, not SMs.
fn calls_time_s(
    calls: &[Call],
    instance: Instance,
    time_s: &dyn Fn(&Call, Instance) -> f64,
) -> f64 {
    let mut streams: HashMap<StreamId, f64> = HashMap::new();
    let mut events: HashMap<EventId, f64> = HashMap::new();
    let (mut last_s, mut computed_s) = (0.0f64, 0.0);
    for call in calls {
        let stream_s = streams.entry(call.stream).or_default();
        let waits = call.waits.iter().filter_map(|event| events.get(event).copied());
        let begin_s = waits.fold(*stream_s, f64::max);
        let own_s = if call.runs_in(instance) { time_s(call, instance) } else { 0.0 };
        let end_s = begin_s + own_s;
        *stream_s = end_s;
        events.extend(call.records.map(|event| (event, end_s)));
        last_s = last_s.max(end_s);
        if !matches!(call.op, Op::Collective(_) | Op::HostCopy(_)) {
            computed_s += own_s;
        }
    }
    last_s.max(computed_s)
}

fn is_grouped_gemm(op: &Op) -> bool {
    matches!(
        op.leading(),
        Op::GroupedGemm(_)
            | Op::GroupedGemmDgrad(_)
            | Op::GroupedGemmWgrad(_)
            | Op::ScaledGroupedGemm(_)
    )
}

/// See [`Roof::expert_rows_share`]; 1 for a model without experts.
fn even_share(program: &Program) -> f64 {
    let grouped = program.calls.iter().find_map(|call| match &call.op {
        Op::GroupedGemm(op) => Some(op.grouped),
        Op::ScaledGroupedGemm(op) => Some(op.grouped),
        _ => None,
    });
    let (Some(room), Some(grouped)) = (ExpertRoom::of(program), grouped) else { return 1.0 };
    let pairs = grouped.pairs_of(room.most as usize) as f64;
    if pairs > 0.0 { (room.even as f64 / pairs).min(1.0) } else { 1.0 }
}

/// The GPUs of the other ranks of a group, as far as `programs` has these ranks.
fn other_gpus(group: &ProcessGroup, program: &Program, programs: &[Program]) -> Vec<usize> {
    let others = group.ranks.iter().filter(|&&rank| rank != program.rank);
    let gpu_of_rank = |&rank: &u32| {
        let other = programs.iter().find(|program| program.rank == rank)?;
        other.target.gpu
    };
    others.filter_map(gpu_of_rank).collect()
}

/// GB/s per direction of the slowest link from `gpu` to one of `others`: a collective waits for
/// this link. Without named GPUs, the fastest link of the machine; without a link, PCI Express;
/// infinite if nothing is known, so that the time stays a lower bound.
fn link_gbps(hardware: &Hardware, gpu: &Gpu, others: &[usize]) -> f64 {
    let pcie = gpu.pcie.as_ref().map_or(f64::INFINITY, |pcie| pcie.gbps);
    let to = |other: &Gpu| {
        let [own, other] = [gpu, other].map(|gpu| Endpoint::Gpu(gpu.index));
        hardware.link_between(own, other).and_then(|link| link.gbps).unwrap_or(pcie)
    };
    let named = others.iter().filter_map(|&other| hardware.gpus.get(other));
    let any = || hardware.gpus.iter().filter(|other| other.index != gpu.index);
    let narrowest = named.map(to).reduce(f64::min);
    narrowest.or_else(|| any().map(to).reduce(f64::max)).unwrap_or(pcie)
}
