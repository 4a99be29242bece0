//! Text report of a cluster plan and of the rejected plans.

use std::fmt::{self, Write};

use super::{Candidate, ClusterPlan, Found, SearchRequest, StagePlan, WhatIf};
use crate::Strategy;
use crate::memory::{PhaseMemory, layout};

/// Rows of the front shown for each number of GPUs.
const FRONT_MAX: usize = 6;

/// Formats a whole number with digit groups of three.
pub(super) fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `n thing` or `n things`.
fn counted(count: usize, thing: &str) -> String {
    let plural = match (count, thing.ends_with("ch")) {
        (1, _) => "",
        (_, true) => "es",
        _ => "s",
    };
    format!("{} {thing}{plural}", grouped(count as f64))
}

/// Formats a range of numbers: `-`, a single number, or `first-last`.
fn range(range: &std::ops::Range<usize>) -> String {
    match range.len() {
        0 => "-".to_string(),
        1 => range.start.to_string(),
        _ => format!("{}-{}", range.start, range.end - 1),
    }
}

impl fmt::Display for ClusterPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_head(f)?;
        self.write_time(f)?;
        self.write_memory(f)?;
        write!(f, "\n{}", self.ranks)?;
        if let Some(run) = &self.run {
            let tokens = grouped(run.tokens);
            let days = run.hours / 24.0;
            write!(f, "\nrun of {tokens} tokens: {:.1} hours ({days:.1} days), ", run.hours)?;
            write!(f, "{} GPU hours", grouped(run.gpu_hours))?;
            match (run.cost, self.machines.price_per_gpu_hour) {
                (Some(cost), Some(price)) => {
                    writeln!(f, ", {} at {price} for each", grouped(cost))?;
                }
                _ => writeln!(f, "; --price-per-gpu-hour says what they cost")?,
            }
        }
        for warning in &self.warnings {
            writeln!(f, "\nwarning: {warning}")?;
        }
        Ok(())
    }
}

impl ClusterPlan {
    fn write_head(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ClusterPlan { model, machines, strategy: at, .. } = self;
        let gpus = at.gpus();
        let nodes = counted(machines.nodes_of(gpus), "node");
        let billions = model.parameters() / 1e9;
        writeln!(
            f,
            "plan of {:?} ({billions:.1}B) on {} x {} in {nodes}",
            model.name,
            grouped(gpus as f64),
            machines.gpu.name
        )?;
        writeln!(f, "  strategy      {at}")?;
        writeln!(
            f,
            "  batch         {} x {} tokens = {} of {} of {}",
            grouped(self.global_batch as f64),
            grouped(self.seq as f64),
            counted(at.dp, "data-parallel rank"),
            counted(at.micro_batches, "micro-batch"),
            at.micro_batch
        )?;
        self.write_precision(f)?;
        let fabric = machines.fabric;
        let network = match fabric.nic_gbps > 0.0 && gpus > fabric.domain_gpus {
            true => format!(
                ", {} GB/s of the network for each GPU, {}",
                fabric.nic_gbps,
                counted(machines.rails, "rail")
            ),
            false => String::new(),
        };
        let domain = counted(fabric.domain_gpus.min(gpus), "GPU");
        writeln!(f, "  machines      NVLink domains of {domain}{network}")?;
        writeln!(f, "  efficiencies  {}", machines.gpu.calibration)?;
        if at.pp > 1 {
            writeln!(f, "  layout        {}", layout(model, at))?;
        }
        if model.experts.is_some() {
            let times = self.expert_imbalance;
            let limit = self.capacity_factor.map_or(String::new(), |factor| {
                format!("; an expert takes at most {factor} times the even share")
            });
            writeln!(
                f,
                "  experts       the busiest rank has {times} times the mean of rows{limit}"
            )?;
        }
        match &self.not_run_yet {
            Some(why) => writeln!(f, "  the trainer   does not run this plan yet: {why}")?,
            None if self.is_lowered => writeln!(f, "  the trainer   runs this plan")?,
            None => {
                let rules = "may run this plan: it is within the rules and was not lowered";
                writeln!(f, "  the trainer   {rules}")?;
            }
        }
        let Some((other, seconds)) = &self.faster else { return Ok(()) };
        let less = 100.0 * (1.0 - seconds / self.step.seconds);
        writeln!(
            f,
            "  not run yet   {other}: {less:.1} % less time and its memory are of a closed form"
        )
    }

    fn write_precision(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let precision = match (self.nvfp4, self.fp8) {
            (true, _) => "NVFP4, the last of them MXFP8, the rest BF16",
            (false, true) => "MXFP8, the rest BF16",
            (false, false) => "BF16",
        };
        writeln!(f, "  precision     linear layers {precision}")?;
        if self.precisions.is_empty() {
            return Ok(());
        }
        let times: Vec<String> = self.precisions.iter().map(ToString::to_string).collect();
        writeln!(f, "                the fastest, by the time of a step: {}", times.join(", "))
    }

    fn write_time(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = &self.step;
        let gpus = self.strategy.gpus() as f64;
        writeln!(
            f,
            "\nstep of {:.3} s: {} tokens/s, {} for each GPU, {:.1} % MFU{}",
            step.seconds,
            grouped(self.tokens_per_s),
            grouped(self.tokens_per_s / gpus),
            100.0 * self.mfu,
            match (self.nvfp4, self.fp8) {
                (true, _) => " of the NVFP4 peak",
                (false, true) => " of the FP8 peak",
                (false, false) => "",
            }
        )?;
        let mut row = |name: &str, seconds: f64, note: &str| {
            let share = 100.0 * seconds / step.seconds;
            writeln!(f, "  {name:<16} {seconds:>10.3} s {share:>5.1} %{note}")
        };
        row("compute", step.compute(), "")?;
        row("bubble", step.bubble_s, "")?;
        for (name, overlap) in step.communication.kinds() {
            if overlap.seconds > 0.0 {
                let hidden = 100.0 * overlap.hidden_share();
                let note = format!("  of {:.3} s, {hidden:.0} % hidden", overlap.seconds);
                row(&format!("exposed {name}"), overlap.exposed, &note)?;
            }
        }
        row("optimizer", step.optimizer, "")
    }

    fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = self.memory_limit_bytes / 1e9;
        writeln!(f, "\nmemory of a GPU in GB, {limit:.1} may be used")?;
        writeln!(
            f,
            "                                            allocated in                 at the peak\n\
             stage  ranks          nodes      layers  loaded  passes  optimizer  reserved  \
             outside  device    host  idle"
        )?;
        let mut rest = self.stages.as_slice();
        while let Some(first) = rest.first() {
            let alike = rest.iter().take_while(|other| same_figures(first, other)).count();
            // Two rows are no longer than a row for both stages.
            let count = if alike > 2 { alike } else { 1 };
            writeln!(f, "{}", stage_row(&rest[..count]))?;
            rest = &rest[count..];
        }
        let Some(fullest) = self.fullest_stage() else { return Ok(()) };
        let memory = &fullest.memory;
        let parts = [
            ("parameters", memory.parameters),
            ("gradients", memory.gradients),
            ("optimizer", memory.optimizer),
            ("activations", memory.activations),
            ("logits", memory.logits),
            ("workspace", memory.workspace),
        ];
        let parts = parts.map(|(name, bytes)| format!("{name} {:.1}", bytes / 1e9)).join(", ");
        let stage = if self.stages.len() > 1 {
            format!("of stage {}, the fullest: ", fullest.stage)
        } else {
            String::new()
        };
        writeln!(f, "  {stage}{parts}")?;
        writeln!(
            f,
            "  {:<24} allocated  reserved  outside    host",
            if self.stages.len() > 1 { "most of any rank" } else { "by phase" }
        )?;
        for (index, phase) in fullest.phases.iter().enumerate() {
            let most = |of: fn(&PhaseMemory) -> f64| {
                self.stages.iter().map(|stage| of(&stage.phases[index])).fold(0.0, f64::max) / 1e9
            };
            writeln!(
                f,
                "    {:<22} {:>9.1} {:>9.1} {:>8.1} {:>7.1}",
                phase.phase.name(),
                most(|memory| memory.allocated),
                most(|memory| memory.reserved),
                most(|memory| memory.outside),
                most(|memory| memory.host)
            )?;
        }
        Ok(())
    }
}

/// The figures of a stage in its row.
fn figures(stage: &StagePlan) -> String {
    let [loaded, passes, optimizer, checkpoint] = &stage.phases;
    let gb = |bytes: f64| bytes / 1e9;
    let idle = stage.idle.map_or("-".to_string(), |idle| format!("{:.1} %", 100.0 * idle));
    format!(
        "{:>6.1}  {:>6.1}  {:>9.1}  {:>8.1}  {:>7.1}  {:>6.1}  {:>6.1}  {idle}",
        gb(loaded.allocated),
        gb(passes.allocated),
        gb(optimizer.allocated),
        gb(passes.reserved),
        gb(passes.outside),
        gb(stage.memory.device()),
        gb(checkpoint.host)
    )
}

/// Whether stages have chunks of equal sizes, and the same figures.
fn same_figures(a: &StagePlan, b: &StagePlan) -> bool {
    let counts = |stage: &StagePlan| -> Vec<usize> {
        stage.layers.chunks.iter().map(std::ops::Range::len).collect()
    };
    counts(a) == counts(b) && figures(a) == figures(b)
}

/// Row of a stage, or of several equal stages.
fn stage_row(stages: &[StagePlan]) -> String {
    let (first, last) = (&stages[0], &stages[stages.len() - 1]);
    let layers = match first.layers.chunks.as_slice() {
        _ if stages.len() > 1 => format!("{} each", first.layers.count()),
        [one] => range(one),
        chunks => format!("{} in {}", first.layers.count(), chunks.len()),
    };
    format!(
        "{:>5}  {:<13}  {:<9}  {layers:>6}  {}",
        range(&(first.stage..last.stage + 1)),
        range(&(first.ranks.start..last.ranks.end)),
        range(&(first.nodes.start..last.nodes.end)),
        figures(first)
    )
}

/// Lists dropped plans with reasons, and the effects of changes to the request.
pub fn explanation(found: &Found, numbers: &[WhatIf]) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write_explanation(&mut text, found, numbers);
    text
}

fn slower(found: &Found, other: &Candidate) -> String {
    let percent = 100.0 * (other.seconds / found.best.seconds - 1.0);
    match percent < -0.005 {
        true => format!("{:.2} % faster", -percent),
        false => format!("{:.2} % slower", percent.abs()),
    }
}

fn write_explanation(text: &mut String, found: &Found, numbers: &[WhatIf]) -> fmt::Result {
    let (considered, fitting) = (found.considered as f64, found.fitting as f64);
    writeln!(
        text,
        "\ncombinations: {} looked at, {} fit; the others, by reason",
        grouped(considered),
        grouped(fitting)
    )?;
    for dropped in &found.dropped {
        let count = grouped(dropped.count as f64);
        let why = dropped.why.as_ref().map_or(String::new(), |why| format!(": {why}"));
        writeln!(
            text,
            "  {count:>9}  {}\n             such as {}{why}",
            dropped.reason, dropped.example
        )?;
    }
    match &found.second {
        Some(second) => {
            let slower = slower(found, second);
            writeln!(text, "\nsecond best: {slower}\n  {}", second.at)?;
        }
        None => writeln!(text, "\nsecond best: nothing else fits")?,
    }
    writeln!(text, "\nbest with one dimension at another value")?;
    for (dimension, other) in &found.what_if {
        let pin = format!("{dimension}={}", dimension.text_of(&other.at));
        writeln!(text, "  {pin:<22} {:>14}  {}", slower(found, other), other.at)?;
    }
    if !numbers.is_empty() {
        writeln!(text, "\nbest with one other number: time for a token, plan")?;
    }
    for other in numbers {
        let (change, plan) = match (&other.best, other.time_change) {
            (Some((at, _)), Some(change)) => {
                let same = *at == Strategy { micro_batches: at.micro_batches, ..found.best.at };
                let plan = if same { "the same".to_string() } else { at.to_string() };
                (format!("{:+.2} %", 100.0 * change), plan)
            }
            _ => (String::new(), "nothing fits".to_string()),
        };
        writeln!(text, "  {:<32} {change:>9}  {plan}", other.change)?;
    }
    Ok(())
}

impl Found {
    /// Table of the Pareto front of time, memory, GPUs and cost, least time first.
    pub fn front_table(&self, request: &SearchRequest) -> String {
        let price = request.machines.price_per_gpu_hour;
        let cost = if price.is_some() { "cost" } else { "GPU hours" };
        let mut text = format!(
            "\nfront of time, memory, GPUs and {cost}, of {} plans, the first {FRONT_MAX} for each \
             number of GPUs\n{:>10}  {:>8}  {:>7}  {:>15}  plan\n",
            self.front.len(),
            "step",
            "GB",
            "GPUs",
            format!("{cost}/10^12 t"),
        );
        let mut shown: Vec<(usize, usize)> = Vec::new();
        for candidate in &self.front {
            let gpus = candidate.at.gpus();
            match shown.iter_mut().find(|(known, _)| *known == gpus) {
                Some((_, rows)) if *rows == FRONT_MAX => continue,
                Some((_, rows)) => *rows += 1,
                None => shown.push((gpus, 1)),
            }
            let tokens_per_s = request.tokens() / candidate.seconds;
            let gpu_hours = 1e12 / tokens_per_s / 3600.0 * gpus as f64;
            let (seconds, gigabytes) = (candidate.seconds, candidate.memory_bytes / 1e9);
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "{seconds:>8.3} s  {gigabytes:>8.1}  {:>7}  {:>15}  {}",
                gpus,
                grouped(gpu_hours * price.unwrap_or(1.0)),
                candidate.at
            );
        }
        text
    }
}
