//! Runs programs on a backend.

use std::collections::BTreeMap;

use deepwell_ir::{
    BodyId, ByteRange, Call, Instance, Invocation, Meeting, Phase, Program, ValueId, verify_program,
};

use crate::KernelError;
use crate::backend::{Backend, CallTime, Issue, PreparedCall, Recording};

/// A program whose bodies a backend has prepared and recorded.
#[derive(Debug)]
pub struct LoadedProgram {
    program: Program,
    bodies: BTreeMap<(BodyId, Instance), LoadedBody>,
    /// The pipeline sends and receives before each invocation of the schedule, and after the last.
    meetings: Vec<Option<Recording>>,
}

#[derive(Debug)]
struct LoadedBody {
    /// In the order of the program; `None` where the instance does not run a call.
    calls: Vec<Option<PreparedCall>>,
    recording: Recording,
}

impl LoadedProgram {
    /// The program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    fn invocation(&self, index: usize) -> Result<Invocation, KernelError> {
        self.program.schedule.get(index).copied().ok_or_else(|| KernelError::Run {
            call: format!("invocation {index}"),
            what: format!("the schedule has {}", self.program.schedule.len()),
        })
    }

    fn body(&self, body: BodyId, instance: Instance) -> Result<&LoadedBody, KernelError> {
        let found = match self.program.bodies.get(body.index()) {
            Some(_) => self.bodies.get(&(body, self.program.instance_of(body, instance))),
            None => None,
        };
        found.ok_or_else(|| KernelError::Run {
            call: format!("body {} in slot {}", body.0, instance.slot),
            what: "is in no schedule of the program".to_string(),
        })
    }
}

/// Inspects, and may change, the arena between two calls.
pub trait Observer {
    /// Called before `call` runs.
    ///
    /// # Errors
    /// An error stops the run.
    fn before(
        &mut self,
        _program: &Program,
        _call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        Ok(CallAction::Run)
    }

    /// Called after `call` has run.
    ///
    /// # Errors
    /// An error stops the run.
    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError>;
}

/// Whether an observed call runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallAction {
    /// The call runs.
    Run,
    /// The call is skipped: for tests that plant a fault.
    Skip,
}

/// An arena on a backend, shared by the loaded programs.
pub struct Executor {
    backend: Box<dyn Backend>,
    arena_bytes: usize,
    host_bytes: usize,
}

impl Executor {
    /// Allocates an arena for programs of at most `arena_bytes`.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub fn new(backend: Box<dyn Backend>, arena_bytes: usize) -> Result<Executor, KernelError> {
        Executor::with_host(backend, arena_bytes, 0)
    }

    /// [`Executor::new`] with the first `host_bytes` of the arena in host memory.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub fn with_host(
        mut backend: Box<dyn Backend>,
        arena_bytes: usize,
        host_bytes: usize,
    ) -> Result<Executor, KernelError> {
        backend.allocate_with_host(arena_bytes, host_bytes)?;
        Ok(Executor { backend, arena_bytes, host_bytes })
    }

    /// The backend. The executor turns programs into recordings and values into ranges of the
    /// arena; for everything else its user calls the backend directly.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// The backend, mutably. A new arena or [`Backend::forget_prepared`] invalidates loaded
    /// programs.
    pub fn backend_mut(&mut self) -> &mut dyn Backend {
        self.backend.as_mut()
    }

    /// Size of the arena.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// The part of the arena in host memory.
    pub fn host_bytes(&self) -> usize {
        self.host_bytes
    }

    /// Verifies a program and prepares its calls.
    ///
    /// # Errors
    /// A program that breaks a rule or exceeds the arena, or a call that the backend cannot
    /// prepare.
    pub fn load(&mut self, program: Program) -> Result<LoadedProgram, KernelError> {
        verify_program(&program)?;
        if program.arena.bytes > self.arena_bytes {
            return Err(KernelError::ArenaTooSmall {
                program: program.name,
                needs: program.arena.bytes,
                has: self.arena_bytes,
            });
        }
        if program.arena.host_bytes != self.host_bytes {
            return Err(KernelError::HostPart {
                program: program.name,
                needs: program.arena.host_bytes,
                has: self.host_bytes,
            });
        }
        let mut bodies = BTreeMap::new();
        for (body, instance) in program.instances() {
            let loaded = load_body(self.backend.as_mut(), &program, body, instance)?;
            bodies.insert((body, instance), loaded);
        }
        let meetings = load_meetings(self.backend.as_mut(), &program)?;
        Ok(LoadedProgram { program, bodies, meetings })
    }

    /// Runs the whole schedule.
    ///
    /// # Errors
    /// The error of a call.
    pub fn run(&mut self, loaded: &LoadedProgram) -> Result<(), KernelError> {
        let invocations = 0..loaded.program.schedule.len();
        invocations.into_iter().try_for_each(|index| self.invoke(loaded, index))?;
        self.backend.synchronize()
    }

    /// Enqueues invocation `index` of the schedule after all earlier work. The pipeline sends and
    /// receives due before the invocation run first; after the last invocation the remaining sends
    /// and receives run. Invocations must be enqueued in schedule order. On a synchronous backend
    /// the invocation has ended when this function returns.
    ///
    /// # Errors
    /// The error of a call.
    pub fn invoke(&mut self, loaded: &LoadedProgram, index: usize) -> Result<(), KernelError> {
        let invocation = loaded.invocation(index)?;
        let body = loaded.body(invocation.body, loaded.program.instance(&invocation))?;
        self.meet(loaded, index)?;
        self.backend.replay(body.recording)?;
        self.meet_behind(loaded, index)
    }

    /// Runs the pipeline sends and receives before an invocation.
    fn meet(&mut self, loaded: &LoadedProgram, index: usize) -> Result<(), KernelError> {
        match loaded.meetings.get(index).copied().flatten() {
            Some(meeting) => self.backend.replay(meeting),
            None => Ok(()),
        }
    }

    /// Runs the remaining pipeline sends and receives if invocation `index` is the last.
    fn meet_behind(&mut self, loaded: &LoadedProgram, index: usize) -> Result<(), KernelError> {
        let next = index + 1;
        if next == loaded.program.schedule.len() { self.meet(loaded, next) } else { Ok(()) }
    }

    /// Enqueues writes of values of a slot after all earlier work, without waiting.
    ///
    /// # Errors
    /// [`KernelError::ValueLength`].
    pub fn stage(
        &mut self,
        program: &Program,
        slot: u32,
        values: &[(ValueId, &[u8])],
    ) -> Result<(), KernelError> {
        let copies = values
            .iter()
            .map(|&(id, bytes)| {
                check_length(program, id, bytes.len())?;
                Ok((program.value(id).range_in(slot), bytes))
            })
            .collect::<Result<Vec<_>, KernelError>>()?;
        self.backend.stage(&copies)
    }

    /// Runs the body of one phase alone, if the program has one: [`Phase::Weights`] after weights
    /// were loaded.
    ///
    /// # Errors
    /// The error of a call.
    pub fn run_phase(&mut self, loaded: &LoadedProgram, phase: Phase) -> Result<(), KernelError> {
        if let Some(body) = loaded.program.body_of(phase) {
            self.backend.replay(loaded.body(body, Instance::ALONE)?.recording)?;
        }
        self.backend.synchronize()
    }

    /// Runs the schedule as [`Executor::run`] does, then each body once more, call by call, and
    /// returns the times of the calls that a step runs, in the order of [`Program::calls`].
    ///
    /// # Errors
    /// The error of a call.
    pub fn profile(&mut self, loaded: &LoadedProgram) -> Result<Vec<CallTime>, KernelError> {
        let mut before = Vec::new();
        let mut last = BTreeMap::new();
        for (invocation, meeting) in loaded.program.schedule.iter().zip(&loaded.meetings) {
            let body = loaded.body(invocation.body, loaded.program.instance(invocation))?;
            before.extend(*meeting);
            before.push(body.recording);
            last.insert(invocation.body, &body.calls);
        }
        before.extend(loaded.meetings.last().copied().flatten());
        // The last run of a body is the run of the last micro-batch, with all calls of a step.
        let calls: Vec<PreparedCall> = last.into_values().flatten().filter_map(|it| *it).collect();
        self.backend.profile(&before, &calls)
    }

    /// Runs one invocation as [`Executor::invoke`] does, but call by call, with an observer before
    /// and after each call. The observer cannot skip the pipeline sends and receives between
    /// bodies.
    ///
    /// # Errors
    /// The error of a call or of the observer.
    pub fn invoke_observed(
        &mut self,
        loaded: &LoadedProgram,
        index: usize,
        observer: &mut dyn Observer,
    ) -> Result<(), KernelError> {
        let invocation = loaded.invocation(index)?;
        let program = &loaded.program;
        let instance = loaded.program.instance(&invocation);
        let body = loaded.body(invocation.body, instance)?;
        self.meet(loaded, index)?;
        let backend = self.backend.as_mut();
        backend.synchronize()?;
        for (call, &prepared) in program.calls_of(invocation.body).iter().zip(&body.calls) {
            let Some(prepared) = prepared else { continue };
            let action = observer.before(program, call, instance, backend)?;
            if action == CallAction::Run && !program.is_handed_over(call) {
                backend.enqueue(prepared)?;
                backend.synchronize()?;
            }
            observer.after(program, call, instance, backend)?;
        }
        self.meet_behind(loaded, index)
    }

    /// Runs the whole schedule with [`Executor::invoke_observed`].
    ///
    /// # Errors
    /// The error of a call or of the observer.
    pub fn run_observed(
        &mut self,
        loaded: &LoadedProgram,
        observer: &mut dyn Observer,
    ) -> Result<(), KernelError> {
        let invocations = 0..loaded.program.schedule.len();
        invocations.into_iter().try_for_each(|index| self.invoke_observed(loaded, index, observer))
    }

    /// Writes a value from the host, as row-major little-endian bytes.
    ///
    /// # Errors
    /// [`KernelError::ValueLength`].
    pub fn write(
        &mut self,
        program: &Program,
        id: ValueId,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        check_length(program, id, bytes.len())?;
        self.backend.write(program.value(id).range, bytes)
    }

    /// Writes zeros into a value. Bytes of zeros are zeros in every format.
    ///
    /// # Errors
    /// As [`Backend::clear`].
    pub fn clear(&mut self, program: &Program, id: ValueId) -> Result<(), KernelError> {
        self.backend.clear(program.value(id).range)
    }

    /// Reads a value to the host.
    ///
    /// # Errors
    /// [`KernelError::ValueLength`].
    pub fn read(
        &mut self,
        program: &Program,
        id: ValueId,
        bytes: &mut [u8],
    ) -> Result<(), KernelError> {
        check_length(program, id, bytes.len())?;
        self.backend.read(program.value(id).range, bytes)
    }
}

/// Prepares an instance of a body and records it.
fn load_body(
    backend: &mut dyn Backend,
    program: &Program,
    body: BodyId,
    instance: Instance,
) -> Result<LoadedBody, KernelError> {
    let mut calls = Vec::new();
    let mut issues = Vec::new();
    for call in program.calls_of(body) {
        let prepared = match call.runs_in(instance) {
            true => Some(backend.prepare(program, call, instance)?),
            false => None,
        };
        calls.push(prepared);
        issues.push(Issue {
            call: prepared.filter(|_| !program.is_handed_over(call)),
            stream: call.stream,
            waits: call.waits.clone(),
            records: call.records,
        });
    }
    let recording = backend.record(&issues)?;
    Ok(LoadedBody { calls, recording })
}

/// Prepares and records the pipeline sends and receives between bodies. Equal meetings share one
/// recording: a schedule has few distinct ones, however many micro-batches it has.
fn load_meetings(
    backend: &mut dyn Backend,
    program: &Program,
) -> Result<Vec<Option<Recording>>, KernelError> {
    let mut recorded: BTreeMap<Meeting, Recording> = BTreeMap::new();
    let mut landed: BTreeMap<u32, Program> = BTreeMap::new();
    let mut recordings = Vec::with_capacity(program.schedule.len() + 1);
    for index in 0..=program.schedule.len() {
        let Some(meeting) = program.meeting(index) else {
            recordings.push(None);
            continue;
        };
        let recording = match recorded.get(&meeting) {
            Some(&recording) => recording,
            None => {
                for &(_, place) in &meeting.arrivals {
                    landed.entry(place).or_insert_with(|| program.with_landings(place));
                }
                let recording = load_meeting(backend, program, &landed, &meeting)?;
                recorded.insert(meeting, recording);
                recording
            }
        };
        recordings.push(Some(recording));
    }
    Ok(recordings)
}

fn load_meeting(
    backend: &mut dyn Backend,
    program: &Program,
    landed: &BTreeMap<u32, Program>,
    meeting: &Meeting,
) -> Result<Recording, KernelError> {
    let mut calls = Vec::new();
    if let Some((body, slot)) = meeting.sends {
        let instance = Instance { slot, ..Instance::ONLY };
        for call in &program.calls_of(body)[program.handed_over(body).1] {
            calls.push(backend.prepare(program, call, instance)?);
        }
    }
    for (body, place) in &meeting.arrivals {
        let landed = &landed[place];
        for call in &program.calls_of(*body)[program.handed_over(*body).0] {
            calls.push(backend.prepare(landed, call, Instance::ONLY)?);
        }
    }
    let mut copies = Vec::new();
    if let (Some((body, slot, place)), Some(handover)) = (meeting.taken, &program.handover) {
        let first = handover.offset + place as usize * handover.place_bytes;
        for (value, range) in program.landings(body) {
            let from = ByteRange { offset: first + range.offset, bytes: range.bytes };
            copies.push((from, program.value(value).range_in(slot)));
        }
    }
    backend.record_exchanges(&calls, &copies)
}

fn check_length(program: &Program, id: ValueId, got: usize) -> Result<(), KernelError> {
    let value = program.value(id);
    if value.range.bytes == got {
        return Ok(());
    }
    Err(KernelError::ValueLength { value: value.name.clone(), expected: value.range.bytes, got })
}
