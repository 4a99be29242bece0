//! Data-parallel communication and the optimizer.

use super::{Communication, Cost, Overlap, StepTime};
use crate::collectives::Collective;
use crate::memory::{StageLayers, layer_parameters};
use deepwell_lower::schedule::OpTimes;

/// Share of a step's passes overlapped with gradient reduction and weight gathering.
const OVERLAP_WINDOW: f64 = 0.9;
/// Share of communication always exposed: the first and the last bucket.
const ALWAYS_EXPOSED: f64 = 0.05;

impl Cost<'_> {
    /// Adds gradient reduction, weight gathering and the optimizer to a pipeline's time.
    pub(super) fn with_data_parallel(
        &self,
        times: &[OpTimes],
        pipeline: f64,
        bubble: f64,
    ) -> StepTime {
        let (shape, at) = (self.shape, self.at);
        let held = StageLayers::of(shape, at, 0);
        let of_layers = layer_parameters(shape, at, &held);
        let tables = if at.pp == 1 && !shape.tied { 2.0 } else { 1.0 };
        let tables = tables * (shape.vocab * shape.hidden) as f64 / at.tp as f64;
        let (dense, routed) = (of_layers.dense + tables, of_layers.routed);
        let (ranks, of_experts) = (at.dp * at.cp, at.expert_dp());
        let [mut of_dense, of_routed] = self.gathered_layers(&held, [ranks, of_experts]);
        of_dense = of_dense.times(of_layers.dense).plus(self.gathered_table().times(tables));
        let of_routed = of_routed.times(routed);
        let groups = [
            (dense, of_dense, ranks, self.local(ranks, at.tp)),
            (routed, of_routed, of_experts, self.local(of_experts, at.etp * at.ep)),
        ];
        let (mut reduce, mut gather) = (0.0, 0.0);
        let (mut held_states, mut copied) = (0.0, 0.0);
        // Under ZeRO-2 and 3 each layer is reduced and gathered separately, with the protocol
        // chosen by NCCL for the smaller size, and with its latency.
        let pieces = if at.zero >= 2 { held.count().max(1) as f64 } else { 1.0 };
        for (parameters, gathered, ranks, local) in groups {
            let time = |collective, bytes: f64| {
                pieces * self.fabric.time(collective, bytes / pieces, ranks, local).seconds
            };
            let gradients = parameters * self.rules.gradient_bytes;
            if at.zero == 0 {
                reduce += time(Collective::AllReduce, gradients);
                held_states += parameters;
            } else {
                reduce += time(Collective::ReduceScatter, gradients);
                gather += time(Collective::AllGather, gathered.moved);
                copied += if ranks > 1 { gathered.copied } else { 0.0 };
                held_states += parameters / ranks as f64;
            }
        }
        let of = |pick: fn(&OpTimes) -> f64| times.iter().map(pick).fold(0.0, f64::max);
        // Weight copies are made in each pass (ZeRO-3), or once after the update.
        let copied_s = if copied > 0.0 { self.kernels(copied, 4.0 * pieces) } else { 0.0 };
        let (in_passes, once) = if at.zero >= 3 { (copied_s, 0.0) } else { (0.0, copied_s) };
        let forward = of(|times| times.forward) + in_passes;
        let backward = of(|times| times.dgrad + times.wgrad) + in_passes;
        let count = at.micro_batches as f64;
        let bubble_s = bubble * pipeline;
        let mut pipeline = pipeline;
        let mut data = Overlap { seconds: reduce + gather, exposed: reduce + gather };
        // Communication after the passes.
        let mut tail = data.exposed;
        let slow = self.rules.interference - 1.0;
        // Seconds of a pass overlapped with communication, and the exposed part of the
        // communication.
        let both = |compute: f64, comm: f64| {
            let slowed = compute + slow * comm.min(compute);
            (slowed.max(comm), (comm - slowed).max(0.0))
        };
        if at.zero >= 3 {
            // Weights are gathered in each pass, layer by layer, overlapped with the previous
            // layer.
            let comm = [gather, gather + reduce];
            let (first, second) = (both(forward, comm[0]), both(backward, comm[1]));
            let idle = pipeline - count * (forward + backward - 2.0 * in_passes);
            pipeline = count * (first.0 + second.0) + idle;
            // The first layer's gather and the last layer's reduction have no compute to overlap
            // with.
            tail = (gather + reduce) / shape.layers as f64;
            data.seconds = count * (comm[0] + comm[1]);
            data.exposed = count * (first.1 + second.1) + tail;
        } else if self.rules.dp_overlap {
            let hidden = OVERLAP_WINDOW * (forward + backward);
            pipeline += tail.min(hidden) * slow;
            tail = (tail - hidden).max(ALWAYS_EXPOSED * tail);
            data.exposed = tail;
            if at.zero == 2 {
                // A rank holds only its slice of the gradients, so each micro-batch is reduced.
                let (pass, exposed) = both(backward, reduce);
                pipeline += (count - 1.0) * (pass - backward);
                data.seconds += (count - 1.0) * reduce;
                data.exposed += (count - 1.0) * exposed;
            }
        }
        // Reads gradient, master weight and two moments; writes master, moments and the copy.
        let optimizer = match at.offload {
            false => self.kernels(held_states * 34.0, 40.0),
            true => self.gpu.host_optimizer_s(12.0 * held_states),
        };
        let optimizer = optimizer + once;
        // The first stage has an additional layer if layers do not divide evenly.
        let in_layers =
            self.layer(shape.layers - 1).communication.times(count * held.count() as f64);
        StepTime {
            seconds: pipeline + tail + optimizer,
            pipeline,
            bubble,
            bubble_s,
            communication: Communication { data, ..in_layers },
            optimizer,
        }
    }
}
