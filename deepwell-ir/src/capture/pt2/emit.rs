//! Emits nodes for expressions, and records where weights are stored.

use std::collections::HashMap;

use super::SourceSlice;
use super::exported::{Arg, InputKind, Scalar};
use super::lower::{Emitted, Lowering, Parameter, Source};
use super::value::{Columns, Id, Kind, Value, View, Weight};
use crate::ops;
use crate::{DType, Dim, Init, Op, Role, Shape};

/// Standard deviation of freshly initialized weights, as in most published models.
const STD: f64 = 0.02;

impl Lowering<'_> {
    fn path(&self, id: Id) -> &str {
        let node = self.trace.exprs.all[id].node;
        node.map_or("", |node| self.exported.nodes[node].path.as_str())
    }

    /// Adds a node, named after the module's path and `name`.
    pub(super) fn push(
        &mut self,
        name: &str,
        path: &str,
        op: impl Into<Op>,
        inputs: Vec<Source>,
    ) -> usize {
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

    /// A separately stored vector.
    fn vector(
        &mut self,
        name: &str,
        start: usize,
        width: usize,
        label: &str,
        role: Role,
    ) -> Source {
        let init = if role == Role::Norm { Init::Ones } else { Init::Zeros };
        let stored = SourceSlice { name: name.to_string(), start, transposed: false };
        self.parameter(labelled(name, label), Parameter { shape: vec![width], role, init, stored })
    }

    /// A separately stored table.
    fn table(&mut self, name: &str) -> Source {
        let shape = self.exported.inputs.iter().find_map(|(input, kind)| {
            let is_it = *kind == InputKind::Parameter(name.to_string());
            is_it.then(|| self.exported.tensors.get(input).map(|meta| meta.shape.clone()))?
        });
        let stored = SourceSlice { name: name.to_string(), start: 0, transposed: false };
        let (role, init) = (Role::Embedding, Init::Normal { std: STD });
        let shape = shape.unwrap_or_default();
        self.parameter(name.to_string(), Parameter { shape, role, init, stored })
    }

    /// Outputs `start..start + width` of a weight.
    pub(super) fn weight(
        &mut self,
        of: &Weight,
        start: usize,
        width: usize,
        label: &str,
        role: Role,
    ) -> Source {
        let stored = SourceSlice { name: of.name.clone(), start, transposed: of.transposed };
        let (shape, init) = (vec![width, of.inputs], Init::Normal { std: STD });
        self.parameter(labelled(&of.name, label), Parameter { shape, role, init, stored })
    }

    pub(super) fn whole_source(&mut self, id: Id) -> Source {
        let width = self.trace.exprs.width(id);
        self.source(&Columns { base: id, start: 0, width })
    }

    /// The source of columns, lowered on first use.
    fn source(&mut self, columns: &Columns) -> Source {
        let key = (columns.base, columns.start, columns.width);
        if let Some(source) = self.made.get(&key) {
            return source.clone();
        }
        self.emit(columns.base, columns, "");
        self.made.get(&key).cloned().unwrap_or(Source::Tokens)
    }

    /// Lowers columns of an expression.
    pub(super) fn emit(&mut self, id: Id, columns: &Columns, label: &str) {
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
            Kind::Embedding { table, padding } => {
                let inputs = vec![Source::Tokens, self.table(&table)];
                self.node("", &path, ops::Embedding { padding }, inputs)
            }
            Kind::AddPositions { x, table } => {
                let inputs = vec![self.whole_source(x), self.table(&table)];
                self.node("positions", &path, ops::AddPositions {}, inputs)
            }
            Kind::Linear { x, weight, bias } => {
                let (start, width) = (columns.start, columns.width);
                let label = match (width == weight.outputs, label) {
                    (true, _) => String::new(),
                    // Unknown calls give no label to their operands.
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
                    ..ops::Rope::default()
                };
                let inputs = vec![self.source(&x)];
                self.node("rope", &path, op, inputs)
            }
            Kind::Attention { q, k, v, heads } => {
                let inputs = vec![self.source(&q), self.source(&k), self.source(&v)];
                self.node("attention", &path, ops::Attention { heads }, inputs)
            }
            Kind::SwiGlu { gate, up } => {
                let inputs = vec![self.source(&gate), self.source(&up)];
                self.node("swiglu", &path, ops::SwiGlu {}, inputs)
            }
            Kind::Gelu { x, tanh } => {
                let inputs = vec![self.whole_source(x)];
                self.node("gelu", &path, ops::Gelu { tanh }, inputs)
            }
            Kind::Relu { x } => {
                let inputs = vec![self.whole_source(x)];
                self.node("relu", &path, ops::Relu {}, inputs)
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

    /// The bias of a norm has the role of the norm.
    fn norm_bias(&mut self, name: &str, width: usize) -> Source {
        let stored = SourceSlice { name: name.to_string(), start: 0, transposed: false };
        let (shape, role, init) = (vec![width], Role::Norm, Init::Zeros);
        self.parameter(name.to_string(), Parameter { shape, role, init, stored })
    }

    fn input(&mut self, id: Id, name: String) -> Source {
        let shape = &self.trace.exprs.all[id].shape;
        let scalar = self.exported.tensors.get(&name).map_or(Scalar::F32, |meta| meta.scalar);
        self.inputs.insert(name.clone(), (self.open(shape), dtype_of(scalar)));
        Source::Input(name)
    }

    /// A parameter that an unknown call reads directly.
    fn stray_parameter(&mut self, id: Id, name: &str) -> Source {
        let shape = self.trace.exprs.all[id].shape.clone();
        let stored = SourceSlice { name: name.to_string(), start: 0, transposed: false };
        let init = if shape.len() > 1 { Init::Normal { std: STD } } else { Init::Zeros };
        self.parameter(name.to_string(), Parameter { shape, role: Role::Linear, init, stored })
    }

    /// A call without a matching rule, under its original name.
    fn opaque(&mut self, id: Id, output: usize) -> Source {
        let expr = &self.trace.exprs.all[id];
        let Some(node) = expr.node else { return Source::Tokens };
        if let Some(&at) = self.calls.get(&node) {
            return Source::Node(at, output);
        }
        let Kind::Pending { operands, .. } = expr.kind.clone() else { return Source::Tokens };
        let mut inputs = Vec::new();
        let mut constants = HashMap::new();
        for operand in operands.iter() {
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
                    // A known tensor, not a number.
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

    /// A view as a tensor: its base if the view covers the base, otherwise the call that made the
    /// view.
    pub(super) fn source_of(&mut self, view: &View) -> Source {
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

    /// A shape of the export, with a symbolic size for rows of tokens.
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
}

/// `a.b.weight` with label `q` becomes `a.b.q.weight`.
fn labelled(name: &str, label: &str) -> String {
    match (label, name.rsplit_once('.')) {
        ("", _) => name.to_string(),
        (label, Some((stem, leaf))) => format!("{stem}.{label}.{leaf}"),
        (label, None) => format!("{name}.{label}"),
    }
}

fn dtype_of(scalar: Scalar) -> DType {
    match scalar {
        Scalar::Int { bytes: 4 } => DType::I32,
        Scalar::Int { .. } => DType::I64,
        Scalar::Bool => DType::Bool,
        Scalar::F32 | Scalar::Bf16 | Scalar::F16 | Scalar::F64 => DType::F32,
    }
}
