//! Collectives of host memory, through buffers on the device.

use std::sync::Arc;

use cudarc::driver::sys;
use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{DType, ProcessGroup, Shape};

use super::super::context::{Context, new_stream};
use super::super::error::check;
use super::{NcclRank, Shared};
use crate::runtime::cuda::comm::DeviceExchange;
use crate::runtime::cuda::driver::{DevicePtr, DriverResult};
use crate::{Comm, CommError, Exchange};

/// Bytes of each of the two buffers: longer collectives are split.
const BUFFER_BYTES: usize = 4 << 20;
/// Parts of a collective begin at multiples of this.
const ALIGNMENT: usize = 16;

/// [`Comm`] by NCCL: collectives of host memory among groups of [`NcclRank`].
///
/// Has a separate stream and separate buffers, and is never captured.
pub struct NcclHost {
    buffers: Buffers,
    shared: Arc<Shared>,
}

/// Stream and device buffers, freed before the context.
struct Buffers {
    context: Arc<Context>,
    stream: sys::CUstream,
    input: DevicePtr,
    output: DevicePtr,
}

// SAFETY: the driver's handles belong to no thread; the context is made current in every call.
unsafe impl Send for Buffers {}

impl NcclRank {
    /// Creates a [`Comm`] for host memory.
    ///
    /// # Errors
    /// No memory for the buffers.
    pub fn host(&self) -> DriverResult<NcclHost> {
        let context = Arc::clone(&self.shared.context);
        context.enter()?;
        let mut buffers = Buffers {
            stream: new_stream(context.high_priority())?,
            context,
            input: DevicePtr(0),
            output: DevicePtr(0),
        };
        for buffer in [&mut buffers.input, &mut buffers.output] {
            // SAFETY: writes one address.
            let code = unsafe { sys::cuMemAlloc_v2(&mut buffer.0, BUFFER_BYTES) };
            check("cuMemAlloc", code)?;
        }
        Ok(NcclHost { buffers, shared: Arc::clone(&self.shared) })
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return;
        }
        for buffer in [self.input, self.output].into_iter().filter(|buffer| buffer.0 != 0) {
            // SAFETY: given in `host`, freed once.
            let _ = unsafe { sys::cuMemFree_v2(buffer.0) };
        }
        // SAFETY: made in `host`, destroyed once.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
    }
}

impl NcclHost {
    /// Runs a collective on a piece of each part of the input and output.
    fn exchange_piece(
        &self,
        exchange: &Exchange,
        pieces: &[&[u8]],
        results: &mut [&mut [u8]],
    ) -> DriverResult<()> {
        let Buffers { context, stream, input, output } = &self.buffers;
        context.enter()?;
        let mut input_bytes = 0;
        for piece in pieces {
            let target = input.offset(input_bytes).0;
            // SAFETY: the pieces of a collective fit into the buffer together, and live until the
            // stream is synchronized before the return.
            let code = unsafe {
                sys::cuMemcpyHtoDAsync_v2(target, piece.as_ptr().cast(), piece.len(), *stream)
            };
            check("cuMemcpyHtoDAsync", code)?;
            input_bytes += piece.len();
        }
        let output_bytes = results.iter().map(|result| result.len()).sum();
        let of_device = DeviceExchange {
            exchange: exchange.clone(),
            input: *input,
            input_bytes,
            output: *output,
            output_bytes,
        };
        let exchanged = self.shared.enqueue(&of_device, *stream);
        let mut offset = 0;
        for result in results {
            if exchanged.is_ok() {
                let source = output.offset(offset).0;
                // SAFETY: as above; the results are borrowed until the stream is synchronized.
                let code = unsafe {
                    sys::cuMemcpyDtoHAsync_v2(
                        result.as_mut_ptr().cast(),
                        source,
                        result.len(),
                        *stream,
                    )
                };
                check("cuMemcpyDtoHAsync", code)?;
            }
            offset += result.len();
        }
        let waited = self.shared.wait(|| {
            // SAFETY: the stream is alive.
            check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(*stream) })
        });
        waited.and(exchanged)
    }
}

impl NcclHost {
    /// Exchanges a buffer with the next and the previous rank of a ring at the same time.
    pub(super) fn meet_neighbors(&mut self, group: &ProcessGroup) -> Result<(), CommError> {
        let failed = |error: crate::cuda::DriverError| match self.shared.failed() {
            Some((rank, reason)) => CommError::Failed { rank, reason },
            None => CommError::Request { what: error.call, reason: error.reason },
        };
        let Some(place) = group.position_of(self.shared.rank) else { return Ok(()) };
        let ranks = group.ranks.len();
        let mut neighbors = vec![(place + ranks - 1) % ranks, (place + 1) % ranks];
        neighbors.dedup();
        let Buffers { context, stream, input, output } = &self.buffers;
        let bytes = BUFFER_BYTES / 2;
        let meet = || -> DriverResult<()> {
            context.enter()?;
            let exchange = |kind, slot: usize| DeviceExchange {
                exchange: Exchange { kind, group: group.clone(), dtype: DType::E8m0 },
                input: input.offset(slot * bytes),
                input_bytes: bytes,
                output: output.offset(slot * bytes),
                output_bytes: bytes,
            };
            let both = |(slot, &neighbor): (usize, &usize)| {
                let to = neighbor as u32;
                let shape = Shape::new([bytes]);
                let dtype = DType::E8m0;
                let receive = CollectiveKind::Recv { from: to, shape, dtype };
                [exchange(CollectiveKind::Send { to }, slot), exchange(receive, slot)]
            };
            let all: Vec<DeviceExchange> = neighbors.iter().enumerate().flat_map(both).collect();
            self.shared.enqueue_together(&all.iter().collect::<Vec<_>>(), *stream)?;
            self.shared.wait(|| {
                // SAFETY: the stream is alive.
                check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(*stream) })
            })
        };
        meet().map_err(failed)
    }
}

/// Number of equally long parts in the input and in the output of a collective.
fn parts(kind: &CollectiveKind, ranks: usize) -> (usize, usize) {
    match kind {
        CollectiveKind::AllReduce { .. }
        | CollectiveKind::Broadcast { .. }
        | CollectiveKind::Shift { .. } => (1, 1),
        CollectiveKind::ReduceScatter { .. } => (ranks, 1),
        CollectiveKind::AllGather => (1, ranks),
        CollectiveKind::AllToAll => (ranks, ranks),
        CollectiveKind::Send { .. } => (1, 0),
        CollectiveKind::Recv { .. } => (0, 1),
    }
}

impl Comm for NcclHost {
    fn rank(&self) -> u32 {
        self.shared.rank
    }

    fn world_size(&self) -> u32 {
        self.shared.world_size
    }

    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let failed = |error: crate::cuda::DriverError| match self.shared.failed() {
            Some((rank, reason)) => CommError::Failed { rank, reason },
            None => CommError::Request { what: error.call, reason: error.reason },
        };
        let whole = DeviceExchange {
            exchange: exchange.clone(),
            input: self.buffers.input,
            input_bytes: input.len(),
            output: self.buffers.output,
            output_bytes: output.len(),
        };
        self.shared.accept(&whole).map_err(failed)?;
        let ranks = exchange.group.ranks.len();
        let (inputs, outputs) = parts(&exchange.kind, ranks);
        let part = input.len().checked_div(inputs).unwrap_or(output.len());
        let most = BUFFER_BYTES / ranks / ALIGNMENT * ALIGNMENT;
        let mut begin = 0;
        while begin < part {
            let end = part.min(begin + most);
            let pieces: Vec<&[u8]> =
                input.chunks_exact(part).map(|part| &part[begin..end]).collect();
            let mut results: Vec<&mut [u8]> =
                output.chunks_exact_mut(part).map(|part| &mut part[begin..end]).collect();
            debug_assert_eq!((pieces.len(), results.len()), (inputs, outputs));
            self.exchange_piece(exchange, &pieces, &mut results).map_err(failed)?;
            begin = end;
        }
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
        self.shared.fail(self.shared.rank, reason);
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::Reduction;

    use super::*;

    /// The parts of each kind satisfy `Exchange::check`.
    #[test]
    fn parts_of_each_kind() {
        let sum = Reduction::Sum;
        for kind in [
            CollectiveKind::AllReduce { reduction: sum },
            CollectiveKind::ReduceScatter { reduction: sum },
            CollectiveKind::AllGather,
            CollectiveKind::AllToAll,
            CollectiveKind::Broadcast { root: 1 },
            CollectiveKind::Shift { by: 2 },
            CollectiveKind::Send { to: 1 },
        ] {
            let group = super::super::host_group(3);
            let (inputs, outputs) = parts(&kind, 3);
            let exchange = Exchange { kind, group, dtype: deepwell_ir::DType::F32 };
            let checked = exchange.check((0, 3), inputs * 8, outputs * 8);
            assert_eq!(checked, Ok(()), "{:?}", exchange.kind);
        }
    }
}
