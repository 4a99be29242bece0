//! Number formats of peak rates.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ProbeError;

/// Operand format of a multiply-add, for peak figures.
///
/// Describes only the rate of arithmetic; the bit layouts are in `deepwell-precision`. Names in
/// JSON and as text are lower case: `bf16`, `mxfp8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NumberFormat {
    /// IEEE binary64.
    Fp64,
    /// IEEE binary32.
    Fp32,
    /// 19-bit TensorFloat inputs, FP32 accumulation.
    Tf32,
    /// bfloat16 inputs, FP32 accumulation.
    Bf16,
    /// IEEE binary16 inputs, FP32 accumulation.
    Fp16,
    /// E4M3 or E5M2 inputs without block scales, FP32 accumulation.
    Fp8,
    /// E4M3 inputs with one E8M0 scale per 32 elements, applied by the matrix unit.
    Mxfp8,
    /// E3M2 or E2M3 inputs with one E8M0 scale per 32 elements, applied by the matrix unit.
    Mxfp6,
    /// E2M1 inputs with one E8M0 scale per 32 elements, applied by the matrix unit.
    Mxfp4,
    /// E2M1 inputs with one E4M3 scale per 16 elements, applied by the matrix unit.
    Nvfp4,
    /// 8-bit integers, 32-bit accumulation.
    Int8,
}

/// Every format, in table order.
pub const NUMBER_FORMATS: [NumberFormat; 11] = [
    NumberFormat::Fp64,
    NumberFormat::Fp32,
    NumberFormat::Tf32,
    NumberFormat::Bf16,
    NumberFormat::Fp16,
    NumberFormat::Fp8,
    NumberFormat::Mxfp8,
    NumberFormat::Mxfp6,
    NumberFormat::Mxfp4,
    NumberFormat::Nvfp4,
    NumberFormat::Int8,
];

impl NumberFormat {
    /// Name in JSON, on the command line and in tables.
    pub fn name(self) -> &'static str {
        match self {
            NumberFormat::Fp64 => "fp64",
            NumberFormat::Fp32 => "fp32",
            NumberFormat::Tf32 => "tf32",
            NumberFormat::Bf16 => "bf16",
            NumberFormat::Fp16 => "fp16",
            NumberFormat::Fp8 => "fp8",
            NumberFormat::Mxfp8 => "mxfp8",
            NumberFormat::Mxfp6 => "mxfp6",
            NumberFormat::Mxfp4 => "mxfp4",
            NumberFormat::Nvfp4 => "nvfp4",
            NumberFormat::Int8 => "int8",
        }
    }
}

impl fmt::Display for NumberFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for NumberFormat {
    type Err = ProbeError;

    fn from_str(text: &str) -> Result<NumberFormat, ProbeError> {
        NUMBER_FORMATS
            .into_iter()
            .find(|format| format.name() == text)
            .ok_or_else(|| ProbeError::UnknownFormat { got: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for format in NUMBER_FORMATS {
            assert_eq!(format.name().parse::<NumberFormat>().unwrap(), format);
            let json = serde_json::to_string(&format).unwrap();
            assert_eq!(json, format!("\"{}\"", format.name()));
        }
        let error = "float8".parse::<NumberFormat>().unwrap_err().to_string();
        assert!(error.contains("`float8`") && error.contains("mxfp8"), "{error}");
    }
}
