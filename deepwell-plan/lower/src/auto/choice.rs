//! The fastest format of each layer.

use std::collections::{HashMap, HashSet};

use deepwell_ir::TensorId;
use deepwell_precision::Format;

/// Predicted times of a layer in the format of a preset, seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Priced {
    /// fprop, dgrad and wgrad with quantized operands, and quantization of the output gradient and,
    /// with a tensor scale, of the weight.
    pub(super) own_s: f64,
    /// Quantization of the input, shared by all layers of the preset with this input.
    pub(super) input_s: f64,
}

/// A linear layer and its predicted times.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub(super) name: String,
    /// Place among the linear layers of the enclosing layer (`None` outside of layers); sizes of
    /// input, weight and output.
    pub(super) kind: (Option<usize>, [Vec<usize>; 3]),
    pub(super) input: TensorId,
    pub(super) bf16_s: f64,
    /// The format in the policy of each preset.
    pub(super) formats: Vec<Format>,
    /// The times in the format of each preset. `None` without kernels, if the policy of the preset
    /// has no quantized GEMMs for the layer, or if they are those of an earlier preset.
    pub(super) priced: Vec<Option<Priced>>,
}

impl Layer {
    /// Time of the layer alone in the format of a preset or, with `None`, in BF16.
    fn own_s(&self, choice: Option<usize>) -> f64 {
        match choice {
            None => self.bf16_s,
            Some(preset) => self.priced[preset].map_or(f64::INFINITY, |priced| priced.own_s),
        }
    }

    fn input_s(&self, preset: usize) -> f64 {
        self.priced[preset].map_or(0.0, |priced| priced.input_s)
    }

    /// The fastest choice among BF16 and the presets of a set, given by bits.
    fn fastest_of(&self, presets: usize) -> Option<usize> {
        let allowed = (0..self.priced.len()).filter(|preset| presets >> preset & 1 == 1);
        let faster = |best, preset| match self.own_s(Some(preset)) < self.own_s(best) {
            true => Some(preset),
            false => best,
        };
        allowed.fold(None, faster)
    }
}

/// The preset of each layer, or BF16, with the least sum of times. Layers with the same input share
/// its quantization in each preset, so each set of presets is tried for them together: within a
/// set, each layer takes its fastest.
pub(super) fn fastest(layers: &[Layer]) -> Vec<Option<usize>> {
    let mut readers: HashMap<TensorId, Vec<usize>> = HashMap::new();
    for (index, layer) in layers.iter().enumerate() {
        readers.entry(layer.input).or_default().push(index);
    }
    let mut chosen = vec![None; layers.len()];
    for indices in readers.values() {
        let group: Vec<Layer> = indices.iter().map(|&index| layers[index].clone()).collect();
        let presets = group.first().map_or(0, |layer| layer.priced.len());
        let of_set = |set: usize| -> Vec<Option<usize>> {
            group.iter().map(|layer| layer.fastest_of(set)).collect()
        };
        let mut best = of_set(0);
        for set in 1..1_usize << presets {
            let choices = of_set(set);
            if total_s(&group, &choices) < total_s(&group, &best) {
                best = choices;
            }
        }
        for (&index, choice) in indices.iter().zip(best) {
            chosen[index] = choice;
        }
    }
    chosen
}

/// Seconds of all layers with these choices.
pub(super) fn total_s(layers: &[Layer], choices: &[Option<usize>]) -> f64 {
    let mut quantized = HashSet::new();
    let of_layer = |(layer, &choice): (&Layer, &Option<usize>)| {
        let first = choice.filter(|&preset| quantized.insert((layer.input, preset)));
        layer.own_s(choice) + first.map_or(0.0, |preset| layer.input_s(preset))
    };
    layers.iter().zip(choices).map(of_layer).sum()
}
