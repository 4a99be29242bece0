//! What a search found, as text; and what another world would move.

use std::fmt;

use serde::Serialize;

use super::{Candidate, Dimension, Found, SearchRequest, search};
use crate::PlanError;

/// A dimension that another world changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The dimension.
    pub dimension: Dimension,
    /// Its value now.
    pub from: usize,
    /// Its value then.
    pub to: usize,
}

/// Plans for another number of GPUs and says what moves: the plan, its changes, and the share of a
/// rank's states that it does not hold already, 0 to 1.
///
/// # Errors
/// As [`search`].
pub fn replan(
    request: &SearchRequest,
    now: &Candidate,
    gpus: usize,
) -> Result<(Found, Vec<Change>, f64), PlanError> {
    let found = search(&SearchRequest { gpus: vec![gpus], ..request.clone() })?;
    let changes: Vec<Change> = Dimension::ALL
        .into_iter()
        .map(|dimension| Change {
            dimension,
            from: dimension.of(&now.at),
            to: dimension.of(&found.best.at),
        })
        .filter(|change| change.from != change.to)
        .collect();
    // Of a shard of 1/n that becomes 1/k a rank keeps at most n/k, where k is the larger; on
    // another grid of TP and PP it is taken to keep nothing.
    let shards = |candidate: &Candidate| {
        let at = &candidate.at;
        at.tp * at.pp * if at.zero > 0 { at.dp * at.cp } else { 1 }
    };
    let (before, after) = (shards(now) as f64, shards(&found.best) as f64);
    let same_grid = now.at.tp == found.best.at.tp && now.at.pp == found.best.at.pp;
    let kept = if same_grid { (after / before).min(1.0) } else { 0.0 };
    Ok((found, changes, 1.0 - kept))
}

impl Found {
    /// Tokens a second of all GPUs.
    pub fn tokens_per_s(&self, request: &SearchRequest) -> f64 {
        (request.seq * request.global_batch) as f64 / self.step.seconds
    }

    /// Share of the BF16 peak that the model's own FLOPs are.
    pub fn mfu(&self, request: &SearchRequest) -> f64 {
        let tokens = (request.seq * request.global_batch) as f64;
        let flops = request.shape.model_flops(tokens, request.seq);
        let gpus = self.best.at.gpus() as f64;
        flops / self.step.seconds / gpus / request.gpu.bf16_flops
    }

    /// The plan and, with `explain`, what was not taken and why.
    pub fn describe<'a>(
        &'a self,
        request: &'a SearchRequest,
        explain: bool,
    ) -> impl fmt::Display + 'a {
        Described { found: self, request, explain }
    }
}

struct Described<'a> {
    found: &'a Found,
    request: &'a SearchRequest,
    explain: bool,
}

/// Ranks of a group, as far as they say where neighbours are.
fn ranks(start: usize, stride: usize, count: usize) -> String {
    let shown: Vec<String> =
        (0..count.min(8)).map(|at| (start + at * stride).to_string()).collect();
    format!("{}{}", shown.join(" "), if count > 8 { " ..." } else { "" })
}

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Described { found, request, explain } = self;
        let (best, step) = (&found.best, &found.step);
        let at = &best.at;
        writeln!(f, "{} on {} x {}", request.shape.name, at.gpus(), request.gpu.name)?;
        writeln!(f, "  plan        {at}{}", if best.fp8 { ", FP8" } else { "" })?;
        writeln!(
            f,
            "  step        {:.3} s, {:.0} tokens/s, {:.1} % MFU",
            step.seconds,
            found.tokens_per_s(request),
            100.0 * found.mfu(request)
        )?;
        writeln!(
            f,
            "  of it       bubble {:.1} %, exposed in stages {:.1} %, data parallel {:.1} %, \
             optimizer {:.1} %",
            100.0 * step.bubble,
            100.0 * step.exposed_in_stage / step.seconds,
            100.0 * step.data_parallel / step.seconds,
            100.0 * step.optimizer / step.seconds
        )?;
        let gigabytes = best.memory_bytes / 1e9;
        let limit = request.memory_limit_bytes() / 1e9;
        writeln!(f, "  memory      {gigabytes:.1} GB of {limit:.1} GB on the fullest stage")?;
        let strides = [
            ("TP", at.tp, 1),
            ("CP", at.cp, at.tp),
            ("EP", at.ep, at.etp),
            ("DP", at.dp, at.tp * at.cp),
            ("PP", at.pp, at.tp * at.cp * at.dp),
        ];
        for (name, count, stride) in strides.into_iter().filter(|(_, count, _)| *count > 1) {
            writeln!(f, "  {name} of rank 0  {}", ranks(0, stride, count))?;
        }
        if let Some(price) = request.price_per_gpu_hour {
            let per_trillion = 1e12 / found.tokens_per_s(request) / 3600.0 * at.gpus() as f64;
            let cost = per_trillion * price;
            writeln!(f, "  10^12 tokens  {per_trillion:.0} GPU hours, {cost:.0} at {price}")?;
        }
        writeln!(f, "  efficiencies  {}", request.gpu.calibration)?;
        if step.bubble > 0.05 {
            let cure = "more micro-batches, or more chunks of a stage";
            writeln!(f, "  warning     the bubble is over 5 %; {cure} would make it smaller")?;
        }
        if !explain {
            return Ok(());
        }
        let loses = |other: &Candidate| 100.0 * (other.seconds / best.seconds - 1.0);
        if let Some(second) = &found.second {
            writeln!(f, "second best   {}, loses {:.2} %", second.at, loses(second))?;
        }
        writeln!(f, "what if       one dimension had another value")?;
        for (dimension, other) in &found.what_if {
            let value = dimension.of(&other.at);
            writeln!(f, "  {dimension}={value:<8} loses {:>6.2} %: {}", loses(other), other.at)?;
        }
        writeln!(f, "front         time, memory, GPUs")?;
        for candidate in found.front.iter().take(8) {
            let gigabytes = candidate.memory_bytes / 1e9;
            let (seconds, at) = (candidate.seconds, &candidate.at);
            writeln!(f, "  {seconds:>8.3} s {gigabytes:>7.1} GB {:>6} GPUs: {at}", at.gpus())?;
        }
        writeln!(f, "dropped       of {} combinations, {} fit", found.considered, found.fitting)?;
        for dropped in &found.dropped {
            writeln!(
                f,
                "  {:>7} x {}, such as {}",
                dropped.count, dropped.reason, dropped.example
            )?;
        }
        Ok(())
    }
}
