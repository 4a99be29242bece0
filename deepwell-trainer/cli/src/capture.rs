//! `deepwell capture`.

use std::fmt;

use anyhow::Result;
use clap::Args;
use deepwell_ir::capture::StoredDType;
use deepwell_ir::{Graph, Tag, TensorId, TensorKind};
use deepwell_plan::format_bytes;
use deepwell_trainer::ModelSource;
use serde::Serialize;
use serde_json::Value;

use crate::Outcome;
use crate::output::{grouped, note, print, print_json};

const AFTER_HELP: &str = "\
Every key of the configuration is checked: it changes the graph, or it is known not to affect
training (--summary lists such keys), or it is an error. If the folder has weights, their names,
shapes and types are compared with the configuration; no weight is read.

A .pt2 archive of torch.export.save is a graph of PyTorch ops. Ops of Llama- and GPT-2-style modules
are recognized; others keep their names and are listed as opaque.

Examples:
  deepwell capture llama-micro                           the graph as text
  deepwell capture ./TinyLlama --summary                 parameters, layers, tags, notes
  deepwell capture llama-micro --dot | dot -Tsvg > g.svg
  deepwell capture ./my-model/config.json --json > graph.json
  deepwell capture exported.pt2 --summary                tags and opaque ops of an export

Exit codes: 0 captured, 2 the model cannot be read";

/// Read a model as a graph of typed ops over tensors
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CaptureArgs {
    /// Preset name, `config.json`, model folder or `.pt2` archive
    model: String,
    /// Tokens per sequence; required for models with dynamic RoPE scaling
    #[arg(long, alias = "seq-len", value_name = "TOKENS")]
    seq: Option<usize>,
    /// Print Graphviz DOT, with one cluster per layer
    #[arg(long, conflicts_with_all = ["json", "summary"])]
    dot: bool,
    /// Print counts and notes instead of the graph
    #[arg(long)]
    summary: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &CaptureArgs) -> Result<Outcome> {
    let model = ModelSource::open(&args.model)?;
    let graph = model.capture(args.seq)?;
    if args.summary {
        let summary = Summary::new(&model, &graph);
        if args.json {
            print_json(&summary)?
        } else {
            print(&summary)?
        }
        return Ok(Outcome::Success);
    }
    for remark in &model.notes().remarks {
        note(remark);
    }
    for call in model.opaque() {
        note(format_args!("{}: `{}` is not known and stays opaque", call.node, call.target));
    }
    if args.dot {
        print(&graph.to_dot())?;
    } else if args.json {
        print_json(&graph)?;
    } else {
        print(&graph)?;
    }
    Ok(Outcome::Success)
}

/// A model in numbers.
#[derive(Debug, Serialize)]
struct Summary {
    model: String,
    family: &'static str,
    parameter_count: u64,
    parameter_tensors: usize,
    layers: usize,
    nodes: usize,
    tags: Vec<TagSummary>,
    /// Calls of an exported graph without a matching op.
    opaque: Vec<OpaqueSummary>,
    /// Version of PyTorch that exported the graph.
    torch_version: Option<String>,
    config: Option<Value>,
    weights: Option<WeightSummary>,
    keys_without_effect: Vec<String>,
    remarks: Vec<String>,
}

/// One part of the model in numbers. A tied table counts in the part that reads it first.
#[derive(Debug, Serialize)]
struct TagSummary {
    tag: Tag,
    nodes: usize,
    parameter_count: u64,
}

/// An unknown op, and its number of calls in a part of the model.
#[derive(Debug, PartialEq, Serialize)]
struct OpaqueSummary {
    op: String,
    tag: Tag,
    calls: usize,
    /// Name of the first call.
    first: String,
}

/// Weights on the disk.
#[derive(Debug, Serialize)]
struct WeightSummary {
    tensors: usize,
    bytes: u64,
    dtypes: Vec<&'static str>,
}

impl Summary {
    fn new(model: &ModelSource, graph: &Graph) -> Summary {
        let weights = model.stored().map(|tensors| {
            let dtypes = tensors.iter().filter_map(|tensor| StoredDType::of(tensor.dtype));
            let mut dtypes: Vec<_> = dtypes.map(StoredDType::name).collect();
            dtypes.sort_unstable();
            dtypes.dedup();
            let bytes = tensors.iter().map(|tensor| tensor.size_bytes).sum();
            WeightSummary { tensors: tensors.len(), bytes, dtypes }
        });
        Summary {
            model: model.name().to_string(),
            family: model.family(),
            parameter_count: graph.parameter_count(),
            parameter_tensors: graph.parameters().count(),
            layers: layers_of(graph),
            nodes: graph.nodes.len(),
            tags: tags_of(graph),
            opaque: opaque_of(model),
            torch_version: model.exported().map(|exported| exported.torch_version.clone()),
            config: model.config().map(|config| config.to_json()),
            weights,
            keys_without_effect: model.notes().without_effect.clone(),
            remarks: model.notes().remarks.clone(),
        }
    }
}

fn layers_of(graph: &Graph) -> usize {
    graph.nodes.iter().filter_map(|node| node.layer).max().map_or(0, |last| last as usize + 1)
}

fn opaque_of(model: &ModelSource) -> Vec<OpaqueSummary> {
    let mut all: Vec<OpaqueSummary> = Vec::new();
    for call in model.opaque() {
        match all.iter_mut().find(|known| (&known.op, known.tag) == (&call.target, call.tag)) {
            Some(known) => known.calls += 1,
            None => {
                let (op, tag, first) = (call.target, call.tag, call.node);
                all.push(OpaqueSummary { op, tag, calls: 1, first });
            }
        }
    }
    all
}

fn tags_of(graph: &Graph) -> Vec<TagSummary> {
    let mut tags: Vec<TagSummary> = Vec::new();
    let mut counted: Vec<bool> = vec![false; graph.tensors.len()];
    for node in &graph.nodes {
        let mut parameter_count = 0;
        for &id in &node.inputs {
            if !std::mem::replace(&mut counted[id.index()], true) {
                parameter_count += parameters_in(graph, id);
            }
        }
        match tags.iter_mut().find(|known| known.tag == node.tag) {
            Some(known) => {
                known.nodes += 1;
                known.parameter_count += parameter_count;
            }
            None => tags.push(TagSummary { tag: node.tag, nodes: 1, parameter_count }),
        }
    }
    tags
}

fn parameters_in(graph: &Graph, id: TensorId) -> u64 {
    let tensor = graph.tensor(id);
    match (&tensor.kind, tensor.shape.as_fixed()) {
        (TensorKind::Parameter { .. }, Some(shape)) => {
            shape.iter().map(|&size| size as u64).product()
        }
        _ => 0,
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = grouped(self.parameter_count);
        writeln!(f, "model       {}", self.model)?;
        match &self.torch_version {
            None => writeln!(f, "family      {}", self.family)?,
            Some(version) => writeln!(f, "family      exported by PyTorch {version}")?,
        }
        writeln!(f, "parameters  {count} in {} tensors", self.parameter_tensors)?;
        writeln!(f, "layers      {}", self.layers)?;
        match &self.weights {
            None if self.torch_version.is_some() => writeln!(f, "weights     in the archive")?,
            None => writeln!(f, "weights     none here")?,
            Some(weights) => writeln!(
                f,
                "weights     {} tensors, {}, {}",
                weights.tensors,
                format_bytes(weights.bytes),
                weights.dtypes.join(" and ")
            )?,
        }
        writeln!(f, "\n{:<10} {:>6} {:>16}", "tag", "nodes", "parameters")?;
        for tag in &self.tags {
            let count = grouped(tag.parameter_count);
            writeln!(f, "{:<10} {:>6} {count:>16}", tag.tag.to_string(), tag.nodes)?;
        }
        let count = grouped(self.parameter_count);
        writeln!(f, "{:<10} {:>6} {count:>16}", "total", self.nodes)?;
        if !self.opaque.is_empty() {
            writeln!(f, "\n{:<32} {:<10} {:>6}  first", "opaque op", "tag", "calls")?;
            for op in &self.opaque {
                let tag = op.tag.to_string();
                writeln!(f, "{:<32} {tag:<10} {:>6}  {}", op.op, op.calls, op.first)?;
            }
        }
        if !self.keys_without_effect.is_empty() {
            let keys = self.keys_without_effect.join(", ");
            writeln!(f, "\nkeys without effect on training: {keys}")?;
        }
        for (index, remark) in self.remarks.iter().enumerate() {
            let gap = if index == 0 { "\n" } else { "" };
            writeln!(f, "{gap}note: {remark}")?;
        }
        Ok(())
    }
}
