//! Effects of single changes to a request.

use serde::Serialize;

use super::{Found, SearchAids, SearchRequest, search_with};
use crate::Strategy;
use crate::collectives::Fabric;
use deepwell_lower::PlanError;

/// A request with a single change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WhatIf {
    /// The changed number and its new value.
    pub change: String,
    /// The best plan for the changed request; `None` if no plan fits.
    pub best: Option<(Strategy, f64)>,
    /// Relative change of the time per token.
    pub time_change: Option<f64>,
}

/// Searches with network and NVLink at half and twice their rates, with 20 % less and more memory,
/// with twice the batch, with experts twice as far from balance, and with linear layers in each
/// other precision.
///
/// `aids` are the aids of the original search. Other precisions are searched without programs.
///
/// # Errors
/// Errors of [`search_with`], except for a search without a plan that fits.
pub fn what_if(
    request: &SearchRequest,
    found: &Found,
    aids: &SearchAids<'_>,
) -> Result<Vec<WhatIf>, PlanError> {
    let mut changed: Vec<(String, SearchRequest)> = Vec::new();
    let mut with = |change: String, edit: &dyn Fn(&mut SearchRequest)| {
        let mut other = request.clone();
        edit(&mut other);
        changed.push((change, other));
    };
    let fabric = request.machines.fabric;
    if found.best.at.gpus() > fabric.domain_gpus {
        for factor in [0.5, 2.0] {
            let gbps = fabric.nic_gbps * factor;
            with(format!("network {gbps:.1} GB/s for each GPU"), &|other| {
                other.machines.fabric.nic_gbps = gbps;
            });
        }
    }
    if found.best.at.gpus() > 1 && fabric.domain_gpus > 1 {
        for factor in [0.5, 2.0] {
            let nvlink_share = fabric.nvlink_share * factor;
            let gbps = Fabric { nvlink_share, ..fabric }.nvlink_gbps();
            with(format!("NVLink {gbps:.0} GB/s for each GPU"), &|other| {
                other.machines.fabric.nvlink_share = nvlink_share;
            });
        }
    }
    for factor in [0.8, 1.2] {
        let bytes = request.memory_limit_bytes() * factor;
        with(format!("memory {:.1} GB", bytes / 1e9), &|other| {
            other.gpu_memory_bytes = Some(bytes);
        });
    }
    let batch = request.global_batch * 2;
    with(format!("batch {batch} sequences"), &|other| other.global_batch = batch);
    if request.shape.experts.is_some() {
        let times = 2.0 * request.expert_imbalance - 1.0;
        with(format!("experts imbalanced by {times:.2}"), &|other| other.expert_imbalance = times);
    }
    let gpu = &request.machines.gpu;
    let precisions = [
        ("BF16", [false, false], true),
        ("MXFP8", [true, false], gpu.fp8_flops > gpu.bf16_flops),
        ("NVFP4", [true, true], gpu.nvfp4_flops > gpu.fp8_flops),
    ];
    for (name, [fp8, nvfp4], is_faster) in precisions {
        if is_faster && [fp8, nvfp4] != [request.fp8, request.nvfp4] {
            with(format!("linear layers in {name}"), &|other| {
                (other.fp8, other.nvfp4) = (fp8, nvfp4);
            });
        }
    }
    let per_token = |request: &SearchRequest, seconds: f64| seconds / request.tokens();
    let now = per_token(request, found.best.seconds);
    let mut all = Vec::new();
    for (change, other) in changed {
        let is_same = (other.fp8, other.nvfp4) == (request.fp8, request.nvfp4);
        let programs = aids.programs.filter(|_| is_same);
        let best = match search_with(&other, &SearchAids { programs, best_alone: true, ..*aids }) {
            Ok(found) => Some((found.best.at, found.best.seconds)),
            Err(error) if error.is_no_plan() => None,
            Err(error) => return Err(error),
        };
        let time_change = best.map(|(_, seconds)| per_token(&other, seconds) / now - 1.0);
        all.push(WhatIf { change, best, time_change });
    }
    Ok(all)
}
