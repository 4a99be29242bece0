//! Clusters by name, with optional changes.

use crate::cluster::COUNT_MAX;
use crate::skus::{Host, RACK_TRAYS, Sku, sku};
use crate::{Cluster, Hardware, Nodes, ProbeError};

/// Keys allowed after a name.
const KEYS: &str = "`nodes`, `gpus`, `nics`, `gbit` or `price`";

impl Cluster {
    /// A cluster by name: `gb200-nvl72` or `gb300-nvl72` (18 compute trays of four GPUs in one
    /// NVLink domain), or a board, `hgx-h100`, `hgx-h200`, `hgx-b200`, `hgx-b300`; a suffix such as
    /// `-x16` multiplies either. NICs are as in NVIDIA's own systems of these SKUs, with a rail per
    /// NIC.
    ///
    /// ```
    /// use deepwell_probe::Cluster;
    ///
    /// let racks = Cluster::preset("gb300-nvl72-x8")?;
    /// assert_eq!((racks.node_count(), racks.gpu_count()), (144, 576));
    /// assert_eq!(racks.nodes[0].nvlink_domain_gpus(), Some(72));
    /// # Ok::<(), deepwell_probe::ProbeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ProbeError::UnknownPreset`], with the known names.
    pub fn preset(name: &str) -> Result<Cluster, ProbeError> {
        let unknown = || ProbeError::UnknownPreset {
            got: name.to_owned(),
            known: "`gb200-nvl72`, `gb300-nvl72`, `hgx-h100`, `hgx-h200`, `hgx-b200` or \
                    `hgx-b300`, each also with `-x2` or more after it"
                .to_owned(),
        };
        let (one, count) = match name.rsplit_once("-x") {
            None => (name, 1),
            Some((one, count)) => (one, count.parse::<u32>().map_err(|_| unknown())?),
        };
        let rack = one.strip_suffix("-nvl72").and_then(sku);
        let board = one.strip_prefix("hgx-").and_then(sku);
        let rack = rack.filter(|sku| sku.host == Host::Grace);
        let board = board.filter(|sku| sku.host != Host::Grace);
        let found = rack.map(|sku| (sku, RACK_TRAYS)).or(board.map(|board| (board, 1)));
        let Some((sku, trays)) = found.filter(|_| (1..=COUNT_MAX / 100).contains(&count)) else {
            return Err(unknown());
        };
        let (nics, nic_gbit_per_s) = sku.nics.ok_or_else(unknown)?;
        let preset = format!("{}-x{}", sku.preset, sku.gpus_max);
        let nodes = Nodes {
            count: count * trays,
            hardware: Hardware::preset(&preset)?,
            preset,
            nics,
            nic_gbit_per_s,
            nvlink_domain_nodes: trays,
        };
        Ok(Cluster {
            name: name.to_owned(),
            rails: nics,
            nodes: vec![nodes],
            price_per_gpu_hour: None,
        })
    }

    /// A cluster in one line: a name of [`Cluster::preset`] or of [`Hardware::preset`], optionally
    /// followed by a colon and changes separated by commas: `nodes`, `gpus` per node, `nics` per
    /// node, `gbit` (Gbit/s of a NIC) and `price` (of a GPU per hour). A GPU's name with `nodes`
    /// means NVIDIA's own system: eight GPUs, or four with Grace.
    ///
    /// ```
    /// use deepwell_probe::Cluster;
    ///
    /// let cluster = Cluster::from_name("h100:nodes=2048,price=2.5")?;
    /// assert_eq!((cluster.gpu_count(), cluster.price_per_gpu_hour), (16384, Some(2.5)));
    /// assert_eq!(Cluster::from_name("h200-x8")?.gpu_count(), 8);
    /// # Ok::<(), deepwell_probe::ProbeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ProbeError::UnknownPreset`], or [`ProbeError::ClusterName`] with the invalid key.
    pub fn from_name(text: &str) -> Result<Cluster, ProbeError> {
        let (name, changes) = text.split_once(':').unwrap_or((text, ""));
        let refuse = |what: String| ProbeError::ClusterName { got: text.to_owned(), what };
        let mut cluster = match Cluster::preset(name) {
            Ok(cluster) => cluster,
            Err(_) => machine(name, changes.contains("nodes="))?,
        };
        cluster.name = text.to_owned();
        let node = &mut cluster.nodes[0];
        for change in changes.split(',').filter(|change| !change.is_empty()) {
            let (key, value) = change
                .split_once('=')
                .ok_or_else(|| refuse(format!("expected KEY=VALUE, got `{change}`")))?;
            let count = |most: u32| {
                let parsed = value.parse::<u32>().ok().filter(|count| (1..=most).contains(count));
                parsed
                    .ok_or_else(|| refuse(format!("`{key}`: expected 1 to {most}, got `{value}`")))
            };
            let number = || {
                let parsed = value.parse::<f64>().ok();
                let parsed = parsed.filter(|number| *number >= 0.0 && number.is_finite());
                parsed.ok_or_else(|| {
                    refuse(format!("`{key}`: expected a number of 0 or more, got `{value}`"))
                })
            };
            match key {
                "nodes" => node.count = count(COUNT_MAX)?,
                "gpus" => {
                    let sku = node.preset.rsplit_once("-x").map_or(&*node.preset, |(sku, _)| sku);
                    let gpus = count(72)?;
                    let preset = format!("{sku}-x{gpus}");
                    node.hardware = Hardware::preset(&preset)
                        .map_err(|error| refuse(format!("`gpus`: {error}")))?;
                    node.nics = node.nics.min(gpus);
                    node.preset = preset;
                }
                "nics" => node.nics = count(1024)?,
                "gbit" => node.nic_gbit_per_s = number()?,
                "price" => cluster.price_per_gpu_hour = Some(number()?),
                _ => return Err(refuse(format!("expected the keys {KEYS}, got `{key}`"))),
            }
        }
        let nodes = &cluster.nodes[0];
        cluster.rails = nodes.nics.max(1);
        let domain = nodes.nvlink_domain_nodes;
        if !nodes.count.is_multiple_of(domain) {
            let what = format!(
                "`nodes`: expected a multiple of the {domain} nodes of an NVLink domain, got {}",
                nodes.count
            );
            return Err(refuse(what));
        }
        if nodes.count > 1 && (nodes.nics == 0 || nodes.nic_gbit_per_s <= 0.0) {
            let what = "several machines need a network\nhint: add `nics=8,gbit=400` to the name";
            return Err(refuse(what.to_owned()));
        }
        Ok(cluster)
    }

    /// A single machine, with the NICs of NVIDIA's own system if its GPUs are known.
    pub fn of_machine(name: &str, hardware: Hardware) -> Cluster {
        let gpus = hardware.gpus.len() as u32;
        let known = hardware.gpus.first().and_then(|gpu| sku_of(&gpu.name));
        let nics = known.and_then(|sku| sku.nics);
        let (nics, nic_gbit_per_s) = nics.map_or((0, 0.0), |(nics, rate)| (nics.min(gpus), rate));
        let nodes = Nodes {
            count: 1,
            preset: name.to_owned(),
            hardware,
            nics,
            nic_gbit_per_s,
            nvlink_domain_nodes: 1,
        };
        let rails = nics.max(1);
        Cluster { name: name.to_owned(), rails, nodes: vec![nodes], price_per_gpu_hour: None }
    }
}

/// The machine of a preset; for a GPU's name, NVIDIA's own system if `is_system`.
fn machine(name: &str, is_system: bool) -> Result<Cluster, ProbeError> {
    let preset = match sku(name).filter(|_| is_system) {
        Some(sku) => format!("{name}-x{}", sku.gpus_max),
        None => name.to_owned(),
    };
    Ok(Cluster::of_machine(&preset, Hardware::preset(&preset)?))
}

/// The SKU with this GPU name.
fn sku_of(name: &str) -> Option<&'static Sku> {
    crate::skus::SKUS.iter().find(|sku| sku.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_on_one_line() {
        // Nodes, GPUs, network GB/s per GPU, GPUs per NVLink domain.
        let check = |name: &str, expected: (u32, u32, f64, u32)| {
            let cluster = Cluster::from_name(name).unwrap();
            let nodes = &cluster.nodes[0];
            let gbps = nodes.network_gbps_per_gpu().unwrap();
            let domain = nodes.nvlink_domain_gpus().unwrap();
            let found = (cluster.node_count(), cluster.gpu_count(), gbps, domain);
            assert_eq!(found, expected, "{name}");
        };
        check("h200-x8", (1, 8, 50.0, 8));
        check("h200-x2", (1, 2, 50.0, 2));
        check("h100", (1, 1, 50.0, 1));
        check("h100:nodes=2048", (2048, 16384, 50.0, 8));
        check("h100-x4:nodes=3", (3, 12, 50.0, 4));
        check("h100:nodes=2,gpus=4,nics=2,gbit=200", (2, 8, 12.5, 4));
        check("hgx-b300-x16", (16, 128, 100.0, 8));
        check("gb200-nvl72-x2", (36, 144, 50.0, 72));
        check("gb200-nvl72:nodes=36", (36, 144, 50.0, 72));
        check("gb300:nodes=2", (2, 8, 100.0, 4));
    }

    #[test]
    fn lines_that_name_no_cluster() {
        let check = |name: &str, part: &str| {
            let message = Cluster::from_name(name).unwrap_err().to_string();
            assert!(message.contains(part), "{name}: {message}");
        };
        check("h101", "h200");
        check("h100:nodes", "expected KEY=VALUE, got `nodes`");
        check("h100:nodes=0", "`nodes`: expected 1 to");
        check("h100:nodes=2,price=-1", "`price`: expected a number of 0 or more");
        check("h100:noodles=2", "expected the keys `nodes`");
        check("h100:nodes=2,gpus=9", "`gpus`: ");
        check("gb200-nvl72:nodes=20", "multiple of the 18 nodes");
        check("rtx5090:nodes=2", "several machines need a network");
    }
}
