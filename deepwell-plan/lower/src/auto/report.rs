//! The choices of `auto`, for people and for files.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::choice::Layer;

/// Equal-sized weights at the same place in their layers, with the predicted times of the first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AutoLayers {
    /// Name of the first weight.
    pub first: String,
    /// Number of weights.
    pub count: usize,
    /// Number of weights in a quantized format.
    pub quantized: usize,
    /// Number of these in NVFP4.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub nvfp4: usize,
    /// fprop, dgrad and wgrad in BF16, in microseconds.
    pub bf16_us: f64,
    /// fprop, dgrad and wgrad in MXFP8, including quantization of inputs and gradients; `None`
    /// without kernels, or if the policy keeps the weight in BF16.
    pub quantized_us: Option<f64>,
    /// The same in NVFP4, including quantization of the weight; `None` also where the recipe has
    /// MXFP8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvfp4_us: Option<f64>,
}

/// Predicted time of all linear layers of a micro-batch under a preset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AutoTime {
    /// Name of the preset.
    pub preset: String,
    /// Milliseconds.
    pub ms: f64,
}

/// The choices of `auto`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AutoPrecision {
    /// The preset of the policy: that of fewest bits with a layer of its own.
    pub preset: String,
    /// Sequences and tokens per sequence assumed by the predictions.
    pub micro_batch: [usize; 2],
    /// Times of `bf16` and of each preset for all layers.
    #[serde(default)]
    pub times: Vec<AutoTime>,
    /// Time of the choice, milliseconds.
    #[serde(default)]
    pub chosen_ms: f64,
    /// Linear layers, in the order of the model.
    pub layers: Vec<AutoLayers>,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl fmt::Display for AutoPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = |of: fn(&AutoLayers) -> usize| self.layers.iter().map(of).sum::<usize>();
        let [all, quantized, nvfp4] =
            [sum(|it| it.count), sum(|it| it.quantized), sum(|it| it.nvfp4)];
        let [batch, seq] = self.micro_batch;
        match nvfp4 {
            0 => write!(f, "{quantized} of {all} linear layers in {}", self.preset)?,
            _ => write!(
                f,
                "{nvfp4} of {all} linear layers in {}, {} in mxfp8",
                self.preset,
                quantized - nvfp4
            )?,
        }
        write!(f, ", {} in bf16, by predicted times for {batch} x {seq} tokens", all - quantized)?;
        let times = self.times.iter().map(|it| format!("{} {:.2} ms", it.preset, it.ms));
        let times: Vec<String> = times.collect();
        if !times.is_empty() {
            write!(f, ": all layers in {}, as chosen {:.2} ms", times.join(", "), self.chosen_ms)?;
        }
        if (1..all).contains(&quantized) {
            let in_bf16 = self.layers.iter().filter(|it| it.quantized < it.count);
            let like = |it: &AutoLayers| format!("{} like {}", it.count - it.quantized, it.first);
            write!(f, "; bf16: {}", in_bf16.map(like).collect::<Vec<_>>().join(", "))?;
        }
        Ok(())
    }
}

/// Summarizes the choices by kind of layer.
pub(super) fn report(layers: &[Layer], chosen: &[Option<usize>]) -> Vec<AutoLayers> {
    let mut report: Vec<(&Layer, AutoLayers)> = Vec::new();
    for (layer, choice) in layers.iter().zip(chosen) {
        let known = report.iter().position(|(first, _)| first.kind == layer.kind);
        let known = known.unwrap_or_else(|| {
            let us = |preset: usize| {
                let priced = (*layer.priced.get(preset)?)?;
                let shares = |other: &(&Layer, &Option<usize>)| {
                    other.0.input == layer.input && *other.1 == Some(preset)
                };
                let readers = layers.iter().zip(chosen).filter(shares).count().max(1);
                Some((priced.own_s + priced.input_s / readers as f64) * 1e6)
            };
            let first = AutoLayers {
                first: layer.name.clone(),
                count: 0,
                quantized: 0,
                nvfp4: 0,
                bf16_us: layer.bf16_s * 1e6,
                quantized_us: us(0),
                nvfp4_us: us(1),
            };
            report.push((layer, first));
            report.len() - 1
        });
        let of_kind = &mut report[known].1;
        of_kind.count += 1;
        of_kind.quantized += usize::from(choice.is_some());
        let is_nvfp4 = |preset: &usize| layer.formats[*preset].has_tensor_scale();
        of_kind.nvfp4 += usize::from(choice.as_ref().is_some_and(is_nvfp4));
    }
    report.into_iter().map(|(_, layers)| layers).collect()
}
