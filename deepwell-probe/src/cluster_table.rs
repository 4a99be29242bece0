//! A cluster as a text table.

use std::fmt::Write;

use crate::table::rate;
use crate::{Cluster, NUMBER_FORMATS, Nodes, NumberFormat};

impl Cluster {
    /// Dense TFLOP/s of all GPUs together; `None` if the peak of any GPU is unknown.
    ///
    /// ```
    /// use deepwell_probe::{Cluster, NumberFormat};
    ///
    /// let cluster = Cluster::preset("hgx-h200-x2")?;
    /// assert_eq!(cluster.peak_tflops(NumberFormat::Bf16), Some(16.0 * 989.0));
    /// assert_eq!(cluster.peak_tflops(NumberFormat::Nvfp4), None);
    /// # Ok::<(), deepwell_probe::ProbeError>(())
    /// ```
    pub fn peak_tflops(&self, format: NumberFormat) -> Option<f64> {
        let of_one = |nodes: &Nodes| -> Option<f64> {
            nodes.hardware.gpus.iter().map(|gpu| gpu.peak_tflops(format)).sum()
        };
        self.nodes.iter().map(|nodes| Some(of_one(nodes)? * f64::from(nodes.count))).sum()
    }

    /// Memory of all GPUs together, bytes.
    pub fn gpu_memory_bytes(&self) -> u64 {
        let of_one =
            |nodes: &Nodes| -> u64 { nodes.hardware.gpus.iter().map(|gpu| gpu.memory_bytes).sum() };
        self.nodes.iter().map(|nodes| of_one(nodes) * u64::from(nodes.count)).sum()
    }

    /// A human-readable table of several lines, each ended by a line break. Rates are GB (10⁹
    /// bytes) per second in one direction.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let name = if self.name.is_empty() { "without a name" } else { &self.name };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{:<16} {name}", "cluster");
        let tebibytes = self.gpu_memory_bytes() as f64 / (1u64 << 40) as f64;
        let (nodes, gpus) = (self.node_count(), self.gpu_count());
        let _ = writeln!(text, "{:<16} {nodes} nodes, {gpus} GPUs, {tebibytes:.2} TiB", "  all");
        let plural = if self.rails == 1 { "" } else { "s" };
        let _ = writeln!(text, "{:<16} {} rail{plural}", "  network", self.rails);
        let peaks: Vec<String> = NUMBER_FORMATS
            .iter()
            .filter_map(|&format| {
                let peak = self.peak_tflops(format).filter(|&peak| peak > 0.0)?;
                Some(format!("{format} {}", rate(peak / 1e3)))
            })
            .collect();
        if !peaks.is_empty() {
            let _ = writeln!(text, "{:<16} {}", "  peak PFLOP/s", peaks.join(", "));
        }
        for nodes in &self.nodes {
            let _ = writeln!(text, "{:<16} {} x {}", "nodes", nodes.count, nodes.preset);
            let nics = match nodes.nics {
                0 => "no network".to_owned(),
                1 => format!("1 NIC of {} Gbit/s", nodes.nic_gbit_per_s),
                nics => format!("{nics} NICs of {} Gbit/s", nodes.nic_gbit_per_s),
            };
            let each = match nodes.network_gbps_per_gpu().filter(|&gbps| gbps > 0.0) {
                Some(gbps) => format!(", {} GB/s for each GPU", rate(gbps)),
                None => String::new(),
            };
            let _ = writeln!(text, "{:<16} {nics}{each}", "  network");
            if let Some(gpus) = nodes.nvlink_domain_gpus() {
                let _ = writeln!(text, "{:<16} domains of {gpus} GPUs", "  NVLink");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_as_tables() {
        insta::assert_snapshot!("racks", Cluster::preset("gb200-nvl72-x2").unwrap().table());
        let text = "rails = 1\n[[nodes]]\ncount = 2\npreset = \"h100-x8\"\nnics = 1\n\
                    nic_gbit_per_s = 400\n[[nodes]]\ncount = 1\npreset = \"cpu\"\nnics = 0\n\
                    nic_gbit_per_s = 25.5\n";
        insta::assert_snapshot!("boards", Cluster::from_toml(text).unwrap().table());
    }
}
