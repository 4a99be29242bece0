//! Weight packing of a checkpoint: `quantization_config`, in the two forms used by published large
//! mixtures.

use serde_json::{Map, Value, json};

use crate::capture::json::Keys;
use crate::capture::{CaptureError, CaptureNotes, ModelFamily};

/// A packing of stored weights. Packing changes the tensors in a folder, but not the model:
/// parameter counts are for unpacked values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightPacking {
    /// Expert weights as MXFP4: two elements per byte, one E8M0 scale per 32 values along the
    /// contraction (gpt-oss).
    Mxfp4,
    /// Linear weights as E4M3 with an F32 factor per block of `rows` by `columns` (DeepSeek-V3).
    Fp8Blocks {
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        columns: usize,
    },
}

impl WeightPacking {
    /// Reads `quantization_config`. `null` and an absent key mean no packing.
    pub(super) fn read(
        keys: &mut Keys<'_>,
        location: &str,
        family: ModelFamily,
        notes: &mut CaptureNotes,
    ) -> Result<Option<WeightPacking>, CaptureError> {
        let supported = match family {
            ModelFamily::GptOss => "mxfp4",
            ModelFamily::DeepseekV3 => "fp8",
            // The list of restricted keys rejects the key, with a separate message.
            _ => return Ok(None),
        };
        let Some(value) = keys.get("quantization_config") else { return Ok(None) };
        let Value::Object(object) = value else {
            return Err(keys.wrong("quantization_config", "an object", value, ""));
        };
        let mut inner = Keys::new(location, "quantization_config.", object);
        let method = inner.string("quant_method")?.unwrap_or_default();
        if method != supported {
            let hint = format!("supported with {}: `{supported}`", family.model_type());
            return Err(inner.unsupported("quant_method", &json!(method), &hint));
        }
        // The set of unpacked modules is fixed for both forms; activations are not stored.
        for key in ["modules_to_not_convert", "activation_scheme", "dequantize"] {
            inner.get(key);
        }
        let packing = if supported == "mxfp4" {
            WeightPacking::Mxfp4
        } else {
            if let Some(other) = inner.string("fmt")?.filter(|&form| form != "e4m3") {
                return Err(inner.unsupported("fmt", &json!(other), "supported: `e4m3`"));
            }
            let key = "weight_block_size";
            let sizes: Option<Vec<usize>> = inner.get(key).and_then(Value::as_array).map(|all| {
                all.iter().filter_map(Value::as_u64).map(|size| size as usize).collect()
            });
            match sizes.as_deref() {
                Some(&[rows, columns]) if rows > 0 && columns > 0 => {
                    WeightPacking::Fp8Blocks { rows, columns }
                }
                _ => {
                    let got = object.get(key).unwrap_or(&Value::Null);
                    return Err(inner.wrong(key, "two sizes, [128, 128] for example", got, ""));
                }
            }
        };
        inner.finish_nested(&format!("quant_method `{method}`"))?;
        notes.remarks.push(format!(
            "weights are packed as {}: counted as if they were not",
            packing.describe()
        ));
        Ok(Some(packing))
    }

    fn describe(self) -> String {
        match self {
            WeightPacking::Mxfp4 => "MXFP4".to_string(),
            WeightPacking::Fp8Blocks { rows, columns } => {
                format!("E4M3 with factors for blocks of {rows}x{columns}")
            }
        }
    }

    pub(super) fn write(self) -> Value {
        match self {
            WeightPacking::Mxfp4 => json!({"quant_method": "mxfp4"}),
            WeightPacking::Fp8Blocks { rows, columns } => {
                let mut object = Map::new();
                object.insert("quant_method".to_string(), json!("fp8"));
                object.insert("fmt".to_string(), json!("e4m3"));
                object.insert("weight_block_size".to_string(), json!([rows, columns]));
                Value::Object(object)
            }
        }
    }
}
