//! The components of a program's memory, and their sum.

use deepwell_ir::MemoryKind;
use serde::{Deserialize, Serialize};

use super::landmarks::Landmarks;
use crate::memory::StageMemory;
use deepwell_lower::RankReport;
use deepwell_lower::arena::align;
use deepwell_lower::counting::alive_bytes;
use deepwell_lower::counting::{Counted, Transient, further_copy_bytes, shared_operand_lifetimes};

/// Kinds of persistent values.
const PERSISTENT: [MemoryKind; 4] =
    [MemoryKind::Optimizer, MemoryKind::Gradients, MemoryKind::Weights, MemoryKind::Host];

/// Activations in flight on a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InFlight {
    /// Micro-batches in flight through a chunk.
    pub(super) slots: usize,
    /// Buffers for received messages of other stages.
    pub(super) places: usize,
}

/// Memory of a rank's program, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramBytes {
    /// Master weights and moments.
    pub optimizer: u64,
    /// Gradients.
    pub gradients: u64,
    /// Compute copies of weights.
    pub weights: u64,
    /// Inputs and outputs of the host.
    pub host: u64,
    /// Values living within a step.
    pub transient: u64,
    /// Room for GEMMs with BF16 fallback.
    pub reserve: u64,
    /// Outside of the arena.
    pub backend: u64,
}

impl ProgramBytes {
    /// The bytes of a whole program, from the report of a dry run.
    pub fn of_report(rank: &RankReport) -> ProgramBytes {
        let of = |kind: MemoryKind| rank.bytes_at_peak.get(kind.name()).copied().unwrap_or(0);
        let [optimizer, gradients, weights, host] = PERSISTENT.map(of);
        ProgramBytes {
            optimizer,
            gradients,
            weights,
            host,
            transient: rank.arena_bytes.saturating_sub(optimizer + gradients + weights + host),
            reserve: rank.reserved_bytes,
            backend: rank.peak_bytes - rank.arena_bytes - rank.reserved_bytes,
        }
    }

    /// Sum of all components.
    pub fn peak(&self) -> u64 {
        let arena = self.optimizer + self.gradients + self.weights + self.host + self.transient;
        arena + self.reserve + self.backend
    }

    /// Converts to [`StageMemory`]; host batches and staging are taken from `closed`.
    pub(crate) fn of_stage(&self, closed: &StageMemory) -> StageMemory {
        let [parameters, gradients, optimizer] =
            [self.weights, self.gradients, self.optimizer].map(|bytes| bytes as f64);
        StageMemory {
            parameters,
            gradients,
            optimizer,
            activations: self.transient as f64,
            logits: 0.0,
            workspace: (self.host + self.reserve) as f64,
            outside: self.backend as f64,
            host_batches: closed.host_batches,
            host_optimizer: closed.host_optimizer,
            host: parameters + optimizer + closed.host_optimizer + closed.host_batches,
        }
    }
}

/// Sizes that grow with the number of layers. Differences may be negative.
#[derive(Clone, Debug, Default)]
struct Sizes {
    /// By kind: optimizer, gradients, weights, host.
    persistent: [i64; 4],
    /// Host inputs per slot, not included in `persistent`.
    host_slot: i64,
    /// Bytes per slot of values living across bodies.
    slot: i64,
    slot_shared: Landmarks,
    /// Bytes of values within a body.
    local: i64,
    local_alive: Landmarks,
    local_shared: Landmarks,
    place: i64,
}

impl Sizes {
    fn of(counted: &Counted) -> Sizes {
        let program = &counted.program;
        let slots = program.slots as i64;
        let persistent_bytes = |kind: MemoryKind| -> i64 {
            let values = program.values_of(kind);
            values.map(|value| align(value.range.bytes) as i64).sum()
        };
        let mut persistent = PERSISTENT.map(persistent_bytes);
        let in_slots = program.values.iter().filter(|value| value.slot_stride_bytes > 0);
        let (host, kept): (Vec<_>, Vec<_>) = in_slots.partition(|it| it.memory.is_persistent());
        let host_slot = host.iter().map(|value| value.slot_stride_bytes as i64).sum();
        persistent[3] -= host_slot;
        let slot = kept.iter().map(|value| value.slot_stride_bytes as i64).max().unwrap_or(0);
        let handover = program.handover.as_ref();
        let place = handover.map_or(0, |handover| handover.place_bytes as i64);
        let landing = handover.map_or(0, |handover| i64::from(handover.places)) * place;
        let [slot_shared, local_shared] = shared_operand_lifetimes(program)
            .map(|lifetimes| Landmarks::of(program, &alive_bytes(&lifetimes)));
        Sizes {
            persistent,
            host_slot,
            slot,
            slot_shared,
            local: program.arena.transient_bytes() as i64 - slots * slot - landing,
            local_alive: Landmarks::of(program, &counted.alive_bytes),
            local_shared,
            place,
        }
    }

    /// `self` plus `[all, of_chunk]` times the difference of `to` and `from`, which differ by
    /// `layers`.
    fn grown(self, from: &Sizes, to: &Sizes, [all, of_chunk]: [i64; 2], layers: i64) -> Sizes {
        let persistent = std::array::from_fn(|kind| {
            let further = to.persistent[kind] - from.persistent[kind];
            self.persistent[kind] + all * further / layers
        });
        let grow = |own: i64, from: i64, to: i64| own + of_chunk * (to - from) / layers;
        let all_alive = |own: Landmarks, from: &Landmarks, to: &Landmarks| {
            own.grown(from, to, of_chunk, layers)
        };
        let local_alive = all_alive(self.local_alive, &from.local_alive, &to.local_alive);
        // The packing overhead differs from program to program and does not grow per layer, so it
        // is scaled as a share of the live bytes.
        let local = match [from, to].map(Sizes::packing_share) {
            [Some(of_from), Some(of_to)] if local_alive.peak() > 0 => {
                (local_alive.peak() as f64 * of_from.max(of_to)) as i64
            }
            _ => grow(self.local, from.local, to.local),
        };
        Sizes {
            persistent,
            host_slot: grow(self.host_slot, from.host_slot, to.host_slot),
            slot: grow(self.slot, from.slot, to.slot),
            slot_shared: all_alive(self.slot_shared, &from.slot_shared, &to.slot_shared),
            local,
            local_alive,
            local_shared: all_alive(self.local_shared, &from.local_shared, &to.local_shared),
            place: grow(self.place, from.place, to.place),
        }
    }

    /// Bytes of values within a body over the live bytes at the fullest call.
    fn packing_share(&self) -> Option<f64> {
        let alive = self.local_alive.peak();
        (alive > 0).then(|| self.local as f64 / alive as f64)
    }

    fn persistent(&self, in_flight: &InFlight) -> i64 {
        self.persistent.iter().sum::<i64>() + in_flight.slots as i64 * self.host_slot
    }

    fn transient(&self, in_flight: &InFlight) -> Transient {
        let [slots, places] = [in_flight.slots, in_flight.places].map(|count| count as i64);
        let landing = places * self.place;
        let sum = |in_slot: i64, local: i64| (slots * in_slot + local).max(0) as usize;
        Transient {
            bytes: sum(self.slot, self.local + landing),
            alive: sum(self.slot, self.local_alive.peak() + landing),
            shared: sum(self.slot_shared.peak(), self.local_shared.peak()),
        }
    }
}

/// The components of a stage's program.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    planned: Sizes,
    /// Sizes of the BF16 program, and bytes by which the larger weight copies exceed the planned
    /// copies.
    in_bf16: Option<(Sizes, i64)>,
    backend: i64,
}

impl Parts {
    pub(super) fn of(counted: &Counted, fallback: Option<&Counted>) -> Parts {
        let of_fallback = |fallback: &Counted| {
            let further = further_copy_bytes(&counted.program, &fallback.program);
            (Sizes::of(fallback), further as i64)
        };
        Parts {
            planned: Sizes::of(counted),
            in_bf16: fallback.map(of_fallback),
            backend: counted.program.fixed_overhead_bytes as i64,
        }
    }

    /// Transient bytes, with room for BF16 fallback.
    pub(super) fn within_step(&self, in_flight: &InFlight) -> usize {
        let planned = self.planned.transient(in_flight);
        self.in_bf16.as_ref().map_or(planned.bytes, |(in_bf16, _)| {
            Transient::of_mixtures(planned, in_bf16.transient(in_flight))
        })
    }

    /// Bytes kept by a micro-batch.
    pub(super) fn kept(&self) -> i64 {
        self.planned.slot + self.planned.local
    }

    /// Adds the difference of `to` and `from`, a difference of `layers` layers, `times` per layer:
    /// for persistent values the additional layers of all chunks, for activations those of the
    /// largest chunk.
    pub(super) fn grow(&mut self, from: &Parts, to: &Parts, times: [usize; 2], layers: usize) {
        let (times, layers) = (times.map(|count| count as i64), layers as i64);
        let grown = |own: &mut Sizes, from: &Sizes, to: &Sizes| {
            *own = std::mem::take(own).grown(from, to, times, layers);
        };
        grown(&mut self.planned, &from.planned, &to.planned);
        let in_bf16 = (&mut self.in_bf16, &from.in_bf16, &to.in_bf16);
        if let (Some(own), Some(from), Some(to)) = in_bf16 {
            grown(&mut own.0, &from.0, &to.0);
            own.1 += times[0] * (to.1 - from.1) / layers;
        }
        self.backend += times[0] * (to.backend - from.backend) / layers;
    }

    /// The memory for the given activations in flight, counted like
    /// [`arena_bytes_with_fallback`](deepwell_lower::arena_bytes_with_fallback).
    pub(super) fn bytes(&self, in_flight: &InFlight) -> ProgramBytes {
        let (persistent, transient) =
            (self.planned.persistent(in_flight), self.planned.transient(in_flight));
        let reserve = self.in_bf16.as_ref().map_or(0, |(in_bf16, further)| {
            let room = (persistent + further).max(in_bf16.persistent(in_flight));
            let mixed = Transient::of_mixtures(transient, in_bf16.transient(in_flight)) as i64;
            room + mixed - persistent - transient.bytes as i64
        });
        let of = |bytes: i64| bytes.max(0) as u64;
        let [optimizer, gradients, weights, host] = self.planned.persistent.map(of);
        ProgramBytes {
            optimizer,
            gradients,
            weights,
            host: host + in_flight.slots as u64 * of(self.planned.host_slot),
            transient: transient.bytes as u64,
            reserve: of(reserve),
            backend: of(self.backend),
        }
    }
}
