//! Reverse-mode differentiation as a graph pass.
//!
//! Nodes are visited last to first. Each op's rule emits nodes to compute gradients of its
//! inputs from gradients of its outputs. Several gradients of a tensor are summed in order of
//! arrival, except where an op adds in its own pass (see [`BackwardContext::take_gradient`]).
//!
//! No gradient is lost silently: a gradient that arrives at an output must be requested by the op's
//! rule and must reach every input that can have one.

use std::collections::{HashMap, HashSet};

use crate::builder::{kind_of_output, output_name};
use crate::op::input_types;
use crate::{
    DType, Graph, IrError, Node, Op, Phase, Shape, Stage, Tensor, TensorId, TensorKind, ops,
};

/// Appends the backward pass to a captured graph.
///
/// # Errors
/// A graph that is not at [`Stage::Captured`], a graph without loss, or an op without derivative.
pub fn differentiate(graph: &Graph) -> Result<Graph, IrError> {
    if graph.stage != Stage::Captured {
        return Err(IrError::Stage {
            pass: "differentiate",
            wants: Stage::Captured,
            got: graph.stage,
        });
    }
    if graph.loss.is_none() {
        return Err(IrError::Invalid {
            graph: graph.name.clone(),
            stage: graph.stage,
            what: "there is no loss to differentiate".to_string(),
        });
    }
    let forward = graph.nodes.clone();
    let mut context = BackwardContext {
        graph: Graph { stage: Stage::Differentiated, nodes: Vec::new(), ..graph.clone() },
        gradients: HashMap::new(),
        parameter_gradients: HashMap::new(),
        asked: HashSet::new(),
        current: &forward[0],
        replaced: false,
    };
    let mut kept = vec![true; forward.len()];
    for (index, node) in forward.iter().enumerate().rev() {
        context.current = node;
        context.replaced = false;
        let arrived: Vec<TensorId> = context.arrived();
        node.op.rule().backward(node, &mut context)?;
        context.check_passed_on(&arrived)?;
        kept[index] = !context.replaced;
    }
    let mut result = context.graph;
    let backward = std::mem::take(&mut result.nodes);
    result.nodes = forward
        .iter()
        .zip(kept)
        .filter(|(_, kept)| *kept)
        .map(|(node, _)| node.clone())
        .chain(backward)
        .collect();
    crate::verify(&result)?;
    Ok(result)
}

/// State that an op's backward rule reads and extends.
pub struct BackwardContext<'a> {
    graph: Graph,
    /// Sum of the gradients that have arrived so far at each activation.
    gradients: HashMap<TensorId, TensorId>,
    parameter_gradients: HashMap<TensorId, TensorId>,
    /// Outputs of the current node whose gradient the rule requested.
    asked: HashSet<TensorId>,
    current: &'a Node,
    replaced: bool,
}

impl BackwardContext<'_> {
    /// Returns the outputs of the current node at which a gradient has arrived.
    fn arrived(&mut self) -> Vec<TensorId> {
        self.asked.clear();
        let outputs = self.current.outputs.iter();
        outputs.copied().filter(|output| self.gradients.contains_key(output)).collect()
    }

    /// Checks that the current node's rule requested every gradient in `arrived` and passed it on.
    fn check_passed_on(&self, arrived: &[TensorId]) -> Result<(), IrError> {
        let lost = |tensor: TensorId, what: &str| IrError::LostGradient {
            node: self.current.name.clone(),
            op: self.current.op.rule().name(),
            tensor: self.graph.tensor(tensor).name.clone(),
            what: what.to_string(),
        };
        if let Some(&output) = arrived.iter().find(|output| !self.asked.contains(output)) {
            return Err(lost(output, "its rule does not ask for that gradient"));
        }
        let is_without = |input: &&TensorId| {
            self.takes_gradient(**input) && !self.gradients.contains_key(*input)
        };
        match self.current.inputs.iter().find(is_without) {
            Some(&input) if !arrived.is_empty() => {
                Err(lost(input, "its rule gives that input none"))
            }
            _ => Ok(()),
        }
    }

    /// Whether a forward node computes the tensor in a type that has gradients (F32 or BF16).
    fn takes_gradient(&self, tensor: TensorId) -> bool {
        let tensor = self.graph.tensor(tensor);
        let is_computed = matches!(tensor.kind, TensorKind::Activation | TensorKind::Statistic);
        is_computed && tensor.dtype.is_high_precision()
    }

    /// Returns the gradient of a tensor if any path from the loss reaches the tensor.
    pub fn gradient_of(&mut self, tensor: TensorId) -> Option<TensorId> {
        self.asked.insert(tensor);
        self.gradients.get(&tensor).copied()
    }

    /// Removes and returns the gradient so far; the caller's op adds that gradient in its own pass.
    pub fn take_gradient(&mut self, tensor: TensorId) -> Option<TensorId> {
        self.asked.insert(tensor);
        self.gradients.remove(&tensor)
    }

    /// Shape of a tensor.
    pub fn shape(&self, tensor: TensorId) -> &Shape {
        &self.graph.tensor(tensor).shape
    }

    /// Element type of a tensor.
    pub fn dtype(&self, tensor: TensorId) -> DType {
        self.graph.tensor(tensor).dtype
    }

    /// Returns the FP32 accumulator of a parameter's gradient, created on first use.
    pub fn parameter_gradient(&mut self, parameter: TensorId) -> TensorId {
        if let Some(&id) = self.parameter_gradients.get(&parameter) {
            return id;
        }
        let source = self.graph.tensor(parameter);
        let tensor = Tensor {
            name: format!("grad.{}", source.name),
            shape: source.shape.clone(),
            dtype: DType::F32,
            kind: TensorKind::ParameterGradient { parameter },
            link: None,
        };
        let id = self.graph.add_tensor(tensor);
        self.parameter_gradients.insert(parameter, id);
        id
    }

    /// Removes the current forward node: a backward node computes its outputs.
    pub fn replace_forward(&mut self) {
        self.replaced = true;
    }

    /// Emits a backward node that writes existing tensors.
    pub(crate) fn emit(
        &mut self,
        op: impl Into<Op>,
        suffix: &str,
        inputs: &[TensorId],
        outputs: &[TensorId],
    ) -> Result<(), IrError> {
        let outputs: Vec<_> = outputs.iter().map(|&id| Some(id)).collect();
        self.emit_with(op, suffix, inputs, &outputs).map(drop)
    }

    /// Emits a backward node whose outputs are all new tensors.
    pub(crate) fn emit_fresh(
        &mut self,
        op: impl Into<Op>,
        suffix: &str,
        inputs: &[TensorId],
    ) -> Result<Vec<TensorId>, IrError> {
        self.emit_with(op, suffix, inputs, &[])
    }

    /// Emits a backward node; creates a tensor for each output that is not given.
    pub(crate) fn emit_with(
        &mut self,
        op: impl Into<Op>,
        suffix: &str,
        inputs: &[TensorId],
        given: &[Option<TensorId>],
    ) -> Result<Vec<TensorId>, IrError> {
        let suffix = if suffix.is_empty() { "backward" } else { suffix };
        self.push(op.into(), output_name(&self.current.name, suffix), inputs, given)
    }

    /// Adds `gradient` to the gradient of `tensor`. Graph inputs ignore gradients.
    ///
    /// # Errors
    /// A tensor that has no gradient, or whose gradient is an accumulator (for a parameter use
    /// [`BackwardContext::parameter_gradient`]).
    pub fn contribute(&mut self, tensor: TensorId, gradient: TensorId) -> Result<(), IrError> {
        if matches!(self.graph.tensor(tensor).kind, TensorKind::Input { .. }) {
            return Ok(());
        }
        if !self.takes_gradient(tensor) {
            let tensor = self.graph.tensor(tensor);
            return Err(IrError::LostGradient {
                node: self.current.name.clone(),
                op: self.current.op.rule().name(),
                tensor: tensor.name.clone(),
                what: format!("{:?} in {} takes no gradient there", tensor.kind, tensor.dtype),
            });
        }
        let total = match self.gradients.get(&tensor) {
            None => gradient,
            Some(&earlier) => {
                let name = format!("{}.{}.sum", self.current.name, self.graph.tensor(tensor).name);
                let sum = self.push(ops::Add {}.into(), name, &[earlier, gradient], &[])?[0];
                // A sum of FP32 gradients stays FP32 too.
                self.graph.tensors[sum.index()].kind = self.graph.tensor(gradient).kind.clone();
                sum
            }
        };
        self.gradients.insert(tensor, total);
        Ok(())
    }

    fn push(
        &mut self,
        op: Op,
        name: String,
        inputs: &[TensorId],
        given: &[Option<TensorId>],
    ) -> Result<Vec<TensorId>, IrError> {
        let types = op
            .rule()
            .infer(&input_types(&self.graph, inputs))
            .map_err(|source| IrError::Operands { node: name.clone(), source })?;
        let outputs: Vec<TensorId> = types
            .into_iter()
            .enumerate()
            .map(|(index, output)| match given.get(index).copied().flatten() {
                Some(id) => id,
                None => {
                    let kind = kind_of_output(&self.graph, output.kind, inputs);
                    self.graph.add_tensor(Tensor {
                        name: output_name(&name, output.suffix),
                        shape: output.shape,
                        dtype: output.dtype,
                        kind,
                        link: None,
                    })
                }
            })
            .collect();
        self.graph.nodes.push(Node {
            name,
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            tag: self.current.tag,
            layer: self.current.layer,
            phase: Phase::Backward,
            recompute: false,
            source: self.current.source,
            repeats: false,
        });
        Ok(outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Add, Route, RouteScore};
    use crate::{Dim, GraphBuilder, Shape, Tag};

    /// `logits = x + x; gates, experts = route(logits)`, and the ids of `logits`, `gates`,
    /// `experts`.
    fn graph() -> (Graph, [TensorId; 3]) {
        let mut b = GraphBuilder::new("router");
        let x = b.input("x", Shape(vec![Dim::TOKENS, Dim::fixed(4)]), DType::F32);
        b.scope(Tag::Router, Some(0));
        let logits = b.op("logits", Add {}, &[x, x]).unwrap()[0];
        let route = Route {
            experts: 4,
            top_k: 2,
            score: RouteScore::Softmax,
            normalize: false,
            scaling: 1.0,
            groups: None,
            selection_bias: false,
        };
        let routed = b.op("route", route, &[logits]).unwrap();
        (b.finish().unwrap(), [logits, routed[0], routed[1]])
    }

    fn context<'a>(graph: &Graph, current: &'a Node) -> BackwardContext<'a> {
        BackwardContext {
            graph: Graph { nodes: Vec::new(), ..graph.clone() },
            gradients: HashMap::new(),
            parameter_gradients: HashMap::new(),
            asked: HashSet::new(),
            current,
            replaced: false,
        }
    }

    /// Checks rules that stop a gradient, in place of the router's own rule.
    #[test]
    fn a_gradient_that_goes_no_further_is_an_error() {
        let (graph, [logits, gates, _]) = graph();
        let node = &graph.nodes[1];
        type Rule = fn(&mut BackwardContext<'_>, TensorId, TensorId);
        let rows: [(Rule, Option<&str>); 3] = [
            (|_, _, _| {}, Some("loses the gradient of `route.gates`: its rule does not ask")),
            (
                |context, gates, _| _ = context.gradient_of(gates),
                Some("loses the gradient of `logits`: its rule gives that input none"),
            ),
            (
                |context, gates, logits| {
                    let dgates = context.gradient_of(gates).unwrap();
                    context.contribute(logits, dgates).unwrap();
                },
                None,
            ),
        ];
        for (rule, expected) in rows {
            let mut context = context(&graph, node);
            context.gradients.insert(gates, gates);
            let arrived = context.arrived();
            rule(&mut context, gates, logits);
            match (context.check_passed_on(&arrived), expected) {
                (Ok(()), None) => {}
                (Err(error), Some(words)) => assert!(error.to_string().contains(words), "{error}"),
                (got, expected) => panic!("expected {expected:?}, got {got:?}"),
            }
        }
        // Nothing arrived: nothing is lost.
        let mut context = context(&graph, node);
        let arrived = context.arrived();
        context.check_passed_on(&arrived).unwrap();
    }

    #[test]
    fn choices_take_no_gradient() {
        let (graph, [logits, _, experts]) = graph();
        let mut context = context(&graph, &graph.nodes[1]);
        let error = context.contribute(experts, logits).unwrap_err().to_string();
        assert!(error.contains("Statistic in i32 takes no gradient there"), "{error}");
    }
}
