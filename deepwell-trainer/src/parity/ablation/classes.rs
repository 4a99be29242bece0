//! Classes that an ablation leaves out or has alone: GEMM operands, for some tensors or for all,
//! and parts of a policy's recipe.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{Graph, PrecisionPolicy, Tag, TensorKind};
use deepwell_precision::{GemmKind, OperandClass, PolicyError, RecipePart, Role};
use globset::Glob;
use serde::{Deserialize, Serialize};

/// Division of a policy's quantized operands into classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum AblateBy {
    /// GEMMs of linear layers: fprop, dgrad, wgrad.
    Gemm,
    /// Operands of these GEMMs: two for each of fprop, dgrad, wgrad.
    Operand,
    /// Linear tensors by kind, over all layers: q, k, v, o, gate, up, down.
    Tensor,
    /// All parts of the policy's recipe, of those below.
    Recipe,
    /// Random Hadamard transform of wgrad's operands.
    Rht,
    /// Stochastic rounding of gradients.
    Sr,
    /// Square blocks of weights.
    Square,
    /// Higher precision of the last blocks.
    Exceptions,
    /// Selection of 4 or 6 for the activations of fprop.
    FourSix,
    /// Elements of gradients: E5M2 beside E4M3, E3M2 beside E2M3.
    GradientElement,
}

impl AblateBy {
    /// Whether the classes are parts of the recipe, not operands.
    pub(super) const fn is_of_parts(self) -> bool {
        !matches!(self, AblateBy::Gemm | AblateBy::Operand | AblateBy::Tensor)
    }

    /// The parts of the recipe of `policy`; none if the classes are of operands.
    pub(super) fn parts(self, policy: &PrecisionPolicy) -> Vec<RecipePart> {
        match self {
            AblateBy::Gemm | AblateBy::Operand | AblateBy::Tensor => Vec::new(),
            AblateBy::Recipe => {
                let all = RecipePart::ALL.iter().copied();
                all.filter(|&part| policy.has_part(part)).collect()
            }
            AblateBy::GradientElement => vec![RecipePart::GradientElement],
            AblateBy::Rht => vec![RecipePart::Hadamard],
            AblateBy::Sr => vec![RecipePart::StochasticRounding],
            AblateBy::Square => vec![RecipePart::SquareWeights],
            AblateBy::Exceptions => vec![RecipePart::LastBlocks],
            AblateBy::FourSix => vec![RecipePart::FourSix],
        }
    }
}

/// What a class consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Members {
    /// Operands that are quantized, or not, together.
    Operands {
        operands: Vec<OperandClass>,
        /// A glob over tensor names; none takes all.
        tensors: Option<String>,
    },
    /// A part of the recipe, with or without it.
    Part(RecipePart),
}

/// What an ablation leaves out, or has alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Class {
    /// Name in the report.
    pub(super) name: String,
    /// Common part of the folders' names.
    pub(super) folder: String,
    members: Members,
}

impl Members {
    fn of(operands: &[OperandClass], tensors: Option<String>) -> Members {
        Members::Operands { operands: operands.to_vec(), tensors }
    }
}

impl Class {
    fn of_gemm(gemm: GemmKind, tensors: Option<&str>) -> Class {
        let name = gemm.name().to_string();
        let members = Members::of(&OperandClass::of(gemm), tensors.map(str::to_string));
        Class { folder: name.clone(), name, members }
    }

    fn of_operand(class: OperandClass, tensors: Option<&str>) -> Class {
        Class {
            name: class.name().to_string(),
            folder: format!("{}-{}", class.gemm().name(), class.operand()),
            members: Members::of(&[class], tensors.map(str::to_string)),
        }
    }

    fn of_kind(kind: &Kind<'_>) -> Class {
        let name = match kind.names.as_slice() {
            [] | [_] => kind.names.concat(),
            [first, others @ ..] => format!("{first} and {} like it", others.len()),
        };
        Class {
            name,
            folder: format!("{}-{}", kind.tag, kind.place),
            members: Members::of(OperandClass::ALL, Some(format!("{{{}}}", kind.names.join(",")))),
        }
    }

    fn of_part(part: RecipePart) -> Class {
        let name = part.name().to_string();
        Class { folder: name.clone(), name, members: Members::Part(part) }
    }

    /// `policy` with nothing else quantized, or with no other part of the recipe.
    pub(super) fn alone(&self, policy: &PrecisionPolicy) -> Result<PrecisionPolicy, PolicyError> {
        let policy = policy.clone();
        match &self.members {
            Members::Operands { operands, tensors: None } => Ok(policy.only(operands)),
            Members::Operands { operands, tensors: Some(tensors) } => {
                policy.only_in(tensors, operands)
            }
            Members::Part(part) => Ok(policy.with_part_alone(*part)),
        }
    }

    /// `policy` with everything else quantized, or with all other parts of the recipe.
    pub(super) fn left_out(
        &self,
        policy: &PrecisionPolicy,
    ) -> Result<PrecisionPolicy, PolicyError> {
        let policy = policy.clone();
        match &self.members {
            Members::Operands { operands, tensors: None } => Ok(policy.without(operands)),
            Members::Operands { operands, tensors: Some(tensors) } => {
                policy.without_in(tensors, operands)
            }
            Members::Part(part) => Ok(policy.without_part(*part)),
        }
    }
}

/// The classes, in a fixed order. The glob `tensors` restricts them to matching tensors.
///
/// # Errors
/// [`PolicyError::Glob`] if `tensors` is malformed, [`PolicyError::NoMatch`] if the classes are of
/// tensors and no tensor matches.
pub(super) fn classes(
    graph: &Graph,
    policy: &PrecisionPolicy,
    by: AblateBy,
    tensors: Option<&str>,
) -> Result<Vec<Class>, PolicyError> {
    Ok(match by {
        AblateBy::Gemm => GemmKind::ALL.iter().map(|&gemm| Class::of_gemm(gemm, tensors)).collect(),
        AblateBy::Operand => {
            OperandClass::ALL.iter().map(|&class| Class::of_operand(class, tensors)).collect()
        }
        AblateBy::Tensor => {
            let mut kinds = kinds_of_tensors(graph);
            if let Some(glob) = tensors {
                restrict(&mut kinds, glob)?;
            }
            kinds.iter().map(Class::of_kind).collect()
        }
        by => by.parts(policy).into_iter().map(Class::of_part).collect(),
    })
}

/// Keeps the tensors that match `glob`, and drops empty kinds.
fn restrict(kinds: &mut Vec<Kind<'_>>, glob: &str) -> Result<(), PolicyError> {
    let matcher = Glob::new(glob).map_err(|error| PolicyError::Glob {
        place: String::new(),
        glob: glob.to_string(),
        message: error.kind().to_string(),
    })?;
    let matcher = matcher.compile_matcher();
    let tensor_count = kinds.iter().map(|kind| kind.names.len()).sum();
    for kind in kinds.iter_mut() {
        kind.names.retain(|name| matcher.is_match(name));
    }
    kinds.retain(|kind| !kind.names.is_empty());
    if kinds.is_empty() {
        return Err(PolicyError::NoMatch {
            place: String::new(),
            glob: glob.to_string(),
            tensor_count,
            hint: String::new(),
        });
    }
    Ok(())
}

/// Linear tensors with the same position in their layers: the third of attention, for example.
struct Kind<'a> {
    tag: Tag,
    /// Position among the linear tensors of this part of a layer, from 1.
    place: usize,
    /// Names of the tensors, one per layer.
    names: Vec<&'a str>,
}

/// The kinds of linear tensors in layers, found by the nodes that read the tensors and not by
/// names: first the tensors of attention in order, then those of the MLP or of the experts.
fn kinds_of_tensors(graph: &Graph) -> Vec<Kind<'_>> {
    let mut kinds: Vec<Kind<'_>> = Vec::new();
    let mut seen = HashSet::new();
    let mut places: HashMap<(u32, Tag), usize> = HashMap::new();
    for node in &graph.nodes {
        let Some(layer) = node.layer else { continue };
        for &id in &node.inputs {
            let tensor = graph.tensor(id);
            let is_linear = matches!(
                tensor.kind,
                TensorKind::Parameter { role: Role::Linear | Role::Expert, .. }
            );
            if !is_linear || tensor.shape.rank() < 2 || !seen.insert(id) {
                continue;
            }
            let place = places.entry((layer, node.tag)).or_default();
            *place += 1;
            let (tag, place) = (node.tag, *place);
            match kinds.iter_mut().find(|kind| (kind.tag, kind.place) == (tag, place)) {
                Some(kind) => kind.names.push(&tensor.name),
                None => kinds.push(Kind { tag, place, names: vec![&tensor.name] }),
            }
        }
    }
    kinds
}

#[cfg(test)]
mod tests {
    use deepwell_ir::capture::ModelConfig;

    use super::*;

    fn check(model: &str, by: AblateBy, tensors: Option<&str>, expected: &[&str]) {
        let preset = if by.is_of_parts() { "nvfp4" } else { "mxfp8" };
        check_preset(preset, model, by, tensors, expected);
    }

    fn check_preset(
        preset: &str,
        model: &str,
        by: AblateBy,
        tensors: Option<&str>,
        expected: &[&str],
    ) {
        let graph = ModelConfig::preset(model).unwrap().capture(Some(32)).unwrap();
        let policy = PrecisionPolicy::preset(preset).unwrap();
        let classes = classes(&graph, &policy, by, tensors).unwrap();
        let names: Vec<String> =
            classes.iter().map(|class| format!("{}: {}", class.folder, class.name)).collect();
        assert_eq!(names, expected);
        for class in &classes {
            // Each policy can be applied: its globs match.
            for policy in [class.alone(&policy).unwrap(), class.left_out(&policy).unwrap()] {
                deepwell_ir::apply_precision(&graph, &policy).unwrap();
            }
        }
    }

    #[test]
    fn parts_of_the_recipe() {
        check(
            "llama-micro",
            AblateBy::Recipe,
            None,
            &[
                "rht: rht",
                "sr: sr",
                "square: square",
                "exceptions: exceptions",
                "four-six: four-six",
            ],
        );
        check("llama-micro", AblateBy::FourSix, None, &["four-six: four-six"]);
        for (preset, expected) in [
            ("mxfp8", &[][..]),
            ("mxfp8-hybrid", &["gradient-element: gradient-element"]),
            ("mxfp6", &["gradient-element: gradient-element"]),
            ("mxfp4", &["rht: rht", "sr: sr", "exceptions: exceptions"]),
        ] {
            check_preset(preset, "llama-micro", AblateBy::Recipe, None, expected);
        }
    }

    #[test]
    fn classes_of_models() {
        check(
            "llama-micro",
            AblateBy::Gemm,
            None,
            &["fprop: fprop", "dgrad: dgrad", "wgrad: wgrad"],
        );
        check(
            "llama-micro",
            AblateBy::Operand,
            None,
            &[
                "fprop-activation: fprop.activation",
                "fprop-weight: fprop.weight",
                "dgrad-gradient: dgrad.gradient",
                "dgrad-weight: dgrad.weight",
                "wgrad-gradient: wgrad.gradient",
                "wgrad-activation: wgrad.activation",
            ],
        );
        check(
            "llama-micro",
            AblateBy::Tensor,
            None,
            &[
                "attn-1: model.layers.0.self_attn.q_proj.weight and 1 like it",
                "attn-2: model.layers.0.self_attn.k_proj.weight and 1 like it",
                "attn-3: model.layers.0.self_attn.v_proj.weight and 1 like it",
                "attn-4: model.layers.0.self_attn.o_proj.weight and 1 like it",
                "mlp-1: model.layers.0.mlp.gate_proj.weight and 1 like it",
                "mlp-2: model.layers.0.mlp.up_proj.weight and 1 like it",
                "mlp-3: model.layers.0.mlp.down_proj.weight and 1 like it",
            ],
        );
        check(
            "gpt2-micro",
            AblateBy::Tensor,
            None,
            &[
                "attn-1: h.0.attn.q.weight and 1 like it",
                "attn-2: h.0.attn.k.weight and 1 like it",
                "attn-3: h.0.attn.v.weight and 1 like it",
                "attn-4: h.0.attn.c_proj.weight and 1 like it",
                "mlp-1: h.0.mlp.c_fc.weight and 1 like it",
                "mlp-2: h.0.mlp.c_proj.weight and 1 like it",
            ],
        );
        check(
            "llama-micro",
            AblateBy::Tensor,
            Some("*.{v_proj,down_proj}.weight"),
            &[
                "attn-3: model.layers.0.self_attn.v_proj.weight and 1 like it",
                "mlp-3: model.layers.0.mlp.down_proj.weight and 1 like it",
            ],
        );
        check(
            "llama-micro",
            AblateBy::Tensor,
            Some("*.1.*.v_proj.weight"),
            &["attn-3: model.layers.1.self_attn.v_proj.weight"],
        );
    }

    #[test]
    fn a_glob_that_matches_nothing_is_an_error() {
        let graph = ModelConfig::preset("llama-micro").unwrap().capture(Some(32)).unwrap();
        let error =
            classes(&graph, &PrecisionPolicy::mxfp8(), AblateBy::Tensor, Some("*.lm_head.*"))
                .unwrap_err();
        let expected = "rule `*.lm_head.*` matches none of the 14 tensors";
        assert_eq!(error.to_string(), expected);
    }

    /// A class contains the tensors of the same position in all layers, and no others.
    #[test]
    fn a_kind_is_the_same_place_of_every_layer() {
        let graph = ModelConfig::preset("llama-micro").unwrap().capture(Some(32)).unwrap();
        let kinds = kinds_of_tensors(&graph);
        for kind in &kinds {
            let layers = kind.names.len();
            assert_eq!(layers, kinds[0].names.len(), "{}-{}", kind.tag, kind.place);
        }
        let count: usize = kinds.iter().map(|kind| kind.names.len()).sum();
        let is_linear =
            |kind: &TensorKind| matches!(kind, TensorKind::Parameter { role: Role::Linear, .. });
        let linear = graph.parameters().filter(|(_, tensor)| is_linear(&tensor.kind)).count();
        assert_eq!(count, linear);
    }
}
