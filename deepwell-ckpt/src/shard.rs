//! The safetensors container: eight bytes of header length, a JSON header, then the tensors.
//!
//! ```text
//! | u64 LE: n | n bytes of JSON, padded with spaces to 8 | tensor | tensor | ... |
//! ```
//!
//! The header is built by the `safetensors` crate; the tensors are streamed here, since
//! the crate wants either all of them in memory or none of our checksums.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use deepwell_ir::SafetensorsHeader;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::tensor::CkptDtype;

/// One tensor of a file that is to be written.
pub(crate) struct HeaderTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: CkptDtype,
    pub(crate) shape: &'a [usize],
    pub(crate) bytes: usize,
}

/// The first bytes of a file, up to and with the padding before the first tensor.
///
/// The tensors follow in the order given, without gaps; give those with wide elements first and
/// each one is aligned to its element.
pub(crate) fn header_bytes(tensors: &[HeaderTensor<'_>]) -> Result<Vec<u8>, String> {
    let mut begin = 0;
    let infos = tensors
        .iter()
        .map(|tensor| {
            let data_offsets = (begin, begin + tensor.bytes);
            begin = data_offsets.1;
            let info = TensorInfo {
                dtype: tensor.dtype.to_safetensors(),
                shape: tensor.shape.to_vec(),
                data_offsets,
            };
            (tensor.name.to_string(), info)
        })
        .collect();
    // Hugging Face's loaders insist on a `format`. One key only: the crate keeps them in a hash
    // map, and a second key would make the bytes differ from run to run.
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
