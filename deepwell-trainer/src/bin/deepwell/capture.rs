//! `deepwell capture`.

use std::fmt;

use anyhow::Result;
use clap::Args;
use deepwell_ir::{Graph, Tag, TensorId, TensorKind};
use deepwell_plan::format_bytes;
use serde::Serialize;
use serde_json::Value;

use crate::Outcome;
use crate::model::Model;
use crate::output::{grouped, note, print, print_json};

const AFTER_HELP: &str = "\
Every key of the configuration is accounted for: it has its effect, or it is known to have none
on training (--summary lists those), or it is an error that names it. Where a folder has weights,
their names, shapes and types are compared with the configuration; no weight is read.

Examples:
  deepwell capture llama-micro                           the graph as text
  deepwell capture ./TinyLlama --summary                 parameters, layers, tags, notes
  deepwell capture llama-micro --dot | dot -Tsvg > g.svg
  deepwell capture ./my-model/config.json --json > graph.json";

/// Read a model as a graph of typed ops over tensors
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CaptureArgs {
    /// Preset name, `config.json` or model folder
    model: String,
    /// Capture for sequences of this many tokens; models with dynamic RoPE scaling need it
    #[arg(long, alias = "seq-len", value_name = "TOKENS")]
    seq: Option<usize>,
    /// Print Graphviz DOT, one cluster for each layer
    #[arg(long, conflicts_with_all = ["json", "summary"])]
    dot: bool,
    /// Print counts and notes rather than the graph
    #[arg(long)]
    summary: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &CaptureArgs) -> Result<Outcome> {
    let model = Model::open(&args.model)?;
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
    for remark in &model.notes.remarks {
        note(remark);
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
    parameter_count: u64,
    parameter_tensors: usize,
    layers: usize,
    nodes: usize,
    tags: Vec<TagSummary>,
    config: Value,
    weights: Option<WeightSummary>,
    keys_without_effect: Vec<String>,
    remarks: Vec<String>,
}

/// One part of the model in numbers. A tied table counts where it is read first.
#[derive(Debug, Serialize)]
struct TagSummary {
    tag: Tag,
    nodes: usize,
    parameter_count: u64,
}

/// Weights on the disk.
#[derive(Debug, Serialize)]
struct WeightSummary {
    tensors: usize,
    bytes: u64,
    dtypes: Vec<&'static str>,
}

impl Summary {
    fn new(model: &Model, graph: &Graph) -> Summary {
        let weights = model.weights.as_ref().map(|tensors| {
            let mut dtypes: Vec<_> = tensors.iter().map(|tensor| tensor.dtype.name()).collect();
            dtypes.sort_unstable();
            dtypes.dedup();
            let bytes = tensors.iter().map(|tensor| tensor.size_bytes).sum();
            WeightSummary { tensors: tensors.len(), bytes, dtypes }
        });
        Summary {
            model: model.name.clone(),
            parameter_count: graph.parameter_count(),
            parameter_tensors: graph.parameters().count(),
            layers: model.config.num_layers,
            nodes: graph.nodes.len(),
            tags: tags_of(graph),
            config: model.config.to_json(),
            weights,
            keys_without_effect: model.notes.without_effect.clone(),
            remarks: model.notes.remarks.clone(),
        }
    }
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
        writeln!(f, "parameters  {count} in {} tensors", self.parameter_tensors)?;
        writeln!(f, "layers      {}", self.layers)?;
        match &self.weights {
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
