//! From what an exported graph computes to a [`Graph`]: only what its output needs, in order.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::Part;
use super::schema::{Arg, Exported, InputKind, Scalar};
use super::tags::{Piece, tags};
use super::trace::Trace;
use super::value::{Columns, Id, Kind, Value, View, Weight};
use crate::capture::CaptureError;
use crate::op::Op;
use crate::ops;
use crate::{DType, Dim, Graph, GraphBuilder, Init, Role, Shape, Tag, TensorId};

/// Standard deviation of weights that are made anew: that of most published models.
const STD: f64 = 0.02;

/// Where an operand comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Source {
    Tokens,
    Targets,
    LossScale,
    Input(String),
    Parameter(String),
    /// A node and which of its outputs.
    Node(usize, usize),
}

/// A node before its operands have ids.
struct Emitted {
    name: String,
    op: Op,
    inputs: Vec<Source>,
    path: String,
}

/// A parameter of the graph.
struct Parameter {
    shape: Vec<usize>,
    role: Role,
    init: Init,
    part: Part,
}

/// A captured graph and what it was made of.
pub(super) struct Lowered {
    pub(super) graph: Graph,
    /// Where each parameter is stored, in the order of the graph.
    pub(super) parts: Vec<(String, Part)>,
}

struct Lowering<'a> {
    exported: &'a Exported,
    trace: &'a Trace,
    emitted: Vec<Emitted>,
    names: HashSet<String>,
    /// Which columns of an expression stand where.
    made: HashMap<(Id, usize, usize), Source>,
    /// Outputs of opaque calls, by node.
    calls: HashMap<usize, usize>,
    parameters: BTreeMap<String, Parameter>,
    inputs: BTreeMap<String, (Shape, DType)>,
}

/// Makes the graph of the first output, with a loss if it ends in an output head.
pub(super) fn lower(
    exported: &Exported,
    trace: &Trace,
    name: &str,
    place: &str,
) -> Result<Lowered, CaptureError> {
    let Some(output) = trace.outputs.first() else {
        return Err(CaptureError::Export {
            place: place.to_string(),
            what: "the program gives no tensor".to_string(),
            hint: "export a model that gives its logits".to_string(),
        });
    };
    let mut lowering = Lowering {
        exported,
        trace,
        emitted: Vec::new(),
        names: HashSet::new(),
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
    /// Lowers what `output` needs, in the order of the exported graph.
    fn needed(&mut self, output: &Value) {
        let exprs = &self.trace.exprs;
        // Which columns of each expression are read, and what as.
        let mut demands: BTreeMap<Id, Vec<(Columns, &'static str)>> = BTreeMap::new();
        let whole = |id: Id| Columns { base: id, start: 0, width: exprs.width(id) };
        let last = match (self.head_of(output), output) {
            (Some((x, _)), _) => whole(x),
            (None, Value::View(view)) => whole(view.base),
            (None, Value::Known(_)) => return,
        };
        demands.insert(last.base, vec![(last, "")]);
        for id in (0..exprs.all.len()).rev() {
            let Some(label) = demands.get(&id).map(|all| all[0].1) else { continue };
            for (columns, label) in reads_of(exprs.kind(id), label) {
                let columns = columns.unwrap_or_else(whole);
                let all = demands.entry(columns.base).or_default();
                if !all.iter().any(|(known, _)| *known == columns) {
                    all.push((columns, label));
                }
            }
        }
        for (id, columns) in demands {
            for (columns, label) in columns {
                self.emit(id, &columns, label);
            }
        }
    }

    /// The operand and the weight of the output head, if the output is one: a linear layer
    /// without bias that gives a number for each token of a vocabulary.
    fn head_of(&self, output: &Value) -> Option<(Id, Weight)> {
        let id = self.trace.exprs.rows(output)?;
        match self.trace.exprs.kind(id) {
            Kind::Linear { x, weight, bias: None } if !weight.transposed => {
                Some((*x, weight.clone()))
            }
            _ => None,
        }
    }

    /// The loss, or else the output as it is.
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

    fn path(&self, id: Id) -> &str {
        let node = self.trace.exprs.all[id].node;
        node.map_or("", |node| self.exported.nodes[node].path.as_str())
    }

    /// Adds a node. One of a module of its own has the module's name.
    fn push(&mut self, name: &str, path: &str, op: impl Into<Op>, inputs: Vec<Source>) -> usize {
        let op = op.into();
        let name = match (path.is_empty(), name.is_empty()) {
            (true, true) => op.name().to_string(),
            (true, false) => name.to_string(),
            (false, true) => path.to_string(),
            (false, false) => format!("{path}.{name}"),
        };
        let mut unique = name.clone();
        let mut number = 2;
        while !self.names.insert(unique.clone()) {
            unique = format!("{name}_{number}");
            number += 1;
        }
        self.emitted.push(Emitted { name: unique, op, inputs, path: path.to_string() });
        self.emitted.len() - 1
    }

    fn parameter(&mut self, name: String, parameter: Parameter) -> Source {
        // A tied head keeps the role of the table.
        self.parameters.entry(name.clone()).or_insert(parameter);
        Source::Parameter(name)
    }

    /// A vector that is stored by itself.
    fn vector(
        &mut self,
        name: &str,
        start: usize,
        width: usize,
        label: &str,
        role: Role,
    ) -> Source {
        let init = if role == Role::Norm { Init::Ones } else { Init::Zeros };
        let part = Part { name: name.to_string(), start, transposed: false };
        self.parameter(labelled(name, label), Parameter { shape: vec![width], role, init, part })
    }

    /// A table that is stored by itself.
    fn table(&mut self, name: &str) -> Source {
        let shape = self.exported.inputs.iter().find_map(|(input, kind)| {
            let is_it = *kind == InputKind::Parameter(name.to_string());
            is_it.then(|| self.exported.tensors.get(input).map(|meta| meta.shape.clone()))?
        });
        let part = Part { name: name.to_string(), start: 0, transposed: false };
        let (role, init) = (Role::Embedding, Init::Normal { std: STD });
        let shape = shape.unwrap_or_default();
        self.parameter(name.to_string(), Parameter { shape, role, init, part })
    }

    /// Outputs `start..start + width` of a weight.
    fn weight(
        &mut self,
        of: &Weight,
        start: usize,
        width: usize,
        label: &str,
        role: Role,
    ) -> Source {
        let part = Part { name: of.name.clone(), start, transposed: of.transposed };
        let (shape, init) = (vec![width, of.inputs], Init::Normal { std: STD });
        self.parameter(labelled(&of.name, label), Parameter { shape, role, init, part })
    }

    fn whole_source(&mut self, id: Id) -> Source {
        let width = self.trace.exprs.width(id);
        self.source(&Columns { base: id, start: 0, width })
    }

    /// Where columns stand that were lowered before.
    fn source(&mut self, columns: &Columns) -> Source {
        let key = (columns.base, columns.start, columns.width);
        if let Some(source) = self.made.get(&key) {
            return source.clone();
        }
        self.emit(columns.base, columns, "");
        self.made.get(&key).cloned().unwrap_or(Source::Tokens)
    }

    /// Lowers columns of an expression.
    fn emit(&mut self, id: Id, columns: &Columns, label: &str) {
        let key = (id, columns.start, columns.width);
        if self.made.contains_key(&key) {
            return;
        }
        let path = self.path(id).to_string();
        let kind = self.trace.exprs.kind(id).clone();
        let source = match kind {
            Kind::Tokens => Source::Tokens,
            Kind::Input(name) | Kind::Buffer(name) => self.input(id, name),
            Kind::Parameter(name) => self.stray_parameter(id, &name),
            Kind::Positions { table } => self.table(&table),
            Kind::Embedding { table } => {
                let inputs = vec![Source::Tokens, self.table(&table)];
                self.node("", &path, ops::Embedding {}, inputs)
            }
            Kind::AddPositions { x, table } => {
                let inputs = vec![self.whole_source(x), self.table(&table)];
                self.node("positions", &path, ops::AddPositions {}, inputs)
            }
            Kind::Linear { x, weight, bias } => {
                let (start, width) = (columns.start, columns.width);
                let label = match (width == weight.outputs, label) {
                    (true, _) => String::new(),
                    // What an unknown call reads has no name of its own.
                    (false, "") => format!("from_{start}"),
                    (false, label) => label.to_string(),
                };
                let label = label.as_str();
                let mut inputs = vec![self.whole_source(x)];
                inputs.push(self.weight(&weight, start, width, label, Role::Linear));
                if let Some(bias) = &bias {
                    inputs.push(self.vector(bias, start, width, label, Role::Linear));
                }
                self.node(label, &path, ops::Linear { bias: bias.is_some() }, inputs)
            }
            Kind::RmsNorm { x, gain, width, eps } => {
                let inputs =
                    vec![self.whole_source(x), self.vector(&gain, 0, width, "", Role::Norm)];
                if width == self.trace.exprs.width(id) {
                    self.node("", &path, ops::RmsNorm { eps }, inputs)
                } else {
                    self.node("", &path, ops::HeadRmsNorm { eps }, inputs)
                }
            }
            Kind::LayerNorm { x, gain, bias, eps } => {
                let width = self.trace.exprs.width(id);
                let gain = self.vector(&gain, 0, width, "", Role::Norm);
                let bias = self.norm_bias(&bias, width);
                let inputs = vec![self.whole_source(x), gain, bias];
                self.node("", &path, ops::LayerNorm { eps }, inputs)
            }
            Kind::Rope { x, heads, frequencies, factor } => {
                let op = ops::Rope {
                    heads,
                    head_dim: x.width / heads.max(1),
                    inverse_frequencies: frequencies,
                    attention_factor: factor,
                };
                let inputs = vec![self.source(&x)];
                self.node("rope", &path, op, inputs)
            }
            Kind::Attention { q, k, v, heads, window } => {
                let inputs = vec![self.source(&q), self.source(&k), self.source(&v)];
                match window {
                    Some(window) => {
                        let op = ops::WindowAttention { heads, window };
                        self.node("attention", &path, op, inputs)
                    }
                    None => self.node("attention", &path, ops::Attention { heads }, inputs),
                }
            }
            Kind::SwiGlu { gate, up } => {
                let inputs = vec![self.source(&gate), self.source(&up)];
                self.node("swiglu", &path, ops::SwiGlu {}, inputs)
            }
            Kind::Gelu { x, tanh } => {
                let inputs = vec![self.whole_source(x)];
                self.node("gelu", &path, ops::Gelu { tanh }, inputs)
            }
            Kind::Add { a, b } => {
                let inputs = vec![self.whole_source(a), self.whole_source(b)];
                self.node("residual", &path, ops::Add {}, inputs)
            }
            Kind::Pending { output, .. } => self.opaque(id, output),
        };
        self.made.insert(key, source);
    }

    fn node(&mut self, name: &str, path: &str, op: impl Into<Op>, inputs: Vec<Source>) -> Source {
        Source::Node(self.push(name, path, op, inputs), 0)
    }

    /// The bias of a norm counts as a part of it.
    fn norm_bias(&mut self, name: &str, width: usize) -> Source {
        let part = Part { name: name.to_string(), start: 0, transposed: false };
        let (shape, role, init) = (vec![width], Role::Norm, Init::Zeros);
        self.parameter(name.to_string(), Parameter { shape, role, init, part })
    }

    fn input(&mut self, id: Id, name: String) -> Source {
        let shape = &self.trace.exprs.all[id].shape;
        let scalar = self.exported.tensors.get(&name).map_or(Scalar::F32, |meta| meta.scalar);
        self.inputs.insert(name.clone(), (self.open(shape), dtype_of(scalar)));
        Source::Input(name)
    }

    /// A parameter that an unknown call reads as it is.
    fn stray_parameter(&mut self, id: Id, name: &str) -> Source {
        let shape = self.trace.exprs.all[id].shape.clone();
        let part = Part { name: name.to_string(), start: 0, transposed: false };
        let init = if shape.len() > 1 { Init::Normal { std: STD } } else { Init::Zeros };
        self.parameter(name.to_string(), Parameter { shape, role: Role::Linear, init, part })
    }

    /// A call that no rule took, under its own name.
    fn opaque(&mut self, id: Id, output: usize) -> Source {
        let expr = &self.trace.exprs.all[id];
        let Some(node) = expr.node else { return Source::Tokens };
        if let Some(&at) = self.calls.get(&node) {
            return Source::Node(at, output);
        }
        let Kind::Pending { operands, .. } = expr.kind.clone() else { return Source::Tokens };
        let mut inputs = Vec::new();
        let mut constants = HashMap::new();
        for operand in &operands {
            match &operand.value {
                Value::View(view) => inputs.push(self.source_of(view)),
                Value::Known(constant) => drop(constants.insert(&operand.name, constant)),
            }
        }
        let call = &self.exported.nodes[node];
        let arguments: Vec<String> = call
            .args
            .iter()
            .filter_map(|(name, arg)| {
                let text = match arg {
                    Arg::Int(value) => value.to_string(),
                    Arg::Ints(values) => format!("{values:?}"),
                    Arg::Float(value) => value.to_string(),
                    Arg::Bool(value) => value.to_string(),
                    Arg::Text(value) => value.clone(),
                    // What was worked out and is not a number.
                    Arg::Tensor(_) => format!("constant{:?}", constants.get(name)?.shape),
                    _ => return None,
                };
                Some(format!("{name}={text}"))
            })
            .collect();
        let outputs = call
            .outputs
            .iter()
            .map(|name| match self.exported.tensors.get(name) {
                Some(meta) => ops::OpaqueOutput {
                    shape: self.open(&meta.shape),
                    dtype: dtype_of(meta.scalar),
                },
                None => ops::OpaqueOutput { shape: Shape(Vec::new()), dtype: DType::F32 },
            })
            .collect();
        let op =
            ops::Opaque { target: call.target.clone(), arguments: arguments.join(" "), outputs };
        let (name, path) = (call.outputs[0].clone(), call.path.clone());
        let at = self.push(&name, &path, op, inputs);
        self.calls.insert(node, at);
        Source::Node(at, output)
    }

    /// A view as a tensor: its base if it is all of it, else the call that made the view.
    fn source_of(&mut self, view: &View) -> Source {
        let exprs = &self.trace.exprs;
        let value = Value::View(view.clone());
        if exprs.base_of(&value).is_some() {
            return self.whole_source(view.base);
        }
        if let Some(columns) = exprs.columns(&value) {
            return self.source(&columns);
        }
        let base = self.whole_source(view.base);
        let call = view.node.map(|node| &self.exported.nodes[node]);
        let (target, name, path) = match call {
            Some(call) => (call.target.clone(), call.outputs[0].clone(), call.path.clone()),
            None => ("view".to_string(), "view".to_string(), String::new()),
        };
        let output =
            ops::OpaqueOutput { shape: self.open(&view.layout.shape()), dtype: DType::F32 };
        let arguments = if view.scale == 1.0 { String::new() } else { format!("x{}", view.scale) };
        let op = ops::Opaque { target, arguments, outputs: vec![output] };
        self.node(&name, &path, op, vec![base])
    }

    /// A shape of the export, open where it is one row for each token.
    fn open(&self, shape: &[usize]) -> Shape {
        let sizes = self.trace.exprs.sizes;
        if shape == [sizes.batch, sizes.seq] {
            return Shape(vec![Dim::TOKENS]);
        }
        if sizes.is_rows(shape) {
            let count: usize = shape.iter().product();
            return Shape(vec![Dim::TOKENS, Dim::fixed(count / sizes.tokens())]);
        }
        Shape::new(shape.iter().copied())
    }

    fn finish(self, name: &str, has_loss: bool) -> Result<Lowered, CaptureError> {
        let mut graph = GraphBuilder::new(name);
        let mut ids: HashMap<Source, TensorId> = HashMap::new();
        let rows = Shape(vec![Dim::TOKENS]);
        ids.insert(Source::Tokens, graph.input("tokens", rows.clone(), DType::I32));
        if has_loss {
            ids.insert(Source::Targets, graph.input("targets", rows, DType::I32));
            let scale = graph.input("loss_scale", Shape(vec![Dim::fixed(1)]), DType::F32);
            ids.insert(Source::LossScale, scale);
        }
        for (name, (shape, dtype)) in self.inputs {
            let id = graph.input(&name, shape, dtype);
            ids.insert(Source::Input(name), id);
        }
        // In the order of the export; parts of one tensor by where they begin.
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
            (order.get(parameter.part.name.as_str()).copied(), parameter.part.start)
        });
        let mut parts = Vec::with_capacity(parameters.len());
        for (name, Parameter { shape, role, init, part }) in parameters {
            let id = graph.parameter(&name, Shape::new(shape), init, role);
            ids.insert(Source::Parameter(name.clone()), id);
            parts.push((name, part));
        }
        let pieces: Vec<Piece<'_>> = self
            .emitted
            .iter()
            .map(|node| Piece {
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
        let tags: Vec<Tag> = tags(&pieces);
        for (index, (node, tag)) in self.emitted.iter().zip(tags).enumerate() {
            graph.scope(tag, layer_of(&node.path));
            let inputs: Vec<TensorId> =
                node.inputs.iter().filter_map(|source| ids.get(source).copied()).collect();
            let outputs = graph.op(&node.name, node.op.clone(), &inputs)?;
            for (output, id) in outputs.into_iter().enumerate() {
                ids.insert(Source::Node(index, output), id);
            }
        }
        Ok(Lowered { graph: graph.finish()?, parts })
    }
}

/// Columns that an expression reads, or all of a base, and what as. `label` is what it is read as
/// itself.
fn reads_of(kind: &Kind, label: &'static str) -> Vec<(Result<Columns, Id>, &'static str)> {
    match kind {
        Kind::Tokens
        | Kind::Input(_)
        | Kind::Parameter(_)
        | Kind::Buffer(_)
        | Kind::Embedding { .. }
        | Kind::Positions { .. }
        // What an unknown call reads is lowered where it is met: it may be a view.
        | Kind::Pending { .. } => Vec::new(),
        Kind::AddPositions { x, .. }
        | Kind::Linear { x, .. }
        | Kind::RmsNorm { x, .. }
        | Kind::LayerNorm { x, .. }
        | Kind::Gelu { x, .. } => vec![(Err(*x), "")],
        Kind::Rope { x, .. } => vec![(Ok(x.clone()), label)],
        Kind::Attention { q, k, v, .. } => {
            vec![(Ok(q.clone()), "q"), (Ok(k.clone()), "k"), (Ok(v.clone()), "v")]
        }
        Kind::SwiGlu { gate, up } => vec![(Ok(gate.clone()), "gate"), (Ok(up.clone()), "up")],
        Kind::Add { a, b } => vec![(Err(*a), ""), (Err(*b), "")],
    }
}

/// `a.b.weight` as `a.b.q.weight`.
fn labelled(name: &str, label: &str) -> String {
    match (label, name.rsplit_once('.')) {
        ("", _) => name.to_string(),
        (label, Some((stem, leaf))) => format!("{stem}.{label}.{leaf}"),
        (label, None) => format!("{name}.{label}"),
    }
}

/// The first number among the parts of a path: `model.layers.3.mlp` is of layer 3.
fn layer_of(path: &str) -> Option<u32> {
    path.split('.').find_map(|part| part.parse().ok())
}

fn dtype_of(scalar: Scalar) -> DType {
    match scalar {
        Scalar::Int { bytes: 4 } => DType::I32,
        Scalar::Int { .. } => DType::I64,
        Scalar::Bool => DType::Bool,
        Scalar::F32 | Scalar::Bf16 | Scalar::F16 | Scalar::F64 => DType::F32,
    }
}
