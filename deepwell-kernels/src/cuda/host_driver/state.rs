//! State shared by a driver over host memory and the libraries that enqueue into its streams: the
//! machine, streams with their captures, events and counts.

use std::sync::Arc;

use super::counts::{FakeCounts, FakeNode};
use super::exchange::{SharedComm, exchange};
use super::host_blas::multiply;
use super::machine::Machine;
use super::pinned::HostPinned;
use crate::runtime::cuda::blas::Matmul;
use crate::runtime::cuda::comm::DeviceExchange;
use crate::runtime::cuda::driver::{DevicePtr, DriverError, DriverResult, Launch, Stream};

/// An operation in a stream. `Matmul` is a GEMM that computes nothing.
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
    /// Origin stream of the capture that receives this stream's work: this stream, or a stream that
    /// this stream joined.
    recording_of: Option<usize>,
    /// Work captured so far, if this stream is the origin of a capture.
    recorded: Vec<Work>,
    group: Option<Vec<Work>>,
}

pub(super) struct EventState {
    has_timing: bool,
    /// Clock when the event was last recorded.
    done_at: Option<u64>,
    /// Origin stream of the capture in which the event was recorded.
    recording_of: Option<usize>,
}

pub(in crate::cuda) struct State<M> {
    pub(in crate::cuda) machine: M,
    pub(super) counts: FakeCounts,
    pub(super) graphs: Vec<Option<Vec<Work>>>,
    pub(super) events: Vec<EventState>,
    pub(super) streams: Vec<StreamState>,
    /// Number of executed operations.
    clock: u64,
}

/// The error of a handle that is unknown or no longer valid.
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

    /// Captures work, or runs it.
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

    /// Executes work, in a stream or in a graph; nodes of a graph are not counted separately.
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
        let of_event = event.recording_of;
        let was_recorded = event.done_at.is_some();
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
