//! Stream capture into graphs, with groups as child graphs.
//!
//! States of a stream: idle; captured (from `begin_capture`, or after a wait for an event of a
//! captured stream); grouped (within a capture). The work of a grouped stream goes to a private
//! stream, captured into a separate graph. The end of the group adds this graph as a child node
//! that depends on the stream's current capture dependencies, and the stream's next work depends on
//! the child node.
//!
//! Captures are relaxed: a library may load its kernels during a capture, and other threads may
//! allocate. `captures.rs` describes the calls of other threads that have to wait.

use std::ptr;

use cudarc::driver::sys;

use super::captures::CAPTURES;
use super::context::{Context, StreamSlot, new_stream, slot_of};
use super::error::check;
use crate::runtime::cuda::driver::{DriverError, DriverResult, Stream};

const MODE: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

/// A captured graph.
struct Recorded(sys::CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: a graph of ours, destroyed once.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// An instantiated graph.
pub(super) struct LaunchableGraph {
    recorded: Recorded,
    executable: sys::CUgraphExec,
}

impl LaunchableGraph {
    /// Number of nodes of the top level.
    pub(super) fn node_count(&self) -> DriverResult<usize> {
        node_count(&self.recorded)
    }

    pub(super) fn launch(&self, stream: sys::CUstream) -> DriverResult<()> {
        // SAFETY: both handles are alive.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.executable, stream) })
    }
}

impl Drop for LaunchableGraph {
    fn drop(&mut self) {
        // SAFETY: an executable graph of ours, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}

fn node_count(graph: &Recorded) -> DriverResult<usize> {
    let mut count = 0;
    // SAFETY: without an array the function writes only the count.
    let code = unsafe { sys::cuGraphGetNodes(graph.0, ptr::null_mut(), &mut count) };
    check("cuGraphGetNodes", code)?;
    Ok(count)
}

fn begin(stream: sys::CUstream) -> DriverResult<()> {
    // SAFETY: a live stream.
    check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream, MODE) })
}

fn end(stream: sys::CUstream) -> DriverResult<Recorded> {
    let mut graph = ptr::null_mut();
    // SAFETY: a live stream; writes one handle, null if the capture was invalidated.
    let code = unsafe { sys::cuStreamEndCapture(stream, &mut graph) };
    // Wrapped before the code is checked, so that the graph is always destroyed.
    let recorded = (!graph.is_null()).then(|| Recorded(graph));
    check("cuStreamEndCapture", code)?;
    recorded.ok_or_else(|| DriverError::new("cuStreamEndCapture", "gave no graph"))
}

/// The graph that a stream is captured into, and the dependencies of the stream's next work.
struct Position {
    graph: sys::CUgraph,
    dependencies: Vec<sys::CUgraphNode>,
}

impl Position {
    fn of(stream: sys::CUstream) -> DriverResult<Option<Position>> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph, mut count) = (0, ptr::null_mut(), 0);
        let (mut dependencies, mut edges) = (ptr::null(), ptr::null());
        // SAFETY: writes one value through each pointer.
        check("cuStreamGetCaptureInfo", unsafe {
            sys::cuStreamGetCaptureInfo_v3(
                stream,
                &mut status,
                &mut id,
                &mut graph,
                &mut dependencies,
                &mut edges,
                &mut count,
            )
        })?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE {
            return Ok(None);
        }
        let dependencies = if count == 0 || dependencies.is_null() {
            Vec::new()
        } else {
            // SAFETY: the driver owns `count` handles at this address until the next use of the
            // stream, which is after this copy.
            unsafe { std::slice::from_raw_parts(dependencies, count) }.to_vec()
        };
        Ok(Some(Position { graph, dependencies }))
    }
}

impl Context {
    pub(super) fn begin_capture(&self, stream: Stream) -> DriverResult<()> {
        // Before the slots are locked, because opening may wait for another thread.
        let open = CAPTURES.open(self.device());
        let mut slots = self.slots();
        let slot = slot_of(&mut slots, stream)?;
        if slot.recording.is_some() {
            return Err(DriverError::new("begin_capture", "the stream is recorded already"));
        }
        begin(slot.raw)?;
        slot.recording = Some(open);
        Ok(())
    }

    pub(super) fn begin_group(&self, stream: Stream) -> DriverResult<()> {
        let mut slots = self.slots();
        let slot = slot_of(&mut slots, stream)?;
        if slot.is_grouped {
            return Err(DriverError::new("begin_group", "a group was begun already"));
        }
        if Position::of(slot.raw)?.is_none() {
            return Err(DriverError::new(
                "begin_group",
                "expected a stream that is recorded, got one that is not",
            ));
        }
        let private = match slot.private {
            Some(private) => private,
            None => *slot.private.insert(new_stream(slot.priority)?),
        };
        begin(private)?;
        slot.is_grouped = true;
        Ok(())
    }

    pub(super) fn end_group(&self, stream: Stream) -> DriverResult<()> {
        let mut slots = self.slots();
        let slot = slot_of(&mut slots, stream)?;
        let Some(group) = take_group(slot)? else {
            return Err(DriverError::new("end_group", "no group was begun"));
        };
        let Some(Position { graph, dependencies }) = Position::of(slot.raw)? else {
            return Err(DriverError::new("end_group", "the recording around the group has ended"));
        };
        let mut node = ptr::null_mut();
        if node_count(&group)? == 0 {
            // SAFETY: graph and dependencies belong to the capture in progress; the array is alive
            // and has the given length.
            check("cuGraphAddEmptyNode", unsafe {
                sys::cuGraphAddEmptyNode(
                    &mut node,
                    graph,
                    dependencies.as_ptr(),
                    dependencies.len(),
                )
            })?;
        } else {
            // SAFETY: as above; the child graph is copied.
            check("cuGraphAddChildGraphNode", unsafe {
                sys::cuGraphAddChildGraphNode(
                    &mut node,
                    graph,
                    dependencies.as_ptr(),
                    dependencies.len(),
                    group.0,
                )
            })?;
        }
        use sys::CUstreamUpdateCaptureDependencies_flags_enum as Flags;
        let set = Flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
        // SAFETY: a single node of the graph that the stream is captured into, without edge data.
        check("cuStreamUpdateCaptureDependencies", unsafe {
            sys::cuStreamUpdateCaptureDependencies_v2(slot.raw, &mut node, ptr::null(), 1, set)
        })
    }

    pub(super) fn end_capture(&self, stream: Stream) -> DriverResult<LaunchableGraph> {
        let mut slots = self.slots();
        let slot = slot_of(&mut slots, stream)?;
        let Some(_until_the_end) = slot.recording.take() else {
            return Err(DriverError::new(
                "end_capture",
                "expected a stream that is recorded, got one that is not",
            ));
        };
        // A group that was not ended is discarded with the capture.
        let open_group = take_group(slot);
        let recorded = end(slot.raw)?;
        if !matches!(open_group, Ok(None)) {
            return Err(DriverError::new("end_capture", "a group was begun and not ended"));
        }
        let mut executable = ptr::null_mut();
        // SAFETY: a graph of ours; writes one handle.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut executable, recorded.0, 0)
        })?;
        let launchable = LaunchableGraph { recorded, executable };
        // Upload here rather than in the first launch, so that memory accounting includes the graph
        // from the start.
        // SAFETY: both handles are alive.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(executable, slot.raw) })?;
        Ok(launchable)
    }

    /// Ends and discards all captures.
    pub(super) fn abandon_captures(&self) {
        for slot in self.slots().iter_mut() {
            let _ = take_group(slot);
            if let Some(_until_the_end) = slot.recording.take() {
                let _ = end(slot.raw);
            }
        }
    }
}

/// Ends the capture of a group's private stream; `None` without a group.
fn take_group(slot: &mut StreamSlot) -> DriverResult<Option<Recorded>> {
    let Some(private) = slot.private.filter(|_| slot.is_grouped) else { return Ok(None) };
    slot.is_grouped = false;
    end(private).map(Some)
}
