//! Model, tokenizer and precision that settings name.

use deepwell_ir::PrecisionPolicy;
use deepwell_probe::Hardware;

use crate::{ChosenTokenizer, ModelSource, Settings, TrainError};

impl Settings {
    /// Opens the named model.
    ///
    /// # Errors
    /// The model is neither a preset nor can it be captured.
    pub fn model_source(&self) -> Result<ModelSource, TrainError> {
        ModelSource::open(&self.model)
    }

    /// Opens the named tokenizer, or the model's own if none is named.
    ///
    /// # Errors
    /// As [`ModelSource::choose_tokenizer`].
    pub fn resolve_tokenizer(
        &mut self,
        model: &ModelSource,
    ) -> Result<ChosenTokenizer, TrainError> {
        let chosen = model.choose_tokenizer(self.tokenizer.as_deref(), &self.data)?;
        self.tokenizer.clone_from(&chosen.file);
        Ok(chosen)
    }

    /// Replaces [`Settings::AUTO`] by the name of a preset.
    ///
    /// # Errors
    /// The device is not in `hardware`.
    pub fn resolve_precision(&mut self, hardware: &Hardware) -> Result<(), TrainError> {
        if self.precision == Settings::AUTO {
            let target = self.device.target(hardware)?;
            self.precision = Settings::auto_precision(&target.arch).to_string();
        }
        Ok(())
    }

    /// The precision policy.
    ///
    /// # Errors
    /// An unknown preset or a broken policy file.
    pub fn precision_policy(&self) -> Result<PrecisionPolicy, TrainError> {
        let policy = self.policy_as_written()?;
        Ok(match self.fallback {
            Some(fallback) => policy.with_fallback(fallback),
            None => policy,
        })
    }

    /// The policy of plan, policy file or preset.
    fn policy_as_written(&self) -> Result<PrecisionPolicy, TrainError> {
        if let Some(link) = &self.plan {
            return Ok(link.file()?.plan.policy.clone());
        }
        match &self.policy {
            // Before the device is known, the finer blocks represent both.
            None if self.precision == Settings::AUTO => Ok(PrecisionPolicy::preset("mxfp8")?),
            None => Ok(PrecisionPolicy::preset(&self.precision)?),
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(TrainError::io(path))?;
                Ok(PrecisionPolicy::from_toml(&text, &path.display().to_string())?)
            }
        }
    }
}
