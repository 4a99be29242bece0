//! Views of a program's values in place.

use std::collections::HashMap;

use deepwell_ir::{ByteRange, Call, DType, Instance, Program, ValueId};
use deepwell_kernels::{Backend, KernelError};

/// Number of compared GEMM outputs, or elements of a parameter; smaller tensors are compared whole.
pub const SAMPLES: usize = 64;

/// Bytes of a value in the arena, with their name, type and shape.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    /// Name of the value.
    pub(super) name: &'a str,
    /// Row-major shape.
    pub(super) shape: &'a [usize],
    /// Type of the elements.
    pub(super) dtype: DType,
    /// The elements, little endian.
    pub(super) bytes: &'a [u8],
}

/// Memory that the host may read while one call is checked: the whole arena in place if the host
/// sees the backend's memory, otherwise copies of the operands of that call.
pub(super) struct Memory<'a> {
    backend: &'a dyn Backend,
    slot: u32,
    copies: HashMap<ValueId, Vec<u8>>,
}

impl<'a> Memory<'a> {
    /// Copies the operands of `call` to the host unless the host sees the backend's memory.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn of_call(
        program: &Program,
        call: &Call,
        instance: Instance,
        backend: &'a mut dyn Backend,
    ) -> Result<Memory<'a>, KernelError> {
        let mut copies = HashMap::new();
        for id in call.operands.iter().map(|operand| operand.value) {
            let range = program.value(id).range_in(instance.slot);
            if backend.host_view(range).is_none() && !copies.contains_key(&id) {
                let mut bytes = vec![0; range.bytes];
                backend.read(range, &mut bytes)?;
                copies.insert(id, bytes);
            }
        }
        Ok(Memory { backend, slot: instance.slot, copies })
    }

    /// Byte range of a value while the call runs.
    pub(super) fn range(&self, program: &Program, id: ValueId) -> ByteRange {
        program.value(id).range_in(self.slot)
    }
}

/// Returns a view of a value.
///
/// # Errors
/// The value is no operand of the call under check, on a backend whose memory the host cannot see.
pub(super) fn view<'a>(
    program: &'a Program,
    id: ValueId,
    memory: &'a Memory<'_>,
) -> Result<View<'a>, KernelError> {
    let value = program.value(id);
    let copied = memory.copies.get(&id).map(Vec::as_slice);
    let bytes = copied.or_else(|| memory.backend.host_view(memory.range(program, id))).ok_or_else(
        || KernelError::Run {
            call: "audit".to_string(),
            what: format!("expected an operand of the checked call, got `{}`", value.name),
        },
    )?;
    Ok(View { name: &value.name, shape: &value.shape, dtype: value.dtype, bytes })
}

impl<'a> View<'a> {
    /// Number of matrices of a stack; none for a single matrix.
    pub(super) fn stack(&self) -> Option<usize> {
        (self.shape.len() == 3).then(|| self.shape[0])
    }

    /// Returns matrix `index` along the first dimension if the value is a stack, otherwise the
    /// value.
    pub(super) fn part(self, index: usize, is_stack: bool) -> View<'a> {
        match (self.shape, is_stack) {
            ([count, shape @ ..], true) => {
                let bytes = self.bytes.len() / (*count).max(1);
                View { shape, bytes: &self.bytes[index * bytes..][..bytes], ..self }
            }
            _ => self,
        }
    }
}

impl View<'_> {
    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The largest finite magnitude of an F32 or BF16 value.
    pub(super) fn amax(&self) -> f32 {
        let magnitudes = (0..self.len()).map(|index| self.float(index).abs());
        magnitudes.filter(|x| x.is_finite()).fold(0.0, f32::max)
    }

    /// Element `index` of an F32 or BF16 value.
    pub(super) fn float(&self, index: usize) -> f32 {
        if self.dtype == DType::Bf16 {
            let bits = u16::from_le_bytes([self.bytes[2 * index], self.bytes[2 * index + 1]]);
            return f32::from_bits(u32::from(bits) << 16);
        }
        let mut word = [0; 4];
        word.copy_from_slice(&self.bytes[4 * index..4 * index + 4]);
        f32::from_le_bytes(word)
    }

    /// Element `index` of an I32 value; 0 if the element is negative.
    pub(super) fn index(&self, index: usize) -> usize {
        let mut word = [0; 4];
        word.copy_from_slice(&self.bytes[4 * index..4 * index + 4]);
        usize::try_from(i32::from_le_bytes(word)).unwrap_or(0)
    }

    /// Element `index` of a U64 value.
    pub(super) fn counter(&self, index: usize) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.bytes[8 * index..8 * index + 8]);
        u64::from_le_bytes(word)
    }

    /// Coordinate of element `index`, in the form used by messages.
    pub(super) fn coordinate(&self, index: usize) -> String {
        let mut rest = index;
        let mut coordinate: Vec<String> = Vec::with_capacity(self.shape.len());
        for &size in self.shape.iter().rev() {
            coordinate.push((rest % size.max(1)).to_string());
            rest /= size.max(1);
        }
        coordinate.reverse();
        format!("[{}]", coordinate.join(", "))
    }
}

/// Returns the sampled elements of a tensor of `len`, ascending: the first, the last, and others
/// spread by the golden ratio from a start derived from the name, so that tensors of one shape are
/// sampled at different coordinates.
pub(super) fn sample_indices(name: &str, len: usize) -> Vec<usize> {
    if len <= SAMPLES {
        return (0..len).collect();
    }
    let mut place = fingerprint(name.as_bytes());
    let mut indices = vec![0, len - 1];
    // Neighbours may fall together where `len` is little more than `SAMPLES`.
    let mut tries = 0;
    while indices.len() < SAMPLES {
        // 2^64 over the golden ratio.
        place = place.wrapping_add(0x9E37_79B9_7F4A_7C15);
        tries += 1;
        let spread = ((u128::from(place) * len as u128) >> 64) as usize;
        let index = if tries <= 4 * SAMPLES { spread } else { tries % len };
        if !indices.contains(&index) {
            indices.push(index);
        }
    }
    indices.sort_unstable();
    indices
}

/// Hash of the bytes: a changed byte leaves it unchanged with probability 2^-64.
pub(super) fn fingerprint(bytes: &[u8]) -> u64 {
    // FNV-1a's constants, on words instead of bytes, with the high half folded down: a product
    // alone carries nothing from high bits to low bits.
    let mix = |hash: u64, word: u64| {
        let product = (hash ^ word).wrapping_mul(0x0000_0100_0000_01B3);
        product ^ (product >> 32)
    };
    let words = bytes.chunks_exact(8);
    let tail = words.remainder();
    let mut hash = 0xCBF2_9CE4_8422_2325 ^ bytes.len() as u64;
    for word in words {
        let mut array = [0; 8];
        array.copy_from_slice(word);
        hash = mix(hash, u64::from_le_bytes(array));
    }
    tail.iter().fold(hash, |hash, &byte| mix(hash, u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_distinct_and_hold_both_ends() {
        for len in [0, 1, 63, 64, 65, 66, 100, 1000, 1 << 33] {
            let indices = sample_indices("layers.0.mlp", len);
            assert_eq!(indices.len(), len.min(SAMPLES), "of {len}");
            assert!(indices.windows(2).all(|pair| pair[0] < pair[1]), "of {len}: {indices:?}");
            if len > 0 {
                assert_eq!((indices[0], indices[indices.len() - 1]), (0, len - 1));
            }
        }
    }

    #[test]
    fn every_byte_and_the_length_count() {
        let bytes: Vec<u8> = (0..29).collect();
        let whole = fingerprint(&bytes);
        for index in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[index] ^= 1 << bit;
                assert_ne!(fingerprint(&changed), whole, "byte {index}, bit {bit}");
            }
        }
        assert_ne!(fingerprint(&[0; 8]), fingerprint(&[0; 16]));
    }

    #[test]
    fn coordinates_are_row_major() {
        let view = View { name: "x", shape: &[3, 5], dtype: DType::E4m3, bytes: &[0; 15] };
        assert_eq!((view.coordinate(0), view.coordinate(9)), ("[0, 0]".into(), "[1, 4]".into()));
    }
}
