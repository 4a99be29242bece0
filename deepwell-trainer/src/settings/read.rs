//! Reads run files.

use std::path::Path;

use crate::plan_file::PlanFile;
use crate::{Settings, TrainError};

impl Settings {
    /// Reads a run file. Errors contain `place`, with line and column.
    ///
    /// # Errors
    /// The text is no run file, a value is invalid, or a value contradicts the plan.
    pub fn from_toml(text: &str, place: &str) -> Result<Settings, TrainError> {
        let mut settings: Settings = toml::from_str(text).map_err(|error| TrainError::Setting {
            setting: "run file",
            expected: "settings in TOML".to_string(),
            got: format!("{place}: {error}"),
            hint: None,
        })?;
        if let Some(path) = settings.plan.clone() {
            PlanFile::read(&path)?.apply(&mut settings, &Settings::default())?;
        }
        settings.check()?;
        Ok(settings)
    }

    /// Reads a run file.
    ///
    /// # Errors
    /// As [`Settings::from_toml`], or the file cannot be read.
    pub fn from_file(path: &Path) -> Result<Settings, TrainError> {
        let text = std::fs::read_to_string(path).map_err(TrainError::io(path))?;
        Settings::from_toml(&text, &path.display().to_string())
    }
}
