//! Kinds and sizes of a model's layers.

use std::collections::HashMap;

use deepwell_ir::{Graph, TensorId, TensorKind, layer_kinds};
use deepwell_precision::{Assignment, Format, PrecisionPolicy, QuantFormat, Role, TensorUse};

use deepwell_lower::Parallel;

/// Buckets of gradients filled by the lowered layers of a longer chunk. Sizes grow irregularly
/// while buckets fill, and as long as collectives overlap with the layers that fill the next ones.
/// Found by trial: with four buckets, plans of llama-1.1b differ by up to 10 %.
const BUCKETS: usize = 8;
/// Fewest layers of a kind lowered for a longer chunk: enough for the layers, not the loss, to
/// determine the peak.
const FEWEST: usize = 4;
/// A chunk is lowered whole if it has at most this many times the layers lowered for a longer
/// chunk. Lowering the few, and the additional layers of [`MORE`](super::few_layers::MORE), costs
/// about as much.
const WHOLE: usize = 3;

/// Format of a tensor's GEMMs, and of their operands.
type Formats = (Format, [Option<QuantFormat>; 6]);

/// Kinds and sizes of the layers of a model.
#[derive(Debug)]
pub(super) struct Layers {
    /// Kind of each layer. Layers of a kind have the same ops, and parameters of the same shapes
    /// and formats.
    pub(super) kinds: Vec<usize>,
    /// Elements of the smallest layer: divided among tensor-parallel ranks, and among
    /// expert-parallel ranks.
    smallest: [usize; 2],
}

impl Layers {
    pub(super) fn of(graph: &Graph, policy: &PrecisionPolicy) -> Layers {
        let layer_of = layer_of_parameters(graph);
        let mut sizes = vec![[0; 2]; graph.layer_count()];
        for (id, tensor) in graph.parameters() {
            let Some(&layer) = layer_of.get(&id) else { continue };
            let elements = tensor.shape.as_fixed().map_or(0, |sizes| sizes.iter().product());
            let is_expert = matches!(tensor.kind, TensorKind::Parameter { role: Role::Expert, .. });
            sizes[layer][usize::from(is_expert)] += elements;
        }
        let smallest = sizes.into_iter().min_by_key(|[dense, routed]| dense + routed);
        Layers { kinds: kinds(graph, policy, &layer_of), smallest: smallest.unwrap_or_default() }
    }

    /// Layers of a kind to lower for a chunk with `layers` of them: all, or a few that fill
    /// [`BUCKETS`] of gradients.
    pub(super) fn lowered(&self, at: Parallel, bucket_bytes: usize, layers: usize) -> usize {
        let [dense, routed] = self.smallest;
        let elements = dense / at.tensor + routed / at.expert;
        let few = (BUCKETS * bucket_bytes / size_of::<f32>()).div_ceil(elements.max(1)).max(FEWEST);
        if layers > WHOLE * few { few } else { layers }
    }
}

/// The layer of the first node that reads each parameter.
fn layer_of_parameters(graph: &Graph) -> HashMap<TensorId, usize> {
    let mut layer_of = HashMap::new();
    for node in &graph.nodes {
        let Some(layer) = node.layer else { continue };
        for &input in &node.inputs {
            layer_of.entry(input).or_insert(layer as usize);
        }
    }
    layer_of
}

/// The policy with rules about the last blocks by name: a model of a few layers counts them anew.
pub(super) fn with_blocks_by_name(graph: &Graph, policy: &PrecisionPolicy) -> PrecisionPolicy {
    let layer_of = layer_of_parameters(graph);
    policy.clone().with_blocks_by_name(&uses(graph, &layer_of))
}

/// The parameters as a policy sees them.
fn uses<'a>(graph: &'a Graph, layer_of: &HashMap<TensorId, usize>) -> Vec<TensorUse<'a>> {
    let use_of = |(id, tensor): (TensorId, &'a deepwell_ir::Tensor)| match tensor.kind {
        TensorKind::Parameter { role, .. } => {
            let layer = layer_of.get(&id).map(|&layer| layer as u32);
            Some(TensorUse { name: &tensor.name, role, layer })
        }
        _ => None,
    };
    graph.parameters().filter_map(use_of).collect()
}

/// Kinds by ops and shapes, told apart further by the formats of the parameters.
fn kinds(
    graph: &Graph,
    policy: &PrecisionPolicy,
    layer_of: &HashMap<TensorId, usize>,
) -> Vec<usize> {
    let kinds = layer_kinds(graph);
    // A policy may keep the first and the last linear tensor in BF16. Every stage with few layers
    // keeps the first and the last layer of the model, so both stand here for linear tensors.
    let end = TensorUse { name: "", role: Role::Linear, layer: None };
    let parameters: Vec<_> = graph.parameters().collect();
    let uses = uses(graph, layer_of).into_iter();
    let uses: Vec<TensorUse<'_>> = [end].into_iter().chain(uses).chain([end]).collect();
    // Lowering reports a policy that cannot be applied.
    let Ok(assigned) = policy.assign(&uses) else { return kinds };
    let mut formats: Vec<Vec<Formats>> = vec![Vec::new(); kinds.len()];
    for ((id, _), assignment) in parameters.iter().zip(&assigned[1..]) {
        let Assignment { format, operands, .. } = assignment;
        if let Some(&layer) = layer_of.get(id) {
            formats[layer].push((*format, *operands));
        }
    }
    let layers: Vec<(usize, Vec<Formats>)> = kinds.into_iter().zip(formats).collect();
    let mut known: Vec<&(usize, Vec<Formats>)> = Vec::new();
    let mut of_layer = |layer| match known.iter().position(|other| *other == layer) {
        Some(kind) => kind,
        None => {
            known.push(layer);
            known.len() - 1
        }
    };
    layers.iter().map(&mut of_layer).collect()
}

#[cfg(test)]
mod tests {
    use deepwell_ir::capture::{LlamaConfig, capture};

    use super::*;
    use deepwell_lower::Plan;

    /// Regression: layers with the same ops counted as one kind whatever their formats, so a plan
    /// with later layers in BF16 was counted as if these were like the first.
    #[test]
    fn layers_in_other_formats_are_of_another_kind() {
        let graph = |preset| capture(&LlamaConfig::preset(preset).unwrap()).unwrap();
        let check = |preset, rules: &[&str], expected: &[usize]| {
            let mut policy = PrecisionPolicy::mxfp8();
            for rule in rules {
                policy = policy.with_rule(rule, Format::Bf16).unwrap();
            }
            assert_eq!(Layers::of(&graph(preset), &policy).kinds, expected, "{preset} {rules:?}");
        };
        // The first and the last linear tensor stay BF16 without a kind of their own.
        check("parity-3m", &[], &[0, 0, 0, 0]);
        check("parity-3m", &["*layers.1.*"], &[0, 1, 0, 0]);
        check("parity-3m", &["*layers.[12].*"], &[0, 1, 1, 0]);
        check("parity-3m", &["*layers.0.*down*", "*layers.2.*"], &[0, 1, 2, 1]);
        // A rule that matches norms alone changes no format.
        check("parity-3m", &["*layers.1.*norm*"], &[0, 0, 0, 0]);
        // A rule without a tensor is an error of lowering.
        check("parity-3m", &["*layers.9.*"], &[0, 0, 0, 0]);
    }

    #[test]
    fn lowered_layers_fill_buckets() {
        let graph = capture(&LlamaConfig::preset("llama-3-8b").unwrap()).unwrap();
        let layers = Layers::of(&graph, &PrecisionPolicy::bf16());
        let check = |tensor: usize, all: usize, expected: usize| {
            let at = Parallel { tensor, ..Parallel::data(1) };
            assert_eq!(layers.lowered(at, Plan::BUCKET_BYTES, all), expected, "{tensor} {all}");
        };
        // 218,112,000 parameters in a layer, 41,943,040 in a bucket.
        check(1, 12, 12);
        check(1, 13, 4);
        check(8, 39, 39);
        check(8, 40, 13);
    }
}
