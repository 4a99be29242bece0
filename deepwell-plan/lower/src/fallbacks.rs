//! Formats requested by a precision policy but unsupported by the device: reported, counted, and an
//! error if no quantized format is left.

use std::fmt;

use deepwell_ir::TensorPrecision;
use deepwell_precision::Format;
use serde::{Deserialize, Serialize};

/// Tensors that do not get the requested format, for a common reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrecisionFallback {
    /// The format requested by the policy.
    pub asked: Format,
    /// The format used instead.
    pub format: Format,
    /// Number of tensors.
    pub tensors: usize,
    /// The reason.
    pub reason: String,
}

impl fmt::Display for PrecisionFallback {
    /// `7 tensors in bf16, not nvfp4: CUDA kernels of experts take mxfp8, not nvfp4`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PrecisionFallback { asked, format, tensors, reason } = self;
        let plural = if *tensors == 1 { "" } else { "s" };
        write!(f, "{tensors} tensor{plural} in {format}, not {asked}: {reason}")
    }
}

/// Groups the fallbacks by reason, in the order of the first tensor of each group.
///
/// ```
/// use deepwell_ir::TensorPrecision;
/// use deepwell_lower::precision_fallbacks;
/// use deepwell_precision::Format;
///
/// let tensor = |asked| TensorPrecision {
///     tensor: "w".to_string(),
///     format: Format::Bf16,
///     gemms: None,
///     asked,
///     reason: "no kernel; asked for by: rule `*`".to_string(),
/// };
/// let found = precision_fallbacks(&[tensor(None), tensor(Some(Format::NVFP4))]);
/// assert_eq!(found.len(), 1);
/// assert_eq!(found[0].to_string(), "1 tensor in bf16, not nvfp4: no kernel");
/// ```
pub fn precision_fallbacks(tensors: &[TensorPrecision]) -> Vec<PrecisionFallback> {
    let mut found: Vec<PrecisionFallback> = Vec::new();
    for tensor in tensors {
        let Some(asked) = tensor.asked else { continue };
        // The part after the marker names the requesting rule and differs by tensor; the reason
        // before it does not.
        let reason = tensor.reason.split("; asked for by: ").next().unwrap_or_default();
        let format = tensor.format;
        let is_same = |it: &&mut PrecisionFallback| {
            (it.asked, it.format, it.reason.as_str()) == (asked, format, reason)
        };
        match found.iter_mut().find(is_same) {
            Some(known) => known.tensors += 1,
            None => {
                let reason = reason.to_string();
                found.push(PrecisionFallback { asked, format, tensors: 1, reason });
            }
        }
    }
    found
}
