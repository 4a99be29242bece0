//! Planes of quantized operands by definition: data and scales to numbers, and numbers to quantized
//! data.

use deepwell_ir::DType;
use deepwell_kernels::ops::dequantize::oracle::{decode, decode_e8m0};
use deepwell_kernels::ops::scaled_gemm::nvfp4_oracle::decode_ue4m3;
use deepwell_precision::hadamard::POINTS;
use deepwell_precision::nvfp4::ScaleOrder;
use deepwell_precision::{
    ElementFormat, Overflow, QuantFormat, Rounding, ScaleFormat, TensorScale, e8m0, packed,
    scale_tiles, ue4m3,
};

use rayon::prelude::*;

use super::view::View;

/// Values of all bit patterns of elements and scales.
pub(super) struct Tables {
    /// In the order of [`ElementFormat::ALL`].
    elements: Vec<[f64; 256]>,
    e8m0: [f64; 256],
    ue4m3: [f64; 256],
}

impl Tables {
    pub(super) fn new() -> Tables {
        Tables {
            elements: ElementFormat::ALL
                .iter()
                .map(|&element| std::array::from_fn(|code| decode(element, code as u8)))
                .collect(),
            e8m0: std::array::from_fn(|code| decode_e8m0(code as u8)),
            ue4m3: std::array::from_fn(|code| decode_ue4m3(code as u8)),
        }
    }

    fn element(&self, element: ElementFormat, code: u8) -> f64 {
        let index = ElementFormat::ALL.iter().position(|&it| it == element).unwrap_or(0);
        self.elements[index][usize::from(code)]
    }
}

/// Code `(outer, k)` of data `[outer, k]`.
pub(super) fn code_at(format: &QuantFormat, data: &View<'_>, outer: usize, k: usize) -> u8 {
    let row = &data.bytes[packed::len(format.element, outer, data.shape[1])..];
    packed::code(format.element, row, k)
}

/// What is quantized, `[outer, k]`: the source in the operand's orientation, transformed by
/// definition if the format has a transform.
pub(super) struct Transformed {
    /// Row-major numbers; none if the source is quantized as it is.
    numbers: Option<Vec<f32>>,
    k: usize,
    amax: f32,
}

impl Transformed {
    /// The operand of a matrix quantized along the columns or the rows.
    pub(super) fn new(source: &View<'_>, is_column: bool, format: &QuantFormat) -> Transformed {
        let (rows, columns) = (source.shape[0], source.shape[1]);
        let k = if is_column { rows } else { columns };
        let Some(transform) = format.hadamard else {
            let amax = if format.tensor_scale == TensorScale::None { 0.0 } else { source.amax() };
            return Transformed { numbers: None, k, amax };
        };
        let at = |index: usize| match is_column {
            true => source.float(index % rows * columns + index / rows),
            false => source.float(index),
        };
        let mut numbers: Vec<f32> = (0..rows * columns).into_par_iter().map(at).collect();
        numbers.par_chunks_exact_mut(POINTS).for_each(|group| {
            let mut numbers: [f32; POINTS] = std::array::from_fn(|i| group[i]);
            transform.forward_bf16(&mut numbers);
            group.copy_from_slice(&numbers);
        });
        let finite = numbers.iter().filter(|x| x.is_finite());
        let amax = finite.fold(0.0_f32, |amax, x| amax.max(x.abs()));
        Transformed { numbers: Some(numbers), k, amax }
    }

    /// The largest finite magnitude, in a format with a tensor scale.
    pub(super) fn amax(&self) -> f32 {
        self.amax
    }

    /// Element `(outer, k)`, if it differs from the source's.
    pub(super) fn at(&self, outer: usize, k: usize) -> Option<f32> {
        self.numbers.as_ref().map(|numbers| numbers[outer * self.k + k])
    }
}

/// An operand quantized along K.
#[derive(Clone)]
pub(super) struct Planes<'a> {
    pub(super) format: QuantFormat,
    pub(super) data: View<'a>,
    pub(super) scales: View<'a>,
    /// Present only for formats with a tensor scale; one of each group of rows if there are groups.
    pub(super) tensor_scale: Option<View<'a>>,
    /// The ends of groups of rows or, if true, of elements along K.
    pub(super) groups: Option<(Vec<usize>, bool)>,
}

impl Planes<'_> {
    /// Element times scales, exact in `f64`.
    pub(super) fn at(&self, tables: &Tables, outer: usize, k: usize) -> f64 {
        let every = self.format.scale.stored_every();
        let place = scale_tiles::offset(outer, k / every, self.data.shape[1].div_ceil(every));
        let scale = usize::from(self.scales.bytes[place]);
        let element =
            tables.element(self.format.element, code_at(&self.format, &self.data, outer, k));
        match self.format.scale {
            ScaleFormat::E8m0(_) => element * tables.e8m0[scale],
            _ => {
                let group = self.groups.as_ref().map_or(0, |(ends, is_along_k)| {
                    let place = if *is_along_k { k } else { outer };
                    ends.partition_point(|&end| end <= place).min(ends.len().saturating_sub(1))
                });
                let of_group = |scales: View<'_>| f64::from(scales.float(group));
                let tensor_scale = self.tensor_scale.map_or(1.0, of_group);
                element * tables.ue4m3[scale] * tensor_scale
            }
        }
    }
}

/// The encoders of a matrix: one for all rows, or one for each group of rows.
pub(super) struct Encoders {
    ends: Vec<usize>,
    each: Vec<Encoder>,
}

impl Encoders {
    /// `scope` is the input of the call that names the amax of a whole tensor, f32, or the offsets
    /// of groups of rows, i32.
    pub(super) fn new(
        format: QuantFormat,
        source: &View<'_>,
        transformed: &Transformed,
        is_column: bool,
        scope: Option<View<'_>>,
    ) -> Encoders {
        let one = |amax: f32| Encoders { ends: Vec::new(), each: vec![Encoder::new(format, amax)] };
        let Some(scope) = scope else { return one(transformed.amax()) };
        if scope.dtype == DType::F32 {
            return one(scope.float(0));
        }
        let offsets: Vec<usize> = (0..scope.len()).map(|index| scope.index(index)).collect();
        let columns = source.shape[1];
        let of_group = |group: &[usize]| {
            let places = (group[0]..group[1]).flat_map(|row| (0..columns).map(move |at| (row, at)));
            let numbers = places.map(|(row, column)| {
                let (outer, k) = if is_column { (column, row) } else { (row, column) };
                transformed.at(outer, k).unwrap_or_else(|| source.float(row * columns + column))
            });
            let amax = numbers.filter(|x| x.is_finite()).fold(0.0_f32, |amax, x| amax.max(x.abs()));
            Encoder::new(format, amax)
        };
        let each = offsets.windows(2).map(of_group).collect();
        Encoders { ends: offsets[1..].to_vec(), each }
    }

    /// The encoder of a row of the source.
    pub(super) fn of_row(&self, row: usize) -> Encoder {
        let group = self.ends.partition_point(|&end| end <= row);
        self.each[group.min(self.each.len() - 1)]
    }

    /// All encoders, in the order of the groups.
    pub(super) fn all(&self) -> &[Encoder] {
        &self.each
    }
}

/// Encodes numbers as scales and data, as the format defines.
#[derive(Clone, Copy)]
pub(super) struct Encoder {
    format: QuantFormat,
    /// The largest finite magnitude of the tensor.
    amax: f32,
    /// Factor applied to all numbers before encoding.
    encode_scale: f32,
}

impl Encoder {
    /// Encoder of a tensor whose largest finite magnitude is `amax`.
    pub(super) fn new(format: QuantFormat, amax: f32) -> Encoder {
        let encode_scale = match format.scale {
            ScaleFormat::Ue4m3(bound) => format.order.encode_scale(amax, bound),
            _ => 1.0,
        };
        Encoder { format, amax, encode_scale }
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
                let six = self.format.element.max();
                let by_division = amax / six * self.encode_scale;
                let encode = |wanted: f32| {
                    let wanted = wanted.min(ue4m3::MAX);
                    ue4m3::encode(wanted, Rounding::NearestEven, Overflow::Saturate)
                };
                if self.format.four_six {
                    let (of_six, of_four) = (encode(by_division), encode(by_division * 1.5));
                    let is_better = self.error(elements, of_four) < self.error(elements, of_six);
                    return if is_better { of_four } else { of_six };
                }
                match self.format.order {
                    ScaleOrder::Te => encode(amax * (self.encode_scale * (1.0 / six))),
                    _ => encode(by_division),
                }
            }
        }
    }

    /// Sum of the squared errors of NVFP4 elements under a scale.
    fn error(&self, elements: &[f32], scale: u8) -> f32 {
        let ScaleFormat::Ue4m3(bound) = self.format.scale else { return 0.0 };
        let (factor, largest) = (self.factor(scale), self.format.element.max() * bound.value());
        elements.iter().fold(0.0, |sum, &x| {
            let element = self.format.element.decode(self.code(x, factor));
            let difference = element * ue4m3::decode(scale) * self.amax / largest - x;
            sum + difference * difference
        })
    }

    /// Factor by which an element is multiplied under a scale.
    pub(super) fn factor(&self, scale: u8) -> f32 {
        match (self.format.scale, scale) {
            (ScaleFormat::E8m0(_), scale) => e8m0::reciprocal(scale),
            (_, scale) if scale >= ue4m3::CODE_NAN => f32::NAN,
            (_, scale) if self.format.order == ScaleOrder::Te => {
                (1.0 / (ue4m3::decode(scale) * self.tensor_scale())).min(f32::MAX)
            }
            (_, 0) => 0.0,
            (_, scale) => (self.encode_scale / ue4m3::decode(scale)).min(f32::MAX),
        }
    }

    /// The code of an element under a factor.
    pub(super) fn code(&self, x: f32, factor: f32) -> u8 {
        self.format.element.encode(x * factor, Rounding::NearestEven, Overflow::Saturate)
    }
}
