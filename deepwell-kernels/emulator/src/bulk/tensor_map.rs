//! Tensor maps: the 128-byte description of a tensor and of the boxes to copy.

use serde::{Deserialize, Serialize};

use super::element::ElementType;
use super::rules;
use super::swizzle::Swizzle;
use crate::error::Fault;

/// Size of an encoded map, in bytes.
pub const TENSOR_MAP_BYTES: usize = 128;

/// Marks this crate's encoding, to reject other bytes.
const MAGIC: [u8; 8] = *b"emu-tmap";

pub(super) const ADDRESS_AT: usize = 8;
pub(super) const DIMENSIONS_AT: usize = 16;
pub(super) const STRIDES_AT: usize = 56;
pub(super) const BOX_AT: usize = 88;
pub(super) const ELEMENT_STRIDES_AT: usize = 108;
pub(super) const RANK_AT: usize = 113;
pub(super) const ELEMENT_AT: usize = 114;
pub(super) const INTERLEAVE_AT: usize = 115;
pub(super) const SWIZZLE_AT: usize = 116;
pub(super) const ATOMICITY_AT: usize = 117;
pub(super) const FILL_AT: usize = 118;
const END_AT: usize = 119;

const _: () = assert!(DIMENSIONS_AT + 5 * 8 == STRIDES_AT);
const _: () = assert!(STRIDES_AT + 4 * 8 == BOX_AT);
const _: () = assert!(BOX_AT + 5 * 4 == ELEMENT_STRIDES_AT);
const _: () = assert!(ELEMENT_STRIDES_AT + 5 == RANK_AT);
const _: () = assert!(END_AT <= TENSOR_MAP_BYTES);

/// Channel interleave layout. Only [`Interleave::None`] can be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[allow(missing_docs)]
pub enum Interleave {
    #[default]
    None,
    Bytes16,
    Bytes32,
}

impl Interleave {
    /// Returns the layout of a code of `CUtensorMapInterleave` and `tensormap.replace`.
    pub fn from_code(code: u32) -> Option<Interleave> {
        [Interleave::None, Interleave::Bytes16, Interleave::Bytes32].get(code as usize).copied()
    }
}

/// Value of out-of-bounds elements in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fill {
    /// Zero.
    #[default]
    Zero,
    /// A NaN ([`ElementType::not_a_number`]).
    #[serde(rename = "nan")]
    NotANumber,
}

impl Fill {
    /// Returns the fill of a code of `CUtensorMapFloatOOBfill` and `tensormap.replace`.
    pub fn from_code(code: u32) -> Option<Fill> {
        [Fill::Zero, Fill::NotANumber].get(code as usize).copied()
    }
}

/// Arguments of `cuTensorMapEncodeTiled`, without the L2 promotion, which is a hint. Dimensions are
/// innermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMapSpec {
    /// Element type.
    pub element: ElementType,
    /// Address of the tensor's first byte.
    pub global_address: u64,
    /// Elements along each of the 1 to 5 dimensions.
    pub global_dimensions: Vec<u64>,
    /// Strides in bytes along dimensions 1 and up.
    pub global_strides_bytes: Vec<u64>,
    /// Elements of a box along each dimension, including skipped elements.
    pub box_dimensions: Vec<u32>,
    /// Step between copied elements along each dimension. The first step is ignored.
    pub element_strides: Vec<u32>,
    /// Channel interleave layout.
    pub interleave: Interleave,
    /// Swizzle pattern in shared memory.
    pub swizzle: Swizzle,
    /// Value of out-of-bounds elements.
    pub fill: Fill,
}

impl TensorMapSpec {
    /// Creates a map without swizzle, with element strides of 1 and zero fill.
    pub fn new(
        element: ElementType,
        global_address: u64,
        global_dimensions: &[u64],
        global_strides_bytes: &[u64],
        box_dimensions: &[u32],
    ) -> TensorMapSpec {
        TensorMapSpec {
            element,
            global_address,
            global_dimensions: global_dimensions.to_vec(),
            global_strides_bytes: global_strides_bytes.to_vec(),
            box_dimensions: box_dimensions.to_vec(),
            element_strides: vec![1; global_dimensions.len()],
            interleave: Interleave::None,
            swizzle: Swizzle::None,
            fill: Fill::Zero,
        }
    }

    /// Checks that a target supports the map; `target` is the number in its name, such as 90.
    ///
    /// # Errors
    /// `tensor-map-target` for elements smaller than a byte, and for swizzle atoms of more than 16
    /// bytes, before sm_100.
    pub fn check_target(&self, target: u32) -> Result<(), Fault> {
        rules::check_target(self, target)
    }
}

/// A decoded, valid map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    pub(super) spec: TensorMapSpec,
}

impl TensorMap {
    /// Encodes a map to 128 bytes.
    ///
    /// # Errors
    /// The broken rule of `cuTensorMapEncodeTiled`.
    pub fn encode(spec: &TensorMapSpec) -> Result<[u8; TENSOR_MAP_BYTES], Fault> {
        rules::check(spec)?;
        let mut bytes = [0; TENSOR_MAP_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        put_u64(&mut bytes, ADDRESS_AT, spec.global_address);
        for (index, &extent) in spec.global_dimensions.iter().enumerate() {
            put_u64(&mut bytes, DIMENSIONS_AT + 8 * index, extent);
        }
        for (index, &stride) in spec.global_strides_bytes.iter().enumerate() {
            put_u64(&mut bytes, STRIDES_AT + 8 * index, stride);
        }
        for (index, &extent) in spec.box_dimensions.iter().enumerate() {
            put_u32(&mut bytes, BOX_AT + 4 * index, extent);
        }
        for (index, &stride) in spec.element_strides.iter().enumerate() {
            // The rules limit strides to 8.
            bytes[ELEMENT_STRIDES_AT + index] = stride as u8;
        }
        bytes[RANK_AT] = spec.global_dimensions.len() as u8;
        bytes[ELEMENT_AT] = spec.element.ptx_code();
        bytes[INTERLEAVE_AT] = spec.interleave as u8;
        (bytes[SWIZZLE_AT], bytes[ATOMICITY_AT]) = spec.swizzle.ptx_codes();
        bytes[FILL_AT] = spec.fill as u8;
        Ok(bytes)
    }

    /// Decodes a map and checks all rules again, because `tensormap.replace` may have broken a
    /// rule.
    ///
    /// # Errors
    /// `tensor-map-invalid` for bytes that are not a map; otherwise the broken rule.
    pub fn decode(bytes: &[u8; TENSOR_MAP_BYTES]) -> Result<TensorMap, Fault> {
        check_magic(bytes)?;
        if bytes[END_AT..].iter().any(|&byte| byte != 0) {
            return Err(Fault::new("tensor-map-invalid", "a tensor map was overwritten in part"));
        }
        let rank = usize::from(bytes[RANK_AT]);
        if !(1..=5).contains(&rank) {
            return Err(Fault::new(
                "tensor-map-rank",
                format!("a tensor map has 1 to 5 dimensions, not {rank}"),
            ));
        }
        let unknown = |field: &str, code: u8| {
            Fault::new("tensor-map-field", format!("`{field}` of a tensor map cannot be {code}"))
        };
        let spec = TensorMapSpec {
            element: ElementType::from_ptx(u32::from(bytes[ELEMENT_AT]))
                .ok_or_else(|| unknown("elemtype", bytes[ELEMENT_AT]))?,
            global_address: get_u64(bytes, ADDRESS_AT),
            global_dimensions: (0..rank).map(|i| get_u64(bytes, DIMENSIONS_AT + 8 * i)).collect(),
            global_strides_bytes: (0..rank - 1)
                .map(|i| get_u64(bytes, STRIDES_AT + 8 * i))
                .collect(),
            box_dimensions: (0..rank).map(|i| get_u32(bytes, BOX_AT + 4 * i)).collect(),
            element_strides: (0..rank).map(|i| u32::from(bytes[ELEMENT_STRIDES_AT + i])).collect(),
            interleave: Interleave::from_code(u32::from(bytes[INTERLEAVE_AT]))
                .ok_or_else(|| unknown("interleave_layout", bytes[INTERLEAVE_AT]))?,
            swizzle: Swizzle::from_ptx(bytes[SWIZZLE_AT], bytes[ATOMICITY_AT]).ok_or_else(
                || {
                    Fault::new(
                        "tensor-map-swizzle",
                        format!(
                            "swizzle mode {} with atomicity {} is not supported",
                            bytes[SWIZZLE_AT], bytes[ATOMICITY_AT]
                        ),
                    )
                },
            )?,
            fill: Fill::from_code(u32::from(bytes[FILL_AT]))
                .ok_or_else(|| unknown("fill_mode", bytes[FILL_AT]))?,
        };
        rules::check(&spec)?;
        Ok(TensorMap { spec })
    }

    /// Returns the fields of the map.
    pub fn spec(&self) -> &TensorMapSpec {
        &self.spec
    }

    /// Number of dimensions, 1 to 5.
    pub fn rank(&self) -> usize {
        self.spec.global_dimensions.len()
    }
}

/// Rejects bytes that were not encoded by [`TensorMap::encode`].
pub(super) fn check_magic(bytes: &[u8; TENSOR_MAP_BYTES]) -> Result<(), Fault> {
    if bytes[..8] == MAGIC {
        return Ok(());
    }
    Err(Fault::new(
        "tensor-map-invalid",
        "expected a tensor map that the emulated driver has encoded, got other bytes",
    ))
}

pub(super) fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

pub(super) fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    (0..8).fold(0, |value, i| value | u64::from(bytes[at + i]) << (8 * i))
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    (0..4).fold(0, |value, i| value | u32::from(bytes[at + i]) << (8 * i))
}
