//! The safetensors container: eight bytes of header length, a JSON header, then the tensors.
//!
//! ```text
//! | u64 LE: n | n bytes of JSON, padded with spaces to 8 | tensor | tensor | ... |
//! ```
//!
//! The header is built by the `safetensors` crate. The tensors are streamed here, since the crate
//! would need all of them in memory and has no checksums.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use deepwell_ir::SafetensorsHeader;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::tensor::{CkptDtype, tensor_bytes};

/// Returns the first bytes of a file with tensors of these names, types and shapes, up to the first
/// tensor, including the padding.
///
/// The tensors follow in the given order, without gaps; with wide elements first, each tensor is
/// aligned to its element size.
pub(crate) fn header_bytes<'a>(
    tensors: impl IntoIterator<Item = (&'a str, CkptDtype, &'a [usize])>,
) -> Result<Vec<u8>, String> {
    let mut begin = 0usize;
    let infos = tensors
        .into_iter()
        .map(|(name, dtype, shape)| {
            let bytes = tensor_bytes(dtype, shape).unwrap_or(usize::MAX);
            let data_offsets = (begin, begin.saturating_add(bytes));
            begin = data_offsets.1;
            let dtype = dtype.to_safetensors();
            (name.to_string(), TensorInfo { dtype, shape: shape.to_vec(), data_offsets })
        })
        .collect();
    // Hugging Face's loaders require a `format`. Only one key: the crate keeps keys in a hash map,
    // and the bytes of several keys would differ from run to run.
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(format), infos).map_err(|error| error.to_string())?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

/// Reads and checks the header of a file, see [`SafetensorsHeader::read`].
pub(crate) fn read_header(path: &Path) -> Result<SafetensorsHeader, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    SafetensorsHeader::read(&file).map_err(|error| error.to_string())
}
