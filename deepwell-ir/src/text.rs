//! A graph as text for people and snapshots, and as DOT for drawings.

use std::fmt;

use petgraph::graph::DiGraph;

use crate::{Graph, Node, TensorKind};

/// `linear(x, w) bias`: op, operands by name, attributes.
fn call_text(graph: &Graph, node: &Node) -> String {
    let inputs: Vec<&str> = node.inputs.iter().map(|&id| graph.tensor(id).name.as_str()).collect();
    let attributes = node.op.rule().attributes();
    let space = if attributes.is_empty() { "" } else { " " };
    format!("{}({}){space}{attributes}", node.op.name(), inputs.join(", "))
}

impl fmt::Display for Graph {
    /// One line per input, parameter and node:
    /// `%name: dtype[shape] = op(operands) attributes  #tag`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "graph {:?} stage={} parameters={}",
            self.name,
            format!("{:?}", self.stage).to_lowercase(),
            self.parameter_count()
        )?;
        for tensor in &self.tensors {
            match &tensor.kind {
                TensorKind::Input { .. } => {
                    writeln!(f, "  input {}: {}{}", tensor.name, tensor.dtype, tensor.shape)?;
                }
                TensorKind::Parameter { role, .. } => writeln!(
                    f,
                    "  param {}: {}{} {}",
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    format!("{role:?}").to_lowercase()
                )?,
                _ => {}
            }
        }
        let mut phase = None;
        for node in &self.nodes {
            if phase != Some(node.phase) {
                writeln!(f, "  {}:", node.phase)?;
                phase = Some(node.phase);
            }
            let outputs: Vec<String> = node
                .outputs
                .iter()
                .map(|&id| {
                    let tensor = self.tensor(id);
                    let plus = if tensor.kind.is_accumulator() { "+" } else { "" };
                    format!("{plus}{}: {}{}", tensor.name, tensor.dtype, tensor.shape)
                })
                .collect();
            let mark = if node.recompute { " recompute" } else { "" };
            writeln!(
                f,
                "    {} = {}  #{}{mark}",
                outputs.join(", "),
                call_text(self, node),
                node.tag
            )?;
        }
        Ok(())
    }
}

impl Graph {
    /// Data flow between nodes: node indices as vertices, tensor names on the edges.
    pub fn dependencies(&self) -> DiGraph<usize, String> {
        let mut result = DiGraph::new();
        let vertices: Vec<_> = (0..self.nodes.len()).map(|index| result.add_node(index)).collect();
        let mut writers: Vec<Vec<usize>> = vec![Vec::new(); self.tensors.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            for &id in &node.inputs {
                for &writer in &writers[id.index()] {
                    let name = self.tensor(id).name.clone();
                    result.add_edge(vertices[writer], vertices[index], name);
                }
            }
            for &id in &node.outputs {
                writers[id.index()].push(index);
            }
        }
        result
    }

    /// The graph in Graphviz' DOT language, one cluster per layer.
    pub fn to_dot(&self) -> String {
        let mut out = format!("digraph {:?} {{\n  rankdir=TB; node [shape=box];\n", self.name);
        let mut layers: Vec<Option<u32>> = self.nodes.iter().map(|node| node.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        for layer in layers {
            let indent = if let Some(layer) = layer {
                out.push_str(&format!(
                    "  subgraph \"cluster_{layer}\" {{\n    label=\"layer {layer}\";\n"
                ));
                "    "
            } else {
                "  "
            };
            for (index, node) in self.nodes.iter().enumerate() {
                if node.layer == layer {
                    out.push_str(&format!(
                        "{indent}n{index} [label=\"{}\\n{}\"];\n",
                        node.name,
                        node.op.name()
                    ));
                }
            }
            if layer.is_some() {
                out.push_str("  }\n");
            }
        }
        let dependencies = self.dependencies();
        for edge in dependencies.edge_indices() {
            if let Some((from, to)) = dependencies.edge_endpoints(edge) {
                out.push_str(&format!(
                    "  n{} -> n{} [label={:?}];\n",
                    dependencies[from], dependencies[to], dependencies[edge]
                ));
            }
        }
        out.push_str("}\n");
        out
    }
}
