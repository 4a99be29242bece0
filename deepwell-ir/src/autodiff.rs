//! Reverse-mode differentiation as a graph pass.
//!
//! Nodes are visited last to first; each op's rule emits the nodes that turn gradients of its
//! outputs into gradients of its inputs. Gradients that meet at a tensor are summed in the order
//! in which they arrive, except where an op adds in its own pass (see
//! [`BackwardContext::take_gradient`]).

use std::collections::HashMap;

use crate::builder::output_name;
use crate::op::{OutputKind, input_types};
use crate::{
    DType, Graph, IrError, Node, Op, Phase, Shape, Stage, Tensor, TensorId, TensorKind, ops,
};

/// Adds the backward to a captured graph.
///
/// # Errors
/// A graph that is not at [`Stage::Captured`] or has no loss; an op without a derivative.
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
        current: &forward[0],
        replaced: false,
    };
    let mut kept = vec![true; forward.len()];
    for (index, node) in forward.iter().enumerate().rev() {
        context.current = node;
        context.replaced = false;
        node.op.rule().backward(node, &mut context)?;
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

/// What an op's backward rule works with.
pub struct BackwardContext<'a> {
    graph: Graph,
    /// Gradient that has arrived so far at each activation.
    gradients: HashMap<TensorId, TensorId>,
    parameter_gradients: HashMap<TensorId, TensorId>,
    current: &'a Node,
    replaced: bool,
}

impl BackwardContext<'_> {
    /// The gradient of an activation, if any path from the loss reaches it.
    pub fn gradient_of(&self, tensor: TensorId) -> Option<TensorId> {
        self.gradients.get(&tensor).copied()
    }

    /// Takes the gradient that has arrived so far: the caller's op adds it in its own pass.
    pub fn take_gradient(&mut self, tensor: TensorId) -> Option<TensorId> {
        self.gradients.remove(&tensor)
    }

    /// Shape of a tensor.
    pub fn shape(&self, tensor: TensorId) -> &Shape {
        &self.graph.tensor(tensor).shape
    }

    /// The FP32 accumulator of a parameter's gradient, made on first use.
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
        };
        let id = self.graph.add_tensor(tensor);
        self.parameter_gradients.insert(parameter, id);
        id
    }

    /// The current forward node is computed by a backward node instead.
    pub fn replace_forward(&mut self) {
        self.replaced = true;
    }

    /// Emits a backward node with known outputs.
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

    /// Emits a backward node whose outputs are all fresh.
    pub(crate) fn emit_fresh(
        &mut self,
        op: impl Into<Op>,
        suffix: &str,
        inputs: &[TensorId],
    ) -> Result<Vec<TensorId>, IrError> {
        self.emit_with(op, suffix, inputs, &[])
    }

    /// Emits a backward node; an output that is not given is made.
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

    /// Adds a gradient of `tensor` to what has arrived there. Inputs of the graph take none.
    pub fn contribute(&mut self, tensor: TensorId, gradient: TensorId) -> Result<(), IrError> {
        if !matches!(self.graph.tensor(tensor).kind, TensorKind::Activation) {
            return Ok(());
        }
        let total = match self.gradients.get(&tensor) {
            None => gradient,
            Some(&earlier) => {
                let name = format!("{}.{}.sum", self.current.name, self.graph.tensor(tensor).name);
                self.push(ops::Add {}.into(), name, &[earlier, gradient], &[])?[0]
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
                    let kind = match output.kind {
                        OutputKind::Activation => TensorKind::Activation,
                        _ => TensorKind::Statistic,
                    };
                    self.graph.add_tensor(Tensor {
                        name: output_name(&name, output.suffix),
                        shape: output.shape,
                        dtype: output.dtype,
                        kind,
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
        });
        Ok(outputs)
    }
}
