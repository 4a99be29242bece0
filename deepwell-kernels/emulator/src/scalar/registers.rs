//! Registers of one warp.

use crate::decode::{PredicateSource, Program, Register, Source};

/// Lanes of a warp.
pub const LANES: usize = 32;

/// Registers of one warp: 32 lanes per register.
#[derive(Clone, Debug)]
pub struct Registers {
    /// Predicates; bit `i` is lane `i`.
    pub predicates: Vec<u32>,
    /// Registers of up to 32 bits.
    pub words: Vec<[u32; LANES]>,
    /// Registers of 64 bits.
    pub longs: Vec<[u64; LANES]>,
    /// The carry flag of each lane.
    pub carry: u32,
}

impl Registers {
    /// Creates the registers of `program`, set to zero.
    pub fn new(program: &Program) -> Registers {
        Registers::with_counts(program.predicate_count, program.word_count, program.long_count)
    }

    /// Creates registers set to zero.
    pub fn with_counts(predicates: u32, words: u32, longs: u32) -> Registers {
        Registers {
            predicates: vec![0; predicates as usize],
            words: vec![[0; LANES]; words as usize],
            longs: vec![[0; LANES]; longs as usize],
            carry: 0,
        }
    }

    /// Returns the mask of lanes in which `source` is true.
    #[inline]
    pub fn predicate(&self, source: PredicateSource) -> u32 {
        match source {
            PredicateSource::Register { index, negated: false } => self.predicates[index as usize],
            PredicateSource::Register { index, negated: true } => !self.predicates[index as usize],
            PredicateSource::Constant(value) => {
                if value {
                    u32::MAX
                } else {
                    0
                }
            }
        }
    }

    /// Writes a predicate in the lanes of `mask`.
    #[inline]
    pub fn set_predicate(&mut self, index: u32, values: u32, mask: u32) {
        let row = &mut self.predicates[index as usize];
        *row = (*row & !mask) | (values & mask);
    }

    /// Returns one lane of a value, zero-extended from the register's width.
    #[inline]
    pub fn lane(&self, source: Source, lane: usize) -> u64 {
        match source {
            Source::Register(Register::Half(index) | Register::Word(index)) => {
                u64::from(self.words[index as usize][lane])
            }
            Source::Register(Register::Long(index)) => self.longs[index as usize][lane],
            Source::Immediate(value) => value,
        }
    }

    /// Writes one lane, truncated to the register's width.
    #[inline]
    pub fn set_lane(&mut self, register: Register, lane: usize, value: u64) {
        match register {
            Register::Half(index) => {
                self.words[index as usize][lane] = (value & 0xffff) as u32;
            }
            Register::Word(index) => self.words[index as usize][lane] = value as u32,
            Register::Long(index) => self.longs[index as usize][lane] = value,
        }
    }

    /// Returns all lanes of a value, truncated to 32 bits.
    #[inline]
    pub fn row32(&self, source: Source) -> [u32; LANES] {
        match source {
            Source::Register(Register::Half(index) | Register::Word(index)) => {
                self.words[index as usize]
            }
            Source::Register(Register::Long(index)) => {
                let row = &self.longs[index as usize];
                std::array::from_fn(|lane| row[lane] as u32)
            }
            Source::Immediate(value) => [value as u32; LANES],
        }
    }

    /// Returns all lanes of a value, zero-extended from the register's width.
    #[inline]
    pub fn row64(&self, source: Source) -> [u64; LANES] {
        match source {
            Source::Register(Register::Half(index) | Register::Word(index)) => {
                let row = &self.words[index as usize];
                std::array::from_fn(|lane| u64::from(row[lane]))
            }
            Source::Register(Register::Long(index)) => self.longs[index as usize],
            Source::Immediate(value) => [value; LANES],
        }
    }

    /// Writes the lanes of `mask`, truncated to the register's width.
    #[inline]
    pub fn set_row32(&mut self, register: Register, values: &[u32; LANES], mask: u32) {
        match register {
            Register::Half(index) => {
                let row = &mut self.words[index as usize];
                for lane in 0..LANES {
                    if mask >> lane & 1 == 1 {
                        row[lane] = values[lane] & 0xffff;
                    }
                }
            }
            Register::Word(index) => blend(&mut self.words[index as usize], values, mask),
            Register::Long(index) => {
                let row = &mut self.longs[index as usize];
                for lane in 0..LANES {
                    if mask >> lane & 1 == 1 {
                        row[lane] = u64::from(values[lane]);
                    }
                }
            }
        }
    }

    /// Writes the lanes of `mask`, truncated to the register's width.
    #[inline]
    pub fn set_row64(&mut self, register: Register, values: &[u64; LANES], mask: u32) {
        match register {
            Register::Long(index) => blend(&mut self.longs[index as usize], values, mask),
            _ => {
                let low: [u32; LANES] = std::array::from_fn(|lane| values[lane] as u32);
                self.set_row32(register, &low, mask);
            }
        }
    }
}

#[inline]
fn blend<T: Copy>(row: &mut [T; LANES], values: &[T; LANES], mask: u32) {
    if mask == u32::MAX {
        *row = *values;
        return;
    }
    for lane in 0..LANES {
        if mask >> lane & 1 == 1 {
            row[lane] = values[lane];
        }
    }
}
