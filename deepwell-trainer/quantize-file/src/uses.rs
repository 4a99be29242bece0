//! Role and layout of each tensor of a model: from the model's configuration if Deepwell captures
//! its family, otherwise from names and shapes.

use std::collections::BTreeMap;
use std::path::Path;

use deepwell_ir::capture::ModelConfig;
use deepwell_ir::capture::StoredTensor;
use deepwell_precision::Role;

use super::names::{Neighbours, kept};
use super::orientation::{Orientations, orientations};

const CONFIG: &str = "config.json";

/// Role and layout of one tensor.
pub(super) struct Use {
    pub(super) role: Role,
    /// Whether the tensor is stored as `[.., inputs, outputs]`.
    pub(super) is_inputs_first: bool,
    /// Reason why the tensor is kept under any policy.
    pub(super) kept: Option<&'static str>,
}

/// A tensor according to the configuration.
struct Configured {
    role: Role,
    shape: Vec<usize>,
    is_inputs_first: bool,
}

/// A use for each tensor, and remarks on the source of this information. `folder` is the model's
/// folder.
pub(super) fn uses(tensors: &[&StoredTensor], folder: &Path) -> (Vec<Use>, Vec<String>) {
    let mut notes = Vec::new();
    let configured = configured(tensors, folder, &mut notes);
    let neighbours = Neighbours::new(tensors);
    let Orientations { inputs_first, is_by_name, is_unknown } = orientations(tensors);
    if configured.is_none() {
        if is_by_name {
            notes.push(
                "weights are taken as [inputs, outputs] where names are those of GPT-2 or gpt-oss; \
                 a config.json beside the file decides otherwise"
                    .to_owned(),
            );
        } else if is_unknown {
            notes.push(
                "no config.json and no bias says how weights lie: taken as [outputs, inputs]"
                    .to_owned(),
            );
        }
    }
    let one = |(tensor, by_shapes): (&&StoredTensor, bool)| {
        let found = configured.as_ref().and_then(|configured| find(configured, &tensor.name));
        let by_name = || neighbours.role_of(&tensor.name, &tensor.shape);
        Use {
            role: match found {
                // In the configuration a bias has the role of its weight.
                Some(_) if tensor.shape.len() < 2 => Role::Norm,
                Some(found) => found.role,
                None => by_name(),
            },
            is_inputs_first: found.map_or(by_shapes, |found| found.is_inputs_first),
            kept: kept(&tensor.name, &tensor.shape),
        }
    };
    (tensors.iter().zip(inputs_first).map(one).collect(), notes)
}

/// The tensors of the configuration in `folder`, if the configuration matches these tensors.
fn configured(
    tensors: &[&StoredTensor],
    folder: &Path,
    notes: &mut Vec<String>,
) -> Option<BTreeMap<String, Configured>> {
    let path = folder.join(CONFIG);
    if !path.is_file() {
        return None;
    }
    let by_names = "roles and layouts follow from names and shapes";
    let config = match ModelConfig::from_path(&path) {
        Ok((config, _)) => config,
        Err(error) => {
            let error = error.to_string();
            let first = error.lines().next().unwrap_or_default();
            notes.push(format!("config.json is not used, {by_names}: {first}"));
            return None;
        }
    };
    let mut map = BTreeMap::new();
    for (spec, parts) in config.stored_slices() {
        for part in parts {
            let role = spec.role.precision_role();
            let (shape, is_inputs_first) = (part.shape, part.transposed);
            map.insert(part.name, Configured { role, shape, is_inputs_first });
        }
    }
    let matched = tensors.iter().filter_map(|tensor| Some((tensor, find(&map, &tensor.name)?)));
    let mut count = 0;
    for (tensor, configured) in matched {
        if tensor.shape != configured.shape {
            notes.push(format!(
                "config.json is of another model, {by_names}: `{}` is {:?}, it says {:?}",
                tensor.name, tensor.shape, configured.shape
            ));
            return None;
        }
        count += 1;
    }
    if count == 0 {
        notes.push(format!("config.json names none of the tensors, {by_names}"));
    }
    (count > 0).then_some(map)
}

/// Returns the entry of a tensor. `save_pretrained` adds `transformer.` to names of GPT-2; models
/// saved without their head lack `model.`.
fn find<'a>(map: &'a BTreeMap<String, Configured>, name: &str) -> Option<&'a Configured> {
    let bare = name.strip_prefix("transformer.");
    map.get(name).or_else(|| map.get(bare?)).or_else(|| map.get(&format!("model.{name}")))
}
