//! Predicts memory and time of programs before a run.

mod experts;
mod pipeline;
mod program;
mod report;
mod roof;

pub use self::experts::ExpertRoom;
pub use self::pipeline::dryrun_stages;
pub use self::program::{dryrun, dryrun_world, roofline};
pub use self::report::{Bound, DryRun, ExchangeTime, OpTime, RankReport, ZeroBubble};
