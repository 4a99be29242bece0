//! Building blocks shared by the graphs of all model families.

use std::collections::HashMap;

use super::{CaptureError, ParameterRole, ParameterSpec};
use crate::ops;
use crate::{Graph, GraphBuilder, Shape, Tag, TensorId};

/// A graph under construction, with its inputs and parameters.
pub(super) struct Blocks {
    pub(super) graph: GraphBuilder,
    /// Token ids, i32 `[B·S]`.
    pub(super) tokens: TensorId,
    targets: TensorId,
    loss_scale: TensorId,
    parameters: HashMap<(ParameterRole, Option<u32>), TensorId>,
}

impl Blocks {
    /// Creates a graph with inputs and parameters, but without nodes.
    pub(super) fn new(name: &str, specs: Vec<ParameterSpec>) -> Blocks {
        let mut graph = GraphBuilder::new(name);
        let (tokens, targets) = (graph.tokens(), graph.targets());
        let loss_scale = graph.loss_scale();
        let mut parameters = HashMap::new();
        for ParameterSpec { name, shape, init, role, layer } in specs {
            let id = graph.parameter(&name, Shape::new(shape), init, role.precision_role());
            parameters.insert((role, layer), id);
        }
        Blocks { graph, tokens, targets, loss_scale, parameters }
    }

    /// A parameter that every configuration of the family has.
    pub(super) fn parameter(&self, role: ParameterRole, layer: Option<u32>) -> TensorId {
        self.parameters[&(role, layer)]
    }

    /// A parameter that only some configurations have.
    pub(super) fn optional(&self, role: ParameterRole, layer: Option<u32>) -> Option<TensorId> {
        self.parameters.get(&(role, layer)).copied()
    }

    /// Applies an op and returns the first output.
    pub(super) fn op(
        &mut self,
        name: &str,
        op: impl Into<crate::Op>,
        inputs: &[TensorId],
    ) -> Result<TensorId, CaptureError> {
        Ok(self.graph.op(name, op, inputs)?[0])
    }

    /// Adds a linear layer, with a bias if the model has one.
    pub(super) fn linear(
        &mut self,
        name: &str,
        role: ParameterRole,
        bias_role: ParameterRole,
        layer: u32,
        x: TensorId,
    ) -> Result<TensorId, CaptureError> {
        let mut inputs = vec![x, self.parameter(role, Some(layer))];
        inputs.extend(self.parameters.get(&(bias_role, Some(layer))));
        self.op(name, ops::Linear { bias: inputs.len() == 3 }, &inputs)
    }

    /// Adds the output head with the loss of `x`, and returns the finished graph.
    pub(super) fn finish(mut self, tied: bool, x: TensorId) -> Result<Graph, CaptureError> {
        self.graph.scope(Tag::Head, None);
        let role = if tied { ParameterRole::TokenEmbedding } else { ParameterRole::Head };
        let inputs = [x, self.parameter(role, None), self.targets, self.loss_scale];
        self.op("lm_head", ops::LinearCrossEntropy {}, &inputs)?;
        Ok(self.graph.finish()?)
    }
}
