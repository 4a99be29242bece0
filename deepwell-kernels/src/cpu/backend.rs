//! The CPU as a [`Backend`]: calls run at once, on rayon's global pool.

use deepwell_ir::{ByteRange, Call, Program, StreamId};

use super::arena::Arena;
use super::calls::{self, CpuCall};
use crate::KernelError;
use crate::backend::{Backend, PreparedCall};

/// Runs calls on this machine's processor.
#[derive(Default)]
pub struct CpuBackend {
    arena: Option<Arena>,
    calls: Vec<CpuCall>,
}

impl CpuBackend {
    /// A backend without an arena yet.
    pub fn new() -> CpuBackend {
        CpuBackend::default()
    }

    fn outside(range: ByteRange) -> KernelError {
        KernelError::Run {
            call: "copy".to_string(),
            what: format!("bytes {}..{} lie outside of the arena", range.offset, range.end()),
        }
    }

    fn bytes(&mut self, range: ByteRange) -> Result<&mut [u8], KernelError> {
        self.arena
            .as_mut()
            .and_then(|arena| arena.bytes(range))
            .ok_or_else(|| CpuBackend::outside(range))
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn allocate(&mut self, bytes: usize) -> Result<(), KernelError> {
        self.arena = None;
        self.arena = Some(Arena::new(bytes)?);
        Ok(())
    }

    fn prepare(&mut self, program: &Program, call: &Call) -> Result<PreparedCall, KernelError> {
        self.calls.push(calls::prepare(program, call)?);
        Ok(PreparedCall(self.calls.len() - 1))
    }

    fn forget_prepared(&mut self) {
        self.calls.clear();
    }

    fn enqueue(&mut self, call: PreparedCall, _stream: StreamId) -> Result<(), KernelError> {
        let (Some(arena), Some(call)) = (&self.arena, self.calls.get(call.0)) else {
            return Err(KernelError::Run {
                call: format!("prepared call {}", call.0),
                what: "there is no such call, or no arena".to_string(),
            });
        };
        call.run(arena)
    }

    fn synchronize(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    fn write(&mut self, range: ByteRange, bytes: &[u8]) -> Result<(), KernelError> {
        let target = self.bytes(range)?;
        if target.len() != bytes.len() {
            return Err(CpuBackend::outside(range));
        }
        target.copy_from_slice(bytes);
        Ok(())
    }

    fn read(&mut self, range: ByteRange, bytes: &mut [u8]) -> Result<(), KernelError> {
        let source = self.bytes(range)?;
        if source.len() != bytes.len() {
            return Err(CpuBackend::outside(range));
        }
        bytes.copy_from_slice(source);
        Ok(())
    }

    fn host_view(&self, range: ByteRange) -> Option<&[u8]> {
        self.arena.as_ref()?.view(range)
    }
}
