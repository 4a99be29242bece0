//! Compares two tensors of one type and shape, element by element, in pieces of 1 MiB.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use half::{bf16, f16};

use crate::error::CheckpointError;
use crate::io::PIECE_BYTES;
use crate::load::{Checkpoint, StoredTensor};
use crate::manifest::TensorEntry;
use crate::tensor::CkptDtype;

/// Distance between two tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Distance {
    /// Elements whose bits differ.
    pub(super) differing: u64,
    /// Largest absolute difference of values, and its element index.
    pub(super) max_abs: f64,
    pub(super) max_abs_at: u64,
    /// Sums of squares: of the differences, and of the first tensor.
    square_of_difference: f64,
    square_of_first: f64,
}

impl Distance {
    /// Euclidean norm of the difference relative to the norm of the first tensor.
    pub(super) fn relative(&self) -> Option<f64> {
        (self.square_of_first > 0.0)
            .then(|| (self.square_of_difference / self.square_of_first).sqrt())
    }

    /// Adds the elements from index `first` on.
    fn add(&mut self, dtype: CkptDtype, first: u64, a: &[u8], b: &[u8]) {
        let width = dtype.element_bytes();
        for (index, (a, b)) in a.chunks_exact(width).zip(b.chunks_exact(width)).enumerate() {
            let (x, y) = (value(dtype, a), value(dtype, b));
            self.square_of_first += x * x;
            if a == b {
                continue;
            }
            self.differing += 1;
            let off = (x - y).abs();
            self.square_of_difference += off * off;
            if off > self.max_abs {
                (self.max_abs, self.max_abs_at) = (off, first + index as u64);
            }
        }
    }
}

/// Reads both tensors together, verifies both checksums and compares the elements.
pub(super) fn compare(
    [a, b]: [(&Checkpoint, &StoredTensor); 2],
    buffers: &mut [Vec<u8>; 2],
) -> Result<Distance, CheckpointError> {
    let dtype = a.1.dtype;
    let ([of_a], [of_b]) = (&a.1.entries[..], &b.1.entries[..]) else {
        let read = |(checkpoint, tensor): (&Checkpoint, &StoredTensor)| {
            checkpoint.read(tensor.section, &tensor.name)
        };
        let mut distance = Distance::default();
        distance.add(dtype, 0, &read(a)?, &read(b)?);
        return Ok(distance);
    };
    let a = (a.0, &a.0.entries()[*of_a]);
    let b = (b.0, &b.0.entries()[*of_b]);
    let mut readers = [Reader::open(a.0, a.1)?, Reader::open(b.0, b.1)?];
    let mut distance = Distance::default();
    let mut position = 0;
    while position < a.1.bytes {
        let length = PIECE_BYTES.min((a.1.bytes - position) as usize);
        for (reader, buffer) in readers.iter_mut().zip(buffers.iter_mut()) {
            buffer.resize(PIECE_BYTES, 0);
            reader.read(&mut buffer[..length])?;
        }
        let first = position / dtype.element_bytes() as u64;
        distance.add(dtype, first, &buffers[0][..length], &buffers[1][..length]);
        position += length as u64;
    }
    readers.into_iter().try_for_each(Reader::finish)?;
    Ok(distance)
}

/// Reads a tensor once, from its first byte to its last.
struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    entry: &'a TensorEntry,
    file: File,
    hasher: blake3::Hasher,
}

impl<'a> Reader<'a> {
    fn open(checkpoint: &'a Checkpoint, entry: &'a TensorEntry) -> Result<Self, CheckpointError> {
        let path = checkpoint.path().join(&entry.file);
        let mut file = File::open(&path).map_err(CheckpointError::io("open", &path))?;
        file.seek(SeekFrom::Start(entry.begin)).map_err(CheckpointError::io("read", &path))?;
        Ok(Reader { checkpoint, entry, file, hasher: blake3::Hasher::new() })
    }

    fn read(&mut self, piece: &mut [u8]) -> Result<(), CheckpointError> {
        let path = || self.checkpoint.path().join(&self.entry.file);
        self.file.read_exact(piece).map_err(|cause| CheckpointError::io("read", path())(cause))?;
        self.hasher.update(piece);
        Ok(())
    }

    fn finish(self) -> Result<(), CheckpointError> {
        let got = self.hasher.finalize().to_hex().to_string();
        if got == self.entry.blake3 {
            return Ok(());
        }
        Err(CheckpointError::TensorChecksum {
            path: self.checkpoint.path().join(&self.entry.file),
            section: self.entry.section,
            name: self.entry.name.clone(),
            offset: self.entry.begin,
            bytes: self.entry.bytes,
            expected: self.entry.blake3.clone(),
            got,
        })
    }
}

/// Value of an element. Integers beyond 2^53 are rounded; checkpoints hold no non-finite values.
fn value(dtype: CkptDtype, bytes: &[u8]) -> f64 {
    let mut word = [0u8; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(word);
    match dtype {
        CkptDtype::F64 => f64::from_bits(bits),
        CkptDtype::F32 => f64::from(f32::from_bits(bits as u32)),
        CkptDtype::F16 => f16::from_bits(bits as u16).to_f64(),
        CkptDtype::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        CkptDtype::E4M3 => small_float(bits as u8, 3, 7),
        CkptDtype::E5M2 => small_float(bits as u8, 2, 15),
        CkptDtype::E8M0 => (bits as f64 - 127.0).exp2(),
        CkptDtype::U8 | CkptDtype::U16 | CkptDtype::U32 | CkptDtype::U64 => bits as f64,
        CkptDtype::I8 => f64::from(bits as u8 as i8),
        CkptDtype::I16 => f64::from(bits as u16 as i16),
        CkptDtype::I32 => f64::from(bits as u32 as i32),
        CkptDtype::I64 => bits as i64 as f64,
    }
}

/// A finite float with a sign, an exponent and `mantissa_bits`.
fn small_float(code: u8, mantissa_bits: u32, bias: i32) -> f64 {
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let exponent = i32::from((code & 0x7F) >> mantissa_bits);
    let magnitude = match exponent {
        0 => mantissa * f64::from(1 - bias).exp2(),
        _ => (1.0 + mantissa) * f64::from(exponent - bias).exp2(),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_elements() {
        let check = |dtype: CkptDtype, bytes: &[u8], expected: f64| {
            assert_eq!(value(dtype, bytes), expected, "{dtype} {bytes:?}");
        };
        check(CkptDtype::F64, &(-2.5f64).to_le_bytes(), -2.5);
        check(CkptDtype::F32, &1.5f32.to_le_bytes(), 1.5);
        check(CkptDtype::F16, &f16::from_f32(0.25).to_le_bytes(), 0.25);
        check(CkptDtype::Bf16, &bf16::from_f32(-3.0).to_le_bytes(), -3.0);
        // Largest, smallest, one and minus one, from the OCP specification of FP8.
        check(CkptDtype::E4M3, &[0x7E], 448.0);
        check(CkptDtype::E4M3, &[0x01], 2f64.powi(-9));
        check(CkptDtype::E4M3, &[0x38], 1.0);
        check(CkptDtype::E4M3, &[0xB8], -1.0);
        check(CkptDtype::E5M2, &[0x7B], 57344.0);
        check(CkptDtype::E5M2, &[0x01], 2f64.powi(-16));
        check(CkptDtype::E8M0, &[127], 1.0);
        check(CkptDtype::E8M0, &[0], 2f64.powi(-127));
        check(CkptDtype::E8M0, &[254], 2f64.powi(127));
        check(CkptDtype::U8, &[255], 255.0);
        check(CkptDtype::I8, &[255], -1.0);
        check(CkptDtype::I16, &(-300i16).to_le_bytes(), -300.0);
        check(CkptDtype::I32, &(-70_000i32).to_le_bytes(), -70_000.0);
        check(CkptDtype::I64, &(-5i64).to_le_bytes(), -5.0);
        check(CkptDtype::U16, &300u16.to_le_bytes(), 300.0);
        check(CkptDtype::U32, &70_000u32.to_le_bytes(), 70_000.0);
        check(CkptDtype::U64, &5u64.to_le_bytes(), 5.0);
    }
}
