//! `tcgen05.ld` and `tcgen05.st`: transfers between tensor memory and registers.
//!
//! Both instructions access the words of a lane in order. Word `w` is column `w`; with `.pack::16b`
//! and `.unpack::16b`, the low halves of columns `2 w` and `2 w + 1`. Register `r` of thread `t` of
//! a warp holds:
//!
//! | shape | lane | word |
//! |---|---|---|
//! | `.32x32b` | `t` | `r` |
//! | `.16x64b` | `t / 4 + 8 * (t % 2)` | `t / 2 % 2 + 2 * r` |
//! | `.16x128b` | `t / 4 + 8 * (r % 2)` | `t % 4 + 4 * (r / 2)` |
//! | `.16x256b` | `t / 4 + 8 * (r / 2 % 2)` | `2 * (t % 4) + r % 2 + 8 * (r / 4)` |
//! | `.16x32bx2` | `t % 16`, of the second access if `t >= 16` | `r` |

use super::address::TensorAddress;
use crate::decode::Tcgen05Shape;
use crate::error::Fault;
use crate::place::{Memory, TENSOR_COLUMNS};

/// Registers of one warp: 32 lanes for each register.
pub type WarpRegisters = Vec<[u32; 32]>;

/// Treatment of an address whose lane belongs to another warp.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaneBits {
    /// A fault, as in the instruction set: a warp reaches only the 32 lanes of its position among
    /// four warps.
    #[default]
    Checked,
    /// Bits 5 and 6 of the lane are replaced by the warp's, as hardware is said to do.
    Ignored,
}

/// A `tcgen05.ld` or `tcgen05.st` with its operand values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisterAccess {
    /// `.shape`.
    pub shape: Tcgen05Shape,
    /// `.num`.
    pub repeat: u32,
    /// `.pack::16b`, `.unpack::16b`.
    pub halves: bool,
    /// Offset from the address to the second half of `.16x32bx2`.
    pub half_offset: u32,
    /// Tensor-memory address.
    pub address: u32,
    /// Rank of the CTA.
    pub rank: u32,
    /// Index of the warp in its CTA.
    pub warp: u32,
    /// Treatment of another warp's lanes.
    pub lane_bits: LaneBits,
}

/// A legal access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisterPlan {
    access: RegisterAccess,
    /// First lane and column of each access; two for `.16x32bx2`.
    starts: Vec<TensorAddress>,
}

impl RegisterAccess {
    /// Registers per thread.
    pub fn registers(&self) -> u32 {
        self.shape.registers() * self.repeat
    }

    /// Words per lane of one access.
    fn words(&self) -> u32 {
        match self.shape {
            Tcgen05Shape::S32x32b | Tcgen05Shape::S16x32bx2 => self.repeat,
            Tcgen05Shape::S16x64b => 2 * self.repeat,
            Tcgen05Shape::S16x128b => 4 * self.repeat,
            Tcgen05Shape::S16x256b => 8 * self.repeat,
        }
    }

    /// Columns per lane of one access.
    pub fn columns(&self) -> u32 {
        self.words() * if self.halves { 2 } else { 1 }
    }

    /// Checks that the instruction is legal.
    ///
    /// # Errors
    /// `tensor-access-repeat`, `tensor-lane-of-another-warp`, `tensor-lane-alignment`,
    /// `tensor-memory-out-of-range`.
    pub fn check(&self) -> Result<RegisterPlan, Fault> {
        if !self.repeat.is_power_of_two() || self.registers() > 128 {
            return Err(Fault::new(
                "tensor-access-repeat",
                format!(
                    "expected a power of two and at most 128 registers, got {:?} `.x{}`",
                    self.shape, self.repeat
                ),
            ));
        }
        let mut starts = vec![self.start(self.address)?];
        if self.shape == Tcgen05Shape::S16x32bx2 {
            starts.push(self.start(self.address.wrapping_add(self.half_offset))?);
        }
        Ok(RegisterPlan { access: *self, starts })
    }

    fn start(&self, bits: u32) -> Result<TensorAddress, Fault> {
        let mut address = TensorAddress::decode(bits)?;
        let own = self.warp % 4 * 32;
        if self.lane_bits == LaneBits::Ignored {
            address.lane = address.lane % 32 + own;
        }
        if address.lane / 32 != self.warp % 4 {
            return Err(Fault::new(
                "tensor-lane-of-another-warp",
                format!("{address}: warp {} reaches lanes {own} to {}", self.warp, own + 31),
            ));
        }
        let allowed: &[u32] =
            if self.shape == Tcgen05Shape::S32x32b { &[own] } else { &[own, own + 16] };
        address.check_lane("the access", allowed)?;
        if self.columns() > TENSOR_COLUMNS {
            return Err(Fault::new(
                "tensor-memory-out-of-range",
                format!("{} columns: there are {TENSOR_COLUMNS}", self.columns()),
            ));
        }
        address.check_columns("the access", self.columns())?;
        Ok(address)
    }

    /// Lane (relative to the first) and word of a register of a thread.
    fn position(&self, thread: u32, register: u32) -> (u32, u32) {
        match self.shape {
            Tcgen05Shape::S32x32b => (thread, register),
            Tcgen05Shape::S16x32bx2 => (thread % 16, register),
            Tcgen05Shape::S16x64b => (thread / 4 + 8 * (thread % 2), thread / 2 % 2 + 2 * register),
            Tcgen05Shape::S16x128b => {
                (thread / 4 + 8 * (register % 2), thread % 4 + 4 * (register / 2))
            }
            Tcgen05Shape::S16x256b => (
                thread / 4 + 8 * (register / 2 % 2),
                2 * (thread % 4) + register % 2 + 8 * (register / 4),
            ),
        }
    }

    fn lanes(&self) -> u32 {
        if self.shape == Tcgen05Shape::S32x32b { 32 } else { 16 }
    }
}

impl RegisterPlan {
    /// Returns first lane, lanes, first column and columns of each access.
    pub fn extents(&self) -> impl Iterator<Item = (u32, u32, u32, u32)> + '_ {
        let (lanes, columns) = (self.access.lanes(), self.access.columns());
        self.starts.iter().map(move |start| (start.lane, lanes, start.column, columns))
    }

    /// Calls `each` with the index of a word over all accesses and lanes, and with the register and
    /// the thread of the word.
    fn for_each(&self, mut each: impl FnMut(usize, usize, usize)) {
        let access = &self.access;
        for thread in 0..32 {
            let second = access.shape == Tcgen05Shape::S16x32bx2 && thread >= 16;
            let first = if second { access.lanes() } else { 0 };
            for register in 0..access.registers() {
                let (lane, word) = access.position(thread, register);
                let index = (first + lane) * access.words() + word;
                each(index as usize, register as usize, thread as usize);
            }
        }
    }

    /// Returns the addresses of all lanes of all accesses, in the order of
    /// [`RegisterPlan::for_each`].
    fn lanes(&self) -> impl Iterator<Item = TensorAddress> + '_ {
        let lanes = self.access.lanes();
        self.starts.iter().flat_map(move |start| {
            (0..lanes).map(move |lane| TensorAddress { lane: start.lane + lane, ..*start })
        })
    }

    /// `tcgen05.ld`.
    ///
    /// # Errors
    /// The errors of `memory`.
    pub fn load(&self, memory: &mut dyn Memory) -> Result<WarpRegisters, Fault> {
        let access = &self.access;
        let mut words = Vec::with_capacity(self.starts.len() * 32 * access.words() as usize);
        let mut data = vec![0; access.columns() as usize * 4];
        for address in self.lanes() {
            memory.read(address.place(access.rank), &mut data)?;
            if access.halves {
                let pairs = data.as_chunks::<8>().0.iter();
                words.extend(pairs.map(|p| u32::from_le_bytes([p[0], p[1], p[4], p[5]])));
            } else {
                let chunks = data.as_chunks::<4>().0.iter();
                words.extend(chunks.map(|word| u32::from_le_bytes(*word)));
            }
        }
        let mut registers = vec![[0; 32]; access.registers() as usize];
        self.for_each(|word, register, thread| registers[register][thread] = words[word]);
        Ok(registers)
    }

    /// `tcgen05.st`. `.unpack::16b` writes zeros to the upper halves of columns.
    ///
    /// # Errors
    /// The errors of `memory`; `tensor-access-registers` for a wrong number of registers.
    pub fn store(&self, registers: &[[u32; 32]], memory: &mut dyn Memory) -> Result<(), Fault> {
        let access = &self.access;
        if registers.len() != access.registers() as usize {
            return Err(Fault::new(
                "tensor-access-registers",
                format!("expected {} registers, got {}", access.registers(), registers.len()),
            ));
        }
        let lanes = self.starts.len() * access.lanes() as usize;
        let mut words = vec![0; lanes * access.words() as usize];
        self.for_each(|word, register, thread| words[word] = registers[register][thread]);
        let mut data = Vec::with_capacity(access.columns() as usize * 4);
        for (address, words) in self.lanes().zip(words.chunks_exact(access.words() as usize)) {
            data.clear();
            for &word in words {
                if access.halves {
                    data.extend((word & 0xffff).to_le_bytes());
                    data.extend((word >> 16).to_le_bytes());
                } else {
                    data.extend(word.to_le_bytes());
                }
            }
            memory.write(address.place(access.rank), &data)?;
        }
        Ok(())
    }
}

/// Checks and executes a `tcgen05.ld`.
///
/// # Errors
/// The errors of [`RegisterAccess::check`] and [`RegisterPlan::load`].
pub fn load(access: &RegisterAccess, memory: &mut dyn Memory) -> Result<WarpRegisters, Fault> {
    access.check()?.load(memory)
}

/// Checks and executes a `tcgen05.st`.
///
/// # Errors
/// The errors of [`RegisterAccess::check`] and [`RegisterPlan::store`].
pub fn store(
    access: &RegisterAccess,
    registers: &[[u32; 32]],
    memory: &mut dyn Memory,
) -> Result<(), Fault> {
    access.check()?.store(registers, memory)
}
