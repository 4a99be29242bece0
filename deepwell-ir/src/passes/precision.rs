//! Makes a precision policy explicit: casts and quantizations become nodes.
//!
//! Quantization stands right behind the producer of the high-precision tensor, so that what the
//! forward keeps for the backward is the quantized copy. Both directions of a tensor are made in
//! one node when both are read.

use std::collections::HashMap;

use deepwell_precision::{Assignment, BLOCK, Format, MxSpec, PrecisionPolicy, Role, TensorUse};
use serde::{Deserialize, Serialize};

use crate::builder::output_name;
use crate::op::input_types;
use crate::ops::{Axis, MxGemm, Quantize};
use crate::{
    DType, Graph, IrError, Node, Op, Phase, Product, Stage, Tag, Tensor, TensorId, TensorKind, ops,
};

/// What one parameter got.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorPrecision {
    /// Name of the parameter.
    pub tensor: String,
    /// The format of its matrix products.
    pub format: Format,
    /// Which rule said so.
    pub reason: String,
}

/// Rewrites the graph under `policy`, and says what each parameter got, in execution order.
///
/// Activations become BF16, or stay F32 when the policy gives F32 to every tensor. Takes a graph
/// at any stage before [`Stage::Quantized`], so that a forward-only graph for evaluation goes
/// through the same pass.
///
/// # Errors
/// A policy that cannot be applied: a rule without a match, F32 for some tensors only.
pub fn apply_precision(
    graph: &Graph,
    policy: &PrecisionPolicy,
) -> Result<(Graph, Vec<TensorPrecision>), IrError> {
    if graph.stage >= Stage::Quantized {
        return Err(IrError::Stage {
            pass: "precision",
            wants: Stage::Recomputed,
            got: graph.stage,
        });
    }
    let (assignments, report) = assign(graph, policy)?;
    let activation = activation_dtype(&report)?;
    let mut result = Graph { stage: Stage::Quantized, nodes: Vec::new(), ..graph.clone() };
    for tensor in &mut result.tensors {
        if tensor.kind == TensorKind::Activation {
            tensor.dtype = activation;
        }
    }
    let mut rewrite =
        Rewrite { source: graph, assignments, activation, result, made: HashMap::new() };
    let needs = rewrite.needs();
    rewrite.weights(&needs)?;
    for node in &graph.nodes {
        rewrite.node(node)?;
        for &output in &node.outputs {
            rewrite.quantize(output, &needs, node)?;
        }
    }
    let result = rewrite.result;
    crate::verify(&result)?;
    Ok((result, report))
}

fn assign(
    graph: &Graph,
    policy: &PrecisionPolicy,
) -> Result<(HashMap<TensorId, Assignment>, Vec<TensorPrecision>), IrError> {
    let mut order: Vec<(TensorId, Role)> = Vec::new();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Forward) {
        collect_parameters(graph, node, &mut order);
    }
    // The loss op stands in the backward of a differentiated graph; its head comes last.
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Backward) {
        collect_parameters(graph, node, &mut order);
    }
    let uses: Vec<TensorUse<'_>> =
        order.iter().map(|&(id, role)| TensorUse { name: &graph.tensor(id).name, role }).collect();
    let assigned = policy.assign(&uses)?;
    let report = uses
        .iter()
        .zip(&assigned)
        .map(|(tensor, assignment)| TensorPrecision {
            tensor: tensor.name.to_string(),
            format: assignment.format,
            reason: assignment.reason.clone(),
        })
        .collect();
    for (&(id, role), assignment) in order.iter().zip(&assigned) {
        if assignment.format == Format::Mxfp8 && !matches!(role, Role::Linear | Role::Expert) {
            return Err(IrError::Precision {
                tensor: graph.tensor(id).name.clone(),
                what: format!(
                    "expected f32 or bf16 for a tensor of role {role:?}, got mxfp8\n\
                     hint: only linear and expert tensors have mxfp8 products; narrow the rule"
                ),
            });
        }
    }
    for (&(id, _), assignment) in order.iter().zip(&assigned) {
        let tensor = graph.tensor(id);
        let is_whole = |size: &usize| size.is_multiple_of(BLOCK);
        let sizes = tensor.shape.as_fixed().unwrap_or_default();
        if assignment.format == Format::Mxfp8 && !sizes.iter().all(is_whole) {
            return Err(IrError::Precision {
                tensor: tensor.name.clone(),
                what: format!(
                    "expected sizes divisible by {BLOCK} for mxfp8, got {}\n\
                     hint: choose such sizes, or keep it in bf16 by a rule of the policy",
                    tensor.shape
                ),
            });
        }
    }
    let assignments = order.into_iter().map(|(id, _)| id).zip(assigned).collect();
    Ok((assignments, report))
}

fn collect_parameters(graph: &Graph, node: &Node, order: &mut Vec<(TensorId, Role)>) {
    for &id in &node.inputs {
        let tensor = graph.tensor(id);
        let TensorKind::Parameter { role, .. } = tensor.kind else { continue };
        // A bias follows the activations: it has no matrix product of its own.
        let is_bias = role == Role::Linear && tensor.shape.rank() == 1;
        if !is_bias && !order.iter().any(|&(known, _)| known == id) {
            order.push((id, role));
        }
    }
}

fn activation_dtype(report: &[TensorPrecision]) -> Result<DType, IrError> {
    let f32_count = report.iter().filter(|tensor| tensor.format == Format::F32).count();
    if f32_count == 0 {
        return Ok(DType::Bf16);
    }
    match report.iter().find(|tensor| tensor.format != Format::F32) {
        None => Ok(DType::F32),
        Some(other) => Err(IrError::Precision {
            tensor: other.tensor.clone(),
            what: format!(
                "expected f32 as for {f32_count} other tensors, got {}\n\
                 hint: f32 is for whole models; use bf16 for single tensors",
                other.format
            ),
        }),
    }
}

/// A high-precision tensor and how it is quantized.
type Key = (TensorId, MxSpec);

struct Rewrite<'a> {
    source: &'a Graph,
    assignments: HashMap<TensorId, Assignment>,
    activation: DType,
    result: Graph,
    /// Codes and scales of each copy made.
    made: HashMap<(Key, Axis), (TensorId, TensorId)>,
}

impl Rewrite<'_> {
    /// The parameter behind a linear product, and its operands with spec and axis, when the
    /// policy puts the product in MXFP8.
    fn mx_operands(&self, node: &Node) -> Option<(Product, [(Key, Axis); 2])> {
        let (product, parameter) = match &node.op {
            Op::Linear(_) => (Product::Fprop, node.inputs[1]),
            Op::LinearInputGrad(_) => (Product::Dgrad, node.inputs[1]),
            Op::LinearWeightGrad(_) => match self.source.tensor(node.outputs[0]).kind {
                TensorKind::ParameterGradient { parameter } => (Product::Wgrad, parameter),
                _ => return None,
            },
            _ => return None,
        };
        let assignment = self.assignments.get(&parameter)?;
        if assignment.format != Format::Mxfp8 {
            return None;
        }
        let (first, second) = (node.inputs[0], node.inputs[1]);
        let (activation, weight, gradient) =
            (assignment.activation, assignment.weight, assignment.gradient);
        let operands = match product {
            Product::Fprop => [((first, activation), Axis::Row), ((second, weight), Axis::Row)],
            Product::Dgrad => [((first, gradient), Axis::Row), ((second, weight), Axis::Column)],
            Product::Wgrad => {
                [((first, gradient), Axis::Column), ((second, activation), Axis::Column)]
            }
        };
        Some((product, operands))
    }

    /// Every tensor that is quantized, with the axes that its readers want, in order of use.
    fn needs(&self) -> Vec<(Key, Axis)> {
        let mut needs: Vec<(Key, Axis)> = Vec::new();
        for node in &self.source.nodes {
            let Some((_, operands)) = self.mx_operands(node) else { continue };
            for (key, axis) in operands {
                match needs.iter_mut().find(|(known, _)| *known == key) {
                    Some((_, known_axis)) => *known_axis = known_axis.union(axis),
                    None => needs.push((key, axis)),
                }
            }
        }
        needs
    }

    /// Casts and quantizations of parameters, in [`Phase::Weights`].
    fn weights(&mut self, needs: &[(Key, Axis)]) -> Result<(), IrError> {
        for (id, parameter) in self.source.parameters() {
            let reader = self.source.nodes.iter().find(|node| node.inputs.contains(&id));
            let Some(reader) = reader.cloned() else { continue };
            let in_high_precision = self
                .source
                .nodes
                .iter()
                .any(|node| node.inputs.contains(&id) && !self.reads_codes(node, id));
            if in_high_precision && self.activation != DType::F32 {
                let name = format!("{}.{}", parameter.name, self.activation);
                let copy = self.result.add_tensor(Tensor {
                    name: name.clone(),
                    shape: parameter.shape.clone(),
                    dtype: self.activation,
                    kind: TensorKind::WeightCopy,
                });
                self.result.nodes.push(Node {
                    name,
                    op: ops::Cast { to: self.activation }.into(),
                    inputs: vec![id],
                    outputs: vec![copy],
                    phase: Phase::Weights,
                    recompute: false,
                    ..reader.clone()
                });
                self.made.insert(((id, MxSpec::default()), Axis::Both), (copy, copy));
            }
            self.quantize_as(id, needs, reader.tag, reader.layer, Phase::Weights)?;
        }
        Ok(())
    }

    /// Whether `node` reads parameter `id` only as codes.
    fn reads_codes(&self, node: &Node, id: TensorId) -> bool {
        self.mx_operands(node).is_some() && node.inputs[1] == id
    }

    fn quantize(
        &mut self,
        tensor: TensorId,
        needs: &[(Key, Axis)],
        producer: &Node,
    ) -> Result<(), IrError> {
        self.quantize_as(tensor, needs, producer.tag, producer.layer, producer.phase)
    }

    fn quantize_as(
        &mut self,
        tensor: TensorId,
        needs: &[(Key, Axis)],
        tag: Tag,
        layer: Option<u32>,
        phase: Phase,
    ) -> Result<(), IrError> {
        let wanted: Vec<_> = needs.iter().filter(|((id, _), _)| *id == tensor).collect();
        for (count, &&(key, axis)) in wanted.iter().enumerate() {
            let source_name = &self.result.tensor(tensor).name;
            // A second copy under another spec needs another name.
            let number = if count == 0 { String::new() } else { count.to_string() };
            let name = format!("{source_name}.mx{number}");
            let op = Quantize { spec: key.1, axis };
            let types = crate::OpRule::infer(&op, &input_types(&self.result, &[tensor]))
                .map_err(|source| IrError::Operands { node: name.clone(), source })?;
            let is_weight = phase == Phase::Weights;
            let outputs: Vec<TensorId> = types
                .into_iter()
                .map(|output| {
                    let is_statistics = output.dtype == DType::U64;
                    self.result.add_tensor(Tensor {
                        name: output_name(&name, output.suffix),
                        shape: output.shape,
                        dtype: output.dtype,
                        kind: if is_weight && !is_statistics {
                            TensorKind::WeightCopy
                        } else {
                            TensorKind::Statistic
                        },
                    })
                })
                .collect();
            if axis != Axis::Column {
                self.made.insert((key, Axis::Row), (outputs[0], outputs[1]));
            }
            if axis != Axis::Row {
                let at = if axis == Axis::Both { 2 } else { 0 };
                self.made.insert((key, Axis::Column), (outputs[at], outputs[at + 1]));
            }
            self.result.nodes.push(Node {
                name,
                op: op.into(),
                inputs: vec![tensor],
                outputs,
                tag,
                layer,
                phase,
                recompute: false,
            });
        }
        Ok(())
    }

    /// The high-precision tensor that a node reads in place of `id`.
    fn high_precision(&self, id: TensorId) -> TensorId {
        self.made.get(&((id, MxSpec::default()), Axis::Both)).map_or(id, |made| made.0)
    }

    fn node(&mut self, node: &Node) -> Result<(), IrError> {
        let mut node = node.clone();
        match self.mx_operands(&node) {
            None => {
                for input in &mut node.inputs {
                    *input = self.high_precision(*input);
                }
            }
            Some((product, [a, b])) => {
                let mut inputs = Vec::with_capacity(5);
                for operand in [a, b] {
                    let (codes, scales) = self.made[&operand];
                    inputs.extend([codes, scales]);
                }
                let bias = matches!(&node.op, Op::Linear(linear) if linear.bias);
                if bias {
                    inputs.push(self.high_precision(node.inputs[2]));
                }
                let (a, b) = (a.0.1, b.0.1);
                node.op = MxGemm { product, output: self.activation, bias, a, b }.into();
                node.inputs = inputs;
                // Its operands are kept for the backward as codes; nothing is left to recompute.
            }
        }
        self.result.nodes.push(node);
        Ok(())
    }
}
