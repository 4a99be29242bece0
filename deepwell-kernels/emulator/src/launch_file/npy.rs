//! NumPy's array files, versions 1.0 to 3.0, in C order.
//!
//! Layout: `\x93NUMPY`, version, header length, header (a Python dictionary with `descr`,
//! `fortran_order` and `shape`), blanks, a newline, elements. (NumPy Enhancement Proposal 1.)

use thiserror::Error;

use super::data_type::DataType;

const MAGIC: &[u8] = b"\x93NUMPY";
/// Alignment of the first element in the file.
const ALIGNMENT: usize = 64;

/// Contents of a `.npy` file.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Element type in NumPy; small formats are unsigned integers.
    pub dtype: DataType,
    /// Elements along each dimension.
    pub shape: Vec<u64>,
    /// The elements; the last dimension is contiguous.
    pub bytes: Vec<u8>,
}

/// Errors of the parser.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NpyError {
    /// The file is not a `.npy` file.
    #[error("expected a `.npy` file, which begins with `\\x93NUMPY`, got other bytes")]
    NotNpy,
    /// The header is truncated or malformed.
    #[error("expected a header with `descr`, `fortran_order` and `shape`, got `{0}`")]
    Header(String),
    /// The element type is not supported.
    #[error(
        "expected little-endian integers, booleans or floats of 1 to 8 bytes, got `{0}`\n\
         hint: in Python, `array.astype('<f4')` or `.view('u2')`"
    )]
    Type(String),
    /// The array is in Fortran order.
    #[error("expected an array in C order, got Fortran order\nhint: `numpy.ascontiguousarray`")]
    FortranOrder,
    /// The number of bytes differs from the header.
    #[error("expected {expected} bytes of elements, got {got}")]
    Length {
        /// Bytes according to the header.
        expected: u64,
        /// Bytes in the file.
        got: u64,
    },
}

impl Array {
    /// Parses a `.npy` file.
    ///
    /// # Errors
    /// A file with another format, order or type.
    pub fn parse(file: &[u8]) -> Result<Array, NpyError> {
        let rest = file.strip_prefix(MAGIC).ok_or(NpyError::NotNpy)?;
        let (header, elements) = split_header(rest).ok_or(NpyError::NotNpy)?;
        let refuse = || NpyError::Header(header.trim().to_owned());
        let descr = value_of(header, "descr").ok_or_else(refuse)?;
        let dtype = data_type(descr.trim_matches(['\'', '"']))
            .ok_or_else(|| NpyError::Type(descr.trim_matches(['\'', '"']).to_owned()))?;
        match value_of(header, "fortran_order").ok_or_else(refuse)? {
            "False" => {}
            "True" => return Err(NpyError::FortranOrder),
            _ => return Err(refuse()),
        }
        let shape = value_of(header, "shape").ok_or_else(refuse)?;
        let shape: Vec<u64> = shape
            .trim_matches(['(', ')'])
            .split(',')
            .map(str::trim)
            .filter(|extent| !extent.is_empty())
            .map(|extent| extent.parse().map_err(|_| refuse()))
            .collect::<Result<_, _>>()?;
        let expected = shape
            .iter()
            .try_fold(dtype.bytes() as u64, |bytes, extent| bytes.checked_mul(*extent))
            .ok_or_else(refuse)?;
        if elements.len() as u64 != expected {
            return Err(NpyError::Length { expected, got: elements.len() as u64 });
        }
        Ok(Array { dtype, shape, bytes: elements.to_vec() })
    }

    /// Serializes to `.npy`, version 1.0.
    pub fn to_npy(&self) -> Vec<u8> {
        let (kind, bytes) = self.dtype.numpy();
        let order = if bytes == 1 { '|' } else { '<' };
        let extents: String = self.shape.iter().map(|extent| format!("{extent}, ")).collect();
        let shape = match self.shape.len() {
            0 | 1 => extents.trim_end(),
            _ => extents.trim_end_matches(", "),
        };
        let mut header = format!(
            "{{'descr': '{order}{kind}{bytes}', 'fortran_order': False, 'shape': ({shape}), }}"
        );
        let unpadded = MAGIC.len() + 4 + header.len() + 1;
        header.push_str(&" ".repeat(unpadded.next_multiple_of(ALIGNMENT) - unpadded));
        header.push('\n');
        let length = header.len() as u16;
        [MAGIC, &[1, 0], &length.to_le_bytes(), header.as_bytes(), &self.bytes].concat()
    }
}

/// Splits off the header's text.
fn split_header(rest: &[u8]) -> Option<(&str, &[u8])> {
    let (version, rest) = rest.split_at_checked(2)?;
    let (length, rest) = match version[0] {
        1 => {
            let (length, rest) = rest.split_first_chunk::<2>()?;
            (usize::from(u16::from_le_bytes(*length)), rest)
        }
        2 | 3 => {
            let (length, rest) = rest.split_first_chunk::<4>()?;
            (u32::from_le_bytes(*length) as usize, rest)
        }
        _ => return None,
    };
    let (header, elements) = rest.split_at_checked(length)?;
    Some((std::str::from_utf8(header).ok()?, elements))
}

/// Returns the text of a key's value in a dictionary of strings, booleans and tuples.
fn value_of<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let at = header.find(&format!("'{key}'")).or_else(|| header.find(&format!("\"{key}\"")))?;
    let value = header[at + key.len() + 2..].trim_start().strip_prefix(':')?.trim_start();
    let end = match value.chars().next()? {
        '(' => value.find(')')? + 1,
        quote @ ('\'' | '"') => value[1..].find(quote)? + 2,
        _ => value.find([',', '}'])?,
    };
    Some(value[..end].trim())
}

fn data_type(descr: &str) -> Option<DataType> {
    let mut characters = descr.chars();
    let order = characters.next()?;
    let kind = characters.next()?;
    let bytes: usize = characters.as_str().parse().ok()?;
    // A single byte has no byte order.
    let known = order == '<' || order == '|' && bytes == 1;
    known.then(|| DataType::of_numpy(kind, bytes)).flatten()
}
