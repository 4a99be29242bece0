//! `--precision auto`: what a device computes the linear layers of a model in.

use deepwell_ir::{Graph, PrecisionPolicy, Target};
pub use deepwell_plan::AutoPrecision;
use deepwell_plan::auto_precision;
use deepwell_probe::Hardware;

use crate::{Device, Settings, TrainError};

/// The policy of `auto` for a graph on a device of this target, for micro-batches of so many
/// sequences of so many tokens, and what was chosen layer by layer. Nothing is chosen for a
/// processor, nor for a GPU that it emulates: they show the numerics of MXFP8, not its speed.
///
/// # Errors
/// A graph whose experts cannot be expanded.
pub fn auto_policy(
    graph: &Graph,
    (device, target): (Device, &Target),
    micro_batch: (usize, usize),
) -> Result<(PrecisionPolicy, Option<AutoPrecision>), TrainError> {
    let preset = Settings::auto_precision(&target.arch);
    if target.gpu.is_none() {
        return Ok((PrecisionPolicy::preset(preset)?, None));
    }
    let catalog = device.catalog();
    let (policy, chosen) = auto_precision(graph, preset, micro_batch, catalog.as_ref(), target)?;
    Ok((policy, Some(chosen)))
}

impl Settings {
    /// The policy of a run of `graph`. Of [`Settings::AUTO`] it is that of the device, and
    /// [`Settings::precision`] becomes its preset where no layer was chosen by itself.
    ///
    /// # Errors
    /// A device that `hardware` does not have, and as [`Settings::precision_policy`].
    pub fn resolve_policy(
        &mut self,
        graph: &Graph,
        hardware: &Hardware,
    ) -> Result<(PrecisionPolicy, Option<AutoPrecision>), TrainError> {
        let is_auto = self.precision == Settings::AUTO;
        if !is_auto || self.policy.is_some() || self.plan.is_some() {
            self.resolve_precision(hardware)?;
            return Ok((self.precision_policy()?, None));
        }
        let target = self.device.target(hardware)?;
        // All ranks and numbers of ranks choose the same, so that a run goes on on others.
        let micro_batch = (self.micro_batch.unwrap_or(self.batch_size), self.seq_len);
        let (policy, chosen) = auto_policy(graph, (self.device, &target), micro_batch)?;
        if chosen.is_none() {
            self.resolve_precision(hardware)?;
        }
        Ok((policy, chosen))
    }
}

#[cfg(test)]
mod tests {
    use crate::ModelSource;

    use super::*;

    /// A run chooses by its micro-batch, and its settings say by which name.
    #[test]
    fn settings_choose_by_device() {
        let check = |device: Device, model: &str, sizes: [usize; 2], expected: (&str, usize)| {
            let graph = ModelSource::open(model).unwrap().capture(Some(sizes[1])).unwrap();
            let [batch_size, seq_len] = sizes;
            let mut settings = Settings { device, batch_size, seq_len, ..Settings::default() };
            let hardware = Hardware::preset("h200").unwrap();
            let (policy, chosen) = settings.resolve_policy(&graph, &hardware).unwrap();
            let quantized = chosen.iter().flat_map(|it| &it.layers).map(|it| it.quantized).sum();
            assert_eq!((settings.precision.as_str(), quantized), expected, "{device} {model}");
            let in_bf16 = device == Device::Cuda(0) && quantized == 0;
            assert_eq!(policy == PrecisionPolicy::bf16(), in_bf16, "{device} {model}");
        };
        check(Device::Cpu, "llama-micro", [8, 128], ("mxfp8", 0));
        check(Device::Cuda(0), "llama-micro", [8, 128], ("auto", 0));
        check(Device::Cuda(0), "llama-134m", [32, 1024], ("auto", 84));
    }
}
