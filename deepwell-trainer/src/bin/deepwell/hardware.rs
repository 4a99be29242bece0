//! Which machine to plan for: this one, or one that was described.

use std::path::Path;

use anyhow::{Context, Result, bail};
use deepwell_ir::Target;
use deepwell_kernels::cpu_target;
use deepwell_probe::{Hardware, probe};

/// The machine that `--hardware` names, or else this one, with its processor as a target.
pub(crate) fn hardware_and_target(described: Option<&str>) -> Result<(Hardware, Target)> {
    let Some(name) = described else {
        return Ok((probe(), cpu_target(rayon::current_num_threads())));
    };
    let hardware = read(name)?;
    // What kernels ask for goes by the same names as what the probe lists.
    let target = Target::cpu(hardware.cpu.usable_threads as usize, hardware.cpu.simd.clone());
    Ok((hardware, target))
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
