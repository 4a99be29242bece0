//! Detects whether weights are stored as `[outputs, inputs]` or `[inputs, outputs]` from the shapes
//! of other tensors, if no configuration is available.

use std::collections::BTreeMap;

use deepwell_ir::capture::StoredTensor;

/// Modules that are `Conv1D` in transformers' GPT-2 and derived models.
const CONV1D: [&str; 4] = ["c_attn", "c_fc", "c_proj", "q_attn"];
/// Stacks of experts that are parameters rather than modules, as in gpt-oss and Llama 4.
const STACKS: [&str; 2] = ["gate_up_proj", "down_proj"];

/// Group of tensors with the same orientation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Conv1d,
    Matrix,
    Stack,
}

/// Orientation of a model's weights.
pub(super) struct Orientations {
    /// For each tensor, whether the inputs come first.
    pub(super) inputs_first: Vec<bool>,
    /// Whether the orientation of a tensor with inputs first follows only from its name.
    pub(super) is_by_name: bool,
    /// Whether no weight's orientation could be detected.
    pub(super) is_unknown: bool,
}

/// The orientation of each of `tensors`.
///
/// The length of a bias is the number of outputs. Fused gate and up projections of experts have
/// twice as many outputs as the down projection has inputs. Other tensors, for example square
/// weights, get the orientation of their group elsewhere in the model, otherwise the orientation
/// suggested by names.
pub(super) fn orientations(tensors: &[&StoredTensor]) -> Orientations {
    let shapes: BTreeMap<&str, &[usize]> =
        tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect();
    let own: Vec<Option<bool>> = tensors.iter().map(|tensor| by_shapes(tensor, &shapes)).collect();
    let mut of_group: BTreeMap<Group, Option<bool>> = BTreeMap::new();
    for (tensor, found) in tensors.iter().zip(&own) {
        if let (Some(group), Some(found)) = (group_of(tensor), *found) {
            let all = of_group.entry(group).or_insert(Some(found));
            *all = all.filter(|&all| all == found);
        }
    }
    let mut is_by_name = false;
    let mut is_known = own.iter().any(Option::is_some);
    let mut one = |tensor: &StoredTensor, own: Option<bool>| {
        let Some(group) = group_of(tensor) else { return false };
        let found = own.or_else(|| of_group.get(&group).copied().flatten());
        found.unwrap_or_else(|| {
            let by_name = group == Group::Conv1d || is_stack(&tensor.name);
            is_by_name |= by_name;
            is_known |= by_name || tensor.name.contains("self_attn.");
            by_name
        })
    };
    let inputs_first = tensors.iter().zip(own).map(|(tensor, own)| one(tensor, own)).collect();
    Orientations { inputs_first, is_by_name, is_unknown: !is_known }
}

fn group_of(tensor: &StoredTensor) -> Option<Group> {
    let is_conv1d = || tensor.name.split('.').any(|part| CONV1D.contains(&part));
    match tensor.shape.len() {
        2 if is_conv1d() => Some(Group::Conv1d),
        2 => Some(Group::Matrix),
        3 => Some(Group::Stack),
        _ => None,
    }
}

/// Whether the name is a stack of experts rather than a module's `weight`.
fn is_stack(name: &str) -> bool {
    let mut parts = name.rsplit('.');
    let last = parts.next().unwrap_or_default();
    STACKS.contains(&last) && parts.next() == Some("experts")
}

/// Whether inputs come first in a tensor, by its bias or by the projection that reads its output.
fn by_shapes(tensor: &StoredTensor, shapes: &BTreeMap<&str, &[usize]>) -> Option<bool> {
    let (stack, first, second) = match *tensor.shape {
        [first, second] => (None, first, second),
        [stack, first, second] => (Some(stack), first, second),
        _ => return None,
    };
    let bias = match tensor.name.strip_suffix("weight") {
        Some(module) => format!("{module}bias"),
        None => format!("{}_bias", tensor.name),
    };
    let outputs = match (stack, shapes.get(bias.as_str())) {
        (None, Some(&&[outputs])) => Some(outputs),
        (Some(stack), Some(&&[of, outputs])) if of == stack => Some(outputs),
        _ => None,
    };
    if let Some(outputs) = outputs.filter(|_| first != second) {
        return match outputs {
            outputs if outputs == second => Some(true),
            outputs if outputs == first => Some(false),
            _ => None,
        };
    }
    let other = |from: &str, to: &str| {
        let stem = tensor.name.strip_suffix(from)?;
        match (stack, shapes.get(format!("{stem}{to}").as_str())) {
            (Some(stack), Some(&&[of, first, second])) if of == stack => Some((first, second)),
            _ => None,
        }
    };
    let (up, down) = match other("gate_up_proj", "down_proj") {
        Some(down) => ((first, second), down),
        None => (other("down_proj", "gate_up_proj")?, (first, second)),
    };
    let is_inputs_first = up.0 == down.1 && up.1 == 2 * down.0;
    let is_outputs_first = up.1 == down.0 && up.0 == 2 * down.1;
    (is_inputs_first != is_outputs_first).then_some(is_inputs_first)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the tensors whose inputs come first.
    fn check(tensors: &[(&str, &[usize])], expected: &[&str], by_name: bool, unknown: bool) {
        let tensors: Vec<StoredTensor> = tensors
            .iter()
            .map(|&(name, shape)| {
                let (name, shape) = (name.to_owned(), shape.to_vec());
                crate::safetensors::test_tensor(name, shape)
            })
            .collect();
        let tensors: Vec<&StoredTensor> = tensors.iter().collect();
        let found = orientations(&tensors);
        let first: Vec<&str> = tensors
            .iter()
            .zip(&found.inputs_first)
            .filter_map(|(tensor, &is_first)| is_first.then_some(tensor.name.as_str()))
            .collect();
        assert_eq!(first, expected);
        assert_eq!((found.is_by_name, found.is_unknown), (by_name, unknown), "{expected:?}");
    }

    #[test]
    fn inputs_come_first_where_shapes_or_names_say_so() {
        let (attn, proj) = ("h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight");
        let attn_bias = "h.0.attn.c_attn.bias";
        let (gate_up, down) = ("l.0.mlp.experts.gate_up_proj", "l.0.mlp.experts.down_proj");
        let gate_up_bias = "l.0.mlp.experts.gate_up_proj_bias";
        // GPT-2; the square projection follows the others.
        check(
            &[(attn, &[64, 192]), (attn_bias, &[192]), (proj, &[64, 64])],
            &[attn, proj],
            false,
            false,
        );
        // The same names as linear layers, as in nanoGPT and GPT-BigCode.
        check(&[(attn, &[192, 64]), (attn_bias, &[192]), (proj, &[64, 64])], &[], false, false);
        // Nothing but a name.
        check(&[(proj, &[64, 64])], &[proj], true, false);
        check(&[(down, &[4, 64, 64])], &[down], true, false);
        // gpt-oss, by biases, by both projections, and the packed order.
        check(&[(gate_up, &[4, 64, 96]), (gate_up_bias, &[4, 96])], &[gate_up], false, false);
        check(&[(gate_up, &[4, 64, 192]), (down, &[4, 96, 64])], &[gate_up, down], false, false);
        check(&[(gate_up, &[4, 192, 64]), (down, &[4, 64, 96])], &[], false, false);
        // Square down projections of 64 to 64 follow their gates.
        check(
            &[(gate_up, &[4, 64, 128]), (gate_up_bias, &[4, 128]), (down, &[4, 64, 64])],
            &[gate_up, down],
            false,
            false,
        );
        // Linear layers with and without biases.
        check(&[("l.0.fc.weight", &[96, 64]), ("l.0.fc.bias", &[96])], &[], false, false);
        check(&[("l.0.self_attn.q_proj.weight", &[96, 64])], &[], false, false);
        check(&[("up.weight", &[96, 64])], &[], false, true);
        // Another module with inputs first, and its square neighbour.
        check(
            &[("l.0.a.weight", &[64, 96]), ("l.0.a.bias", &[96]), ("l.0.b.weight", &[64, 64])],
            &["l.0.a.weight", "l.0.b.weight"],
            false,
            false,
        );
    }
}
