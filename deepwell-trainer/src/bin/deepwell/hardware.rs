//! Which machine to plan for: this one, or one that was described.

use std::path::Path;

use anyhow::{Context, Result, bail};
use deepwell_ir::Target;
use deepwell_probe::{Hardware, probe};
use deepwell_trainer::Device;

/// The machine that `--hardware` names, or else this one, with `device` of it as a target.
pub(crate) fn hardware_and_target(
    described: Option<&str>,
    device: Device,
) -> Result<(Hardware, Target)> {
    let hardware = this_or(described)?;
    let target = match (described, device) {
        // What kernels ask for goes by the same names as what the probe lists.
        (Some(_), Device::Cpu) => {
            Target::cpu(hardware.cpu.usable_threads as usize, hardware.cpu.simd.clone())
        }
        _ => device.target(&hardware)?,
    };
    Ok((hardware, target))
}

/// The machine that a name or file describes, or else this one.
pub(crate) fn this_or(described: Option<&str>) -> Result<Hardware> {
    described.map_or_else(|| Ok(probe()), read)
}

fn read(name: &str) -> Result<Hardware> {
    let path = Path::new(name);
    if !path.exists() {
        return match Hardware::preset(name) {
            Ok(hardware) => Ok(hardware),
            Err(_) => bail!(
                "hardware: expected the JSON file of a machine or a preset ({}), got `{name}`\n\
                 hint: `deepwell probe --json > machine.json` describes a machine",
                Hardware::preset_names().join(", ")
            ),
        };
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read `{name}`"))?;
    Hardware::from_json(&text).with_context(|| format!("cannot use `{name}` as hardware"))
}
