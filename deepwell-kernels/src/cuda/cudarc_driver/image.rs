//! Looks over a kernel binary before the driver reads it: the driver is told where it begins and
//! not where it ends, so a truncated one would make it read foreign memory.

use crate::cuda::driver::{DriverError, DriverResult};

const ELF_MAGIC: &[u8] = b"\x7fELF";
const ELF_HEADER_BYTES: usize = 64;
const SECTION_HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
/// A section that takes no room in the file (`SHT_NOBITS`).
const SECTION_WITHOUT_BYTES: u32 = 8;

/// Refuses what is neither a whole cubin nor PTX text with a final zero byte.
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

/// Whether the headers and everything that they point to lie within a 64-bit little-endian ELF
/// file; `None` where a header itself does not.
fn is_whole(image: &[u8]) -> Option<bool> {
    image.get(..ELF_HEADER_BYTES)?;
    let u16_at = |offset: usize| Some(u16::from_le_bytes(*image.get(offset..)?.first_chunk()?));
    let u32_at = |offset: usize| Some(u32::from_le_bytes(*image.get(offset..)?.first_chunk()?));
    let u64_at = |offset: usize| Some(u64::from_le_bytes(*image.get(offset..)?.first_chunk()?));
    let ends_within = |offset: u64, bytes: u64| {
        offset.checked_add(bytes).is_some_and(|end| end <= image.len() as u64)
    };
    let (programs, sections) = (u64_at(0x20)?, u64_at(0x28)?);
    let (program_count, section_count) = (u16_at(0x38)?, u16_at(0x3C)?);
    for index in 0..usize::from(program_count) {
        let header = usize::try_from(programs).ok()?.checked_add(index * PROGRAM_HEADER_BYTES)?;
        if !ends_within(u64_at(header.checked_add(0x08)?)?, u64_at(header.checked_add(0x20)?)?) {
            return Some(false);
        }
    }
    for index in 0..usize::from(section_count) {
        let header = usize::try_from(sections).ok()?.checked_add(index * SECTION_HEADER_BYTES)?;
        let has_bytes = u32_at(header.checked_add(0x04)?)? != SECTION_WITHOUT_BYTES;
        let (offset, bytes) =
            (u64_at(header.checked_add(0x18)?)?, u64_at(header.checked_add(0x20)?)?);
        if has_bytes && !ends_within(offset, bytes) {
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
        let rows: [(&str, Vec<u8>, bool); 11] = [
            ("whole", cubin(), true),
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
