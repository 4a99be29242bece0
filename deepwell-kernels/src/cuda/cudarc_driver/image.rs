//! Validates a kernel image before loading: the driver gets only the address of the image, not its
//! length, so a truncated image would make the driver read out of bounds.

use crate::runtime::cuda::driver::{DriverError, DriverResult};

const ELF_MAGIC: &[u8] = b"\x7fELF";
/// Bytes 4 and 5 of the header.
const ELF_64_LITTLE_ENDIAN: [u8; 2] = [2, 1];
const ELF_HEADER_BYTES: usize = 64;
const SECTION_HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
/// Type of a section without bytes in the file (`SHT_NOBITS`).
const SECTION_WITHOUT_BYTES: u32 = 8;

/// Rejects everything but a complete cubin or PTX text with a final zero byte.
pub(super) fn check_image(image: &[u8]) -> DriverResult<()> {
    let refuse = |reason: &str| {
        Err(DriverError::new("cuModuleLoadData", format!("{reason}, {} bytes long", image.len())))
    };
    if !image.starts_with(ELF_MAGIC) {
        let is_text = image.split_last().is_some_and(|(&last, text)| {
            last == 0 && text.windows(8).any(|word| word == b".version") && !text.contains(&0)
        });
        return match is_text {
            true => Ok(()),
            false => refuse("expected a cubin, or PTX with a final zero byte, got something else"),
        };
    }
    match is_whole(image) {
        Some(true) => Ok(()),
        _ => refuse("expected a whole cubin, got one that is cut off"),
    }
}

/// Whether a 64-bit little-endian ELF file contains its headers and all data that the headers point
/// to; `None` if a header itself is out of bounds.
fn is_whole(image: &[u8]) -> Option<bool> {
    if image.get(..ELF_HEADER_BYTES)?[4..6] != ELF_64_LITTLE_ENDIAN {
        return Some(false);
    }
    let u16_at = |offset: usize| Some(u16::from_le_bytes(*image.get(offset..)?.first_chunk()?));
    let u32_at = |offset: usize| Some(u32::from_le_bytes(*image.get(offset..)?.first_chunk()?));
    let u64_at = |offset: usize| Some(u64::from_le_bytes(*image.get(offset..)?.first_chunk()?));
    let ends_within = |offset: u64, bytes: u64| {
        offset.checked_add(bytes).is_some_and(|end| end <= image.len() as u64)
    };
    // File offset, number and size of the headers of each kind.
    let programs = (u64_at(0x20)?, u16_at(0x38)?, PROGRAM_HEADER_BYTES);
    let sections = (u64_at(0x28)?, u16_at(0x3C)?, SECTION_HEADER_BYTES);
    for (offset, count, bytes) in [programs, sections] {
        if !ends_within(offset, u64::from(count) * bytes as u64) {
            return Some(false);
        }
    }
    let headers = |(offset, count, bytes): (u64, u16, usize)| {
        (0..usize::from(count)).map(move |index| offset as usize + index * bytes)
    };
    for header in headers(programs) {
        if !ends_within(u64_at(header + 0x08)?, u64_at(header + 0x20)?) {
            return Some(false);
        }
    }
    for header in headers(sections) {
        let has_bytes = u32_at(header + 0x04)? != SECTION_WITHOUT_BYTES;
        if has_bytes && !ends_within(u64_at(header + 0x18)?, u64_at(header + 0x20)?) {
            return Some(false);
        }
    }
    Some(true)
}

#[cfg(test)]
mod tests {
    use super::check_image;

    /// An ELF file of a header, eight bytes of data, and the header of the section that holds them.
    fn cubin() -> Vec<u8> {
        let mut image = vec![0; 64 + 8 + 64];
        image[..4].copy_from_slice(b"\x7fELF");
        image[4..6].copy_from_slice(&[2, 1]);
        image[0x28..0x30].copy_from_slice(&72u64.to_le_bytes());
        image[0x3C..0x3E].copy_from_slice(&1u16.to_le_bytes());
        image[72 + 0x04..72 + 0x08].copy_from_slice(&1u32.to_le_bytes());
        image[72 + 0x18..72 + 0x20].copy_from_slice(&64u64.to_le_bytes());
        image[72 + 0x20..72 + 0x28].copy_from_slice(&8u64.to_le_bytes());
        image
    }

    fn with(offset: usize, value: u64) -> Vec<u8> {
        let mut image = cubin();
        image[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
        image
    }

    #[test]
    fn only_whole_cubins_and_terminated_ptx_pass() {
        let cut = |bytes: usize| cubin()[..bytes].to_vec();
        let rows: [(&str, Vec<u8>, bool); 12] = [
            ("whole", cubin(), true),
            ("of 32 bits", with(4, 0x101), false),
            ("a byte short", cut(135), false),
            ("without section headers", cut(72), false),
            ("half a header", cut(20), false),
            ("a section that ends outside", with(72 + 0x20, 73), false),
            ("a section whose end overflows", with(72 + 0x20, u64::MAX), false),
            ("headers beyond the end", with(0x28, u64::MAX), false),
            ("terminated PTX", b".version 9.0\n.target sm_90a\n\0".to_vec(), true),
            ("PTX without its end", b".version 9.0\n.target sm_90a\n".to_vec(), false),
            ("nothing", Vec::new(), false),
            ("a text", b"hello\0".to_vec(), false),
        ];
        for (name, image, passes) in rows {
            assert_eq!(check_image(&image).is_ok(), passes, "{name}");
        }
    }
}
