//! Order of passes, streams of calls and overlap of collectives.

use deepwell_ir::{Call, Schedule, StreamId, Target};

use crate::Plan;
use crate::schedule::StageHandover;
use crate::stages::StagePasses;

/// Order of the passes of a step, streams of the calls, and overlap of collectives.
pub struct Scheduling<'a> {
    /// Forward and backward passes of the micro-batches.
    pub passes: Schedule,
    /// Receives of this pipeline stage between passes; `None` if sends and receives are in the
    /// bodies.
    pub handover: Option<StageHandover>,
    /// The stream of each call; 0 is the main stream. With `None`, a GPU runs independent calls on
    /// several streams and collectives on [`EXCHANGES`]; a CPU has one stream.
    pub stream_of: Option<&'a dyn Fn(&Call) -> StreamId>,
    /// Whether collectives overlap with compute: gradients are reduced as soon as they are
    /// complete, and weights are prefetched one layer ahead.
    pub overlaps: bool,
}

/// The stream of all collectives, of every group: a single stream gives all ranks the same order.
pub const EXCHANGES: StreamId = 1;

impl Scheduling<'_> {
    /// Gradient accumulation with sequential micro-batches and all calls on one stream.
    pub fn of(plan: &Plan) -> Scheduling<'static> {
        Scheduling {
            passes: Schedule::gradient_accumulation(plan.micro_batches),
            handover: None,
            stream_of: None,
            overlaps: false,
        }
    }

    /// The default scheduling of a rank with the passes of its stage.
    pub(super) fn of_stage(
        (passes, handover): StagePasses,
        target: &Target,
    ) -> Scheduling<'static> {
        // CPU ranks alternate compute and collectives; overlap would only keep buffers alive
        // longer.
        let overlaps = target.arch != "cpu" && target.ranks.world_size > 1;
        Scheduling { passes, handover, stream_of: None, overlaps }
    }
}
