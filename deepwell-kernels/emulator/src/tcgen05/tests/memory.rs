//! Memory of a CTA pair that knows what was written.

use crate::error::Fault;
use crate::place::{Memory, Place, TENSOR_COLUMNS, TENSOR_LANES};

const SHARED_BYTES: usize = 227 * 1024;
const TENSOR_BYTES: usize = (TENSOR_LANES * TENSOR_COLUMNS * 4) as usize;

pub(super) struct PairMemory {
    spaces: Vec<Vec<Option<u8>>>,
    pub(super) accesses: u64,
}

impl PairMemory {
    pub(super) fn new() -> PairMemory {
        let spaces = [SHARED_BYTES, SHARED_BYTES, TENSOR_BYTES, TENSOR_BYTES];
        PairMemory { spaces: spaces.map(|bytes| vec![None; bytes]).to_vec(), accesses: 0 }
    }

    fn slice(&mut self, place: Place, bytes: usize) -> Result<&mut [Option<u8>], Fault> {
        self.accesses += 1;
        let (space, offset) = match place {
            Place::Shared { rank, offset } => (rank, offset as usize),
            Place::Tensor { rank, lane, column } => {
                assert!(column as usize * 4 + bytes <= TENSOR_COLUMNS as usize * 4);
                (2 + rank, ((lane * TENSOR_COLUMNS + column) * 4) as usize)
            }
            Place::Global(_) => panic!("tensor cores do not reach global memory"),
        };
        let space = &mut self.spaces[space as usize];
        space.get_mut(offset..offset + bytes).ok_or_else(|| Fault::new("test-range", "outside"))
    }

    pub(super) fn write_byte(&mut self, rank: u32, offset: u32, byte: u8) {
        self.spaces[rank as usize][offset as usize] = Some(byte);
    }

    pub(super) fn byte(&self, rank: u32, offset: u32) -> u8 {
        self.spaces[rank as usize][offset as usize].unwrap_or(0)
    }

    pub(super) fn word(&mut self, rank: u32, lane: u32, column: u32) -> Result<u32, Fault> {
        let mut bytes = [0; 4];
        self.read(Place::Tensor { rank, lane, column }, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    pub(super) fn write_word(&mut self, rank: u32, lane: u32, column: u32, word: u32) {
        self.write(Place::Tensor { rank, lane, column }, &word.to_le_bytes()).unwrap();
    }
}

impl Memory for PairMemory {
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), Fault> {
        let from = self.slice(place, bytes.len())?;
        for (to, from) in bytes.iter_mut().zip(from) {
            *to = from.ok_or_else(|| Fault::new("test-unwritten", place.to_string()))?;
        }
        Ok(())
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), Fault> {
        for (to, from) in self.slice(place, bytes.len())?.iter_mut().zip(bytes) {
            *to = Some(*from);
        }
        Ok(())
    }
}

/// A sequence of numbers that looks random (splitmix64).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 33) as u32 % end
    }
}
