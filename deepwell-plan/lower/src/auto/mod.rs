//! `auto`: chooses the precision of each linear layer by predicted kernel times.

mod choice;
mod report;
mod times;

use deepwell_ir::{Binding, Graph, IrError, KernelCatalog, PrecisionPolicy, Target};
use deepwell_precision::Format;

use crate::PlanError;
use crate::lower::expand_experts;
use choice::Layer;
pub use report::{AutoLayers, AutoPrecision, AutoTime};
use times::Times;

/// Chooses a format for each linear layer: that of the preset with the least predicted time,
/// quantization included, or BF16. A layer takes the format that the policy of the preset has for
/// it, so exceptions of a recipe hold.
///
/// `presets` are one or two names: MXFP8, then NVFP4. The result is the policy of the last preset
/// that a layer takes, with a rule for each layer of another format, or plain BF16. Predictions
/// are the times of kernel selection on `target`, for micro-batches of `batch` sequences.
///
/// # Errors
/// An unknown preset, or a graph whose experts cannot be expanded.
pub fn auto_precision(
    graph: &Graph,
    presets: &[&str],
    (batch, seq): (usize, usize),
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<(PrecisionPolicy, AutoPrecision), PlanError> {
    let policies = presets.iter().map(|name| PrecisionPolicy::preset(name));
    let policies = policies.collect::<Result<Vec<_>, _>>().map_err(IrError::from)?;
    let Some(first) = policies.first() else {
        return Ok((PrecisionPolicy::bf16(), nothing_chosen((batch, seq))));
    };
    let graph = expand_experts(graph, first)?;
    let times = Times { policies: &policies, catalog, target, binding: Binding { batch, seq } };
    let layers = times.layers(&graph)?;
    let chosen = choice::fastest(&layers);
    let last = chosen.iter().flatten().max().copied();
    let policy = match last {
        Some(index) => policy(&policies[index], index, &layers, &chosen)?,
        None if layers.is_empty() => first.clone(),
        None => PrecisionPolicy::bf16(),
    };
    let all_in = |preset: &str, choices: &[Option<usize>]| AutoTime {
        preset: preset.to_string(),
        ms: choice::total_s(&layers, choices) * 1e3,
    };
    let bf16 = vec![None; layers.len()];
    let mut by_preset = vec![all_in("bf16", &bf16)];
    by_preset.extend(presets.iter().enumerate().map(|(index, name)| {
        let of_preset = |layer: &Layer| (0..=index).rev().find(|&at| layer.priced[at].is_some());
        all_in(name, &layers.iter().map(of_preset).collect::<Vec<_>>())
    }));
    let report = AutoPrecision {
        preset: presets[last.unwrap_or(0)].to_string(),
        micro_batch: [batch, seq],
        times: by_preset,
        chosen_ms: choice::total_s(&layers, &chosen) * 1e3,
        layers: report::report(&layers, &chosen),
    };
    Ok((policy, report))
}

fn nothing_chosen((batch, seq): (usize, usize)) -> AutoPrecision {
    AutoPrecision {
        preset: "bf16".to_string(),
        micro_batch: [batch, seq],
        times: Vec::new(),
        chosen_ms: 0.0,
        layers: Vec::new(),
    }
}

/// The policy of preset `index` with a rule for each layer that takes another format.
fn policy(
    base: &PrecisionPolicy,
    index: usize,
    layers: &[Layer],
    chosen: &[Option<usize>],
) -> Result<PrecisionPolicy, PlanError> {
    let mut policy = base.clone();
    for (layer, &choice) in layers.iter().zip(chosen) {
        let is_own = layer.formats[index];
        let (not_mxfp8, not_any) = (
            "NVFP4 is not predicted faster than MXFP8 with its quantization",
            match index {
                0 => "MXFP8 is not predicted faster with its quantization",
                _ => "MXFP8 and NVFP4 are not predicted faster with their quantization",
            },
        );
        policy = match choice {
            None if is_own.is_quantized() => {
                policy.with_rule_because(&layer.name, Format::Bf16, not_any)
            }
            Some(0) if is_own.has_tensor_scale() => {
                policy.with_mxfp8_because(&layer.name, not_mxfp8)
            }
            _ => Ok(policy),
        }
        .map_err(IrError::from)?;
    }
    Ok(policy)
}

#[cfg(test)]
mod tests;
