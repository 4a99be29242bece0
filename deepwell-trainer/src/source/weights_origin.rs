//! Origin of a model's initial weights.

use std::path::Path;

use super::model::{Description, ModelSource};

impl ModelSource {
    /// Whether the model comes with weights, in a folder or an archive.
    pub fn has_weights(&self) -> bool {
        self.stored().is_some() || matches!(self.description, Description::Exported(_))
    }

    /// Text about the origin of the initial weights of a run with this seed.
    pub fn weights_origin(&self, seed: u64) -> String {
        if matches!(self.description, Description::Exported(_)) {
            return format!("{}, the archive", self.name);
        }
        let Some(stored) = self.stored() else {
            let unread = self.unread_weights.as_ref();
            let unread = unread.map(|unread| format!("; {unread}")).unwrap_or_default();
            return format!("random, seed {seed}{unread}");
        };
        let mut files: Vec<&Path> = stored.iter().map(|tensor| tensor.file.as_path()).collect();
        files.sort_unstable();
        files.dedup();
        let first = files.first().map(|file| file.display().to_string()).unwrap_or_default();
        let more = match files.len() {
            0 | 1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        format!("{first}{more}, {} tensors", stored.len())
    }
}
