//! Builds a forward graph node by node and checks operand types.

use deepwell_precision::Role;

use crate::op::{OutputKind, input_types};
use crate::{
    DType, Graph, Init, InputRole, IrError, Node, NodeId, Op, Phase, Shape, Stage, Tag, Tensor,
    TensorId, TensorKind,
};

/// Builds a [`Graph`] in execution order.
///
/// ```
/// use deepwell_ir::{DType, Dim, GraphBuilder, Init, Role, Shape, Tag, ops};
///
/// # fn main() -> Result<(), deepwell_ir::IrError> {
/// let mut b = GraphBuilder::new("one linear");
/// let x = b.input("x", Shape(vec![Dim::TOKENS, 64.into()]), DType::F32);
/// let w = b.parameter("w", Shape::new([32usize, 64]), Init::Normal { std: 0.02 }, Role::Linear);
/// b.scope(Tag::Mlp, Some(0));
/// let y = b.op("project", ops::Linear { bias: false }, &[x, w])?[0];
/// let graph = b.finish()?;
/// assert_eq!(graph.tensor(y).shape.to_string(), "[B*S, 32]");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct GraphBuilder {
    graph: Graph,
    tag: Tag,
    layer: Option<u32>,
}

impl GraphBuilder {
    /// Creates an empty graph.
    pub fn new(name: impl Into<String>) -> GraphBuilder {
        let graph = Graph {
            name: name.into(),
            stage: Stage::Captured,
            tensors: Vec::new(),
            nodes: Vec::new(),
            loss: None,
        };
        GraphBuilder { graph, tag: Tag::Embed, layer: None }
    }

    /// Sets tag and layer of the following nodes.
    pub fn scope(&mut self, tag: Tag, layer: Option<u32>) {
        self.tag = tag;
        self.layer = layer;
    }

    /// Adds an input without a role in training, written by the caller.
    pub fn input(&mut self, name: &str, shape: Shape, dtype: DType) -> TensorId {
        let kind = TensorKind::Input { role: InputRole::Other };
        self.graph.add_tensor(Tensor { name: name.to_string(), shape, dtype, kind, link: None })
    }

    /// Token ids, i32 `[B·S]`.
    pub fn tokens(&mut self) -> TensorId {
        self.graph.host_input(InputRole::Tokens)
    }

    /// Targets, i32 `[B·S]`.
    pub fn targets(&mut self) -> TensorId {
        self.graph.host_input(InputRole::Targets)
    }

    /// Reciprocal of the number of tokens counted in the loss, f32 `[1]`.
    pub fn loss_scale(&mut self) -> TensorId {
        self.graph.host_input(InputRole::LossScale)
    }

    /// Adds a trained FP32 tensor.
    pub fn parameter(&mut self, name: &str, shape: Shape, init: Init, role: Role) -> TensorId {
        let kind = TensorKind::Parameter { init, role };
        let (name, dtype) = (name.to_string(), DType::F32);
        self.graph.add_tensor(Tensor { name, shape, dtype, kind, link: None })
    }

    /// Applies an op and returns its outputs. New tensors are named after the node.
    ///
    /// # Errors
    /// [`IrError::Operands`] if the op does not accept these inputs.
    pub fn op(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        inputs: &[TensorId],
    ) -> Result<Vec<TensorId>, IrError> {
        let op = op.into();
        let types = op
            .rule()
            .infer(&input_types(&self.graph, inputs))
            .map_err(|source| IrError::Operands { node: name.to_string(), source })?;
        let mut outputs = Vec::with_capacity(types.len());
        for output in types {
            let kind = match output.kind {
                OutputKind::Accumulator => TensorKind::Loss,
                kind => kind_of_output(&self.graph, kind, inputs),
            };
            let is_loss = kind == TensorKind::Loss;
            let name = output_name(name, output.suffix);
            if let Some(loss) = self.graph.loss.filter(|_| is_loss) {
                // Several loss terms share one accumulator, named after the last term.
                self.graph.tensors[loss.index()].name = name;
                outputs.push(loss);
                continue;
            }
            let id = self.graph.add_tensor(Tensor {
                name,
                shape: output.shape,
                dtype: output.dtype,
                kind,
                link: None,
            });
            if is_loss {
                self.graph.loss = Some(id);
            }
            outputs.push(id);
        }
        let source = NodeId(self.graph.nodes.len() as u32);
        self.graph.nodes.push(Node {
            name: name.to_string(),
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            tag: self.tag,
            layer: self.layer,
            phase: Phase::Forward,
            recompute: false,
            source,
            repeats: false,
        });
        Ok(outputs)
    }

    /// Verifies and returns the graph.
    ///
    /// # Errors
    /// A broken structural rule, see [`crate::verify`].
    pub fn finish(self) -> Result<Graph, IrError> {
        crate::verify(&self.graph)?;
        Ok(self.graph)
    }
}

impl Graph {
    /// Makes, but does not add, a node of `op` in place of or next to `place`, with the tag, layer,
    /// phase and source of `place`. Outputs are new tensors; the first may be `given` instead.
    ///
    /// # Errors
    /// [`IrError::Operands`] if the op does not accept these inputs.
    pub fn node_beside(
        &mut self,
        place: &Node,
        name: &str,
        op: impl Into<Op>,
        inputs: &[TensorId],
        given: Option<TensorId>,
    ) -> Result<Node, IrError> {
        let op = op.into();
        let types = op
            .rule()
            .infer(&input_types(self, inputs))
            .map_err(|source| IrError::Operands { node: name.to_string(), source })?;
        let mut outputs: Vec<TensorId> = given.into_iter().collect();
        for output in types.into_iter().skip(outputs.len()) {
            let kind = kind_of_output(self, output.kind, inputs);
            outputs.push(self.add_tensor(Tensor {
                name: output_name(name, output.suffix),
                shape: output.shape,
                dtype: output.dtype,
                kind,
                link: None,
            }));
        }
        let (name, inputs) = (name.to_string(), inputs.to_vec());
        Ok(Node { name, op, inputs, outputs, ..place.clone() })
    }
}

/// Tensor kind of a new output that is not an accumulator.
pub(crate) fn kind_of_output(graph: &Graph, kind: OutputKind, inputs: &[TensorId]) -> TensorKind {
    let of_input = || inputs.first().map(|&input| graph.tensor(input).kind.clone());
    match kind {
        OutputKind::Activation => TensorKind::Activation,
        OutputKind::SameAsInput => match of_input() {
            None | Some(TensorKind::Activation) => TensorKind::Activation,
            Some(_) => TensorKind::Statistic,
        },
        OutputKind::Statistic | OutputKind::Copy | OutputKind::Accumulator => TensorKind::Statistic,
    }
}

/// Name of an output tensor: the node's name, then the suffix if not empty.
pub(crate) fn output_name(node: &str, suffix: impl AsRef<str>) -> String {
    let suffix = suffix.as_ref();
    if suffix.is_empty() { node.to_string() } else { format!("{node}.{suffix}") }
}
