//! The graph of an exported program: the JSON output of `torch.export.save`, as plain data.
//!
//! Sizes may be symbols; a symbol is replaced by its value at export. Subgraphs of regions without
//! gradients are inlined.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::exported::{Arg, AtenNode, Exported, InputKind, Scalar, TensorMeta};
use super::layout::is_plausible;
use crate::capture::CaptureError;

/// Supported major version of the schema, written by PyTorch 2.5 and later.
const SCHEMA_MAJOR: u64 = 8;

/// Ops with a subgraph to inline.
const REGIONS: [&str; 2] = [
    "torch.ops.higher_order.wrap_with_set_grad_enabled",
    "torch.ops.higher_order.wrap_with_autocast",
];

/// Reads JSON of one file, whose name appears in errors.
struct Reader<'a> {
    location: &'a str,
    sym_ints: HashMap<String, i64>,
    exported: Exported,
    /// Number of inlined subgraphs.
    regions: usize,
}

impl Exported {
    /// Reads `models/NAME.json`.
    pub(super) fn from_json(text: &[u8], location: &str) -> Result<Exported, CaptureError> {
        let value: Value = serde_json::from_slice(text).map_err(|error| CaptureError::Json {
            location: location.to_string(),
            line: error.line(),
            column: error.column(),
            message: error.to_string(),
        })?;
        let major = value.pointer("/schema_version/major").and_then(Value::as_u64);
        if major != Some(SCHEMA_MAJOR) {
            let got = major.map_or("none".to_string(), |major| major.to_string());
            return Err(CaptureError::Export {
                location: location.to_string(),
                what: format!("expected schema version {SCHEMA_MAJOR}, got {got}"),
                hint: "export it again with PyTorch 2.9 or later".to_string(),
            });
        }
        let mut reader = Reader {
            location,
            sym_ints: HashMap::new(),
            exported: Exported::default(),
            regions: 0,
        };
        let version = value.get("torch_version").and_then(Value::as_str);
        reader.exported.torch_version = version.unwrap_or("of an unknown version").to_string();
        let module = reader.object(&value, "graph_module")?;
        let graph = reader.child(module, "graph")?;
        reader.tables(graph)?;
        reader.signature(reader.child(module, "signature")?)?;
        reader.frozen(reader.child(graph, "tensor_values")?);
        reader.nodes(graph, &HashMap::new())?;
        Ok(reader.exported)
    }
}

impl<'a> Reader<'a> {
    fn broken(&self, what: impl Into<String>) -> CaptureError {
        CaptureError::Export {
            location: self.location.to_string(),
            what: what.into(),
            hint: "the file is not as torch.export.save writes it; export it again".to_string(),
        }
    }

    fn object<'v>(
        &self,
        value: &'v Value,
        key: &str,
    ) -> Result<&'v Map<String, Value>, CaptureError> {
        value
            .get(key)
            .and_then(Value::as_object)
            .ok_or_else(|| self.broken(format!("expected an object `{key}`")))
    }

    fn child<'v>(
        &self,
        object: &'v Map<String, Value>,
        key: &str,
    ) -> Result<&'v Map<String, Value>, CaptureError> {
        let value = object.get(key).and_then(Value::as_object);
        value.ok_or_else(|| self.broken(format!("expected an object `{key}`")))
    }

    fn list<'v>(
        &self,
        object: &'v Map<String, Value>,
        key: &str,
    ) -> Result<&'v Vec<Value>, CaptureError> {
        let value = object.get(key).and_then(Value::as_array);
        value.ok_or_else(|| self.broken(format!("expected a list `{key}`")))
    }

    /// Reads sizes of symbols and types of tensors.
    fn tables(&mut self, graph: &Map<String, Value>) -> Result<(), CaptureError> {
        if let Some(symbols) = graph.get("sym_int_values").and_then(Value::as_object) {
            for (name, value) in symbols {
                if let Some(size) = self.size(value) {
                    self.sym_ints.insert(name.clone(), size);
                }
            }
        }
        for (name, value) in self.child(graph, "tensor_values")? {
            // A tensor of unknown type matters only to its readers.
            if let Some(meta) = self.meta(value) {
                self.exported.tensors.insert(name.clone(), meta);
            } else if self.is_empty(value) {
                self.exported.empty.insert(name.clone());
            }
        }
        Ok(())
    }

    /// A number, or the value of a symbol at export.
    fn size(&self, value: &Value) -> Option<i64> {
        let known = |name: &Value| self.sym_ints.get(name.as_str()?).copied();
        let of_name = || known(value.get("as_name")?);
        let of_hint = || value.pointer("/as_expr/hint/as_int").and_then(Value::as_i64);
        value
            .as_i64()
            .or_else(|| value.get("as_int").and_then(Value::as_i64))
            .or_else(of_name)
            .or_else(of_hint)
    }

    /// Shape and type of a tensor; `None` for an unknown type, an empty tensor or invalid sizes.
    pub(super) fn meta(&self, value: &Value) -> Option<TensorMeta> {
        let sizes = |key: &str| -> Option<Vec<usize>> {
            let list = value.get(key)?.as_array()?;
            list.iter().map(|size| usize::try_from(self.size(size)?).ok()).collect()
        };
        let meta = TensorMeta {
            scalar: Scalar::of(value.get("dtype")?.as_u64()?)?,
            shape: sizes("sizes")?,
            strides: sizes("strides")?,
            offset: usize::try_from(self.size(value.get("storage_offset")?)?).ok()?,
        };
        (is_plausible(&meta.shape) && meta.storage_elements().is_some()).then_some(meta)
    }

    /// Whether a tensor has no elements.
    fn is_empty(&self, value: &Value) -> bool {
        let sizes = value.get("sizes").and_then(Value::as_array);
        sizes.is_some_and(|sizes| sizes.iter().any(|size| self.size(size) == Some(0)))
    }

    fn signature(&mut self, signature: &Map<String, Value>) -> Result<(), CaptureError> {
        for spec in self.list(signature, "input_specs")? {
            let named = |kind: &str, key: &str| {
                let spec = spec.get(kind)?;
                let name = spec.pointer("/arg/name")?.as_str()?.to_string();
                Some((name, spec.get(key)?.as_str()?.to_string()))
            };
            if let Some((name, parameter)) = named("parameter", "parameter_name") {
                self.exported.inputs.push((name, InputKind::Parameter(parameter)));
            } else if let Some((name, buffer)) = named("buffer", "buffer_name")
                .or_else(|| named("tensor_constant", "tensor_constant_name"))
            {
                self.exported.inputs.push((name, InputKind::Buffer(buffer)));
            } else if let Some(name) = spec.pointer("/user_input/arg/as_tensor/name") {
                let name = name.as_str().unwrap_or_default().to_string();
                self.exported.inputs.push((name, InputKind::User));
            }
        }
        for spec in self.list(signature, "output_specs")? {
            if let Some(name) = spec.pointer("/user_output/arg/as_tensor/name") {
                self.exported.outputs.push(name.as_str().unwrap_or_default().to_string());
            }
        }
        Ok(())
    }

    /// Records parameters that PyTorch would not train.
    fn frozen(&mut self, tensors: &Map<String, Value>) {
        let trained = |name: &String| {
            let flag = tensors.get(name).and_then(|value| value.get("requires_grad"));
            flag.and_then(Value::as_bool) != Some(false)
        };
        for (name, kind) in &self.exported.inputs {
            if let InputKind::Parameter(parameter) = kind
                && !trained(name)
            {
                self.exported.frozen.insert(parameter.clone());
            }
        }
    }

    /// Adds the nodes of a graph; `renamed` maps tensor names of the graph to unique names.
    fn nodes(
        &mut self,
        graph: &Map<String, Value>,
        renamed: &HashMap<String, String>,
    ) -> Result<(), CaptureError> {
        for value in self.list(graph, "nodes")? {
            let target = value.get("target").and_then(Value::as_str).unwrap_or_default();
            let inputs = value.get("inputs").and_then(Value::as_array);
            let inputs = inputs.ok_or_else(|| self.broken("a node without inputs"))?;
            let outputs = output_names(value, renamed);
            if REGIONS.contains(&target) {
                self.region(inputs, &outputs, renamed)?;
                continue;
            }
            let args = inputs
                .iter()
                .map(|input| {
                    let name = input.get("name").and_then(Value::as_str).unwrap_or_default();
                    (name.to_string(), self.arg(input.get("arg"), renamed))
                })
                .collect();
            let stack = value.pointer("/metadata/nn_module_stack").and_then(Value::as_str);
            self.exported.nodes.push(AtenNode {
                target: target.strip_prefix("torch.ops.").unwrap_or(target).to_string(),
                args,
                outputs,
                path: innermost_path(stack.unwrap_or_default()),
            });
        }
        Ok(())
    }

    fn arg(&self, value: Option<&Value>, renamed: &HashMap<String, String>) -> Arg {
        let Some((kind, value)) =
            value.and_then(Value::as_object).and_then(|map| map.iter().next())
        else {
            return Arg::Other;
        };
        let tensor = |value: &Value| {
            let name = value.get("name").and_then(Value::as_str).unwrap_or_default();
            renamed.get(name).cloned().unwrap_or_else(|| name.to_string())
        };
        let list = || value.as_array().map(Vec::as_slice).unwrap_or_default();
        match kind.as_str() {
            "as_tensor" => Arg::Tensor(tensor(value)),
            "as_tensors" => Arg::Tensors(list().iter().map(|item| Some(tensor(item))).collect()),
            "as_optional_tensors" => {
                Arg::Tensors(list().iter().map(|item| item.get("as_tensor").map(tensor)).collect())
            }
            "as_int" => value.as_i64().map_or(Arg::Other, Arg::Int),
            "as_sym_int" => self.size(value).map_or(Arg::Other, Arg::Int),
            "as_ints" | "as_sym_ints" => {
                let sizes: Option<Vec<i64>> = list().iter().map(|item| self.size(item)).collect();
                sizes.map_or(Arg::Other, Arg::Ints)
            }
            "as_float" => match value.as_str() {
                // JSON has no numbers for infinities.
                Some("Infinity") => Arg::Float(f64::INFINITY),
                Some("-Infinity") => Arg::Float(f64::NEG_INFINITY),
                _ => value.as_f64().map_or(Arg::Other, Arg::Float),
            },
            "as_bool" => value.as_bool().map_or(Arg::Other, Arg::Bool),
            "as_string" => Arg::Text(value.as_str().unwrap_or_default().to_string()),
            "as_scalar_type" => value.as_u64().and_then(Scalar::of).map_or(Arg::Other, Arg::Type),
            _ => Arg::Other,
        }
    }

    /// Inlines a subgraph. Its tensors get unique names, except inputs and outputs of the subgraph.
    fn region(
        &mut self,
        inputs: &[Value],
        outputs: &[String],
        renamed: &HashMap<String, String>,
    ) -> Result<(), CaptureError> {
        let is_graph = |input: &&Value| input.pointer("/arg/as_graph/graph").is_some();
        let at = inputs.iter().position(|input| is_graph(&input));
        let at = at.ok_or_else(|| self.broken("a region without a graph"))?;
        let graph = self.object(&inputs[at]["arg"]["as_graph"], "graph")?;
        self.regions += 1;
        let prefix = format!("region{}.", self.regions);
        let mut inner: HashMap<String, String> = HashMap::new();
        for (name, value) in self.child(graph, "tensor_values")? {
            let qualified = format!("{prefix}{name}");
            if let Some(meta) = self.meta(value) {
                self.exported.tensors.insert(qualified.clone(), meta);
            } else if self.is_empty(value) {
                self.exported.empty.insert(qualified.clone());
            }
            inner.insert(name.clone(), qualified);
        }
        if let Some(symbols) = graph.get("sym_int_values").and_then(Value::as_object) {
            for (name, value) in symbols {
                if let Some(size) = self.size(value) {
                    self.sym_ints.entry(name.clone()).or_insert(size);
                }
            }
        }
        let formal = self.list(graph, "inputs")?.iter();
        for (formal, actual) in formal.zip(&inputs[at + 1..]) {
            let names = (formal.pointer("/as_tensor/name"), actual.pointer("/arg/as_tensor/name"));
            if let (Some(Value::String(formal)), Some(Value::String(actual))) = names {
                let outer = renamed.get(actual).unwrap_or(actual);
                inner.insert(formal.clone(), outer.clone());
            }
        }
        // An output gets its outer name, unless the output is an unchanged input.
        let given = self.list(graph, "outputs")?.iter();
        let names: Vec<Option<&str>> =
            given.map(|value| value.pointer("/as_tensor/name").and_then(Value::as_str)).collect();
        let mut passed = Vec::new();
        for (name, output) in names.into_iter().zip(outputs) {
            let Some(name) = name else { continue };
            match inner.get(name) {
                Some(outer) if !outer.starts_with(&prefix) => {
                    passed.push((outer.clone(), output.clone()));
                }
                _ => drop(inner.insert(name.to_string(), output.clone())),
            }
        }
        self.nodes(graph, &inner)?;
        for (from, to) in passed {
            self.exported.nodes.push(AtenNode {
                target: "aten.alias.default".to_string(),
                args: vec![("self".to_string(), Arg::Tensor(from))],
                outputs: vec![to],
                path: String::new(),
            });
        }
        Ok(())
    }
}

/// Names of the result tensors of a node; unnamed results have empty names.
fn output_names(node: &Value, renamed: &HashMap<String, String>) -> Vec<String> {
    let name = |value: &Value| {
        let name = value.get("name").and_then(Value::as_str).unwrap_or_default();
        renamed.get(name).cloned().unwrap_or_else(|| name.to_string())
    };
    let mut names = Vec::new();
    for output in node.get("outputs").and_then(Value::as_array).into_iter().flatten() {
        if let Some(tensors) = output.get("as_tensors").and_then(Value::as_array) {
            names.extend(tensors.iter().map(name));
        } else if let Some(tensor) = output.get("as_tensor") {
            names.push(name(tensor));
        }
    }
    names
}

/// Path of the last module of a stack `key,path,class;key,path,class`.
fn innermost_path(stack: &str) -> String {
    let last = stack.rsplit(';').next().unwrap_or_default();
    last.split(',').nth(1).unwrap_or_default().to_string()
}

/// Type of a stored tensor, from an archive's table of weights or constants.
pub(super) fn stored_meta(value: &Value) -> Option<TensorMeta> {
    let reader = Reader {
        location: "",
        sym_ints: HashMap::new(),
        exported: Exported::default(),
        regions: 0,
    };
    reader.meta(value)
}
