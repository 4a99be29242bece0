//! Hardware to plan for: this machine or a described machine.

use std::path::Path;

use anyhow::{Context, Result};
use deepwell_ir::Target;
use deepwell_plan::search::MachineMeasurements;
use deepwell_probe::{Cluster, Hardware, probe};
use deepwell_trainer::Device;

/// Returns the hardware named by `--hardware`, by default this machine, and `device` as a target.
pub(crate) fn hardware_and_target(
    described: Option<&str>,
    device: Device,
) -> Result<(Hardware, Target)> {
    let hardware = this_or(described)?;
    let target = match (described, device) {
        // Kernels and the probe use the same names for instruction sets.
        (Some(_), Device::Cpu) => {
            Target::cpu(hardware.cpu.usable_threads as usize, hardware.cpu.simd.clone())
        }
        _ => device.target(&hardware)?,
    };
    Ok((hardware, target))
}

/// Returns the measurements in a machine's file, if any.
pub(crate) fn measurements_of(name: &str) -> Result<Option<MachineMeasurements>> {
    #[derive(serde::Deserialize)]
    struct Probed {
        measured: Option<MachineMeasurements>,
    }
    let path = Path::new(name);
    if !path.exists() || path.extension().is_some_and(|end| end == "toml") {
        return Ok(None);
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read `{name}`"))?;
    let probed: Probed = serde_json::from_str(&text)
        .with_context(|| format!("expected what `deepwell probe --json` prints in `{name}`"))?;
    Ok(probed.measured)
}

/// Returns the described machine, by default this machine.
pub(crate) fn this_or(described: Option<&str>) -> Result<Hardware> {
    described.map_or_else(|| Ok(probe()), read)
}

/// Returns the cluster described by a name or file: a preset, a preset followed by overrides, a
/// cluster in TOML, or the JSON of one machine. None for a machine without GPUs.
pub(crate) fn cluster_of(name: &str) -> Result<Option<Cluster>> {
    let path = Path::new(name);
    let cluster = if !path.exists() {
        match Cluster::from_name(name) {
            Ok(cluster) => cluster,
            Err(error) if name.contains(':') => return Err(error.into()),
            Err(_) => return Err(unknown(name)),
        }
    } else if path.extension().is_some_and(|end| end == "toml") {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read `{name}`"))?;
        Cluster::from_toml(&text).with_context(|| format!("cannot use `{name}` as a cluster"))?
    } else {
        Cluster::of_machine(name, read(name)?)
    };
    Ok((cluster.gpu_count() > 0).then_some(cluster))
}

fn unknown(name: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "hardware: expected the JSON file of a machine, a cluster in TOML, or a preset ({}), got \
         `{name}`\n\
         hint: `deepwell probe --json > machine.json` describes a machine, `h100:nodes=16` names a \
         cluster",
        Hardware::preset_names().join(", ")
    )
}

fn read(name: &str) -> Result<Hardware> {
    if !Path::new(name).exists() {
        return Hardware::preset(name).map_err(|_| unknown(name));
    }
    let text = std::fs::read_to_string(name).with_context(|| format!("cannot read `{name}`"))?;
    Hardware::from_json(&text).with_context(|| format!("cannot use `{name}` as hardware"))
}
