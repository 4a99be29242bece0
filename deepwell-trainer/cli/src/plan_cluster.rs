//! `deepwell plan` for a cluster: converts flags to a search request and prints the result.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use deepwell_ir::Recompute;
use deepwell_plan::collectives::Generation;
use deepwell_plan::memory::parse_layout;
use deepwell_plan::search::{
    Accounting, ByTrainer, ClusterPlan, Count, Found, Machines, Pictures, Pin, SearchAids,
    SearchRequest, WhatIf, explanation, what_if,
};
use deepwell_plan::{DryRun, ModelShape, Plan};
use deepwell_probe::Cluster;
use deepwell_trainer::ModelSource;
use serde::Serialize;

use crate::hardware::{cluster_of, measurements_of};
use crate::lowered::{self, Source};
use crate::nearest;
use crate::output::{note, print, print_json};
use crate::planning::PlanningArgs;
use crate::watch::Watch;

/// Default tokens per sequence and per step.
const SEQ: usize = 4096;
const STEP_TOKENS: usize = 4 << 20;

/// Options that only a plan for a cluster has.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "For a cluster")]
pub(crate) struct ClusterArgs {
    /// Fix a dimension at a value or exclude a value: tp=4, zero=1, schedule!=1f1b; dimensions are
    /// pp, vpp, schedule, split, tp, sp, cp, ep, etp, dp, zero, mbs, recompute, offload, gpus
    #[arg(long, value_name = "PIN")]
    pin: Vec<Pin>,
    /// Exclude a dimension or a value: cp, recompute, tp=8
    #[arg(long, value_name = "DIMENSION", value_parser = Pin::forbid)]
    forbid: Vec<Pin>,
    /// Layers of each model chunk in Megatron-LM's notation: E embedding, t layer, L loss, |
    /// between chunks, such as 'Et*15|(t*16|)*2t*14L'
    #[arg(long, value_name = "LAYOUT")]
    layout: Option<String>,
    /// Tokens of the busiest expert-parallel rank relative to the mean [default: 1.1]
    #[arg(long, value_name = "TIMES")]
    expert_imbalance: Option<f64>,
    /// Accept only plans that the trainer runs: their programs are lowered and fit
    #[arg(long)]
    runnable: bool,
    /// Maximum number of GPUs; a plan may use fewer [default: all]
    #[arg(long, value_name = "GPUS")]
    max_gpus: Option<usize>,
    /// Price of a GPU per hour, in any currency
    #[arg(long, value_name = "PRICE", value_parser = price)]
    price_per_gpu_hour: Option<f64>,
    /// Training tokens of the whole run, such as 15T or 300B; prints its hours and cost
    #[arg(long, value_name = "TOKENS", value_parser = tokens)]
    tokens: Option<f64>,
    /// Print the Pareto front of time, memory, GPUs and cost over all, half, a quarter and so on of
    /// the GPUs
    #[arg(long)]
    pareto: bool,
    /// Also print memory in another framework's accounting: megatron or fsdp
    #[arg(long = "as", value_name = "FRAMEWORK")]
    accounting: Option<Accounting>,
    /// Write the step as a Chrome trace, with the passes and the memory of each stage
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write the timeline of the pipeline as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the memory of each stage over time as SVG
    #[arg(long, value_name = "FILE")]
    memory_svg: Option<PathBuf>,
}

impl ClusterArgs {
    /// Returns an error if an option is given without a cluster.
    pub(crate) fn refuse_without_cluster(&self) -> Result<()> {
        let Some(option) = self.first_given() else { return Ok(()) };
        bail!(
            "{option}: expected a cluster to plan for, got one device\n\
             hint: `--hardware h200-x8` or `--hardware h100:nodes=16`, without `--device`"
        )
    }

    /// The first option given on the command line.
    fn first_given(&self) -> Option<&'static str> {
        let given = [
            ("--pin", !self.pin.is_empty()),
            ("--forbid", !self.forbid.is_empty()),
            ("--layout", self.layout.is_some()),
            ("--expert-imbalance", self.expert_imbalance.is_some()),
            ("--runnable", self.runnable),
            ("--max-gpus", self.max_gpus.is_some()),
            ("--price-per-gpu-hour", self.price_per_gpu_hour.is_some()),
            ("--tokens", self.tokens.is_some()),
            ("--pareto", self.pareto),
            ("--as", self.accounting.is_some()),
            ("--trace", self.trace.is_some()),
            ("--svg", self.svg.is_some()),
            ("--memory-svg", self.memory_svg.is_some()),
        ];
        given.into_iter().find_map(|(option, is_given)| is_given.then_some(option))
    }
}

/// The cluster to plan for: `--hardware` has GPUs, and no device is given.
pub(crate) fn cluster_asked(planning: &PlanningArgs) -> Result<Option<Cluster>> {
    let Some(name) = planning.hardware.as_deref() else { return Ok(None) };
    if planning.device.is_some() || planning.devices.is_some() {
        return Ok(None);
    }
    cluster_of(name)
}

fn price(text: &str) -> Result<f64, String> {
    let price = text.parse::<f64>().ok().filter(|price| *price >= 0.0 && price.is_finite());
    price.ok_or_else(|| format!("expected a price such as 2.5, got `{text}`"))
}

fn tokens(text: &str) -> Result<f64, String> {
    let (number, factor) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 1e3),
        Some((at, 'M')) => (&text[..at], 1e6),
        Some((at, 'B')) => (&text[..at], 1e9),
        Some((at, 'T')) => (&text[..at], 1e12),
        _ => (text, 1.0),
    };
    let tokens = number.parse::<f64>().ok().map(|number| number * factor);
    let tokens = tokens.filter(|tokens| *tokens >= 1.0 && tokens.is_finite());
    tokens.ok_or_else(|| format!("expected tokens such as 15T, 300B or 1e12, got `{text}`"))
}

/// JSON output of a plan for a cluster.
#[derive(Debug, Serialize)]
struct Printed<'a> {
    /// Name given on the command line.
    model: &'a str,
    plan: &'a ClusterPlan,
    /// The plan of each rank; `None` for a plan unsupported by the trainer.
    program: Option<&'a Plan>,
    /// Prediction of the programs of all classes of ranks, by roofline.
    lowered: Option<&'a DryRun>,
    memory_as: Option<&'a Count>,
    search: &'a Found,
    what_if: &'a [WhatIf],
}

/// Searches and prints the result.
pub(crate) fn run(
    planning: &PlanningArgs,
    args: &ClusterArgs,
    cluster: &Cluster,
    explain: bool,
    json: bool,
) -> Result<()> {
    let mut request = request(planning, args, cluster)?;
    let precisions = match planning.is_auto() && request.fp8 {
        true => request.take_fastest_precision(),
        false => Vec::new(),
    };
    let node = &cluster.nodes[0].hardware;
    let watch = Watch::start();
    let source = Source::of_search(planning, &mut request, node)?;
    let programs = source.as_ref().ok().map(Source::programs);
    let progress = |progress| watch.searched(progress);
    let (programs, best_alone) = (programs.as_ref(), !explain && !json);
    let aids = SearchAids { programs, progress: Some(&progress), best_alone };
    let best = lowered::best(&request, source.as_ref().ok(), &aids);
    let (found, lowered) = best.map_err(|error| nearest::named(error, &request, &aids))?;
    watch.found(&found);
    let mut plan = ClusterPlan::new(&request, &found, args.tokens)?;
    plan.precisions = precisions;
    plan.warnings.extend(lowered.refused.clone());
    plan.not_run_yet = plan.not_run_yet.or(lowered.not_run_yet.clone());
    if let Err(error) = &source {
        plan.not_run_yet.get_or_insert_with(|| error.to_string());
    }
    plan.is_lowered = lowered.planned.is_some();
    let searched = lowered::take_programs(&mut plan, &lowered, &request, programs);
    let planned = lowered.planned;
    let count = args.accounting.map(|whose| Count::of(&plan, whose)).transpose()?;
    write_pictures(args, &request, &plan)?;
    if explain {
        watch.asks_what_if();
    }
    let numbers = if explain { what_if(&request, &found, &aids)? } else { Vec::new() };
    watch.end();
    if json {
        return print_json(&Printed {
            model: &planning.model,
            plan: &plan,
            program: planned.as_ref().map(|planned| &planned.plan),
            lowered: planned.as_ref().map(|planned| &planned.prediction),
            memory_as: count.as_ref(),
            search: &found,
            what_if: &numbers,
        });
    }
    let mut text = plan.to_string();
    // Writing to a string does not fail.
    if let Some(count) = &count {
        let _ = write!(text, "{count}");
    }
    if let Some(planned) = &planned {
        let _ = write!(text, "\neach rank runs the {}", planned.plan);
        text += &lowered::page(&planned.prediction, &searched, &plan);
    }
    if args.pareto {
        text += &found.front_table(&request);
    }
    if explain {
        text += &explanation(&found, &numbers);
    }
    print(&text)
}

fn write_pictures(args: &ClusterArgs, request: &SearchRequest, plan: &ClusterPlan) -> Result<()> {
    if args.trace.is_none() && args.svg.is_none() && args.memory_svg.is_none() {
        return Ok(());
    }
    let pictures = Pictures::new(request, plan)?;
    let write = |path: &Option<PathBuf>, text: &dyn Fn() -> Result<String>| -> Result<()> {
        let Some(path) = path else { return Ok(()) };
        std::fs::write(path, text()?).with_context(|| format!("cannot write `{}`", path.display()))
    };
    write(&args.trace, &|| Ok(pictures.chrome_trace()))?;
    write(&args.svg, &|| Ok(pictures.time_line_svg()?))?;
    write(&args.memory_svg, &|| Ok(pictures.memory_svg()?))
}

/// Builds the request of the search.
fn request(
    planning: &PlanningArgs,
    args: &ClusterArgs,
    cluster: &Cluster,
) -> Result<SearchRequest> {
    let mut machines = Machines::of_cluster(cluster)?;
    if let Some(measured) = planning.hardware.as_deref().map(measurements_of).transpose()?.flatten()
    {
        machines = machines.measured(&measured);
    }
    machines.price_per_gpu_hour = args.price_per_gpu_hour.or(machines.price_per_gpu_hour);
    let seq = planning.seq.unwrap_or(SEQ);
    let mut shape = shape(&planning.model, seq)?;
    if let Some(layout) = &args.layout {
        shape.chunk_layers = parse_layout(layout, shape.layers)?;
    }
    for (option, size) in [("--seq", Some(seq)), ("--batch", planning.batch)] {
        if size == Some(0) {
            bail!("{option}: expected at least 1, got 0");
        }
    }
    if planning.optimizer.masters.is_some_and(|masters| !masters.is_fp32()) {
        bail!(
            "--masters: expected fp32 for a cluster, got bf16\n\
             hint: plan one machine (`--device cuda`), where ZeRO does not shard the masters"
        );
    }
    if let Some(saved) = planning.saved_activations.filter(|saved| !saved.is_exact()) {
        bail!(
            "--saved-activations: expected exact for a cluster, got {saved}\n\
             hint: plan one machine (`--device cuda`): a search has no price for other storage"
        );
    }
    let batch = planning.batch.unwrap_or((STEP_TOKENS / seq).max(1));
    let counts = gpu_counts(args, &mut machines)?;
    let [fp8, nvfp4] = quantized_units(planning, &machines)?;
    let mut pins: Vec<Pin> = args.pin.iter().chain(&args.forbid).copied().collect();
    pins.extend(pins_of(planning)?);
    let request = SearchRequest::new(shape, seq, batch, machines);
    Ok(SearchRequest {
        gpus: counts,
        gpu_memory_bytes: planning.memory_limit.map(|bytes| bytes as f64),
        pins,
        fp8,
        nvfp4,
        capacity_factor: planning.capacity_factor,
        moments: planning.optimizer.moments.unwrap_or_default(),
        expert_imbalance: args.expert_imbalance.unwrap_or(request.expert_imbalance),
        by_trainer: by_trainer(args.runnable),
        ..request
    })
}

/// Converts `--runnable`: whether plans unsupported by the trainer are allowed.
pub(crate) fn by_trainer(runnable: bool) -> ByTrainer {
    if runnable { ByTrainer::Only } else { ByTrainer::First }
}

/// The sizes of a model: of a preset, a configuration, or a model too large for one machine.
fn shape(name: &str, seq: usize) -> Result<ModelShape> {
    if ModelShape::LARGE.contains(&name)
        && let Some(shape) = ModelShape::known(name)
    {
        return Ok(shape);
    }
    let model = ModelSource::open(name).with_context(|| {
        format!("for a cluster there are also {}", ModelShape::LARGE.join(", "))
    })?;
    for remark in &model.notes().remarks {
        note(remark);
    }
    if let Some(longest) = model.seq_max().filter(|&longest| seq > longest) {
        note(format_args!("sequences of {seq} tokens; the model was made for {longest} at most"));
    }
    let shape = model.config().and_then(|config| ModelShape::of(name, config));
    shape.with_context(|| {
        format!(
            "model: expected one with a configuration, got the exported graph `{name}`\n\
             hint: name the `config.json` of the module; its sizes are what is searched with"
        )
    })
}

/// Numbers of GPUs to try.
fn gpu_counts(args: &ClusterArgs, machines: &mut Machines) -> Result<Vec<usize>> {
    let most = args.max_gpus.unwrap_or(machines.gpus).min(machines.gpus);
    if most == 0 {
        bail!("--max-gpus: expected at least 1, got 0");
    }
    // Whole NVLink domains, or the same number of GPUs in each domain.
    let domain = machines.fabric.domain_gpus;
    let whole_domains = most / domain * domain;
    let domains = most.div_ceil(domain);
    let of_each = most / domains;
    let is_even = most.is_multiple_of(domains) && of_each.is_power_of_two();
    let most = match whole_domains {
        0 => most,
        _ if whole_domains == most => most,
        _ if is_even && of_each > machines.node_gpus => {
            note(format_args!("{of_each} of {domain} GPUs of {domains} NVLink domains each"));
            machines.fabric.domain_gpus = of_each;
            most
        }
        _ => {
            note(format_args!(
                "{whole_domains} of {most} GPUs, as an NVLink domain of {domain} is used whole"
            ));
            whole_domains
        }
    };
    if !args.pareto {
        return Ok(machines.counts(most));
    }
    let halves = std::iter::successors(Some(most), |gpus| (gpus % 2 == 0).then_some(gpus / 2));
    Ok(halves.collect())
}

/// Whether linear layers run on FP8 units, and on NVFP4 units.
fn quantized_units(planning: &PlanningArgs, machines: &Machines) -> Result<[bool; 2]> {
    let precision = planning.precision.as_str();
    let gpu = &machines.gpu;
    let has = [gpu.fp8_flops > gpu.bf16_flops, gpu.nvfp4_flops > gpu.fp8_flops];
    let asked = match precision {
        _ if planning.policy.is_some() => None,
        _ if planning.is_auto() => return Ok(has),
        "bf16" => return Ok([false, false]),
        "nvfp4" => Some(([true, true], "NVFP4")),
        "mxfp8" | "mxfp8-floor" | "mxfp8-128" | "mxfp8-2d" => Some(([true, false], "FP8")),
        _ => None,
    };
    let Some(([_, nvfp4], unit)) = asked else {
        let got = match &planning.policy {
            Some(path) => format!("the policy `{}`", path.display()),
            None => format!("`{precision}`"),
        };
        bail!("--precision: for a cluster expected bf16, mxfp8, nvfp4 or auto, got {got}");
    };
    if !has[usize::from(nvfp4)] {
        let others = if nvfp4 && has[0] { "bf16 or mxfp8" } else { "bf16" };
        bail!("--precision: expected {others}, as {} has no {unit}, got `{precision}`", gpu.name);
    }
    if gpu.generation == Generation::Hopper && precision != "mxfp8-128" {
        note(format_args!(
            "`{precision}` has a scale for every 32 elements, which Hopper computes as BF16: \
             `mxfp8-128` takes its FP8 units"
        ));
        return Ok([false, false]);
    }
    Ok([true, nvfp4])
}

/// Converts options of a plan for named ranks to pins.
fn pins_of(planning: &PlanningArgs) -> Result<Vec<Pin>> {
    let degrees = &planning.degrees;
    let given = [
        ("mbs", planning.micro_batch),
        ("dp", degrees.dp),
        ("zero", degrees.zero.map(usize::from)),
        ("tp", degrees.tp),
        ("pp", degrees.pp),
        ("ep", degrees.ep),
    ];
    let mut pins = Vec::new();
    for (dimension, value) in given {
        if let Some(value) = value {
            pins.push(format!("{dimension}={value}").parse()?);
        }
    }
    // A capacity factor requires whole sequences, so context parallelism is excluded.
    if planning.capacity_factor.is_some() {
        pins.push("cp=1".parse()?);
    }
    if planning.optimizer.optimizer_on_host {
        pins.push("offload=1".parse()?);
    }
    if let Some(rule) = planning.recompute {
        if let Recompute::FullOf(_) = rule {
            bail!(
                "--recompute: expected none, norms, activations, selective or full for a cluster, \
                 got {rule}"
            );
        }
        pins.push(format!("recompute={rule}").parse()?);
    }
    Ok(pins)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_run() {
        let check = |text: &str, expected: Option<f64>| assert_eq!(tokens(text).ok(), expected);
        check("15T", Some(15e12));
        check("300B", Some(300e9));
        check("1e12", Some(1e12));
        check("1.5M", Some(1.5e6));
        for wrong in ["", "T", "0", "-1B", "many", "infT"] {
            check(wrong, None);
        }
    }
}
