//! The safetensors container: eight bytes of header length, a JSON header, then the tensors.
//!
//! ```text
//! | u64 LE: n | n bytes of JSON, padded with spaces to 8 | tensor | tensor | ... |
//! ```
//!
//! The header is built and parsed by the `safetensors` crate; the tensors are streamed here, since
//! the crate wants either all of them in memory or none of our checksums.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};

use crate::io::read_full;
use crate::tensor::CkptDtype;

/// Bytes of the length in front of the header.
pub(crate) const LENGTH_BYTES: u64 = 8;
/// The largest header that the safetensors crate accepts.
const HEADER_BYTES_MAX: u64 = 100_000_000;

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

/// A parsed header.
pub(crate) struct Header {
    pub(crate) metadata: Metadata,
    /// Offset in the file of the first tensor's first byte.
    pub(crate) data_begin: u64,
}

/// Reads and checks the header of a file: that it is well-formed, that its tensors lie side by
/// side, and that they end where the file ends.
pub(crate) fn read_header(path: &Path) -> Result<Header, String> {
    let text = |error: std::io::Error| error.to_string();
    let mut file = File::open(path).map_err(text)?;
    let file_bytes = file.metadata().map_err(text)?.len();
    let mut length = [0; LENGTH_BYTES as usize];
    if read_full(&mut file, &mut length).map_err(text)? < length.len() {
        return Err(format!("expected at least 8 bytes, got {file_bytes}"));
    }
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > HEADER_BYTES_MAX || header_bytes + LENGTH_BYTES > file_bytes {
        return Err(format!(
            "the header should have {header_bytes} bytes, the file has {file_bytes}"
        ));
    }
    let mut json = vec![0; header_bytes as usize];
    if read_full(&mut file, &mut json).map_err(text)? < json.len() {
        return Err("the file ends within its header".to_string());
    }
    let metadata: Metadata =
        serde_json::from_slice(&json).map_err(|error| format!("bad header: {error}"))?;
    let data_begin = LENGTH_BYTES + header_bytes;
    let expected_bytes = data_begin + metadata.data_len() as u64;
    if expected_bytes != file_bytes {
        return Err(format!("expected {expected_bytes} bytes, got {file_bytes}: truncated?"));
    }
    Ok(Header { metadata, data_begin })
}
