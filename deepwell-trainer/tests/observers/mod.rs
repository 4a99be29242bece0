//! Faults that are planted at calls of a step.

use deepwell_ir::{ByteRange, Call, Instance, Program, ValueId};
use deepwell_kernels::{Backend, CallAction, KernelError, Observer};

/// Runs a function before each call.
pub(crate) struct Before<F>(pub(crate) F);

impl<F> Observer for Before<F>
where
    F: FnMut(&Program, &Call, &mut dyn Backend) -> Result<CallAction, KernelError>,
{
    fn before(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        (self.0)(program, call, backend)
    }

    fn after(
        &mut self,
        _program: &Program,
        _call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        Ok(())
    }
}

/// Leaves out the calls of this name.
#[allow(dead_code, reason = "not every test leaves calls out")]
pub(crate) fn left_out(name: Option<&str>) -> impl Observer {
    Before(move |_: &Program, call: &Call, _: &mut dyn Backend| {
        Ok(if name == Some(&*call.name) { CallAction::Skip } else { CallAction::Run })
    })
}

/// Writes a number over the first one of a value before a call of this name.
#[allow(dead_code, reason = "not every test poisons a value")]
pub(crate) fn poisoned(
    call_name: &'static str,
    value: impl Fn(&Program) -> Option<ValueId>,
    number: f32,
) -> impl Observer {
    Before(move |program: &Program, call: &Call, backend: &mut dyn Backend| {
        if let (true, Some(id)) = (call.name == call_name, value(program)) {
            let range = program.value(id).range;
            backend.write(ByteRange { bytes: 4, ..range }, &number.to_le_bytes())?;
        }
        Ok(CallAction::Run)
    })
}
