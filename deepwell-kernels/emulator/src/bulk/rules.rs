//! Validity rules of tensor maps.
//!
//! Source: CUDA driver API, `cuTensorMapEncodeTiled`; PTX ISA, tensors.

use super::element::ElementType;
use super::swizzle::Swizzle;
use super::tensor_map::{Fill, Interleave, TensorMapSpec};
use crate::error::Fault;

fn broken<T>(rule: &'static str, message: String) -> Result<T, Fault> {
    Err(Fault::new(rule, message))
}

/// Checks all rules that apply to copies in either direction.
pub(super) fn check(spec: &TensorMapSpec) -> Result<(), Fault> {
    check_rank(spec)?;
    if spec.interleave != Interleave::None {
        return broken(
            "tensor-map-interleave",
            format!("interleaved layouts are not emulated, got {:?}", spec.interleave),
        );
    }
    check_global(spec)?;
    check_box(spec)?;
    check_room(spec)?;
    check_swizzle(spec)?;
    if spec.fill == Fill::NotANumber && !spec.element.is_float() {
        return broken(
            "tensor-map-fill",
            format!("the fill with NaN needs floating-point elements, not {:?}", spec.element),
        );
    }
    Ok(())
}

fn check_rank(spec: &TensorMapSpec) -> Result<(), Fault> {
    let rank = spec.global_dimensions.len();
    if !(1..=5).contains(&rank) {
        return broken(
            "tensor-map-rank",
            format!("a tensor map has 1 to 5 dimensions, not {rank}"),
        );
    }
    for (name, expected, came) in [
        ("global strides", rank - 1, spec.global_strides_bytes.len()),
        ("box dimensions", rank, spec.box_dimensions.len()),
        ("element strides", rank, spec.element_strides.len()),
    ] {
        if came != expected {
            return broken(
                "tensor-map-rank",
                format!("a tensor map of {rank} dimensions has {expected} {name}, not {came}"),
            );
        }
    }
    Ok(())
}

fn check_global(spec: &TensorMapSpec) -> Result<(), Fault> {
    let alignment = if spec.element.is_padded() { 32 } else { 16 };
    if !spec.global_address.is_multiple_of(alignment) {
        return broken(
            "tensor-map-global-address",
            format!(
                "the global address of {:?} elements must be a multiple of {alignment}, got {:#x}",
                spec.element, spec.global_address
            ),
        );
    }
    for (index, &extent) in spec.global_dimensions.iter().enumerate() {
        if extent == 0 || extent > 1 << 32 {
            return broken(
                "tensor-map-global-dimension",
                format!("dimension {index} must be 1 to 2^32 elements, got {extent}"),
            );
        }
    }
    let multiple = match spec.element {
        ElementType::B4x16 => 2,
        ElementType::B4x16Pad64 | ElementType::B6x16Pad32 => 128,
        _ => 1,
    };
    if !spec.global_dimensions[0].is_multiple_of(multiple) {
        return broken(
            "tensor-map-global-dimension",
            format!(
                "dimension 0 of {:?} elements must be a multiple of {multiple}, got {}",
                spec.element, spec.global_dimensions[0]
            ),
        );
    }
    for (index, &stride) in spec.global_strides_bytes.iter().enumerate() {
        let dimension = index + 1;
        if !stride.is_multiple_of(alignment) {
            return broken(
                "tensor-map-global-stride",
                format!(
                    "the stride of dimension {dimension} must be a multiple of {alignment} bytes, \
                     got {stride}"
                ),
            );
        }
        if stride >= 1 << 40 {
            return broken(
                "tensor-map-global-stride",
                format!("the stride of dimension {dimension} must be below 2^40, got {stride}"),
            );
        }
    }
    Ok(())
}

fn check_box(spec: &TensorMapSpec) -> Result<(), Fault> {
    for (index, &extent) in spec.box_dimensions.iter().enumerate() {
        if extent == 0 || extent > 256 {
            return broken(
                "tensor-map-box-dimension",
                format!("a box has 1 to 256 elements along dimension {index}, not {extent}"),
            );
        }
    }
    for (index, &stride) in spec.element_strides.iter().enumerate() {
        if stride == 0 || stride > 8 {
            return broken(
                "tensor-map-element-stride",
                format!("the element stride of dimension {index} must be 1 to 8, not {stride}"),
            );
        }
    }
    let inner = u64::from(spec.box_dimensions[0]);
    if spec.element.is_padded() {
        if inner != 128 {
            return broken(
                "tensor-map-box-inner",
                format!("a box of {:?} elements is 128 wide, not {inner}", spec.element),
            );
        }
        return Ok(());
    }
    let bits = inner * spec.element.global_bits();
    if !bits.is_multiple_of(128) {
        return broken(
            "tensor-map-box-inner",
            format!(
                "the inner extent of a box must be a multiple of 16 bytes, got {inner} elements of \
                 {} bits",
                spec.element.global_bits()
            ),
        );
    }
    Ok(())
}

/// Most shared memory of a CTA, in bytes, on all architectures with tensor copies.
const SHARED_BYTES_MAX: u64 = 227 * 1024;

/// Checks that a box fits in shared memory. Per dimension, dimension 0 included, the driver counts
/// extent / element stride elements, rounded down. This is undocumented, but an H200's driver
/// accepts exactly these maps (`tests/golden/h200_tensor_map_rules.txt`).
fn check_room(spec: &TensorMapSpec) -> Result<(), Fault> {
    let elements: u64 = spec
        .box_dimensions
        .iter()
        .zip(&spec.element_strides)
        .map(|(&extent, &stride)| u64::from(extent / stride))
        .product();
    let bytes = elements * spec.element.shared_bits() / 8;
    if bytes > SHARED_BYTES_MAX {
        return broken(
            "tensor-map-box-size",
            format!("a box has at most {SHARED_BYTES_MAX} bytes, got {bytes}"),
        );
    }
    Ok(())
}

/// Rejects features that the target lacks.
pub(super) fn check_target(spec: &TensorMapSpec, target: u32) -> Result<(), Fault> {
    if target >= 100 {
        return Ok(());
    }
    let has_new_swizzle = matches!(
        spec.swizzle,
        Swizzle::Bytes128Atom32 | Swizzle::Bytes128Atom32Flip8 | Swizzle::Bytes128Atom64
    );
    if has_new_swizzle || spec.element.is_sub_byte() {
        return broken(
            "tensor-map-target",
            format!(
                "{:?} elements with swizzle {:?} need sm_100, the target is sm_{target}",
                spec.element, spec.swizzle
            ),
        );
    }
    Ok(())
}

fn check_swizzle(spec: &TensorMapSpec) -> Result<(), Fault> {
    let Some(span) = spec.swizzle.span_bytes() else { return Ok(()) };
    let inner = u64::from(spec.box_dimensions[0]) * spec.element.shared_bits() / 8;
    if inner > u64::from(span) {
        return broken(
            "tensor-map-swizzle-span",
            format!(
                "with {:?} the inner extent of a box is at most {span} bytes, got {inner}",
                spec.swizzle
            ),
        );
    }
    let allowed = match spec.element {
        ElementType::B6x16Pad32 => {
            matches!(
                spec.swizzle,
                Swizzle::Bytes128 | Swizzle::Bytes128Atom32 | Swizzle::Bytes128Atom64
            )
        }
        ElementType::B4x16Pad64 => {
            matches!(spec.swizzle, Swizzle::Bytes128 | Swizzle::Bytes128Atom32)
        }
        _ => true,
    };
    if !allowed {
        return broken(
            "tensor-map-swizzle",
            format!("{:?} elements cannot have the swizzle {:?}", spec.element, spec.swizzle),
        );
    }
    Ok(())
}
