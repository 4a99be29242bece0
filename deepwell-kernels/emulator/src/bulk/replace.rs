//! `tensormap.replace`.

use super::tensor_map::{
    ADDRESS_AT, ATOMICITY_AT, BOX_AT, DIMENSIONS_AT, ELEMENT_AT, ELEMENT_STRIDES_AT, FILL_AT,
    INTERLEAVE_AT, RANK_AT, STRIDES_AT, SWIZZLE_AT, TENSOR_MAP_BYTES, check_magic, put_u32,
    put_u64,
};
use crate::error::Fault;

/// Fields of a map. Fields with an ordinal have one value per dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MapField {
    /// First byte of the tensor.
    GlobalAddress,
    /// Number of dimensions minus one.
    Rank,
    /// Elements of a box along a dimension.
    BoxDimension(u32),
    /// Elements of the tensor along a dimension.
    GlobalDimension(u32),
    /// Bytes between neighbors along dimension ordinal + 1.
    GlobalStride(u32),
    /// Step between copied elements.
    ElementStride(u32),
    /// Code of the element type.
    ElementType,
    /// Code of the channel interleave layout.
    InterleaveLayout,
    /// Code of the swizzle span.
    SwizzleMode,
    /// Code of the swizzle atom.
    SwizzleAtomicity,
    /// Code of the out-of-bounds fill.
    FillMode,
}

/// Sets one field of an encoded map. Constraints between fields are checked when the map is used,
/// because several replacements may belong together.
///
/// # Errors
/// `tensor-map-invalid` for bytes that are not a map; `tensor-map-replace` for an ordinal or a
/// value out of the field's range.
pub fn replace_field(
    bytes: &mut [u8; TENSOR_MAP_BYTES],
    field: MapField,
    value: u64,
) -> Result<(), Fault> {
    check_magic(bytes)?;
    let ordinal = |ordinal: u32, count: u32| {
        if ordinal < count {
            Ok(ordinal as usize)
        } else {
            Err(Fault::new(
                "tensor-map-replace",
                format!("{field:?} has ordinals 0 to {}, got {ordinal}", count - 1),
            ))
        }
    };
    let below = |limit: u64| {
        if value < limit {
            Ok(value as u8)
        } else {
            Err(Fault::new(
                "tensor-map-replace",
                format!("{field:?} must be below {limit}, got {value}"),
            ))
        }
    };
    match field {
        MapField::GlobalAddress => put_u64(bytes, ADDRESS_AT, value),
        MapField::Rank => bytes[RANK_AT] = below(5)? + 1,
        MapField::BoxDimension(index) => {
            put_u32(bytes, BOX_AT + 4 * ordinal(index, 5)?, value as u32);
        }
        MapField::GlobalDimension(index) => {
            put_u64(bytes, DIMENSIONS_AT + 8 * ordinal(index, 5)?, value & 0xffff_ffff);
        }
        MapField::GlobalStride(index) => {
            put_u64(bytes, STRIDES_AT + 8 * ordinal(index, 4)?, value);
        }
        MapField::ElementStride(index) => {
            bytes[ELEMENT_STRIDES_AT + ordinal(index, 5)?] = below(256)?;
        }
        MapField::ElementType => bytes[ELEMENT_AT] = below(16)?,
        MapField::InterleaveLayout => bytes[INTERLEAVE_AT] = below(3)?,
        MapField::SwizzleMode => bytes[SWIZZLE_AT] = below(5)?,
        MapField::SwizzleAtomicity => bytes[ATOMICITY_AT] = below(4)?,
        MapField::FillMode => bytes[FILL_AT] = below(2)?,
    }
    Ok(())
}
