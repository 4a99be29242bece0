//! `--precision auto`: the precision of a model's linear layers on a device.

use deepwell_ir::{Graph, PrecisionPolicy, Target};
pub use deepwell_plan::AutoPrecision;
use deepwell_plan::auto_precision;
use deepwell_probe::Hardware;

use crate::{Device, Settings, TrainError};

/// Returns the policy of `auto` for a graph on the device, for micro-batches of the given number of
/// sequences and tokens, and the choices made layer by layer among `presets`, the first of
/// [`Settings::auto_presets`] or all of them. No choices are made for a CPU or an emulated GPU:
/// both show the numerics of MXFP8, not its speed.
///
/// # Errors
/// The experts of the graph cannot be expanded.
pub fn auto_policy(
    graph: &Graph,
    (device, target): (Device, &Target),
    micro_batch: (usize, usize),
    presets: &[&str],
) -> Result<(PrecisionPolicy, Option<AutoPrecision>), TrainError> {
    let preset = Settings::auto_precision(&target.arch);
    if target.gpu.is_none() {
        return Ok((PrecisionPolicy::preset(preset)?, None));
    }
    let catalog = device.catalog();
    let (policy, chosen) = auto_precision(graph, presets, micro_batch, catalog.as_ref(), target)?;
    Ok((policy, Some(chosen)))
}

impl Settings {
    /// Returns the policy of a run of `graph`. For [`Settings::AUTO`] the device decides, and
    /// [`Settings::precision`] becomes the device's preset unless layers were chosen one by one.
    ///
    /// # Errors
    /// The device is not in `hardware`; and as [`Settings::precision_policy`].
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
        // All ranks and world sizes choose the same policy, so that a run can resume with another
        // world size.
        let micro_batch = (self.micro_batch.unwrap_or(self.batch_size), self.seq_len);
        let presets = Settings::auto_presets(&target.arch);
        let (policy, chosen) = auto_policy(graph, (self.device, &target), micro_batch, presets)?;
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

    /// A run chooses by its micro-batch; its settings record the name of the choice.
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
        check(Device::Cuda(0), "llama-134m", [32, 1024], ("auto", 82));
    }
}
