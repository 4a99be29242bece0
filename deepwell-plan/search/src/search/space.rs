//! Enumerates the combinations, with reasons for the impossible ones.

use crate::{ActivationRecompute, LayerSplit, Strategy};
use deepwell_lower::schedule::PipelineSchedule;

use super::{Dimension, SearchRequest};

/// Limits on stages and chunks: above them bubbles and messages outweigh the gain.
const PP_MAX: usize = 64;
const VPP_MAX: usize = 8;
const CP_MAX: usize = 16;
/// Enough tokens for any kernel, even of the smallest models.
const MICRO_BATCH_MAX: usize = 64;

fn divisors(of: usize, most: usize) -> Vec<usize> {
    (1..=of.min(most)).filter(|size| of.is_multiple_of(*size)).collect()
}

fn powers_of_two(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |size| Some(size * 2)).take_while(move |size| *size <= most)
}

/// Whether the pins allow `size`, so that whole branches can be skipped.
pub(super) fn pinned(request: &SearchRequest, dimension: Dimension, size: usize) -> bool {
    let mut pins = request.pins.iter().filter(|pin| pin.dimension == dimension);
    pins.all(|pin| (pin.value == size) != pin.forbidden)
}

/// Returns `values` and the pinned values of the dimension.
fn with_pinned(
    request: &SearchRequest,
    dimension: Dimension,
    values: impl Iterator<Item = usize>,
) -> Vec<usize> {
    let mut values: Vec<usize> = values.collect();
    for pin in request.pins.iter().filter(|pin| pin.dimension == dimension && !pin.forbidden) {
        if pin.value > 0 && !values.contains(&pin.value) {
            values.push(pin.value);
        }
    }
    values
}

/// Calls `visit` with every combination, and the reason if a combination is impossible.
///
/// A branch without possible plans is visited once, with the degrees chosen so far.
pub(super) fn for_each(
    request: &SearchRequest,
    visit: &mut dyn FnMut(Strategy, Option<&'static str>),
) {
    let shape = &request.shape;
    let kv_limit = if shape.latent.is_some() { shape.heads } else { shape.kv_heads };
    for &gpus in &request.gpus {
        for tp in powers_of_two(request.machines.fabric.domain_gpus.min(gpus)) {
            let at = Strategy { tp, sp: tp > 1, ..Strategy::SINGLE };
            if !pinned(request, Dimension::Tp, tp) || !pinned(request, Dimension::Gpus, gpus) {
                visit(at, Some("forbidden by a pin"));
                continue;
            }
            if !shape.heads.is_multiple_of(tp) || tp > kv_limit {
                visit(at, Some("heads or key-value heads do not divide by TP"));
                continue;
            }
            if !request.seq.is_multiple_of(tp) {
                visit(at, Some("the sequence does not divide by TP"));
                continue;
            }
            for sp in [true, false] {
                let at = Strategy { sp, ..at };
                let is_pinned = request.pins.iter().any(|pin| pin.dimension == Dimension::Sp);
                match (sp, tp > 1) {
                    (true, false) => continue,
                    (false, true) if !is_pinned => {
                        visit(at, Some("with SP, TP takes the same time and less memory"));
                        continue;
                    }
                    _ => {}
                }
                if tp > 1 && !pinned(request, Dimension::Sp, usize::from(sp)) {
                    visit(at, Some("forbidden by a pin"));
                    continue;
                }
                with_context(request, gpus, at, visit);
            }
        }
    }
}

fn with_context(
    request: &SearchRequest,
    gpus: usize,
    at: Strategy,
    visit: &mut dyn FnMut(Strategy, Option<&'static str>),
) {
    for cp in with_pinned(request, Dimension::Cp, powers_of_two(CP_MAX)) {
        let at = Strategy { cp, ..at };
        if !pinned(request, Dimension::Cp, cp) {
            visit(at, Some("forbidden by a pin"));
            continue;
        }
        if cp > 1 && request.seq / cp < 2048 {
            visit(at, Some("less than 2048 tokens for a context-parallel rank"));
            continue;
        }
        if !request.seq.is_multiple_of(2 * cp * at.tp) && cp > 1 {
            visit(at, Some("the sequence does not divide by 2 CP TP"));
            continue;
        }
        let stages = 1..=PP_MAX.min(request.shape.layers);
        for pp in with_pinned(request, Dimension::Pp, stages) {
            let at = Strategy { pp, ..at };
            if pp > request.shape.layers {
                visit(at, Some("fewer layers than pipeline stages"));
                continue;
            }
            if !pinned(request, Dimension::Pp, pp) {
                visit(at, Some("forbidden by a pin"));
                continue;
            }
            let ranks = at.tp * cp * pp;
            if !gpus.is_multiple_of(ranks) {
                visit(at, Some("GPUs do not divide by TP x CP x PP"));
                continue;
            }
            with_data_parallel(request, Strategy { dp: gpus / ranks, ..at }, visit);
        }
    }
}

fn with_data_parallel(
    request: &SearchRequest,
    at: Strategy,
    visit: &mut dyn FnMut(Strategy, Option<&'static str>),
) {
    if !pinned(request, Dimension::Dp, at.dp) {
        return visit(at, Some("forbidden by a pin"));
    }
    if !request.global_batch.is_multiple_of(at.dp) {
        return visit(at, Some("the batch does not divide by DP"));
    }
    let per_rank = request.global_batch / at.dp;
    let experts = request.shape.experts.map_or(1, |experts| experts.experts);
    for ep in divisors(experts, experts) {
        let both = [1, at.tp];
        let has_choice = request.shape.experts.is_some() && at.tp > 1;
        let sizes = if has_choice { &both[..] } else { &both[..1] };
        for etp in with_pinned(request, Dimension::Etp, sizes.iter().copied()) {
            let at = Strategy { ep, etp, ..at };
            let grid = at.tp * at.cp * at.dp;
            if at.etp > 1 && request.shape.experts.is_none() {
                visit(at, Some("ETP of a model without experts"));
                continue;
            }
            if ep * etp > grid || !grid.is_multiple_of(ep * etp) {
                visit(at, Some("EP x ETP does not divide TP x CP x DP"));
                continue;
            }
            let sizes = powers_of_two(MICRO_BATCH_MAX.min(per_rank));
            for micro_batch in with_pinned(request, Dimension::Mbs, sizes) {
                if !per_rank.is_multiple_of(micro_batch) {
                    let at = Strategy { micro_batch, ..at };
                    visit(at, Some("the batch of a rank does not divide by the micro-batch"));
                    continue;
                }
                let micro_batches = per_rank / micro_batch;
                with_schedule(request, Strategy { micro_batch, micro_batches, ..at }, visit);
            }
        }
    }
}

fn with_schedule(
    request: &SearchRequest,
    at: Strategy,
    visit: &mut dyn FnMut(Strategy, Option<&'static str>),
) {
    let (layers, head) = (request.shape.layers, request.shape.head_layers());
    let given = request.shape.chunk_layers.len();
    if given > 0 && !given.is_multiple_of(at.pp) {
        return visit(at, Some("the layout has another number of chunks"));
    }
    let all = match given {
        0 if at.pp > 1 => with_pinned(request, Dimension::Vpp, 1..=(layers / at.pp).min(VPP_MAX)),
        0 => vec![1],
        _ => vec![given / at.pp],
    };
    for vpp in all {
        if at.pp == 1 && vpp > 1 {
            visit(Strategy { vpp, ..at }, Some("chunks of a model that has one stage"));
            continue;
        }
        let schedules: &[PipelineSchedule] = if vpp == 1 && at.pp > 1 {
            &PipelineSchedule::ALL
        } else {
            &PipelineSchedule::ALL[..1]
        };
        let splits = match (at.pp, given) {
            (1, _) => &LayerSplit::ALL[..1],
            (_, 0) => &LayerSplit::ALL[..3],
            _ => &LayerSplit::ALL[3..],
        };
        let choices = schedules.iter().flat_map(|of| splits.iter().map(move |split| (*of, *split)));
        for (schedule, split) in choices {
            // An optimizer on the host has not been measured, so a pin has to request it.
            let offload = !pinned(request, Dimension::Offload, 0);
            let at = Strategy { vpp, schedule, split, offload, ..at };
            if at.pp > 1 && at.micro_batches < at.pp {
                visit(at, Some("fewer micro-batches than pipeline stages"));
                continue;
            }
            if vpp > 1 && !at.micro_batches.is_multiple_of(at.pp) {
                visit(
                    at,
                    Some("micro-batches do not divide by the stages of an interleaved schedule"),
                );
                continue;
            }
            if vpp > 1 && at.pp * vpp > request.shape.layers {
                visit(at, Some("fewer layers than chunks"));
                continue;
            }
            let ends = match split {
                LayerSplit::Ends => Some((1, 2)),
                LayerSplit::Balanced => Some((head, head)),
                _ => None,
            };
            if ends == Some((0, 0)) {
                visit(at, Some("the head has the FLOPs of less than half a layer"));
                continue;
            }
            if ends.is_some_and(|(most, all)| (layers + all) / (at.pp * vpp) <= most) {
                visit(at, Some("a chunk with nothing but the embedding or the head"));
                continue;
            }
            for zero in [0, 1, 2, 3] {
                if at.dp * at.cp == 1 && zero > 0 {
                    continue;
                }
                for recompute in ActivationRecompute::ALL {
                    let at = Strategy { zero, recompute, ..at };
                    visit(at, reason(request, &at));
                }
            }
        }
    }
}

fn reason(request: &SearchRequest, at: &Strategy) -> Option<&'static str> {
    if !request.pins.iter().all(|pin| pin.allows(at)) {
        return Some("forbidden by a pin");
    }
    if at.zero == 0
        && at.dp * at.cp > 1
        && !request.pins.iter().any(|pin| pin.dimension == Dimension::Zero)
    {
        return Some("ZeRO-1 has the same time and less memory than ZeRO-0");
    }
    let is_asked_for = request.pins.iter().any(|pin| pin.dimension == Dimension::Zero);
    if at.zero >= 2 && at.pp > 1 && !is_asked_for {
        return Some("ZeRO-2 and 3 reduce or gather for each micro-batch of a pipeline");
    }
    None
}
