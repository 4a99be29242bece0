//! A JSON object whose keys are all consumed, known to have no effect, or rejected.

mod keys;
mod known_keys;
mod text;

pub(super) use keys::{Keys, edit_distance, kind};
pub(super) use text::{parse_object, read_text};
