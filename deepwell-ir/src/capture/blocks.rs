//! What the graphs of all model families are built with.

use std::collections::HashMap;

use super::{CaptureError, ParameterRole, ParameterSpec};
use crate::ops;
use crate::{Graph, GraphBuilder, Shape, Tag, TensorId};

/// A graph that is being built, and where its inputs and parameters are.
pub(super) struct Blocks {
    pub(super) graph: GraphBuilder,
    /// Token ids, i32 `[B·S]`.
    pub(super) tokens: TensorId,
    targets: TensorId,
    loss_scale: TensorId,
    parameters: HashMap<(ParameterRole, Option<u32>), TensorId>,
}

impl Blocks {
    /// A graph with inputs and parameters, but no node yet.
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

    /// Applies an op and gives its first output.
    pub(super) fn op(
        &mut self,
        name: &str,
        op: impl Into<crate::Op>,
        inputs: &[TensorId],
    ) -> Result<TensorId, CaptureError> {
        Ok(self.graph.op(name, op, inputs)?[0])
    }

    /// A linear layer, with its bias if the model has one.
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

    /// The output head with the loss of `x`, and the finished graph.
    pub(super) fn finish(mut self, tied: bool, x: TensorId) -> Result<Graph, CaptureError> {
        self.graph.scope(Tag::Head, None);
        let role = if tied { ParameterRole::TokenEmbedding } else { ParameterRole::Head };
        let inputs = [x, self.parameter(role, None), self.targets, self.loss_scale];
        self.op("lm_head", ops::LinearCrossEntropy {}, &inputs)?;
        Ok(self.graph.finish()?)
    }
}
