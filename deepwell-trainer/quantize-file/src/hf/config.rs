//! The configuration of a quantized folder: `quantization_config` of `config.json`, and
//! `hf_quant_config.json` of ModelOpt.

use serde_json::{Map, Value, json};

use super::names::{Convention, FolderFormat};

/// File of ModelOpt's configuration.
pub(super) const QUANT_CONFIG: &str = "hf_quant_config.json";
/// Key of `config.json`.
pub(super) const KEY: &str = "quantization_config";

/// What the configuration states.
pub(super) struct Statement<'a> {
    pub(super) convention: Convention,
    /// Format of all quantized modules but those in `exceptions`.
    pub(super) format: FolderFormat,
    /// Modules in the other format, of compressed-tensors.
    pub(super) exceptions: &'a [String],
    /// Modules in `format`.
    pub(super) modules: &'a [String],
    /// Modules that are not quantized.
    pub(super) ignore: &'a [String],
    /// Whether NVFP4 modules have input scales.
    pub(super) has_input_scales: bool,
}

impl Statement<'_> {
    /// The value of `quantization_config`.
    pub(super) fn config(&self) -> Value {
        match self.convention {
            Convention::CompressedTensors => self.compressed_tensors(),
            Convention::Modelopt => {
                let mut config = self.modelopt_quantization();
                config.insert("quant_method".to_owned(), json!("modelopt"));
                config.insert("producer".to_owned(), producer());
                config.insert("ignore".to_owned(), json!(self.ignore));
                Value::Object(config)
            }
        }
    }

    /// The contents of [`QUANT_CONFIG`].
    pub(super) fn quant_config_file(&self) -> Option<Value> {
        (self.convention == Convention::Modelopt).then(|| {
            let mut quantization = self.modelopt_quantization();
            quantization.insert("kv_cache_quant_algo".to_owned(), Value::Null);
            quantization.insert("exclude_modules".to_owned(), json!(self.ignore));
            json!({ "producer": producer(), "quantization": quantization })
        })
    }

    fn compressed_tensors(&self) -> Value {
        let mut groups = Map::new();
        // A class name would also match merged modules of the other format, before their own names.
        let targets =
            if self.exceptions.is_empty() { json!(["Linear"]) } else { json!(self.modules) };
        let main = (self.format, targets);
        let others = (self.format.other(), json!(self.exceptions));
        let others = Some(others).filter(|_| !self.exceptions.is_empty());
        for (index, (format, targets)) in [main].into_iter().chain(others).enumerate() {
            let mut group = json!({
                "targets": targets,
                "format": packing(format),
                "weights": quantization_args(format, json!(false)),
            });
            let inputs = match (format, self.has_input_scales) {
                (FolderFormat::Nvfp4, true) => Some(quantization_args(format, json!("local"))),
                (FolderFormat::Nvfp4, false) => None,
                _ => Some(quantization_args(format, json!(true))),
            };
            if let Some(inputs) = inputs {
                group["input_activations"] = inputs;
            }
            groups.insert(format!("group_{index}"), group);
        }
        let format = match self.exceptions.is_empty() {
            true => packing(self.format),
            false => "mixed-precision",
        };
        json!({
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": self.ignore,
            "kv_cache_scheme": null,
        })
    }

    /// All modules have one format: engines do not read MXFP8 in mixed precision of ModelOpt.
    fn modelopt_quantization(&self) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("quant_algo".to_owned(), json!(self.algorithm()));
        object.insert("group_size".to_owned(), json!(self.format.block()));
        object
    }

    /// ModelOpt's name of the format.
    fn algorithm(&self) -> &'static str {
        match (self.format, self.has_input_scales) {
            (FolderFormat::Nvfp4, true) => "NVFP4",
            (FolderFormat::Nvfp4, false) => "W4A16_NVFP4",
            _ => "MXFP8",
        }
    }
}

fn producer() -> Value {
    json!({ "name": "deepwell", "version": env!("CARGO_PKG_VERSION") })
}

/// The name of a format in compressed-tensors.
const fn packing(format: FolderFormat) -> &'static str {
    match format {
        FolderFormat::Nvfp4 => "nvfp4-pack-quantized",
        FolderFormat::Mxfp8 => "mxfp8-quantized",
    }
}

/// The quantization of an operand in compressed-tensors.
fn quantization_args(format: FolderFormat, dynamic: Value) -> Value {
    let is_nvfp4 = format == FolderFormat::Nvfp4;
    let mut args = json!({
        "num_bits": if is_nvfp4 { 4 } else { 8 },
        "type": "float",
        "symmetric": true,
        "strategy": if is_nvfp4 { "tensor_group" } else { "group" },
        "group_size": format.block(),
        "scale_dtype": if is_nvfp4 { "torch.float8_e4m3fn" } else { "torch.uint8" },
    });
    if dynamic == json!("local") {
        args["observer"] = json!("static_minmax");
    }
    args["dynamic"] = dynamic;
    args
}
