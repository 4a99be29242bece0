//! Clusters for `deepwell probe --cluster`.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use deepwell_probe::{Cluster, NUMBER_FORMATS, NumberFormat};
use serde::Serialize;

use crate::output::{print, print_json};

/// Output of `probe --cluster --json`.
#[derive(Debug, Serialize)]
struct ClusterSummary {
    name: String,
    nodes: u32,
    gpus: u32,
    gpu_memory_bytes: u64,
    rails: u32,
    /// Dense TFLOP/s of all GPUs together, for the formats that all GPUs support.
    peak_tflops: BTreeMap<NumberFormat, f64>,
    kinds: Vec<NodesSummary>,
}

/// Machines of one kind.
#[derive(Debug, Serialize)]
struct NodesSummary {
    count: u32,
    preset: String,
    gpus: u32,
    nics: u32,
    nic_gbit_per_s: f64,
    network_gbps_per_gpu: Option<f64>,
    nvlink_domain_gpus: Option<u32>,
}

impl ClusterSummary {
    fn new(cluster: &Cluster) -> ClusterSummary {
        let peak = |format| Some((format, cluster.peak_tflops(format).filter(|&peak| peak > 0.0)?));
        ClusterSummary {
            name: cluster.name.clone(),
            nodes: cluster.node_count(),
            gpus: cluster.gpu_count(),
            gpu_memory_bytes: cluster.gpu_memory_bytes(),
            rails: cluster.rails,
            peak_tflops: NUMBER_FORMATS.into_iter().filter_map(peak).collect(),
            kinds: cluster
                .nodes
                .iter()
                .map(|nodes| NodesSummary {
                    count: nodes.count,
                    preset: nodes.preset.clone(),
                    gpus: nodes.gpu_count(),
                    nics: nodes.nics,
                    nic_gbit_per_s: nodes.nic_gbit_per_s,
                    network_gbps_per_gpu: nodes.network_gbps_per_gpu(),
                    nvlink_domain_gpus: nodes.nvlink_domain_gpus(),
                })
                .collect(),
        }
    }
}

/// Prints the cluster described by a file or a preset's name.
pub(crate) fn show(name: &str, as_json: bool) -> Result<()> {
    let cluster = read(name)?;
    if as_json { print_json(&ClusterSummary::new(&cluster)) } else { print(&cluster.table()) }
}

fn read(name: &str) -> Result<Cluster> {
    if !Path::new(name).exists() {
        return Cluster::preset(name)
            .with_context(|| format!("cluster: expected a TOML file or a preset, got `{name}`"));
    }
    let text = std::fs::read_to_string(name).with_context(|| format!("cannot read `{name}`"))?;
    Cluster::from_toml(&text).with_context(|| format!("cannot use `{name}` as a cluster"))
}
