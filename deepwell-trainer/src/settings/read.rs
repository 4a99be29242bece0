//! Reads run files.

use std::path::Path;

use super::layer::SettingsLayer;
use crate::{Settings, TrainError};

impl Settings {
    /// Reads a run file. Errors contain `place`, with line and column.
    ///
    /// # Errors
    /// The text is no run file, a value is invalid, or a value contradicts the plan.
    pub fn from_toml(text: &str, place: &str) -> Result<Settings, TrainError> {
        let settings = Settings::of_layers(SettingsLayer::of_file(text, place)?)?;
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

    /// Returns the settings of merged layers, with the plan that the layers name. The values are
    /// not checked yet.
    ///
    /// # Errors
    /// The plan cannot be read, or a value contradicts the plan.
    pub fn of_layers(given: SettingsLayer) -> Result<Settings, TrainError> {
        let named = given.settings(None)?;
        match &named.plan {
            None => Ok(named),
            Some(link) => {
                let settings = given.settings(Some(link.file()?))?;
                // The file that the link has read stays with the settings.
                Ok(Settings { plan: named.plan.clone(), ..settings })
            }
        }
    }
}
