//! Names of the tensors of a quantized module.

use serde::{Deserialize, Serialize};

use super::super::FileFormat;
use super::super::tensor::TensorScaleForm;

/// Suffix of the tensors that can be quantized: the weight of a module.
pub(super) const WEIGHT: &str = ".weight";

/// Format of the quantized modules of a folder, in the order of precision.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum FolderFormat {
    /// E2M1 elements in blocks of 16 with a tensor scale
    Nvfp4,
    /// E4M3 elements in blocks of 32
    Mxfp8,
}

impl FolderFormat {
    /// Elements of a block.
    pub(super) const fn block(self) -> usize {
        match self {
            Self::Nvfp4 => 16,
            Self::Mxfp8 => 32,
        }
    }

    /// The other format.
    pub(super) const fn other(self) -> Self {
        match self {
            Self::Nvfp4 => Self::Mxfp8,
            Self::Mxfp8 => Self::Nvfp4,
        }
    }
}

impl From<FolderFormat> for FileFormat {
    fn from(format: FolderFormat) -> Self {
        match format {
            FolderFormat::Nvfp4 => Self::Nvfp4,
            FolderFormat::Mxfp8 => Self::Mxfp8,
        }
    }
}

/// Naming of quantized tensors in a model folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Convention {
    /// NVIDIA Model Optimizer: `hf_quant_config.json`, tensor scales as factors
    Modelopt,
    /// compressed-tensors: `config_groups`, tensor scales as reciprocals
    CompressedTensors,
}

impl Convention {
    /// Name on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Modelopt => "modelopt",
            Self::CompressedTensors => "compressed-tensors",
        }
    }

    /// What this convention stores as a tensor scale.
    pub(super) const fn tensor_scale(self) -> TensorScaleForm {
        match self {
            Self::Modelopt => TensorScaleForm::Factor,
            Self::CompressedTensors => TensorScaleForm::Reciprocal,
        }
    }

    /// Shape of a tensor scale.
    pub(super) fn scalar_shape(self) -> Vec<usize> {
        match self {
            Self::Modelopt => Vec::new(),
            Self::CompressedTensors => vec![1],
        }
    }

    /// Names of the tensors of `module` in a format.
    pub(super) fn planes(self, module: &str, format: FolderFormat) -> PlaneNames {
        let name = |suffix: &str| format!("{module}.{suffix}");
        let is_nvfp4 = format == FolderFormat::Nvfp4;
        let (data, tensor_scale, input_scale) = match self {
            Self::Modelopt => ("weight", "weight_scale_2", "input_scale"),
            Self::CompressedTensors if is_nvfp4 => {
                ("weight_packed", "weight_global_scale", "input_global_scale")
            }
            Self::CompressedTensors => ("weight", "", ""),
        };
        PlaneNames {
            data: name(data),
            scales: name("weight_scale"),
            tensor_scale: is_nvfp4.then(|| name(tensor_scale)),
            input_scale: is_nvfp4.then(|| name(input_scale)),
        }
    }
}

/// Names of the tensors of a quantized module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlaneNames {
    pub(super) data: String,
    pub(super) scales: String,
    pub(super) tensor_scale: Option<String>,
    pub(super) input_scale: Option<String>,
}
