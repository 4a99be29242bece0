//! Walks an exported graph once and determines the value of each tensor.
//!
//! Calls that depend only on sizes and buffers are evaluated, movement of values becomes views, and
//! the remaining calls go to the rules. A call without a matching rule stays pending.

use std::collections::HashMap;
use std::rc::Rc;

use super::archive::Archive;
use super::budget::Budget;
use super::constant::{Constant, ELEMENTS_MAX};
use super::evaluate::Call;
use super::exported::{Arg, AtenNode, Exported, InputKind, TensorMeta};
use super::layout::{Layout, axis, elements};
use super::rules;
use super::turned;
use super::value::{Exprs, Id, Kind, Operand, Sizes, Value, View};
use crate::capture::CaptureError;

/// The result of walking a graph.
pub(super) struct Trace {
    pub(super) exprs: Exprs,
    /// Outputs of the program.
    pub(super) outputs: Vec<Value>,
    /// Remarks on ignored features, as sentences.
    pub(super) remarks: Vec<String>,
}

/// Values of a graph during the walk.
struct Tracer<'a> {
    exported: &'a Exported,
    exprs: Exprs,
    values: HashMap<&'a str, Value>,
    buffers: HashMap<String, Constant>,
    budget: Budget,
    drops: bool,
}

/// Ops that return their input, possibly in another type.
const IDENTITIES: [&str; 12] = [
    "_to_copy",
    "alias",
    "clone",
    "contiguous",
    "detach",
    "dropout",
    "feature_dropout",
    "lift_fresh_copy",
    "native_dropout",
    "to",
    "type_as",
    "float",
];

impl Trace {
    pub(super) fn new(
        exported: &Exported,
        archive: &mut Archive,
        location: &str,
    ) -> Result<Trace, CaptureError> {
        let (name, sizes) = token_input(exported).ok_or_else(|| CaptureError::Export {
            location: location.to_string(),
            what: "expected an input of token ids, integers [batch, sequence], got none"
                .to_string(),
            hint: "export a language model that takes `input_ids`".to_string(),
        })?;
        let mut tracer = Tracer {
            exported,
            exprs: Exprs { all: Vec::new(), sizes },
            values: HashMap::new(),
            buffers: HashMap::new(),
            budget: Budget::default(),
            drops: false,
        };
        tracer.inputs(name, archive)?;
        // Values are dropped after their last use, because masks of long sequences are large.
        let mut last_use: HashMap<&str, usize> = HashMap::new();
        for (index, node) in exported.nodes.iter().enumerate() {
            for name in tensors_of(node) {
                last_use.insert(name, index);
            }
        }
        for output in &exported.outputs {
            last_use.insert(output, usize::MAX);
        }
        for (index, node) in exported.nodes.iter().enumerate() {
            tracer.node(index, node);
            for name in tensors_of(node) {
                if last_use.get(name) == Some(&index) {
                    tracer.values.remove(name);
                }
            }
        }
        let outputs = exported
            .outputs
            .iter()
            .filter_map(|name| tracer.values.remove(name.as_str()))
            .collect();
        let mut remarks = Vec::new();
        if tracer.drops {
            remarks.push("the model was exported for training: dropout is left out".to_string());
        }
        Ok(Trace { exprs: tracer.exprs, outputs, remarks })
    }
}

/// First input that looks like token ids, with its sizes.
fn token_input(exported: &Exported) -> Option<(&str, Sizes)> {
    exported.inputs.iter().find_map(|(name, kind)| {
        let meta = exported.tensors.get(name).filter(|_| *kind == InputKind::User)?;
        match (meta.scalar, meta.shape.as_slice()) {
            (super::exported::Scalar::Int { .. }, &[batch, seq]) => {
                Some((name.as_str(), Sizes { batch, seq }))
            }
            _ => None,
        }
    })
}

/// Tensors that a node reads.
fn tensors_of(node: &AtenNode) -> impl Iterator<Item = &str> {
    node.args.iter().flat_map(|(_, arg)| -> Vec<&str> {
        match arg {
            Arg::Tensor(name) => vec![name],
            Arg::Tensors(names) => names.iter().flatten().map(String::as_str).collect(),
            _ => Vec::new(),
        }
    })
}

impl<'a> Tracer<'a> {
    fn inputs(&mut self, tokens: &str, archive: &mut Archive) -> Result<(), CaptureError> {
        for (name, kind) in &self.exported.inputs {
            let Some(meta) = self.exported.tensors.get(name) else { continue };
            let value = match kind {
                InputKind::Buffer(buffer) => match self.stored(buffer, meta, archive)? {
                    Some(constant) => Value::Known(constant),
                    None => self.input(Kind::Buffer(buffer.clone()), &meta.shape),
                },
                InputKind::Parameter(parameter) => {
                    self.input(Kind::Parameter(parameter.clone()), &meta.shape)
                }
                InputKind::User if name == tokens => self.input(Kind::Tokens, &meta.shape),
                InputKind::User => self.input(Kind::Input(name.clone()), &meta.shape),
            };
            self.values.insert(name, value);
        }
        Ok(())
    }

    /// Values of a stored buffer, if the buffer has floats and is not too large.
    fn stored(
        &mut self,
        buffer: &str,
        meta: &TensorMeta,
        archive: &mut Archive,
    ) -> Result<Option<Constant>, CaptureError> {
        if let Some(constant) = self.buffers.get(buffer) {
            return Ok(Some(constant.clone()).filter(|constant| constant.shape == meta.shape));
        }
        let is_stored = archive
            .meta(buffer)
            .is_some_and(|stored| stored.scalar.is_float() && stored.shape == meta.shape);
        let is_small = elements(&meta.shape, ELEMENTS_MAX).is_some();
        if !is_stored || !is_small || !meta.scalar.is_float() {
            return Ok(None);
        }
        let values = archive.values(buffer)?.into_iter().map(f64::from).collect();
        let mut constant = Constant::new(meta.shape.clone(), values, true);
        if !self.budget.admits(&constant) {
            return Ok(None);
        }
        constant.buffers.push(buffer.to_string());
        self.buffers.insert(buffer.to_string(), constant.clone());
        Ok(Some(constant))
    }

    fn input(&mut self, kind: Kind, shape: &[usize]) -> Value {
        let id = self.exprs.add(kind, shape.to_vec(), None);
        self.exprs.whole(id)
    }

    fn node(&mut self, index: usize, node: &'a AtenNode) {
        let Some(first) = node.outputs.first() else { return };
        let constant = |name: &str| match self.values.get(name)? {
            Value::Known(constant) => Some(constant.clone()),
            Value::View(_) => None,
        };
        if tensors_of(node).all(|name| constant(name).is_some())
            && let Some(result) = (Call { node, known: &constant }).evaluate()
            && self.budget.admits(&result)
        {
            // An in-place op also changes the value under the old name.
            if bare_name(&node.target).ends_with('_')
                && let Some((_, Arg::Tensor(changed))) = node.args.first()
            {
                self.values.insert(changed, Value::Known(result.clone()));
            }
            self.values.insert(first, Value::Known(result));
            return;
        }
        let bare = bare_name(&node.target);
        if let Some(value) = self.joined_with_nothing(bare, node) {
            self.values.insert(first, value);
            return;
        }
        if let Some(values) = self.moved(index, bare, node) {
            for (name, value) in node.outputs.iter().zip(values) {
                self.values.insert(name, value);
            }
            return;
        }
        // Fused attention applies dropout to attention weights within the call.
        let dropped = arg(node, &["dropout_p"]);
        self.drops |= matches!(dropped, Some(Arg::Float(share)) if *share > 0.0);
        let operands: Rc<[Operand]> = self.operands(node).into();
        let shape = self.exported.tensors.get(first).map(|meta| meta.shape.clone());
        let shape = shape.unwrap_or_default();
        let buffers = &self.buffers;
        let call = rules::Call { op: bare, node, operands: &operands, shape: &shape, index };
        let value = call
            .apply(&mut self.exprs, buffers)
            .or_else(|| turned::apply(&call, &mut self.exprs, buffers));
        if let Some(value) = value {
            self.values.insert(first, value);
            return;
        }
        for (output, name) in node.outputs.iter().enumerate() {
            let shape = self.exported.tensors.get(name).map(|meta| meta.shape.clone());
            let operands = Rc::clone(&operands);
            let kind = Kind::Pending { op: bare.to_string(), operands, output };
            let id: Id = self.exprs.add(kind, shape.unwrap_or_default(), Some(index));
            self.values.insert(name, self.exprs.whole(id));
        }
    }

    /// The only nonempty operand of a `cat`: Phi-3 concatenates the rotated part of a head with an
    /// empty rest.
    fn joined_with_nothing(&self, op: &str, node: &AtenNode) -> Option<Value> {
        let tensors = node.args.iter().find_map(|(_, arg)| match arg {
            Arg::Tensors(tensors) if op == "cat" => Some(tensors),
            _ => None,
        })?;
        let is_empty = |name: &&str| self.exported.empty.contains(*name);
        let mut rest = tensors.iter().flatten().map(String::as_str).filter(|name| !is_empty(name));
        let (one, none) = (rest.next()?, rest.next());
        if none.is_some() { None } else { self.values.get(one).cloned() }
    }

    /// Tensor and number operands of a node.
    fn operands(&self, node: &AtenNode) -> Vec<Operand> {
        let mut operands = Vec::new();
        for (name, arg) in &node.args {
            let mut push = |value| operands.push(Operand { name: name.clone(), value });
            match arg {
                Arg::Tensor(tensor) => {
                    if let Some(value) = self.values.get(tensor.as_str()) {
                        push(value.clone());
                    }
                }
                Arg::Tensors(tensors) => {
                    for value in tensors.iter().flatten() {
                        if let Some(value) = self.values.get(value.as_str()) {
                            push(value.clone());
                        }
                    }
                }
                Arg::Int(value) => push(Value::Known(Constant::scalar(*value as f64, false))),
                Arg::Float(value) => push(Value::Known(Constant::scalar(*value, true))),
                _ => {}
            }
        }
        operands
    }

    /// Results of an op that only moves, returns or scales values.
    fn moved(&mut self, index: usize, op: &str, node: &AtenNode) -> Option<Vec<Value>> {
        let view = |name: &str| match self.values.get(name)? {
            Value::View(view) => Some(view.clone()),
            Value::Known(_) => None,
        };
        let first = node.args.iter().find_map(|(_, arg)| match arg {
            Arg::Tensor(name) => Some(name.as_str()),
            _ => None,
        })?;
        let source = view(first)?;
        if IDENTITIES.contains(&op) {
            let training = arg(node, &["train", "training"]) == Some(&Arg::Bool(true));
            let drops = match arg(node, &["p"]) {
                Some(Arg::Float(share)) => *share > 0.0,
                Some(Arg::Int(share)) => *share > 0,
                _ => true,
            };
            self.drops |= op.contains("dropout") && training && drops;
            return Some(vec![Value::View(source)]);
        }
        let scaled = |factor: f64| {
            let scale = source.scale * factor;
            Some(vec![Value::View(View { scale, node: Some(index), ..source.clone() })])
        };
        if let Some(factor) = self.factor(op, node, first) {
            return scaled(factor);
        }
        let layouts = movement(op, node, &source.layout)?;
        let view_of = |layout| Value::View(View { layout, node: Some(index), ..source.clone() });
        Some(layouts.into_iter().map(view_of).collect())
    }

    /// The constant factor by which an op multiplies its tensor operand.
    fn factor(&self, op: &str, node: &AtenNode, first: &str) -> Option<f64> {
        if op == "neg" {
            return Some(-1.0);
        }
        if !matches!(op, "mul" | "div") {
            return None;
        }
        let other = node.args.iter().find_map(|(_, arg)| match arg {
            Arg::Int(value) => Some(*value as f64),
            Arg::Float(value) => Some(*value),
            Arg::Tensor(name) if name != first => match self.values.get(name.as_str())? {
                Value::Known(constant) => constant.single(),
                Value::View(_) => None,
            },
            _ => None,
        })?;
        match op {
            "mul" => Some(other),
            _ if node.target.ends_with("Tensor_mode") || other == 0.0 => None,
            _ => Some(1.0 / other),
        }
    }
}

/// `mul` for `aten.mul.Tensor`.
pub(super) fn bare_name(target: &str) -> &str {
    let name = target.strip_prefix("aten.").unwrap_or(target);
    name.split('.').next().unwrap_or(name)
}

/// Argument with one of these names.
pub(super) fn arg<'n>(node: &'n AtenNode, names: &[&str]) -> Option<&'n Arg> {
    node.args.iter().find(|(name, _)| names.contains(&name.as_str())).map(|(_, arg)| arg)
}

pub(super) fn int(node: &AtenNode, names: &[&str]) -> Option<i64> {
    match arg(node, names)? {
        Arg::Int(value) => Some(*value),
        _ => None,
    }
}

fn ints(node: &AtenNode, names: &[&str]) -> Option<Vec<i64>> {
    match arg(node, names)? {
        Arg::Ints(values) => Some(values.clone()),
        Arg::Int(value) => Some(vec![*value]),
        _ => None,
    }
}

/// Layouts of an op's results, from the layout of its operand.
fn movement(op: &str, node: &AtenNode, source: &Layout) -> Option<Vec<Layout>> {
    let (rank, outputs) = (source.rank(), node.outputs.len());
    let dim = |default: i64| int(node, &["dim"]).unwrap_or(default);
    let one = match op {
        "view" | "reshape" | "_unsafe_view" => source.reshaped(&ints(node, &["size", "shape"])?)?,
        "flatten" => {
            let first = axis(int(node, &["start_dim"]).unwrap_or(0), rank)?;
            let last = axis(int(node, &["end_dim"]).unwrap_or(-1), rank)?;
            let mut shape: Vec<i64> = source.shape().iter().map(|&size| size as i64).collect();
            if first > last {
                return None;
            }
            shape.splice(first..=last, [-1]);
            source.reshaped(&shape)?
        }
        "unflatten" => {
            let at = axis(dim(0), rank)?;
            let mut shape: Vec<i64> = source.shape().iter().map(|&size| size as i64).collect();
            shape.splice(at..=at, ints(node, &["sizes"])?);
            source.reshaped(&shape)?
        }
        "permute" => source.permuted(&ints(node, &["dims"])?)?,
        "transpose" => source.swapped(int(node, &["dim0"])?, int(node, &["dim1"])?)?,
        "t" | "numpy_T" if rank == 2 => source.swapped(0, 1)?,
        "mT" => source.swapped(-1, -2)?,
        "expand" => source.expanded(&ints(node, &["size"])?)?,
        "unsqueeze" => source.unsqueezed(dim(0))?,
        "squeeze" => match ints(node, &["dim"]).as_deref() {
            None => source.squeezed(None)?,
            Some(&[at]) => source.squeezed(Some(at))?,
            Some(_) => return None,
        },
        "slice" => {
            if int(node, &["step"]).unwrap_or(1) != 1 {
                return None;
            }
            let start = int(node, &["start"]).unwrap_or(0);
            source.sliced(dim(0), start, int(node, &["end"]).unwrap_or(i64::MAX))?
        }
        "select" => source.selected(dim(0), int(node, &["index"])?)?,
        "repeat_interleave" => {
            let (at, times) = (dim(0), int(node, &["repeats"])?);
            let at = axis(at, rank)?;
            let inner = source.unsqueezed(at as i64 + 1)?;
            let mut shape: Vec<i64> = inner.shape().iter().map(|&size| size as i64).collect();
            shape[at + 1] = times;
            let wide = inner.expanded(&shape)?;
            shape.splice(at..=at + 1, [shape[at].checked_mul(times)?]);
            wide.reshaped(&shape)?
        }
        "split" | "split_with_sizes" | "chunk" => {
            let at = dim(0);
            let size = source.shape()[axis(at, rank)?] as i64;
            let given = ints(node, &["split_size", "split_sizes", "chunks"])?;
            let parts = match (op, given.as_slice()) {
                ("chunk", &[count]) if count > 0 => {
                    equal_parts(size, (size as u64).div_ceil(count as u64) as i64, outputs)?
                }
                ("split", &[part]) if part > 0 => equal_parts(size, part, outputs)?,
                _ => given,
            };
            let mut start = 0_i64;
            return parts
                .into_iter()
                .map(|part| {
                    let end = start.checked_add(part)?;
                    let piece = source.sliced(at, start, end);
                    start = end;
                    piece
                })
                .collect();
        }
        "unbind" => {
            let size = source.shape()[axis(dim(0), rank)?];
            if size != outputs {
                return None;
            }
            return (0..size as i64).map(|index| source.selected(dim(0), index)).collect();
        }
        _ => return None,
    };
    Some(vec![one])
}

/// Splits `size` into parts of `part` and a remainder; `None` if the number of parts is not
/// `outputs`.
fn equal_parts(size: i64, part: i64, outputs: usize) -> Option<Vec<i64>> {
    if (size as u64).div_ceil(part as u64) != outputs as u64 {
        return None;
    }
    let mut parts = vec![part; outputs];
    *parts.last_mut()? = size - part * (outputs as i64 - 1);
    Some(parts)
}
