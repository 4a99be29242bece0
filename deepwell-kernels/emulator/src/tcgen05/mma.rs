//! `tcgen05.mma`: D = A B + D in tensor memory.

use rayon::prelude::*;

use super::address::TensorAddress;
use super::datapath::{DataPath, Part};
use super::elements::{CodeBuffer, Container};
use super::instruction_descriptor::{InstructionDescriptor, k_of, mma_kind};
use super::mma_request::MmaRequest;
use super::scale_factors::ScaleTile;
use super::tile::{K_CHUNKS, SharedTile};
use crate::decode::MmaKind;
use crate::error::Fault;
use crate::hazard::Accumulator;
use crate::number::{Format, Rounding, decode, encode};
use crate::numerics::{Accumulate, MmaSpec, Operand, ResultMode, TensorCore, multiply};
use crate::observe::TensorMma;
use crate::place::Memory;

/// Tensor-memory columns of A: 32 bytes per row.
pub const A_COLUMNS: u32 = 8;

/// A legal MMA, ready to run; returned by [`MmaRequest::check`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MmaPlan {
    pub(super) kind: MmaKind,
    pub(super) group: u32,
    /// Rank of the CTA; of the even CTA of a pair.
    pub(super) rank: u32,
    pub(super) path: DataPath,
    pub(super) descriptor: InstructionDescriptor,
    pub(super) d: TensorAddress,
    pub(super) a: PlannedA,
    pub(super) b: SharedTile,
    /// Elements per scale, and the scales of A and B.
    pub(super) scales: Option<(u32, ScaleTile, ScaleTile)>,
    pub(super) accumulate: bool,
    pub(super) scale_input_d: u32,
    pub(super) disabled_lanes: [u32; 8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlannedA {
    Shared(SharedTile),
    Tensor(TensorAddress, Container),
}

/// Operands of one part of D.
struct Work {
    part: Part,
    a: usize,
    scales: Option<(Vec<u8>, Vec<u8>)>,
    sum: Vec<u32>,
}

impl MmaPlan {
    /// Multiply-adds of the MMA.
    pub fn multiply_adds(&self) -> u64 {
        let shape = [self.descriptor.m, self.descriptor.n, k_of(self.kind)];
        shape.iter().map(|&n| u64::from(n)).product()
    }

    /// Bytes of A and B read from shared memory.
    pub fn bytes_shared(&self) -> u64 {
        let a = if matches!(self.a, PlannedA::Shared(_)) { self.descriptor.m } else { 0 };
        u64::from(a + self.descriptor.n) * 32
    }

    /// The MMA for an observer.
    pub fn observed(&self) -> TensorMma {
        TensorMma {
            m: self.descriptor.m,
            n: self.descriptor.n,
            k: k_of(self.kind),
            group: self.group,
            a_in_shared: matches!(self.a, PlannedA::Shared(_)),
        }
    }

    /// The accumulator.
    pub fn accumulator(&self) -> Accumulator {
        let TensorAddress { lane, column } = self.d;
        Accumulator {
            address: lane << 16 | column,
            shape: [self.descriptor.m, self.descriptor.n],
            group: self.group,
        }
    }

    /// The decoded instruction descriptor.
    pub fn descriptor(&self) -> &InstructionDescriptor {
        &self.descriptor
    }

    /// Columns of the operands in tensor memory: name, first column, number of columns.
    pub fn tensor_columns(&self) -> Vec<(&'static str, u32, u32)> {
        let mut columns = vec![("D", self.d.column, self.descriptor.n / self.path.slices())];
        if let PlannedA::Tensor(a, _) = self.a {
            columns.push(("A", a.column, A_COLUMNS));
        }
        if let Some((_, a, b)) = &self.scales {
            let rows = ScaleTile::columns(self.descriptor.m / self.path.blocks());
            columns.push(("the scales of A", a.address.column, rows));
            let of_b = ScaleTile::columns(self.descriptor.n / self.path.slices());
            columns.push(("the scales of B", b.address.column, of_b));
        }
        columns
    }

    /// Checks that D does not overlap the operands in tensor memory.
    pub(super) fn check_overlap(&self) -> Result<(), Fault> {
        let columns = self.tensor_columns();
        let (_, d, d_count) = columns[0];
        for &(what, at, count) in &columns[1..] {
            if at < d + d_count && d < at + count {
                return Err(Fault::new(
                    "tensor-operands-overlap",
                    format!(
                        "D takes columns {d} to {}, {what} columns {at} to {}",
                        d + d_count - 1,
                        at + count - 1
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Reads the operands, computes and writes D.
    ///
    /// # Errors
    /// The errors of `memory`; `scale-copies-differ`.
    pub fn run(&self, model: ResultMode, memory: &mut dyn Memory) -> Result<(), Fault> {
        let k = k_of(self.kind);
        let b = self.read_b(k, memory)?;
        let mut a = Vec::new();
        let mut work = Vec::new();
        for part in self.path.parts(self.descriptor.m, self.descriptor.n) {
            // In tensor memory, A has a copy for each slice; in shared memory all slices share A.
            if part.slice == 0 || matches!(self.a, PlannedA::Tensor(..)) {
                a.push(self.read_a(&part, k, memory)?);
            }
            let rank = self.rank + part.block;
            let scales = match &self.scales {
                Some((_, of_a, of_b)) => Some((
                    of_a.read_a(&part, rank, memory)?,
                    of_b.read_b(self.path, &part, rank, memory)?,
                )),
                None => None,
            };
            let sum = self.read_d(&part, memory)?;
            work.push(Work { part, a: a.len() - 1, scales, sum });
        }
        self.multiply(model, &a, &b, &mut work)?;
        for item in &work {
            self.write_d(item, memory)?;
        }
        Ok(())
    }

    fn multiply(
        &self,
        model: ResultMode,
        a: &[CodeBuffer],
        b: &CodeBuffer,
        work: &mut [Work],
    ) -> Result<(), Fault> {
        let descriptor = &self.descriptor;
        let spec = MmaSpec {
            model,
            architecture: TensorCore::Blackwell,
            kind: mma_kind(self.kind, descriptor.a),
            a: descriptor.a,
            b: descriptor.b,
            accumulate: descriptor.accumulate,
        };
        let k = k_of(self.kind) as usize;
        work.par_iter_mut().try_for_each(|item| {
            let (rows, columns) = (item.part.rows.len(), item.part.columns.len());
            let element_bits_a = a[item.a].rows(0, rows as u32);
            let element_bits_b = b.rows(item.part.columns.start, columns as u32);
            let (a, b) = match (&item.scales, &self.scales, descriptor.scales) {
                (Some((of_a, of_b)), Some((block, ..)), Some(fields)) => (
                    Operand::scaled(element_bits_a, fields.format, *block as usize, of_a),
                    Operand::scaled(element_bits_b, fields.format, *block as usize, of_b),
                ),
                _ => (Operand::new(element_bits_a), Operand::new(element_bits_b)),
            };
            multiply(
                &spec,
                rows,
                columns,
                k,
                &a,
                &b,
                &mut item.sum,
                self.accumulate,
                descriptor.negate_a,
                descriptor.negate_b,
            )
        })
    }

    /// Reads all of B. Each CTA of a pair holds half of the columns.
    fn read_b(&self, k: u32, memory: &mut dyn Memory) -> Result<CodeBuffer, Fault> {
        let rows = self.descriptor.n / self.group;
        let mut element_bits = CodeBuffer::new(self.descriptor.b, self.descriptor.n, k);
        for block in 0..self.group {
            self.b.read(self.rank + block, block * rows, rows, &mut element_bits, memory)?;
        }
        Ok(element_bits)
    }

    fn read_a(&self, part: &Part, k: u32, memory: &mut dyn Memory) -> Result<CodeBuffer, Fault> {
        let rows = part.rows.len() as u32;
        let rank = self.rank + part.block;
        let mut element_bits = CodeBuffer::new(self.descriptor.a, rows, k);
        match &self.a {
            PlannedA::Shared(tile) => tile.read(rank, 0, rows, &mut element_bits, memory)?,
            PlannedA::Tensor(address, container) => {
                let mut data = [0; A_COLUMNS as usize * 4];
                for row in 0..rows {
                    let lane = address.lane + self.path.lane(part.slice, row);
                    memory.read(TensorAddress { lane, ..*address }.place(rank), &mut data)?;
                    for (chunk, data) in data.chunks_exact(16).enumerate() {
                        let at = (row * k + chunk as u32 * k / K_CHUNKS) as usize;
                        container.unpack(data, &mut element_bits, at, 1);
                    }
                }
            }
        }
        Ok(element_bits)
    }

    /// Written lanes of a part, with row indices relative to the part's first row.
    fn lanes(&self, part: &Part) -> impl Iterator<Item = (usize, u32)> + '_ {
        let (block, slice) = (part.block, part.slice);
        (0..part.rows.len()).filter_map(move |row| {
            let lane = self.d.lane + self.path.lane(slice, row as u32);
            let word = self.disabled_lanes[(block * 4 + lane / 32) as usize];
            (word >> (lane % 32) & 1 == 0).then_some((row, lane))
        })
    }

    /// Reads the accumulator of a part, row-major; zeros if the MMA does not accumulate.
    fn read_d(&self, part: &Part, memory: &mut dyn Memory) -> Result<Vec<u32>, Fault> {
        let columns = part.columns.len();
        let mut sum = vec![0; part.rows.len() * columns];
        if !self.accumulate {
            return Ok(sum);
        }
        let mut data = vec![0; columns * 4];
        for (row, lane) in self.lanes(part) {
            let address = TensorAddress { lane, ..self.d };
            memory.read(address.place(self.rank + part.block), &mut data)?;
            let sums = sum[row * columns..][..columns].iter_mut();
            for (sum, word) in sums.zip(data.as_chunks::<4>().0) {
                *sum = self.scaled_down(u32::from_le_bytes(*word));
            }
        }
        Ok(sum)
    }

    /// Returns an element of D times 2^-`scale_input_d`.
    fn scaled_down(&self, bits: u32) -> u32 {
        if self.scale_input_d == 0 {
            return bits;
        }
        let factor = (-(self.scale_input_d as f32)).exp2();
        match self.descriptor.accumulate {
            Accumulate::F16 => {
                let value = decode(Format::F16, bits & 0xffff) * factor;
                encode(Format::F16, value, Rounding::NearestEven, false, false)
            }
            _ => (f32::from_bits(bits) * factor).to_bits(),
        }
    }

    fn write_d(&self, item: &Work, memory: &mut dyn Memory) -> Result<(), Fault> {
        let columns = item.part.columns.len();
        // 16-bit elements are in the low halves of columns.
        let mask = if self.descriptor.accumulate == Accumulate::F16 { 0xffff } else { u32::MAX };
        let mut data = Vec::with_capacity(columns * 4);
        for (row, lane) in self.lanes(&item.part) {
            data.clear();
            let sums = &item.sum[row * columns..][..columns];
            data.extend(sums.iter().flat_map(|&sum| (sum & mask).to_le_bytes()));
            let address = TensorAddress { lane, ..self.d };
            memory.write(address.place(self.rank + item.part.block), &data)?;
        }
        Ok(())
    }
}

/// [`MmaRequest::check`] followed by [`MmaPlan::run`].
///
/// # Errors
/// The errors of both.
pub fn mma(
    request: &MmaRequest,
    model: ResultMode,
    memory: &mut dyn Memory,
) -> Result<MmaPlan, Fault> {
    let plan = request.check()?;
    plan.run(model, memory)?;
    Ok(plan)
}
