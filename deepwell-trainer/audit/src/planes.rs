//! Planes of quantized operands by definition: data and scales to numbers, and numbers to quantized
//! data.

use deepwell_kernels::ops::dequantize::oracle::{decode_e4m3, decode_e8m0};
use deepwell_kernels::ops::scaled_gemm::nvfp4_oracle::{decode_e2m1, decode_ue4m3};
use deepwell_precision::{
    ElementFormat, Overflow, QuantFormat, Rounding, ScaleFormat, e8m0, nvfp4, scale_tiles, ue4m3,
};

use super::view::View;

/// Values of all bit patterns of elements and scales.
pub(super) struct Tables {
    e4m3: [f64; 256],
    e8m0: [f64; 256],
    e2m1: [f64; 16],
    ue4m3: [f64; 256],
}

impl Tables {
    pub(super) fn new() -> Tables {
        Tables {
            e4m3: std::array::from_fn(|code| decode_e4m3(code as u8)),
            e8m0: std::array::from_fn(|code| decode_e8m0(code as u8)),
            e2m1: std::array::from_fn(|code| decode_e2m1(code as u8)),
            ue4m3: std::array::from_fn(|code| decode_ue4m3(code as u8)),
        }
    }
}

/// Code `(outer, k)` of data `[outer, k]`.
pub(super) fn code_at(format: &QuantFormat, data: &View<'_>, outer: usize, k: usize) -> u8 {
    let columns = data.shape[1];
    match format.element {
        ElementFormat::E2M1 => data.bytes[outer * columns.div_ceil(2) + k / 2] >> (k % 2 * 4) & 0xF,
        _ => data.bytes[outer * columns + k],
    }
}

/// An operand quantized along K.
#[derive(Clone, Copy)]
pub(super) struct Planes<'a> {
    pub(super) format: QuantFormat,
    pub(super) data: View<'a>,
    pub(super) scales: View<'a>,
    /// Present only for formats with a tensor scale.
    pub(super) tensor_scale: Option<View<'a>>,
}

impl Planes<'_> {
    /// Element times scales, exact in `f64`.
    pub(super) fn at(&self, tables: &Tables, outer: usize, k: usize) -> f64 {
        let every = self.format.scale.stored_every();
        let place = scale_tiles::offset(outer, k / every, self.data.shape[1].div_ceil(every));
        let scale = usize::from(self.scales.bytes[place]);
        let code = usize::from(code_at(&self.format, &self.data, outer, k));
        match self.format.scale {
            ScaleFormat::E8m0(_) => tables.e4m3[code] * tables.e8m0[scale],
            _ => {
                let tensor_scale = self.tensor_scale.map_or(1.0, |scale| f64::from(scale.float(0)));
                tables.e2m1[code] * tables.ue4m3[scale] * tensor_scale
            }
        }
    }
}

/// Encodes numbers as scales and data, as the format defines.
#[derive(Clone, Copy)]
pub(super) struct Encoder {
    format: QuantFormat,
    /// Factor applied to all numbers before encoding.
    encode_scale: f32,
}

impl Encoder {
    /// Encoder of a tensor whose largest finite magnitude is `amax`.
    pub(super) fn new(format: QuantFormat, amax: f32) -> Encoder {
        let encode_scale = match format.scale {
            ScaleFormat::Ue4m3(bound) => nvfp4::encode_scale(amax, bound),
            _ => 1.0,
        };
        Encoder { format, encode_scale }
    }

    /// The tensor scale.
    pub(super) fn tensor_scale(&self) -> f32 {
        1.0 / self.encode_scale
    }

    /// Returns the scale of a block of `elements`, in runs of `run` as [`e8m0::from_block`] takes
    /// them; the scale is not finite if an element is not.
    pub(super) fn scale(&self, elements: &[f32], run: usize) -> u8 {
        // Magnitudes as bits: NaN is above infinity, and infinity is above all finite numbers.
        let amax = elements.iter().map(|x| x.to_bits() & 0x7FFF_FFFF).max().unwrap_or(0);
        let amax = f32::from_bits(amax);
        match self.format.scale {
            ScaleFormat::E8m0(rule) => e8m0::from_block(elements, run, self.format.element, rule),
            _ if !amax.is_finite() => ue4m3::CODE_NAN,
            _ => {
                let wanted = (amax / self.format.element.max() * self.encode_scale).min(ue4m3::MAX);
                ue4m3::encode(wanted, Rounding::NearestEven, Overflow::Saturate)
            }
        }
    }

    /// Factor by which an element is multiplied under a scale.
    pub(super) fn factor(&self, scale: u8) -> f32 {
        match (self.format.scale, scale) {
            (ScaleFormat::E8m0(_), scale) => e8m0::reciprocal(scale),
            (_, 0) => 0.0,
            (_, scale) if scale >= ue4m3::CODE_NAN => f32::NAN,
            (_, scale) => (self.encode_scale / ue4m3::decode(scale)).min(f32::MAX),
        }
    }

    /// The code of an element under a factor.
    pub(super) fn code(&self, x: f32, factor: f32) -> u8 {
        self.format.element.encode(x * factor, Rounding::NearestEven, Overflow::Saturate)
    }
}
