//! The document.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::data_type::DataType;
use super::error::LaunchFileError;

/// A launch. Fields that it does not know are refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchFile {
    /// File of PTX text.
    pub ptx: String,
    /// Name of the kernel in it.
    pub kernel: String,
    /// CTAs along x, y, z; what is left out is 1.
    pub grid: Vec<u32>,
    /// Threads of a CTA along x, y, z; what is left out is 1.
    pub block: Vec<u32>,
    /// CTAs of a cluster along x, y, z. Without it there are none, or those that the kernel asks
    /// for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cluster: Vec<u32>,
    /// Bytes of dynamic shared memory of a CTA.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shared_bytes: u32,
    /// The launch may begin before the one before has ended (programmatic dependent launch). What
    /// that one wrote is `written_before` of the buffers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub programmatic: bool,
    /// SMs of the device; 4 without it and without `--sm-count`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_count: Option<u32>,
    /// CTAs that an SM runs at a time, at most, where their threads and shared memory fit; 2
    /// without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(alias = "blocks_per_sm")]
    pub ctas_per_sm: Option<u32>,
    /// Rules that this kernel does without: it counts on what machines do beyond the ISA's text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lenient: Vec<Lenience>,
    /// Folder of the files that the PTX's `.file` lines name, in which comments
    /// `// redundant: reason` are looked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sources: Option<String>,
    /// How it went when it was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded: Option<Recorded>,
    /// Device memory.
    #[serde(default, rename = "buffer", skip_serializing_if = "Vec::is_empty")]
    pub buffers: Vec<Buffer>,
    /// Tensor maps, which arguments may be.
    #[serde(default, rename = "tensor_map", skip_serializing_if = "Vec::is_empty")]
    pub tensor_maps: Vec<TensorMap>,
    /// Arguments, in the order of the kernel's parameters.
    #[serde(default, rename = "argument", skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<Argument>,
    /// What must be in memory afterwards.
    #[serde(default, rename = "expect", skip_serializing_if = "Vec::is_empty")]
    pub expectations: Vec<Expectation>,
    /// Mistakes that may go unnoticed.
    #[serde(default, rename = "redundant", skip_serializing_if = "Vec::is_empty")]
    pub redundant: Vec<Redundant>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl LaunchFile {
    /// Reads the text of a document; `name` is for error messages. Files that it names are not
    /// looked at.
    ///
    /// # Errors
    /// Text that is no TOML, fields that are unknown, missing or of another type, and what
    /// contradicts itself.
    pub fn parse(text: &str, name: &str) -> Result<LaunchFile, LaunchFileError> {
        let file: LaunchFile = toml::from_str(text).map_err(|error| LaunchFileError::Toml {
            file: name.to_owned(),
            message: error.to_string().trim_end().to_owned(),
        })?;
        file.check()
            .map_err(|message| LaunchFileError::Field { file: name.to_owned(), message })?;
        Ok(file)
    }

    /// The text of a document.
    ///
    /// # Errors
    /// Numbers that TOML cannot hold.
    pub fn to_toml(&self) -> Result<String, LaunchFileError> {
        toml::to_string(self).map_err(|error| LaunchFileError::Toml {
            file: self.kernel.clone(),
            message: error.to_string(),
        })
    }
}

/// A rule that is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lenience {
    /// Lanes of a warp are threads of their own: see
    /// [`Lanes::AsOneThread`](crate::hazard::Lanes::AsOneThread).
    Lanes,
    /// Tensor memory needs `tcgen05.fence` between threads.
    TensorFences,
    /// `barrier.cluster.arrive.relaxed` hands on nothing.
    RelaxedClusterArrivals,
    /// CTAs learn of each other by mbarriers that are used with `.cluster` scope only.
    MbarrierScopes,
    /// Addresses in tensor memory name the lanes of the warp that uses them: see
    /// [`LaneBits::Ignored`](crate::tcgen05::LaneBits::Ignored).
    LaneBits,
    /// Warnings are given.
    #[serde(alias = "advice")]
    Warnings,
}

/// What is known of the run that a launch was recorded from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// Name of the `.cu` file, without it the PTX's.
    pub source: String,
    /// Instructions of warps: how large it is.
    pub instructions: u64,
    /// Products of elements on tensor cores.
    #[serde(default)]
    pub multiply_adds: u64,
}

/// A piece of device memory. `shape` or `bytes` says how large it is, unless a file does; one of
/// `file`, `random` and `fill` says what is in it, else it is poison that nobody may depend on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buffer {
    /// By which the rest of the document knows it.
    pub name: String,
    /// Type of its elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DataType>,
    /// Elements along each dimension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Vec<u64>>,
    /// Its size, instead of a shape.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Its contents: a `.npy` file, which must fit `dtype` and `shape` where they are given, or a
    /// file of just the bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Random contents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random: Option<Random>,
    /// Every byte is this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill: Option<u8>,
    /// Where it lies: an address that the emulator gives (a multiple of 2 MiB from 2^36 on), above
    /// those of the buffers before. For memory with pointers in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
    /// Parts that the launch before wrote; only for `programmatic` launches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub written_before: Vec<OrderedBefore>,
}

/// Bytes of a buffer that the launch before wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OrderedBefore {
    /// The first.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// Random contents.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Random {
    /// Of the elements.
    pub distribution: Distribution,
    /// Of the sequence: the same contents for the same seed.
    #[serde(default)]
    pub seed: u64,
    /// Least value of `uniform`; -1 without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<f64>,
    /// `uniform` stays below this; 1 without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<f64>,
    /// Of `normal`; 1 without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deviation: Option<f64>,
}

/// How random elements are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// Evenly between `low` and `high`, rounded to the type.
    Uniform,
    /// Normal, around 0 with `deviation`, rounded to the type.
    Normal,
    /// Any bits: NaN and infinities too, for types that have them.
    Bits,
}

/// A tensor map, as `cuTensorMapEncodeTiled` takes it; dimensions are innermost first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorMap {
    /// By which arguments know it.
    pub name: String,
    /// Where the tensor is.
    pub buffer: String,
    /// Its first byte in the buffer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub offset: u64,
    /// Type of the elements.
    pub element: MapElement,
    /// Elements along each dimension, 1 to 5 of them.
    pub dimensions: Vec<u64>,
    /// Bytes from one element to the next along dimensions 1 and up; without it they are packed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strides: Option<Vec<u64>>,
    /// Elements of a box along each dimension.
    #[serde(rename = "box")]
    pub box_dimensions: Vec<u32>,
    /// One of so many elements is taken along each dimension; without it each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub element_strides: Option<Vec<u32>>,
    /// Pattern in shared memory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub swizzle: MapSwizzle,
    /// What is outside of the tensor.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fill: MapFill,
}

/// Elements of a tensor map: `CUtensorMapDataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum MapElement {
    U8,
    U16,
    U32,
    S32,
    U64,
    S64,
    F16,
    F32,
    /// `FLOAT32_FTZ`.
    F32Ftz,
    F64,
    Bf16,
    Tf32,
    /// `TFLOAT32_FTZ`.
    Tf32Ftz,
    /// `16U4_ALIGN8B`.
    B4x16,
    /// `16U4_ALIGN16B`.
    B4x16P64,
    /// `16U6_ALIGN16B`.
    B6x16P32,
}

/// Swizzle of a tensor map: `CUtensorMapSwizzle`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum MapSwizzle {
    #[default]
    #[serde(rename = "none")]
    None,
    #[serde(rename = "32B")]
    Bytes32,
    #[serde(rename = "64B")]
    Bytes64,
    #[serde(rename = "128B")]
    Bytes128,
    #[serde(rename = "128B_atom_32B")]
    Bytes128Atom32,
    #[serde(rename = "128B_atom_32B_flip_8B")]
    Bytes128Atom32Flip8,
    #[serde(rename = "128B_atom_64B")]
    Bytes128Atom64,
}

/// What elements outside of the tensor are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum MapFill {
    #[default]
    Zero,
    Nan,
}

/// An argument: one of its fields, and `offset` only beside `buffer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Argument {
    /// The address of a buffer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buffer: Option<String>,
    /// Bytes behind the buffer's first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// A tensor map, by value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_map: Option<String>,
    /// An unsigned integer of 8 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub u8: Option<u8>,
    /// An unsigned integer of 16 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub u16: Option<u16>,
    /// An unsigned integer of 32 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub u32: Option<u32>,
    /// An unsigned integer of 64 bits, up to 2^63 - 1: TOML has no larger ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub u64: Option<u64>,
    /// A signed integer of 32 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub i32: Option<i32>,
    /// A signed integer of 64 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub i64: Option<i64>,
    /// A float of single precision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub f32: Option<f32>,
    /// A float of double precision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub f64: Option<f64>,
    /// Any value, such as a structure: its bytes in hexadecimal, blanks between them allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hex: Option<String>,
}

/// What must be in (a part of) a buffer when the kernel has ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectation {
    /// Which buffer.
    pub buffer: String,
    /// Its first byte there.
    #[serde(default, skip_serializing_if = "is_default")]
    pub offset: u64,
    /// What it is, for messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The reference: a `.npy` file or a file of just the bytes. As many are compared as it has.
    pub file: String,
    /// Type of the elements; without it that of the `.npy` file, else the buffer's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DataType>,
    /// How near it must be; `"bits"` without it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tolerance: Tolerance,
    /// How near it must be when tensor cores compute as `--results exact` or `fuzz` says; without
    /// it the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tolerance_other_results: Option<Tolerance>,
}

/// How near a result must be to its reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Tolerance {
    /// Written `"bits"`: every bit.
    #[default]
    Bits,
    /// Written `"any"`: it is not compared.
    Any,
    /// A table.
    Within(Within),
}

impl Serialize for Tolerance {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Tolerance::Bits => serializer.serialize_str("bits"),
            Tolerance::Any => serializer.serialize_str("any"),
            Tolerance::Within(within) => within.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Tolerance {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Tolerance, D::Error> {
        deserializer.deserialize_any(ToleranceVisitor)
    }
}

struct ToleranceVisitor;

impl<'de> Visitor<'de> for ToleranceVisitor {
    type Value = Tolerance;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`\"bits\"`, `\"any\"` or a table with `absolute`, `relative`, `largest`")
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<Tolerance, E> {
        match word {
            "bits" => Ok(Tolerance::Bits),
            "any" => Ok(Tolerance::Any),
            other => Err(E::invalid_value(Unexpected::Str(other), &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Tolerance, A::Error> {
        Within::deserialize(MapAccessDeserializer::new(map)).map(Tolerance::Within)
    }
}

/// A distance: `absolute + relative |expected| + largest max |expected|`, the maximum being that of
/// all elements. Equal infinities and NaN at the same places are near.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Within {
    /// A distance.
    #[serde(default, skip_serializing_if = "is_default")]
    pub absolute: f64,
    /// Of the expected value's magnitude.
    #[serde(default, skip_serializing_if = "is_default")]
    pub relative: f64,
    /// Of the largest expected magnitude.
    #[serde(default, skip_serializing_if = "is_default")]
    pub largest: f64,
}

/// A mistake that may go unnoticed, and why.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Redundant {
    /// The instruction as `mutate` names it, such as `fence.proxy.async`.
    pub what: String,
    /// Where: a line of the PTX (`"120"`), or the end of a source file's path with a line
    /// (`"ops/add/add.cu:41"`), which also covers what is inlined there.
    pub at: String,
    /// Why it may go.
    pub reason: String,
}
