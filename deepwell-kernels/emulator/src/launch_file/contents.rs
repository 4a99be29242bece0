//! Initial contents of buffers.

use std::path::Path;

use super::data_type::DataType;
use super::error::LaunchFileError;
use super::file::{Buffer, Distribution, Random};
use super::npy::Array;
use crate::engine::Random as Sequence;

/// Elements of a buffer, from the document and its file.
#[derive(Clone, Debug)]
pub(super) struct Contents {
    pub(super) dtype: DataType,
    /// `None` for `length` bytes of poison.
    pub(super) bytes: Option<Vec<u8>>,
    pub(super) length: u64,
}

/// Largest buffer. The limit keeps a typo in a document from exhausting memory.
const BYTES_LIMIT: u64 = 1 << 36;

/// Returns the contents of a buffer; `folder` is the folder of the document.
pub(super) fn of_buffer(buffer: &Buffer, folder: &Path) -> Result<Contents, LaunchFileError> {
    let refuse = |message: String| LaunchFileError::Field {
        file: format!("buffer `{}`", buffer.name),
        message,
    };
    let dtype = buffer.dtype.unwrap_or(DataType::U8);
    let asked = match (&buffer.shape, buffer.bytes) {
        (Some(shape), _) => {
            let bytes = shape
                .iter()
                .try_fold(dtype.bytes() as u64, |bytes, extent| bytes.checked_mul(*extent));
            Some(bytes.unwrap_or(u64::MAX))
        }
        (None, bytes) => bytes,
    };
    if let Some(bytes) = asked.filter(|bytes| *bytes > BYTES_LIMIT) {
        return Err(refuse(format!("expected at most {BYTES_LIMIT} bytes, got {bytes}")));
    }
    if let Some(name) = &buffer.file {
        let (stored, bytes) = read_elements(&folder.join(name))?;
        if let (Some(stored), Some(dtype)) = (stored, buffer.dtype)
            && stored.numpy() != dtype.numpy()
        {
            return Err(refuse(format!(
                "expected elements of {} as `{name}` has them, got `dtype = \"{}\"`",
                stored.name(),
                dtype.name()
            )));
        }
        let length = bytes.len() as u64;
        if let Some(asked) = asked.filter(|asked| *asked != length) {
            return Err(refuse(format!("expected {asked} bytes, `{name}` has {length}")));
        }
        let dtype = buffer.dtype.or(stored).unwrap_or(DataType::U8);
        return Ok(Contents { dtype, bytes: Some(bytes), length });
    }
    let length = asked.unwrap_or(0);
    let bytes = match (buffer.random, buffer.fill) {
        (Some(random), _) => Some(random_bytes(random, dtype, length as usize / dtype.bytes())),
        (None, Some(fill)) => Some(vec![fill; length as usize]),
        (None, None) => None,
    };
    Ok(Contents { dtype, bytes, length })
}

/// Reads the elements of a file, and their type if the file has one.
pub(super) fn read_elements(path: &Path) -> Result<(Option<DataType>, Vec<u8>), LaunchFileError> {
    let bytes = std::fs::read(path)
        .map_err(|source| LaunchFileError::Read { path: path.to_owned(), source })?;
    if path.extension().is_none_or(|extension| extension != "npy") {
        return Ok((None, bytes));
    }
    let array = Array::parse(&bytes)
        .map_err(|source| LaunchFileError::Npy { path: path.to_owned(), source })?;
    Ok((Some(array.dtype), array.bytes))
}

fn random_bytes(random: Random, dtype: DataType, elements: usize) -> Vec<u8> {
    let mut sequence = Sequence::new(random.seed);
    // 53 bits, the significand of a double.
    let mut unit = move || (sequence.next() >> 11) as f64 / (1u64 << 53) as f64;
    let mut bits_sequence = Sequence::new(random.seed);
    let (low, high) = (random.low.unwrap_or(-1.0), random.high.unwrap_or(1.0));
    let mut element = || match random.distribution {
        Distribution::Uniform => dtype.encode(low + (high - low) * unit()),
        Distribution::Normal => {
            // Box-Muller transform; the argument of the logarithm is never zero.
            let radius = (-2.0 * (1.0 - unit()).ln()).sqrt();
            let angle = std::f64::consts::TAU * unit();
            dtype.encode(random.deviation.unwrap_or(1.0) * radius * angle.cos())
        }
        Distribution::Bits => {
            let mask = u64::MAX >> (64 - dtype.bits());
            (bits_sequence.next() & mask).to_le_bytes()[..dtype.bytes()].to_vec()
        }
    };
    (0..elements).flat_map(|_| element()).collect()
}
