//! Lowers an exported program to a [`Graph`]: only nodes needed for the output, in order.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::SourceSlice;
use super::exported::{Exported, InputKind};
use super::tags::{TagNode, tags};
use super::trace::Trace;
use super::turned;
use super::value::{Columns, Exprs, Id, Kind, Value, Weight};
use crate::capture::CaptureError;
use crate::ops;
use crate::{DType, Graph, GraphBuilder, Init, Op, Role, Shape, Tag, TensorId};

/// Source of an operand.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Tokens,
    Targets,
    LossScale,
    Input(String),
    Parameter(String),
    /// Node index and output index.
    Node(usize, usize),
}

/// A node whose operands have no ids yet.
pub(super) struct Emitted {
    pub(super) name: String,
    pub(super) op: Op,
    pub(super) inputs: Vec<Source>,
    pub(super) path: String,
}

/// A parameter of the graph.
pub(super) struct Parameter {
    pub(super) shape: Vec<usize>,
    pub(super) role: Role,
    pub(super) init: Init,
    pub(super) stored: SourceSlice,
}

/// A captured graph and the location of its parameters.
pub(super) struct Lowered {
    pub(super) graph: Graph,
    /// Location of each stored parameter, in graph order.
    pub(super) stored: Vec<(String, SourceSlice)>,
}

pub(super) struct Lowering<'a> {
    pub(super) exported: &'a Exported,
    pub(super) trace: &'a Trace,
    pub(super) emitted: Vec<Emitted>,
    pub(super) names: HashSet<String>,
    /// Lowered columns of expressions, each with its source.
    pub(super) made: HashMap<(Id, usize, usize), Source>,
    /// Emitted nodes of opaque calls, by exported node.
    pub(super) calls: HashMap<usize, usize>,
    pub(super) parameters: BTreeMap<String, Parameter>,
    pub(super) inputs: BTreeMap<String, (Shape, DType)>,
}

/// Builds the graph of the first output, with a loss if the output is an output head.
pub(super) fn lower(
    exported: &Exported,
    trace: &Trace,
    name: &str,
    location: &str,
) -> Result<Lowered, CaptureError> {
    let Some(output) = trace.outputs.first() else {
        return Err(CaptureError::Export {
            location: location.to_string(),
            what: "the program gives no tensor".to_string(),
            hint: "export a model that gives its logits".to_string(),
        });
    };
    let mut lowering = Lowering {
        exported,
        trace,
        emitted: Vec::new(),
        // Names of the graph's inputs are taken: a module may have the same name.
        names: ["tokens", "targets", "loss_scale"].map(str::to_string).into(),
        made: HashMap::new(),
        calls: HashMap::new(),
        parameters: BTreeMap::new(),
        inputs: BTreeMap::new(),
    };
    lowering.needed(output);
    let has_loss = lowering.head(output);
    lowering.finish(name, has_loss)
}

impl Lowering<'_> {
    /// Lowers everything that `output` needs, in the order of the exported graph.
    fn needed(&mut self, output: &Value) {
        let exprs = &self.trace.exprs;
        // Columns read from each expression, each with a label.
        let mut demands: BTreeMap<Id, Vec<(Columns, &'static str)>> = BTreeMap::new();
        let all_columns = |id: Id| Columns { base: id, start: 0, width: exprs.width(id) };
        let last = match (self.head_of(output), output) {
            (Some((x, _)), _) => all_columns(x),
            (None, Value::View(view)) => all_columns(view.base),
            (None, Value::Known(_)) => return,
        };
        demands.insert(last.base, vec![(last, "")]);
        for id in (0..exprs.all.len()).rev() {
            let Some(label) = demands.get(&id).map(|all| all[0].1) else { continue };
            for (columns, label) in reads_of(exprs, id, label) {
                let columns = columns.unwrap_or_else(all_columns);
                let all = demands.entry(columns.base).or_default();
                match all.iter_mut().find(|(known, _)| *known == columns) {
                    // An earlier reader was an unknown call, which gives no label.
                    Some((_, known)) if known.is_empty() => *known = label,
                    Some(_) => {}
                    None => all.push((columns, label)),
                }
            }
        }
        for (id, columns) in demands {
            for (columns, label) in columns {
                self.emit(id, &columns, label);
            }
        }
    }

    /// Operand and weight of the output head, if the output is one: a linear layer without bias
    /// that gives logits for each token.
    fn head_of(&self, output: &Value) -> Option<(Id, Weight)> {
        let exprs = &self.trace.exprs;
        // The loss is a mean over tokens, independent of their order.
        let id =
            exprs.rows(output).or_else(|| exprs.rows(&turned::by_sequences(exprs, output)?))?;
        match exprs.kind(id) {
            Kind::Linear { x, weight, bias: None } if !weight.transposed => {
                Some((*x, weight.clone()))
            }
            _ => None,
        }
    }

    /// Adds the loss if the output is an output head, otherwise the output itself.
    fn head(&mut self, output: &Value) -> bool {
        let Some((x, weight)) = self.head_of(output) else {
            if let Value::View(view) = output {
                self.source_of(view);
            }
            return false;
        };
        let x = self.whole_source(x);
        let table = self.weight(&weight, 0, weight.outputs, "", Role::Head);
        let inputs = vec![x, table, Source::Targets, Source::LossScale];
        self.push("lm_head", "", ops::LinearCrossEntropy {}, inputs);
        true
    }

    fn finish(self, name: &str, has_loss: bool) -> Result<Lowered, CaptureError> {
        let mut graph = GraphBuilder::new(name);
        let mut ids: HashMap<Source, TensorId> = HashMap::new();
        ids.insert(Source::Tokens, graph.tokens());
        if has_loss {
            ids.insert(Source::Targets, graph.targets());
            ids.insert(Source::LossScale, graph.loss_scale());
        }
        for (name, (shape, dtype)) in self.inputs {
            let id = graph.input(&name, shape, dtype);
            ids.insert(Source::Input(name), id);
        }
        // In the order of the export; parts of one tensor by position.
        let order: HashMap<&str, usize> = self
            .exported
            .inputs
            .iter()
            .enumerate()
            .filter_map(|(index, (_, kind))| match kind {
                InputKind::Parameter(name) => Some((name.as_str(), index)),
                _ => None,
            })
            .collect();
        let mut parameters: Vec<(String, Parameter)> = self.parameters.into_iter().collect();
        parameters.sort_by_key(|(_, parameter)| {
            (order.get(parameter.stored.name.as_str()).copied(), parameter.stored.start)
        });
        let mut stored = Vec::with_capacity(parameters.len());
        for (name, Parameter { shape, role, init, stored: slice }) in parameters {
            let id = graph.parameter(&name, Shape::new(shape), init, role);
            ids.insert(Source::Parameter(name.clone()), id);
            stored.push((name, slice));
        }
        let nodes: Vec<TagNode<'_>> = self
            .emitted
            .iter()
            .map(|node| TagNode {
                op: &node.op,
                reads: node
                    .inputs
                    .iter()
                    .filter_map(|source| match source {
                        Source::Node(at, _) => Some(*at),
                        _ => None,
                    })
                    .collect(),
            })
            .collect();
        let tags: Vec<Tag> = tags(&nodes);
        for (index, (node, tag)) in self.emitted.iter().zip(tags).enumerate() {
            graph.scope(tag, layer_of(&node.path));
            let inputs: Vec<TensorId> =
                node.inputs.iter().filter_map(|source| ids.get(source).copied()).collect();
            let outputs = graph.op(&node.name, node.op.clone(), &inputs)?;
            for (output, id) in outputs.into_iter().enumerate() {
                ids.insert(Source::Node(index, output), id);
            }
        }
        Ok(Lowered { graph: graph.finish()?, stored })
    }
}

/// Operands of an expression, each with a label: columns, or the id of an expression to read whole.
/// `label` is the label of the expression itself.
fn reads_of(
    exprs: &Exprs,
    id: Id,
    label: &'static str,
) -> Vec<(Result<Columns, Id>, &'static str)> {
    match exprs.kind(id) {
        Kind::Tokens
        | Kind::Input(_)
        | Kind::Parameter(_)
        | Kind::Buffer(_)
        | Kind::Embedding { .. }
        | Kind::Positions { .. } => Vec::new(),
        Kind::Pending { operands, .. } => operands
            .iter()
            .filter_map(|operand| match &operand.value {
                Value::View(view) => {
                    let is_whole = exprs.base_of(&operand.value).is_some();
                    let columns = exprs.columns(&operand.value).filter(|_| !is_whole);
                    Some((columns.ok_or(view.base), ""))
                }
                Value::Known(_) => None,
            })
            .collect(),
        Kind::AddPositions { x, .. }
        | Kind::Linear { x, .. }
        | Kind::RmsNorm { x, .. }
        | Kind::LayerNorm { x, .. }
        | Kind::Gelu { x, .. }
        | Kind::Relu { x } => vec![(Err(*x), "")],
        Kind::Rope { x, .. } => vec![(Ok(x.clone()), label)],
        Kind::Attention { q, k, v, .. } => {
            vec![(Ok(q.clone()), "q"), (Ok(k.clone()), "k"), (Ok(v.clone()), "v")]
        }
        Kind::SwiGlu { gate, up } => vec![(Ok(gate.clone()), "gate"), (Ok(up.clone()), "up")],
        Kind::Add { a, b } => vec![(Err(*a), ""), (Err(*b), "")],
    }
}

/// First number in a path: `model.layers.3.mlp` belongs to layer 3.
fn layer_of(path: &str) -> Option<u32> {
    path.split('.').find_map(|part| part.parse().ok())
}
