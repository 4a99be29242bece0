//! A JSON object of which every key is consumed, known to be without effect, or refused.

mod keys;
mod known_keys;
mod text;

pub(super) use keys::{Keys, edit_distance, kind};
pub(super) use text::{parse_object, read_text};
