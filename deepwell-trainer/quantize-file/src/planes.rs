//! Which tensors of a file are the planes of one quantized tensor.

use std::collections::{BTreeMap, BTreeSet};

use super::FileFormat;
use super::metadata::{Original, Quantized};
use super::shape::Stored;
use super::tensor::TensorScaleForm;

/// A tensor that is quantized in a file.
#[derive(Clone, Debug)]
pub(super) struct QuantizedTensor {
    /// Name of the dequantized tensor.
    pub(super) name: String,
    pub(super) original: Original,
    pub(super) stored: Stored,
    /// Name of the block scales.
    pub(super) scales: String,
    /// Name and meaning of the tensor scale.
    pub(super) tensor_scale: Option<(String, TensorScaleForm)>,
}

/// The quantized tensors of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct QuantizedTensors {
    /// By the name of the data.
    pub(super) tensors: BTreeMap<String, QuantizedTensor>,
    /// Names of scales.
    pub(super) scales: BTreeSet<String>,
}

impl QuantizedTensors {
    /// The tensors of a file of [`super::quantize`].
    pub(super) fn of(quantized: &Quantized) -> QuantizedTensors {
        let stored = Stored { format: quantized.format, layout: quantized.layout };
        let mut all = QuantizedTensors::default();
        for (name, original) in &quantized.tensors {
            let (scales, second) = (format!("{name}_scale"), format!("{name}_scale_2"));
            all.scales.insert(scales.clone());
            let tensor_scale = (stored.format == FileFormat::Nvfp4).then(|| {
                all.scales.insert(second.clone());
                (second, TensorScaleForm::Factor)
            });
            let original = original.clone();
            let tensor =
                QuantizedTensor { name: name.clone(), original, stored, scales, tensor_scale };
            all.tensors.insert(name.clone(), tensor);
        }
        all
    }
}
