//! Which tensors of a folder are quantized, and to what.

use std::collections::BTreeMap;

use deepwell_ir::capture::StoredTensor;
use deepwell_precision::{ElementRounding, QuantFormat, ScaleRule};

use super::super::decide::Decision;
use super::super::{FileFormat, QuantizeFileError};
use super::groups::format_group;
use super::names::{Convention, FolderFormat, WEIGHT};
use super::options::{AssignedWeight, QuantizeFolderOptions};

/// The format of one tensor; none where it is kept.
pub(super) struct Choice {
    pub(super) format: Option<(FolderFormat, QuantFormat)>,
    pub(super) reason: String,
}

/// A choice for each tensor, and remarks.
pub(super) fn choose(
    tensors: &[&StoredTensor],
    decisions: Vec<Decision>,
    options: &QuantizeFolderOptions,
) -> Result<(Vec<Choice>, Vec<String>), QuantizeFileError> {
    let mut choices = Vec::new();
    for (tensor, decision) in tensors.iter().zip(decisions) {
        let choice = of_tensor(tensor, &decision, options);
        choices.push(with_loader_limits(tensor, &decision, choice)?);
    }
    let notes = equal_in_groups(tensors, &mut choices);
    match choices.iter().any(|choice| choice.format.is_some()) {
        true => Ok((choices, notes)),
        false => Err(QuantizeFileError::NothingToQuantize),
    }
}

fn of_tensor(
    tensor: &StoredTensor,
    decision: &Decision,
    options: &QuantizeFolderOptions,
) -> Choice {
    let wanted = FileFormat::from(options.format).quant_format(ScaleRule::default());
    let Some(assigned) = &options.assigned else {
        let format = decision.is_quantized.then_some((options.format, wanted));
        return Choice { format, reason: decision.reason.clone() };
    };
    // Exceptions of a policy are more precise than its format.
    let has_exceptions = assigned
        .values()
        .any(|assigned| assigned.format.and_then(|format| family(&format)) == Some(options.format));
    let Some(AssignedWeight { format, reason }) = assigned.get(&tensor.name) else {
        return Choice { format: None, reason: "no weight of a linear layer".to_owned() };
    };
    let Some(format) = *format else { return Choice { format: None, reason: reason.clone() } };
    let Some(own) = family(&format) else {
        let reason = format!("{reason}; engines read no {}", format.name());
        return Choice { format: Some((options.format, wanted)), reason };
    };
    let is_exception = has_exceptions && own > options.format;
    if is_exception && options.convention == Convention::Modelopt {
        let reason = "engines read no MXFP8 in mixed precision of ModelOpt".to_owned();
        return Choice { format: None, reason };
    }
    let format = match own == options.format || is_exception {
        true => (own, format),
        false => (options.format, wanted),
    };
    Choice { format: Some(format), reason: reason.clone() }
}

/// The format of a folder with these elements and scales; none if engines read no such folder.
fn family(format: &QuantFormat) -> Option<FolderFormat> {
    let families =
        [(QuantFormat::NVFP4, FolderFormat::Nvfp4), (QuantFormat::MXFP8, FolderFormat::Mxfp8)];
    let found = families.iter().find(|(family, _)| format.is_of_family(family));
    found.map(|&(_, folder)| folder)
}

/// Keeps tensors whose rows are not whole blocks, and rejects forms that no inference engine reads.
fn with_loader_limits(
    tensor: &StoredTensor,
    decision: &Decision,
    choice: Choice,
) -> Result<Choice, QuantizeFileError> {
    let Some((folder_format, format)) = choice.format else { return Ok(choice) };
    let refuse = |expected: &str, hint: &'static str| QuantizeFileError::NotLoadable {
        name: tensor.name.clone(),
        expected: expected.to_owned(),
        got: format!("shape {:?}", tensor.shape),
        hint,
    };
    let &[_, cols] = tensor.shape.as_slice() else {
        return Err(refuse(
            "a matrix for each expert",
            "families with stacked experts (gpt-oss) cannot be exported quantized",
        ));
    };
    if decision.is_inputs_first {
        return Err(refuse(
            "a weight of [outputs, inputs]",
            "inference engines quantize linear modules, not the `Conv1D` of GPT-2",
        ));
    }
    if !tensor.name.ends_with(WEIGHT) {
        return Err(refuse("a name that ends in `.weight`", "a rule of the policy can keep it"));
    }
    if format.hadamard.is_some() {
        return Err(QuantizeFileError::NotLoadable {
            name: tensor.name.clone(),
            expected: "a weight without Hadamard transform".to_owned(),
            got: "`fprop.weight.hadamard` in the policy".to_owned(),
            hint: "a rule of the policy can quantize it without",
        });
    }
    if !cols.is_multiple_of(folder_format.block()) {
        let block = folder_format.block();
        let reason = format!("rows of {cols} elements are not whole blocks of {block}");
        return Ok(Choice { format: None, reason });
    }
    let element = FileFormat::from(folder_format).quant_format(ScaleRule::default()).element;
    let format = QuantFormat { element, rounding: ElementRounding::Nearest, ..format };
    Ok(Choice { format: Some((folder_format, format)), ..choice })
}

/// Gives the modules that engines merge the most precise format among them.
fn equal_in_groups(tensors: &[&StoredTensor], choices: &mut [Choice]) -> Vec<String> {
    let mut of_group: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        if let (Some(module), 2) = (tensor.name.strip_suffix(WEIGHT), tensor.shape.len()) {
            of_group.entry(format_group(module)).or_default().push(index);
        }
    }
    let mut notes = Vec::new();
    for members in of_group.values() {
        // No format is the most precise.
        let rank = |index: &usize| match choices[*index].format {
            Some((format, _)) => (false, Some(format)),
            None => (true, None),
        };
        let Some(best) = members.iter().copied().max_by_key(rank) else { continue };
        let (format, name) = (choices[best].format, &tensors[best].name);
        let of_best = format.map(|(format, _)| format);
        let mut changed = 0;
        for &index in members {
            if choices[index].format.map(|(format, _)| format) == of_best {
                continue;
            }
            choices[index] =
                Choice { format, reason: format!("inference engines merge it with `{name}`") };
            changed += 1;
        }
        if changed > 0 {
            let becomes = if format.is_some() { "mxfp8" } else { "not quantized" };
            notes.push(format!(
                "`{name}` is {becomes}, and so are {changed} weights that engines merge with it"
            ));
        }
    }
    notes
}
