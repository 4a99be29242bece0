//! The settings that a run file or the flags name.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::plan_file::PlanFile;
use crate::{Settings, TrainError};

/// Values of some settings, by the names of a run file. Numbers are finite.
///
/// ```
/// use deepwell_trainer::SettingsLayer;
///
/// let file = SettingsLayer::of_file("steps = 50\nseed = 7\n", "run.toml")?;
/// let mut flags = SettingsLayer::default();
/// flags.set("steps", &20);
/// let settings = flags.over(file).settings(None)?;
/// assert_eq!((settings.steps, settings.seed, settings.seq_len), (20, 7, 128));
/// # Ok::<(), deepwell_trainer::TrainError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SettingsLayer {
    values: Map<String, Value>,
}

impl SettingsLayer {
    /// Reads the text of a run file. Errors contain `place`, with line and column.
    ///
    /// # Errors
    /// The text is not TOML, a setting is unknown, or a value is invalid.
    pub fn of_file(text: &str, place: &str) -> Result<SettingsLayer, TrainError> {
        let refuse = |error: toml::de::Error| TrainError::Setting {
            setting: "run file",
            expected: "settings in TOML".to_string(),
            got: format!("{place}: {error}"),
            hint: None,
        };
        // Names and types are checked with their places in the text.
        toml::from_str::<Settings>(text).map_err(refuse)?.check_values()?;
        Ok(SettingsLayer { values: toml::from_str(text).map_err(refuse)? })
    }

    /// Returns the flags that were given: flags that were not are `None`, `false` or an empty list.
    ///
    /// # Panics
    /// `flags` is not serialized as a map.
    pub fn of_flags(flags: &impl Serialize) -> SettingsLayer {
        let Ok(Value::Object(mut values)) = serde_json::to_value(flags) else {
            panic!("flags are a map from names of settings to values");
        };
        values.retain(|_, value| !matches!(value, Value::Null | Value::Bool(false)));
        values.retain(|_, value| value.as_array().is_none_or(|list| !list.is_empty()));
        SettingsLayer { values }
    }

    /// Sets the value at a dotted path of settings: `router.balance`.
    ///
    /// # Panics
    /// The value is not plain data.
    pub fn set(&mut self, path: &str, value: &impl Serialize) {
        let value = serde_json::to_value(value).expect("a setting is plain data");
        let mut parents: Vec<&str> = path.split('.').collect();
        let last = parents.pop().unwrap_or(path);
        let mut values = &mut self.values;
        for parent in parents {
            let entry = values.entry(parent).or_insert_with(|| Value::Object(Map::new()));
            if !entry.is_object() {
                *entry = Value::Object(Map::new());
            }
            values = entry.as_object_mut().expect("it was just made one");
        }
        values.insert(last.to_string(), value);
    }

    /// Whether a value is at a dotted path of settings.
    pub fn has(&self, path: &str) -> bool {
        let mut names = path.split('.');
        let mut value = names.next().and_then(|first| self.values.get(first));
        for name in names {
            value = value.and_then(|value| value.get(name));
        }
        value.is_some()
    }

    /// Returns both layers' values; a setting of both has the value of this layer.
    #[must_use]
    pub fn over(mut self, below: SettingsLayer) -> SettingsLayer {
        merge(&mut self.values, below.values);
        self
    }

    /// Returns all settings: these values, then those of the plan, then the defaults.
    ///
    /// # Errors
    /// [`TrainError::Setting`] if a value has the wrong type or contradicts the plan.
    pub fn settings(&self, plan: Option<&PlanFile>) -> Result<Settings, TrainError> {
        let refuse = |error: serde_json::Error| TrainError::Setting {
            setting: "settings",
            expected: "names and types of a run file".to_string(),
            got: error.to_string(),
            hint: None,
        };
        let values = Value::Object(self.values.clone());
        let mut settings: Settings = serde_json::from_value(values).map_err(refuse)?;
        if let Some(plan) = plan {
            plan.apply(&mut settings, self)?;
        }
        Ok(settings)
    }
}

/// Adds the values of `below` that are missing in `above`.
fn merge(above: &mut Map<String, Value>, below: Map<String, Value>) {
    for (name, value) in below {
        match (above.get_mut(&name), value) {
            (None, value) => drop(above.insert(name, value)),
            (Some(Value::Object(above)), Value::Object(below)) => merge(above, below),
            (Some(_), _) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_stand_over_the_file() {
        let file = "steps = 5\n[router]\nbalance = 0.5\nz = 0.25\n";
        let file = SettingsLayer::of_file(file, "run.toml").unwrap();
        let given = serde_json::json!({ "seed": 3, "model": null, "audit": false, "data": [] });
        let mut flags = SettingsLayer::of_flags(&given);
        flags.set("router.balance", &0.125);
        for (name, expected) in [("seed", true), ("model", false), ("audit", false)] {
            assert_eq!(flags.has(name), expected, "{name}");
        }
        assert!(flags.has("router.balance") && !flags.has("router.z"));
        let settings = flags.over(file).settings(None).unwrap();
        assert_eq!((settings.steps, settings.seed), (5, 3));
        assert_eq!((settings.router.balance, settings.router.z), (0.125, 0.25));
    }

    #[test]
    fn every_setting_survives_a_layer() {
        let settings = Settings { seed: u64::MAX, learning_rate: Some(0.1), ..Settings::default() };
        let layer = SettingsLayer::of_flags(&settings);
        assert_eq!(layer.settings(None).unwrap(), settings);
    }
}
