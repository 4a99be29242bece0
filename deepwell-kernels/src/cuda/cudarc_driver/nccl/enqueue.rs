//! Collectives as calls of the library.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::{self, CUstream};
use deepwell_ir::ops::{CollectiveKind, Reduction};
use deepwell_ir::{DType, ProcessGroup};

use super::super::error::check;
use super::library::{DataType, ReduceOp};
use super::{Handle, Shared, lock};
use crate::Exchange;
use crate::runtime::cuda::comm::DeviceExchange;
use crate::runtime::cuda::driver::{DriverError, DriverResult};

/// The library's type and operation of a reduction, and the bytes of an element.
fn reduced(dtype: DType, reduction: Reduction) -> Result<(DataType, ReduceOp, usize), String> {
    let op = match reduction {
        Reduction::Sum => ReduceOp::Sum,
        Reduction::Max => ReduceOp::Max,
    };
    match (dtype, reduction) {
        (DType::F32 | DType::Bf16, Reduction::Max) => Err(format!(
            "expected a maximum of i32 or u64, got one of {dtype}: that of NCCL loses NaN\n\
             hint: gather the numbers and take their maximum on each rank"
        )),
        (DType::F32, _) => Ok((DataType::Float32, op, 4)),
        (DType::Bf16, _) => Ok((DataType::Bfloat16, op, 2)),
        (DType::I32, _) => Ok((DataType::Int32, op, 4)),
        (DType::U64, _) => Ok((DataType::Uint64, op, 8)),
        _ => Err(format!("expected f32, bf16, i32 or u64 to reduce, got {dtype}")),
    }
}

impl Shared {
    /// Rejects exchanges that this rank cannot take part in.
    pub(super) fn accept(&self, of: &DeviceExchange) -> DriverResult<()> {
        let refuse = |reason: String| DriverError::new(describe(&of.exchange), reason);
        let place = (self.rank, self.world_size);
        of.exchange.check(place, of.input_bytes, of.output_bytes).map_err(refuse)?;
        match of.exchange.kind {
            CollectiveKind::AllReduce { reduction }
            | CollectiveKind::ReduceScatter { reduction } => {
                reduced(of.exchange.dtype, reduction).map_err(refuse)?;
            }
            _ => {}
        }
        if of.exchange.group.ranks.len() == 1 {
            return self.check();
        }
        self.communicator(&of.exchange.group).map(drop)
    }

    fn communicator(&self, group: &ProcessGroup) -> DriverResult<Handle> {
        self.check()?;
        let known = lock(&self.communicators);
        let found = known.iter().find(|(known, _)| known == group).map(|(_, handle)| *handle);
        found.ok_or_else(|| {
            let known: Vec<&str> = known.iter().map(|(group, _)| group.name.as_str()).collect();
            DriverError::new(
                "NCCL",
                format!(
                    "expected a group that this rank has joined ({}), got `{}` of {:?}",
                    known.join(", "),
                    group.name,
                    group.ranks
                ),
            )
        })
    }

    /// Enqueues concurrent exchanges on a stream. The library matches exchanges with the same peer
    /// in order.
    pub(super) fn enqueue_together(
        &self,
        exchanges: &[&DeviceExchange],
        stream: CUstream,
    ) -> DriverResult<()> {
        // Held until the end of the group, where the library uses the communicators.
        let _call = lock(&self.calls);
        let library = self.library;
        // SAFETY: takes nothing; ended below.
        library.check("ncclGroupStart", unsafe { (library.group_start)() })?;
        let enqueued = exchanges.iter().try_for_each(|of| self.enqueue_one(of, stream));
        // SAFETY: ends the group that was begun above, also after an error.
        let ended = unsafe { (library.group_end)() };
        enqueued.and_then(|()| library.check("ncclGroupEnd", ended))
    }

    /// Enqueues an exchange on a stream of the context, which must be current.
    pub(super) fn enqueue(&self, of: &DeviceExchange, stream: CUstream) -> DriverResult<()> {
        let _call = lock(&self.calls);
        self.enqueue_one(of, stream)
    }

    /// [`Shared::enqueue`] with the lock on calls held.
    fn enqueue_one(&self, of: &DeviceExchange, stream: CUstream) -> DriverResult<()> {
        let Exchange { kind, group, dtype } = &of.exchange;
        if group.ranks.len() == 1 {
            self.check()?;
            return keep(of, stream);
        }
        let Handle(communicator) = self.communicator(group)?;
        let library = self.library;
        let (input, output) = (of.input.0 as *const c_void, of.output.0 as *mut c_void);
        // Without a reduction, elements of all types are sent as bytes.
        let bytes = DataType::Uint8;
        let typed = |reduction| {
            reduced(*dtype, reduction)
                .map_err(|reason| DriverError::new(describe(&of.exchange), reason))
        };
        // SAFETY, of every call below: the communicator is alive, as the lock on calls is held and
        // the communicator was in the list; the stream belongs to its device; the operands are
        // device addresses with the lengths that `accept` has compared, and only the device can
        // check the addresses.
        match *kind {
            CollectiveKind::AllReduce { reduction } => {
                let (dtype, op, size) = typed(reduction)?;
                let count = of.input_bytes / size;
                // SAFETY: as above.
                let code = unsafe {
                    (library.all_reduce)(input, output, count, dtype, op, communicator, stream)
                };
                library.check("ncclAllReduce", code)
            }
            CollectiveKind::ReduceScatter { reduction } => {
                let (dtype, op, size) = typed(reduction)?;
                let count = of.output_bytes / size;
                // SAFETY: as above.
                let code = unsafe {
                    (library.reduce_scatter)(input, output, count, dtype, op, communicator, stream)
                };
                library.check("ncclReduceScatter", code)
            }
            CollectiveKind::AllGather => {
                let count = of.input_bytes;
                // SAFETY: as above.
                let code = unsafe {
                    (library.all_gather)(input, output, count, bytes, communicator, stream)
                };
                library.check("ncclAllGather", code)
            }
            CollectiveKind::Broadcast { root } => {
                let (count, root) = (of.input_bytes, root as c_int);
                // SAFETY: as above.
                let code = unsafe {
                    (library.broadcast)(input, output, count, bytes, root, communicator, stream)
                };
                library.check("ncclBroadcast", code)
            }
            CollectiveKind::Send { to } => {
                let count = of.input_bytes;
                // SAFETY: as above.
                let code = unsafe {
                    (library.send)(input, count, bytes, to as c_int, communicator, stream)
                };
                library.check("ncclSend", code)
            }
            CollectiveKind::Recv { from, .. } => {
                let count = of.output_bytes;
                // SAFETY: as above.
                let code = unsafe {
                    (library.recv)(output, count, bytes, from as c_int, communicator, stream)
                };
                library.check("ncclRecv", code)
            }
            CollectiveKind::Shift { by } => {
                let ranks = group.ranks.len();
                let position = group.position_of(self.rank).unwrap_or(0);
                let by = by as usize % ranks;
                // SAFETY: takes nothing; ended below.
                library.check("ncclGroupStart", unsafe { (library.group_start)() })?;
                let to = ((position + by) % ranks) as c_int;
                // SAFETY: as above.
                let code = unsafe {
                    (library.send)(input, of.input_bytes, bytes, to, communicator, stream)
                };
                let sent = library.check("ncclSend", code);
                let from = ((position + ranks - by) % ranks) as c_int;
                // SAFETY: as above.
                let code = unsafe {
                    (library.recv)(output, of.output_bytes, bytes, from, communicator, stream)
                };
                let issued = sent.and_then(|()| library.check("ncclRecv", code));
                // SAFETY: ends the group that was begun above, also after an error.
                let ended = unsafe { (library.group_end)() };
                issued.and_then(|()| library.check("ncclGroupEnd", ended))
            }
            CollectiveKind::AllToAll => {
                let slice = of.input_bytes / group.ranks.len();
                // SAFETY: takes nothing; ended below.
                library.check("ncclGroupStart", unsafe { (library.group_start)() })?;
                let mut issued = Ok(());
                for position in 0..group.ranks.len() {
                    let peer = position as c_int;
                    let from = of.input.offset(position * slice);
                    let to = of.output.offset(position * slice);
                    // SAFETY: as above; each slice lies within its operand.
                    let code = unsafe {
                        (library.send)(
                            from.0 as *const c_void,
                            slice,
                            bytes,
                            peer,
                            communicator,
                            stream,
                        )
                    };
                    issued = issued.and_then(|()| library.check("ncclSend", code));
                    // SAFETY: as above.
                    let code = unsafe {
                        (library.recv)(
                            to.0 as *mut c_void,
                            slice,
                            bytes,
                            peer,
                            communicator,
                            stream,
                        )
                    };
                    issued = issued.and_then(|()| library.check("ncclRecv", code));
                }
                // SAFETY: ends the group that was begun above, also after an error.
                let ended = unsafe { (library.group_end)() };
                issued.and_then(|()| library.check("ncclGroupEnd", ended))
            }
        }
    }
}

/// A collective in a group of a single rank: a copy.
fn keep(of: &DeviceExchange, stream: CUstream) -> DriverResult<()> {
    if of.input == of.output {
        return Ok(());
    }
    let bytes = of.input_bytes.min(of.output_bytes);
    // SAFETY: device addresses with lengths that `accept` has compared; a context is current.
    let code = unsafe { sys::cuMemcpyDtoDAsync_v2(of.output.0, of.input.0, bytes, stream) };
    check("cuMemcpyDtoDAsync", code)
}

fn describe(exchange: &Exchange) -> String {
    let group = &exchange.group;
    format!("{:?} of {} among `{}`", exchange.kind, exchange.dtype, group.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reduced_and_how() {
        let (sum, max) = (Reduction::Sum, Reduction::Max);
        let check = |dtype, reduction, expected: Result<(DataType, ReduceOp, usize), &str>| match (
            reduced(dtype, reduction),
            expected,
        ) {
            (Err(got), Err(expected)) => assert!(got.contains(expected), "{got}"),
            (got, expected) => assert_eq!(got, expected.map_err(str::to_string)),
        };
        check(DType::F32, sum, Ok((DataType::Float32, ReduceOp::Sum, 4)));
        check(DType::Bf16, sum, Ok((DataType::Bfloat16, ReduceOp::Sum, 2)));
        check(DType::I32, sum, Ok((DataType::Int32, ReduceOp::Sum, 4)));
        check(DType::U64, max, Ok((DataType::Uint64, ReduceOp::Max, 8)));
        check(DType::I32, max, Ok((DataType::Int32, ReduceOp::Max, 4)));
        check(DType::F32, max, Err("got one of f32: that of NCCL loses NaN"));
        check(DType::Bf16, max, Err("got one of bf16"));
        check(DType::E4m3, sum, Err("expected f32, bf16, i32 or u64 to reduce, got e4m3"));
    }
}
