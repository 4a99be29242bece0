//! What a driver over host memory and what puts work into its streams share: the machine, streams
//! with their recordings, events and the counts.

use std::sync::Arc;

use super::counts::{FakeCounts, FakeNode};
use super::exchange::{SharedComm, exchange};
use super::host_blas::multiply;
use super::machine::Machine;
use super::pinned::HostPinned;
use crate::cuda::blas::Matmul;
use crate::cuda::comm::DeviceExchange;
use crate::cuda::driver::{DevicePtr, DriverError, DriverResult, Launch, Stream};

/// Something that was put into a stream. `Matmul` is a GEMM that computes nothing.
#[derive(Clone)]
pub(in crate::cuda) enum Work {
    Launch { kernel: String, launch: Arc<Launch> },
    Matmul,
    HostMatmul(Matmul),
    Exchange { exchange: Arc<DeviceExchange>, comm: SharedComm },
    Copy { target: DevicePtr, source: DevicePtr, bytes: usize },
    Fill { target: DevicePtr, byte: u8, bytes: usize },
    FromPinned { target: DevicePtr, source: Arc<HostPinned>, offset: usize, bytes: usize },
    ToPinned { target: Arc<HostPinned>, offset: usize, source: DevicePtr, bytes: usize },
    Graph { graph: usize },
    Record { event: usize },
    Group(Vec<Work>),
}

impl Work {
    pub(super) fn node(&self) -> FakeNode {
        match self {
            Work::Launch { kernel, .. } => FakeNode::Launch(kernel.clone()),
            Work::Matmul | Work::HostMatmul(_) => FakeNode::Matmul,
            Work::Exchange { .. } => FakeNode::Exchange,
            Work::Copy { .. } => FakeNode::Copy,
            Work::Fill { .. } => FakeNode::Fill,
            Work::FromPinned { .. } | Work::ToPinned { .. } => FakeNode::PinnedCopy,
            Work::Graph { .. } => FakeNode::Graph,
            Work::Record { .. } => FakeNode::Record,
            Work::Group(work) => FakeNode::Group(work.iter().map(Work::node).collect()),
        }
    }
}

#[derive(Default)]
pub(super) struct StreamState {
    /// The stream whose recording this one's work goes to: itself, or one that it joined.
    recording_of: Option<usize>,
    /// What a recording that began with this stream holds so far.
    recorded: Vec<Work>,
    group: Option<Vec<Work>>,
}

pub(super) struct EventState {
    has_timing: bool,
    /// Reading of the clock.
    done_at: Option<u64>,
    /// The recording that it is a point of.
    recording_of: Option<usize>,
}

pub(in crate::cuda) struct State<M> {
    pub(in crate::cuda) machine: M,
    pub(super) counts: FakeCounts,
    pub(super) graphs: Vec<Option<Vec<Work>>>,
    pub(super) events: Vec<EventState>,
    pub(super) streams: Vec<StreamState>,
    /// Counts what was run.
    clock: u64,
}

/// A handle that this driver did not give, or has taken back.
pub(in crate::cuda) fn no_such(kind: &str, handle: u64) -> DriverError {
    DriverError::new(kind, format!("expected a {kind} of this driver, got number {handle}"))
}

impl<M: Machine> State<M> {
    pub(super) fn new(machine: M) -> State<M> {
        State {
            machine,
            counts: FakeCounts::default(),
            graphs: Vec::new(),
            events: Vec::new(),
            streams: Vec::new(),
            clock: 0,
        }
    }

    pub(super) fn add_event(&mut self, has_timing: bool) -> usize {
        self.events.push(EventState { has_timing, done_at: None, recording_of: None });
        self.events.len() - 1
    }

    fn stream(&mut self, stream: Stream) -> DriverResult<&mut StreamState> {
        self.streams.get_mut(stream.0 as usize).ok_or_else(|| no_such("stream", stream.0))
    }

    fn event(&mut self, event: usize) -> DriverResult<&mut EventState> {
        self.events.get_mut(event).ok_or_else(|| no_such("event", event as u64))
    }

    /// Records work, or runs it.
    pub(in crate::cuda) fn put(&mut self, stream: Stream, work: Work) -> DriverResult<()> {
        let slot = self.stream(stream)?;
        match (slot.recording_of, &mut slot.group) {
            (None, _) => self.run(&work),
            (Some(_), Some(group)) => {
                group.push(work);
                Ok(())
            }
            (Some(origin), None) => {
                self.streams[origin].recorded.push(work);
                Ok(())
            }
        }
    }

    fn run(&mut self, work: &Work) -> DriverResult<()> {
        self.clock += 1;
        self.counts.change(|counts| match work {
            Work::Launch { .. } => counts.launches += 1,
            Work::Matmul | Work::HostMatmul(_) => counts.matmuls += 1,
            Work::Exchange { .. } => counts.exchanges += 1,
            Work::Copy { .. } => counts.copies += 1,
            Work::Fill { .. } => counts.fills += 1,
            Work::FromPinned { .. } => counts.copies_from_pinned += 1,
            Work::ToPinned { .. } => counts.copies_to_pinned += 1,
            Work::Graph { .. } => counts.graph_launches += 1,
            Work::Record { .. } => counts.records += 1,
            Work::Group(_) => {}
        });
        self.take_effect(work)
    }

    /// What work does, wherever it stands; the nodes of a graph are not counted one by one.
    fn take_effect(&mut self, work: &Work) -> DriverResult<()> {
        match work {
            Work::Launch { launch, .. } => self.machine.launch(launch),
            Work::Matmul => Ok(()),
            Work::HostMatmul(matmul) => multiply(&mut self.machine, matmul),
            Work::Exchange { exchange: of, comm } => exchange(&mut self.machine, of, comm),
            Work::Copy { target, source, bytes } => self.machine.copy(*target, *source, *bytes),
            Work::Fill { target, byte, bytes } => self.machine.fill(*target, *byte, *bytes),
            Work::FromPinned { target, source, offset, bytes } => {
                self.machine.write(*target, &source.read(*offset, *bytes))
            }
            Work::ToPinned { target, offset, source, bytes } => {
                let mut read = vec![0; *bytes];
                self.machine.read(&mut read, *source)?;
                target.write(*offset, &read);
                Ok(())
            }
            Work::Record { event } => {
                let now = self.clock;
                let event = self.event(*event)?;
                (event.done_at, event.recording_of) = (Some(now), None);
                Ok(())
            }
            Work::Group(work) => self.take_effect_of(work),
            Work::Graph { graph } => {
                let work = self.graphs.get(*graph).cloned().flatten();
                let work = work.ok_or_else(|| no_such("graph", *graph as u64))?;
                self.take_effect_of(&work)
            }
        }
    }

    fn take_effect_of(&mut self, work: &[Work]) -> DriverResult<()> {
        for work in work {
            self.clock += 1;
            self.take_effect(work)?;
        }
        Ok(())
    }

    pub(super) fn record(&mut self, event: usize, stream: Stream) -> DriverResult<()> {
        let recording_of = self.stream(stream)?.recording_of;
        let slot = self.event(event)?;
        if recording_of.is_some() && !slot.has_timing {
            slot.recording_of = recording_of;
            return Ok(());
        }
        self.put(stream, Work::Record { event })
    }

    pub(super) fn wait(&mut self, stream: Stream, event: usize) -> DriverResult<()> {
        let event = self.event(event)?;
        let (of_event, was_recorded) = (event.recording_of, event.done_at.is_some());
        let slot = self.stream(stream)?;
        match (of_event, slot.recording_of) {
            (Some(recording), None) => slot.recording_of = Some(recording),
            (None, None) => self.counts.change(|counts| counts.waits += 1),
            (Some(of_event), Some(of_stream)) if of_event == of_stream => {}
            (None, Some(_)) if !was_recorded => {}
            _ => {
                return Err(DriverError::new(
                    "wait",
                    "a recorded stream cannot wait for work outside of its recording",
                ));
            }
        }
        Ok(())
    }

    pub(super) fn is_done(&mut self, event: usize) -> DriverResult<bool> {
        match self.event(event)?.recording_of {
            None => Ok(true),
            Some(_) => Err(DriverError::new("event", "it is a point of a recording")),
        }
    }

    pub(super) fn elapsed_ms(&mut self, from: usize, to: usize) -> DriverResult<f32> {
        let mut times = [0; 2];
        for (time, event) in times.iter_mut().zip([from, to]) {
            let event = self.event(event)?;
            *time = match (event.has_timing, event.done_at) {
                (true, Some(done_at)) => done_at,
                (false, _) => {
                    return Err(DriverError::new("elapsed_ms", "expected events with timing"));
                }
                (true, None) => {
                    return Err(DriverError::new("elapsed_ms", "an event was not recorded"));
                }
            };
        }
        Ok(times[1] as f32 - times[0] as f32)
    }

    pub(super) fn begin_capture(&mut self, stream: Stream) -> DriverResult<()> {
        let slot = self.stream(stream)?;
        if slot.recording_of.is_some() {
            return Err(DriverError::new("begin_capture", "the stream is recorded already"));
        }
        slot.recording_of = Some(stream.0 as usize);
        Ok(())
    }

    pub(super) fn begin_group(&mut self, stream: Stream) -> DriverResult<()> {
        let slot = self.stream(stream)?;
        if slot.recording_of.is_none() {
            return Err(DriverError::new(
                "begin_group",
                "expected a stream that is recorded, got one that is not",
            ));
        }
        if slot.group.is_some() {
            return Err(DriverError::new("begin_group", "a group was begun already"));
        }
        slot.group = Some(Vec::new());
        Ok(())
    }

    pub(super) fn end_group(&mut self, stream: Stream) -> DriverResult<()> {
        match self.stream(stream)?.group.take() {
            Some(group) => self.put(stream, Work::Group(group)),
            None => Err(DriverError::new("end_group", "no group was begun")),
        }
    }

    pub(super) fn end_capture(&mut self, stream: Stream) -> DriverResult<usize> {
        let origin = stream.0 as usize;
        let slot = self.stream(stream)?;
        if slot.recording_of != Some(origin) {
            return Err(DriverError::new(
                "end_capture",
                "expected a stream that is recorded, got one that is not",
            ));
        }
        let recorded = std::mem::take(&mut slot.recorded);
        let mut has_open_group = false;
        for slot in self.streams.iter_mut().filter(|slot| slot.recording_of == Some(origin)) {
            slot.recording_of = None;
            has_open_group |= slot.group.take().is_some();
        }
        for event in self.events.iter_mut().filter(|event| event.recording_of == Some(origin)) {
            event.recording_of = None;
        }
        if has_open_group {
            return Err(DriverError::new("end_capture", "a group was begun and not ended"));
        }
        let nodes = recorded.iter().map(Work::node).collect();
        self.counts.change(|counts| counts.graphs.push(nodes));
        self.graphs.push(Some(recorded));
        Ok(self.graphs.len() - 1)
    }
}
