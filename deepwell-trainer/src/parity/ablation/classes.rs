//! What an ablation quantizes and leaves out: classes of GEMM operands, of some tensors or of all.

use deepwell_ir::{Graph, PrecisionPolicy, TensorKind};
use deepwell_precision::{Direction, OperandClass, PolicyError, Role};
use serde::{Deserialize, Serialize};

/// By what the quantized operands of a policy are divided into classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum AblateBy {
    /// The three GEMMs of a linear layer: fprop, dgrad, wgrad.
    Gemm,
    /// The two operands of each of them.
    Operand,
    /// The linear tensors of a layer, each over all layers: q, k, v, o, gate, up, down.
    Tensor,
}

/// Operands that are quantized, or not, together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Class {
    /// Name in the report.
    pub(super) name: String,
    /// Name of its folders.
    pub(super) folder: String,
    /// The operands.
    pub(super) operands: Vec<OperandClass>,
    /// A glob over tensor names; none takes all.
    pub(super) tensors: Option<String>,
}

impl Class {
    fn of_operands(name: &str, operands: Vec<OperandClass>, tensors: Option<&str>) -> Class {
        let folder = name.replace('.', "-");
        Class { name: name.to_string(), folder, operands, tensors: tensors.map(str::to_string) }
    }

    /// `policy` with nothing else quantized.
    pub(super) fn alone(&self, policy: &PrecisionPolicy) -> Result<PrecisionPolicy, PolicyError> {
        let policy = policy.clone();
        match &self.tensors {
            None => Ok(policy.only(&self.operands)),
            Some(tensors) => policy.only_in(tensors, &self.operands),
        }
    }

    /// `policy` with everything else quantized.
    pub(super) fn left_out(
        &self,
        policy: &PrecisionPolicy,
    ) -> Result<PrecisionPolicy, PolicyError> {
        let policy = policy.clone();
        match &self.tensors {
            None => Ok(policy.without(&self.operands)),
            Some(tensors) => policy.without_in(tensors, &self.operands),
        }
    }
}

/// The classes, in a fixed order. `tensors` restricts them to the tensors that it matches.
pub(super) fn classes(graph: &Graph, by: AblateBy, tensors: Option<&str>) -> Vec<Class> {
    match by {
        AblateBy::Gemm => Direction::ALL
            .iter()
            .map(|&gemm| Class::of_operands(gemm.name(), OperandClass::of(gemm).to_vec(), tensors))
            .collect(),
        AblateBy::Operand => OperandClass::ALL
            .iter()
            .map(|&class| Class::of_operands(class.name(), vec![class], tensors))
            .collect(),
        AblateBy::Tensor => kinds_of_tensors(graph)
            .into_iter()
            .map(|glob| {
                let short = glob.trim_end_matches(".weight").rsplit(['.', '*']).next();
                let folder = short.unwrap_or(&glob).to_string();
                let operands = OperandClass::ALL.to_vec();
                Class { name: folder.clone(), folder, operands, tensors: Some(glob) }
            })
            .collect(),
    }
}

/// A glob for each kind of linear tensor: the names of one layer with the layer's number left open.
fn kinds_of_tensors(graph: &Graph) -> Vec<String> {
    let mut globs: Vec<String> = Vec::new();
    for node in &graph.nodes {
        let Some(layer) = node.layer else { continue };
        for &id in &node.inputs {
            let tensor = graph.tensor(id);
            let is_linear = matches!(
                tensor.kind,
                TensorKind::Parameter { role: Role::Linear | Role::Expert, .. }
            );
            if !is_linear || tensor.shape.rank() < 2 {
                continue;
            }
            let glob = tensor.name.replacen(&format!(".{layer}."), ".*.", 1);
            if !globs.contains(&glob) {
                globs.push(glob);
            }
        }
    }
    globs
}

#[cfg(test)]
mod tests {
    use deepwell_ir::capture::{LlamaConfig, capture};

    use super::*;

    #[test]
    fn classes_of_a_llama() {
        let graph = capture(&LlamaConfig::preset("llama-micro").unwrap()).unwrap();
        for (by, expected) in [
            (AblateBy::Gemm, "fprop dgrad wgrad"),
            (
                AblateBy::Operand,
                "fprop.activation fprop.weight dgrad.gradient dgrad.weight wgrad.gradient \
                 wgrad.activation",
            ),
            (AblateBy::Tensor, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ] {
            let classes = classes(&graph, by, None);
            let names: Vec<&str> = classes.iter().map(|class| class.name.as_str()).collect();
            assert_eq!(names.join(" "), expected);
            for class in &classes {
                // Each policy can be applied: its globs match.
                let policy = PrecisionPolicy::mxfp8();
                for policy in [class.alone(&policy).unwrap(), class.left_out(&policy).unwrap()] {
                    deepwell_ir::apply_precision(&graph, &policy).unwrap();
                }
            }
        }
    }
}
