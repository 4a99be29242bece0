//! Format of launch files.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::data_type::DataType;
use super::error::LaunchFileError;
use crate::bulk::{ElementType, Fill, Swizzle};

/// A launch. Unknown fields are rejected.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchFile {
    /// Path of the PTX file.
    pub ptx: String,
    /// Name of the kernel.
    pub kernel: String,
    /// CTAs along x, y, z; missing axes are 1.
    pub grid: Vec<u32>,
    /// Threads of a CTA along x, y, z; missing axes are 1.
    pub block: Vec<u32>,
    /// CTAs of a cluster along x, y, z. The default is the kernel's own cluster, or none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cluster: Vec<u32>,
    /// Dynamic shared memory of a CTA, in bytes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shared_bytes: u32,
    /// The launch may begin before the previous launch has ended (programmatic dependent launch).
    /// The buffers list writes of the previous launch in `written_before`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub programmatic: bool,
    /// SMs of the device. Default without `--sm-count`: 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_count: Option<u32>,
    /// Most CTAs that an SM runs at a time, if their threads and shared memory fit. Default: 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(alias = "blocks_per_sm")]
    pub ctas_per_sm: Option<u32>,
    /// Rules disabled for this kernel, which relies on hardware behavior beyond the ISA.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lenient: Vec<Lenience>,
    /// Folder of the source files in the PTX's `.file` lines. The files are searched for comments
    /// `// redundant WHAT: REASON`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sources: Option<String>,
    /// Statistics of the recorded run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded: Option<Recorded>,
    /// Device memory.
    #[serde(default, rename = "buffer", skip_serializing_if = "Vec::is_empty")]
    pub buffers: Vec<Buffer>,
    /// Tensor maps for arguments.
    #[serde(default, rename = "tensor_map", skip_serializing_if = "Vec::is_empty")]
    pub tensor_maps: Vec<TensorMap>,
    /// Arguments, in the order of the kernel's parameters.
    #[serde(default, rename = "argument", skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<Argument>,
    /// Expected memory contents after the launch.
    #[serde(default, rename = "expect", skip_serializing_if = "Vec::is_empty")]
    pub expectations: Vec<Expectation>,
    /// Mistakes that are allowed to go unnoticed.
    #[serde(default, rename = "redundant", skip_serializing_if = "Vec::is_empty")]
    pub redundant: Vec<Redundant>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl LaunchFile {
    /// Parses a document; `name` is for error messages. Files named in the document are not read.
    ///
    /// # Errors
    /// Text that is not TOML; fields that are unknown, missing or of a wrong type; contradictions.
    pub fn parse(text: &str, name: &str) -> Result<LaunchFile, LaunchFileError> {
        let file: LaunchFile = toml::from_str(text).map_err(|error| LaunchFileError::Toml {
            file: name.to_owned(),
            message: error.to_string().trim_end().to_owned(),
        })?;
        file.check()
            .map_err(|message| LaunchFileError::Field { file: name.to_owned(), message })?;
        Ok(file)
    }

    /// Serializes the document to TOML.
    ///
    /// # Errors
    /// Numbers outside of TOML's range.
    pub fn to_toml(&self) -> Result<String, LaunchFileError> {
        toml::to_string(self).map_err(|error| LaunchFileError::Toml {
            file: self.kernel.clone(),
            message: error.to_string(),
        })
    }
}

/// A rule that is disabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lenience {
    /// Lanes of a warp are separate threads; disabled as in
    /// [`Lanes::AsOneThread`](crate::hazard::Lanes::AsOneThread).
    Lanes,
    /// Tensor memory needs `tcgen05.fence` between threads.
    TensorFences,
    /// `barrier.cluster.arrive.relaxed` does not release earlier accesses.
    RelaxedClusterArrivals,
    /// Mbarriers synchronize different CTAs only with `.cluster` scope.
    MbarrierScopes,
    /// A thread arrives at an mbarrier only if it knows that the previous phase is complete.
    ArrivalPhases,
    /// Addresses in tensor memory must name the lanes of the executing warp; disabled as in
    /// [`LaneBits::Ignored`](crate::tcgen05::LaneBits::Ignored).
    LaneBits,
    /// Warnings are reported.
    #[serde(alias = "advice")]
    Warnings,
}

/// Statistics of the run from which a launch was recorded.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// Name of the `.cu` file without its extension, or the name of the kernel.
    pub source: String,
    /// Executed warp instructions.
    pub instructions: u64,
    /// Multiply-adds on tensor cores.
    #[serde(default)]
    pub multiply_adds: u64,
}

/// A region of device memory. Its size comes from `file`, `shape` or `bytes`; its contents from
/// `file`, `random` or `fill`. The default content is poison, on which no result may depend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buffer {
    /// Name for references from the rest of the document.
    pub name: String,
    /// Element type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DataType>,
    /// Elements along each dimension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Vec<u64>>,
    /// Size in bytes, instead of a shape.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Path of the contents: a `.npy` file, which must match `dtype` and `shape` if given, or a
    /// file of raw bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Random contents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random: Option<Random>,
    /// Value of every byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill: Option<u8>,
    /// Address of the buffer, for memory that contains pointers: an address that the emulator can
    /// return (a multiple of 2 MiB from 2^36 on), above those of earlier buffers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
    /// Byte ranges written by the previous launch; only for `programmatic` launches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub written_before: Vec<OrderedBefore>,
}

/// A byte range of a buffer that the previous launch wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OrderedBefore {
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Random contents.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Random {
    /// Distribution of the elements.
    pub distribution: Distribution,
    /// Seed of the sequence. Equal seeds give equal contents.
    #[serde(default)]
    pub seed: u64,
    /// Least value of `uniform`. Default: -1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<f64>,
    /// Exclusive upper bound of `uniform`. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<f64>,
    /// Standard deviation of `normal`. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deviation: Option<f64>,
}

/// Distributions of random elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// Uniform from `low` to `high`, rounded to the type.
    Uniform,
    /// Normal with mean 0 and standard deviation `deviation`, rounded to the type.
    Normal,
    /// Random bits, including NaN and infinities.
    Bits,
}

/// A tensor map with the fields of `cuTensorMapEncodeTiled`; dimensions are innermost first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorMap {
    /// Name for references from arguments.
    pub name: String,
    /// Buffer of the tensor.
    pub buffer: String,
    /// Offset of the tensor's first byte in the buffer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub offset: u64,
    /// Element type.
    pub element: ElementType,
    /// Elements along each of the 1 to 5 dimensions.
    pub dimensions: Vec<u64>,
    /// Strides in bytes along dimensions 1 and up. Default: packed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strides: Option<Vec<u64>>,
    /// Elements of a box along each dimension.
    #[serde(rename = "box")]
    pub box_dimensions: Vec<u32>,
    /// Step between copied elements along each dimension. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub element_strides: Option<Vec<u32>>,
    /// Swizzle pattern in shared memory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub swizzle: Swizzle,
    /// Value of out-of-bounds elements.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fill: Fill,
}

/// An argument. Exactly one field is set, except for `offset`, which goes with `buffer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Argument {
    /// The address of a buffer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buffer: Option<String>,
    /// Byte offset into the buffer.
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
    /// An unsigned integer of 64 bits, at most 2^63 - 1, the largest integer in TOML.
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
    /// Any value, such as a structure: bytes in hexadecimal, optionally separated by blanks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hex: Option<String>,
}

/// Expected contents of (a part of) a buffer after the launch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectation {
    /// Name of the buffer.
    pub buffer: String,
    /// Offset of the first byte.
    #[serde(default, skip_serializing_if = "is_default")]
    pub offset: u64,
    /// Name for messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Path of the reference, a `.npy` file or a file of raw bytes. All its elements are compared.
    pub file: String,
    /// Element type. Default: that of the `.npy` file, otherwise that of the buffer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DataType>,
    /// Tolerance. Default: `"bits"`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tolerance: Tolerance,
    /// Tolerance for `--results exact` and `fuzz`. Default: the same tolerance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tolerance_other_results: Option<Tolerance>,
}

/// Tolerance of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Tolerance {
    /// `"bits"`: bit-exact.
    #[default]
    Bits,
    /// `"any"`: not compared.
    Any,
    /// A table of distances.
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

/// Largest distance: `absolute + relative |expected| + largest max |expected|`, with the maximum
/// over all elements. Equal infinities, and NaN in both values, are within the tolerance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Within {
    /// Absolute distance.
    #[serde(default, skip_serializing_if = "is_default")]
    pub absolute: f64,
    /// Factor of the expected value's magnitude.
    #[serde(default, skip_serializing_if = "is_default")]
    pub relative: f64,
    /// Factor of the largest expected magnitude.
    #[serde(default, skip_serializing_if = "is_default")]
    pub largest: f64,
}

/// A mistake that may go unnoticed, with a reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Redundant {
    /// Name of the mistake in the output of `mutate`, such as `fence.proxy.async`.
    pub what: String,
    /// Location: a line of the PTX (`"120"`), or the end of a source path with a line
    /// (`"ops/add/add.cu:41"`). The latter includes code inlined at the line.
    pub at: String,
    /// Reason why the mistake is harmless.
    pub reason: String,
}
