//! The GPUs and networks of a cluster, as input of a search.

use deepwell_probe::{Cluster, Gpu, Nodes, NumberFormat};
use serde::{Deserialize, Serialize};

use crate::collectives::Fabric;
use crate::gpu_model::GpuModel;
use deepwell_lower::PlanError;

/// GPUs of a single kind with their nodes and networks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machines {
    /// Name of the cluster.
    pub name: String,
    /// The GPU.
    pub gpu: GpuModel,
    /// Number of GPUs.
    pub gpus: usize,
    /// GPUs per node.
    pub node_gpus: usize,
    /// NVLink domains and the network between them.
    pub fabric: Fabric,
    /// Number of rails: networks connected only at the top level.
    pub rails: usize,
    /// Price of a GPU hour.
    pub price_per_gpu_hour: Option<f64>,
}

/// Largest number of domains for which all smaller counts are tried.
const COUNTS: usize = 16;

impl Machines {
    /// `gpus` GPUs in NVIDIA's own systems: nodes of eight GPUs, or Grace racks.
    pub fn of_gpus(gpu: GpuModel, gpus: usize) -> Machines {
        let (generation, domain_gpus, nic_gbps) = (gpu.generation, gpu.domain_gpus, gpu.nic_gbps);
        let node_gpus = if domain_gpus > 8 { 4 } else { 8 };
        Machines {
            name: format!("{gpus} x {}", gpu.name),
            gpu,
            gpus,
            node_gpus: node_gpus.min(gpus.max(1)),
            fabric: Fabric { measured: true, ..Fabric::new(generation, domain_gpus, nic_gbps) },
            rails: node_gpus,
            price_per_gpu_hour: None,
        }
    }

    /// The GPUs of a cluster.
    ///
    /// # Errors
    /// No GPUs, several kinds of GPUs, GPUs without NVLink, or an unknown GPU.
    pub fn of_cluster(cluster: &Cluster) -> Result<Machines, PlanError> {
        let refuse = |expected: &str, got: String| PlanError::Request {
            what: "cluster",
            expected: expected.to_string(),
            got,
        };
        let mut kinds = cluster.nodes.iter().filter(|nodes| !nodes.hardware.gpus.is_empty());
        let Some(nodes) = kinds.next() else {
            return Err(refuse("machines with GPUs", "none".to_string()));
        };
        let gpus = &nodes.hardware.gpus;
        let first = &gpus[0];
        let mut count = nodes.count;
        for other in kinds {
            let alike = Nodes { count: nodes.count, ..other.clone() };
            if alike != *nodes {
                let got = match other.preset == nodes.preset {
                    true => format!("{} with other networks", nodes.preset),
                    false => format!("{} and {}", nodes.preset, other.preset),
                };
                return Err(refuse("machines of one kind, as ranks wait for the slowest", got));
            }
            count += other.count;
        }
        if let Some(other) = gpus.iter().find(|gpu| gpu.name != first.name) {
            let got = format!("{} and {}", first.name, other.name);
            return Err(refuse("GPUs of one kind, as ranks wait for the slowest", got));
        }
        let Some(gpu) = GpuModel::of(first) else {
            let known = "A100, H100, H200, B200, B300, GB200 or GB300";
            return Err(refuse(known, first.name.clone()));
        };
        let Some(domain) = nodes.nvlink_domain_gpus().or((gpus.len() == 1).then_some(1)) else {
            return Err(refuse("GPUs joined by NVLink", format!("{} on PCIe", first.name)));
        };
        let nic_gbps = nodes.network_gbps_per_gpu().unwrap_or(0.0);
        let fabric = Fabric::new(gpu.generation, domain as usize, nic_gbps);
        let fabric = Fabric { measured: true, ..fabric };
        if count * gpus.len() as u32 > domain && fabric.nic_gbps <= 0.0 {
            let expected = "NICs with a rate, as nodes have to reach each other";
            return Err(refuse(expected, format!("{count} nodes without")));
        }
        Ok(Machines {
            name: cluster.name.clone(),
            gpu,
            gpus: count as usize * gpus.len(),
            node_gpus: gpus.len(),
            fabric,
            rails: cluster.rails as usize,
            price_per_gpu_hour: cluster.price_per_gpu_hour,
        })
    }

    /// Number of nodes of `gpus` GPUs.
    pub fn nodes_of(&self, gpus: usize) -> usize {
        gpus.div_ceil(self.node_gpus.max(1))
    }

    /// Numbers of GPUs tried by a search with at most `most` GPUs: whole NVLink domains, or any
    /// number within a domain. A number with few divisors may have worse plans than a smaller
    /// number, so smaller numbers are tried too, down to three quarters of `most`: all numbers up
    /// to sixteen domains, above only numbers of domains with four significant binary digits.
    pub fn counts(&self, most: usize) -> Vec<usize> {
        let unit = if most < self.fabric.domain_gpus { 1 } else { self.fabric.domain_gpus };
        let units = most / unit.max(1);
        let is_tried = |count: &usize| {
            let step = (count.next_power_of_two() / COUNTS).max(1);
            *count == units || count.is_multiple_of(step)
        };
        (3 * units / 4 + 1..=units).rev().filter(is_tried).map(|count| count * unit).collect()
    }

    /// The GPU and its links.
    pub fn parts(&self) -> (&GpuModel, &Fabric) {
        (&self.gpu, &self.fabric)
    }
}

impl GpuModel {
    /// A detected GPU: peaks, memory and SMs of the GPU itself, with the efficiencies of its
    /// generation. `None` for unknown GPUs.
    pub fn of(gpu: &Gpu) -> Option<GpuModel> {
        let known = GpuModel::named(&gpu.name)?;
        let peak = |format, or: f64| gpu.peak_tflops(format).map_or(or, |peak| peak * 1e12);
        let bf16_flops = peak(NumberFormat::Bf16, known.bf16_flops);
        Some(GpuModel {
            bf16_flops,
            fp8_flops: peak(NumberFormat::Fp8, known.fp8_flops),
            nvfp4_flops: peak(NumberFormat::Nvfp4, bf16_flops),
            memory_bytes_per_s: gpu.hbw_gbps * 1e9,
            memory_bytes: gpu.memory_free_bytes as f64,
            sms: gpu.sm_count.map_or(known.sms, f64::from),
            ..known
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_become_machines() {
        let of = |name: &str| Machines::of_cluster(&Cluster::from_name(name).unwrap());
        let check = |name: &str, gpus: usize, domain: usize, nic_gbps: f64| {
            let found = of(name).unwrap();
            let fabric = found.fabric;
            let sizes = (found.gpus, fabric.domain_gpus, fabric.nic_gbps);
            assert_eq!(sizes, (gpus, domain, nic_gbps), "{name}");
        };
        check("h100:nodes=2048", 16384, 8, 50.0);
        check("h200-x8", 8, 8, 50.0);
        check("h200", 1, 1, 50.0);
        check("gb200-nvl72-x2", 144, 72, 50.0);
        for (name, part) in [("cpu", "machines with GPUs"), ("rtx5090-x2", "got NVIDIA GeForce")] {
            let message = of(name).unwrap_err().to_string();
            assert!(message.contains(part), "{name}: {message}");
        }
    }

    #[test]
    fn counts_are_whole_domains() {
        let check = |most: usize, expected: &[usize]| {
            let machines = Machines::of_gpus(GpuModel::h100(), most);
            assert_eq!(machines.counts(most), expected);
        };
        check(1, &[1]);
        check(3, &[3]);
        check(7, &[7, 6]);
        check(8, &[8]);
        check(24, &[24]);
        check(64, &[64, 56]);
        check(88, &[88, 80, 72]);
        // 17 domains are tried exactly, smaller numbers of domains only if even.
        check(136, &[136, 128, 120, 112, 104]);
        check(152, &[152, 144, 128, 120]);
        check(1024, &[1024, 960, 896, 832]);
    }

    /// Two groups of one kind were refused: "got h100-x8 and h100-x8".
    #[test]
    fn groups_of_one_kind_are_one() {
        let group = |count: u32, preset: &str, gbit: u32| {
            format!(
                "[[nodes]]\ncount = {count}\npreset = \"{preset}\"\nnics = 8\n\
                 nic_gbit_per_s = {gbit}\n"
            )
        };
        let check = |other: String, expected: Result<usize, &str>| {
            let text = group(2, "h100-x8", 400) + &other;
            match (Machines::of_cluster(&Cluster::from_toml(&text).unwrap()), expected) {
                (Ok(machines), Ok(gpus)) => assert_eq!(machines.gpus, gpus, "{text}"),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (found, _) => panic!("{text}: {found:?}"),
            }
        };
        check(group(3, "h100-x8", 400), Ok(40));
        check(group(1, "h200-x8", 400), Err("got h100-x8 and h200-x8"));
        check(group(1, "h100-x8", 200), Err("got h100-x8 with other networks"));
    }

    /// The datasheet peaks of the probe equal the peaks of the cost model.
    #[test]
    fn models_of_gpus_agree_with_the_probe() {
        for name in ["h100", "h200", "b200", "b300", "gb200", "gb300"] {
            let known = GpuModel::named(name).unwrap();
            let cluster = Cluster::from_name(name).unwrap();
            let found = GpuModel::of(&cluster.nodes[0].hardware.gpus[0]).unwrap();
            let near = |a: f64, b: f64| (a / b - 1.0).abs() < 0.001;
            assert!(near(found.bf16_flops, known.bf16_flops), "{name}");
            assert!(near(found.fp8_flops, known.fp8_flops), "{name}");
            assert!(near(found.nvfp4_flops, known.nvfp4_flops), "{name}");
            // The driver reserves 615 MiB.
            let used = 1.0 - found.memory_bytes / known.memory_bytes;
            assert!((0.0..0.01).contains(&used), "{name}: {used}");
            assert!(near(found.memory_bytes_per_s, known.memory_bytes_per_s), "{name}");
        }
    }
}
