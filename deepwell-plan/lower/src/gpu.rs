//! The GPU of a target.

use deepwell_ir::Target;
use deepwell_probe::{Gpu, Hardware};

/// The GPU of a target, if the target has a GPU of `hardware`.
pub(crate) fn gpu_of<'a>(hardware: &'a Hardware, target: &Target) -> Option<&'a Gpu> {
    hardware.gpus.get(target.gpu?)
}
