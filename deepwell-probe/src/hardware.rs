//! The machine as one value.

use serde::{Deserialize, Serialize};

use crate::link::{self, Fabric};
use crate::software::CUDA_RUNTIME;
use crate::{Arch, Cpu, Endpoint, Fault, Gpu, Library, Link, ProbeError, Software};

/// Description of a machine for planning and kernel selection.
///
/// Plain data: created by [`probe`](crate::probe), by a [preset](Hardware::preset), from JSON or by
/// hand. Planning for another machine only needs another value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hardware {
    /// Processors and memory.
    pub cpu: Cpu,
    /// GPUs in index order.
    pub gpus: Vec<Gpu>,
    /// The reason, if there are no GPUs.
    pub gpus_absent: Option<Absence>,
    /// Connected pairs: of GPUs, of a GPU and a memory node, and of memory nodes.
    pub links: Vec<Link>,
    /// Drivers and libraries.
    pub software: Software,
}

/// Reason for something missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absence {
    /// What was found instead.
    pub reason: String,
    /// How to fix it.
    pub hint: String,
}

impl Hardware {
    /// A machine with a processor and nothing else.
    ///
    /// ```
    /// use deepwell_probe::{Arch, Cpu, Hardware};
    ///
    /// let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 16 << 30);
    /// let hardware = Hardware::cpu_only(cpu);
    /// assert!(hardware.gpus.is_empty());
    /// assert_eq!(hardware.arch(), Arch::Cpu);
    /// ```
    pub fn cpu_only(cpu: Cpu) -> Hardware {
        let links = crate::assemble::numa_links(&cpu);
        Hardware {
            cpu,
            gpus: Vec::new(),
            gpus_absent: Some(Absence {
                reason: "described as a machine without GPUs".to_owned(),
                hint: "probe a machine that has them, or name a preset".to_owned(),
            }),
            links,
            software: Software::none(),
        }
    }

    /// Default architecture for training: that of the first GPU, or of the processor without GPUs.
    pub fn arch(&self) -> Arch {
        self.gpus.first().map_or(Arch::Cpu, |gpu| gpu.arch.clone())
    }

    /// The machine as a graph of memory nodes, GPUs and switches.
    ///
    /// A pair in `links` joined through an NVSwitch becomes two edges to a switch vertex, so that
    /// the bandwidth of a GPU, shared among peers, counts once. A pair of GPUs that meets at the
    /// host by PCIe has no edge of its own: its route is over the memory nodes.
    ///
    /// ```
    /// use deepwell_probe::{Endpoint, Hardware};
    ///
    /// let fabric = Hardware::preset("h200-x2")?.fabric();
    /// let port = fabric.edge_weight(Endpoint::Gpu(0), Endpoint::Switch(0));
    /// assert_eq!(port.and_then(|edge| edge.gbps), Some(478.116));
    /// # Ok::<(), deepwell_probe::ProbeError>(())
    /// ```
    pub fn fabric(&self) -> Fabric {
        let nodes = self.cpu.numa_nodes.iter().map(|node| Endpoint::Numa(node.index));
        let gpus = self.gpus.iter().map(|gpu| Endpoint::Gpu(gpu.index));
        link::fabric(nodes.chain(gpus), &self.links)
    }

    /// The widest link between two endpoints, in either order.
    pub fn link_between(&self, a: Endpoint, b: Endpoint) -> Option<&Link> {
        let joins = |link: &&Link| (link.a == a && link.b == b) || (link.a == b && link.b == a);
        let width = |link: &&Link| link.gbps.unwrap_or(0.0);
        self.links.iter().filter(joins).max_by(|x, y| width(x).total_cmp(&width(y)))
    }

    /// The value as JSON with line breaks; [`Hardware::from_json`] restores it unchanged.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self)
            .expect("maps have text keys and no type refuses to be written")
    }

    /// Reads the output of [`Hardware::to_json`].
    ///
    /// # Errors
    ///
    /// [`ProbeError::Json`] with line and column if the text is not the JSON of a `Hardware`.
    pub fn from_json(text: &str) -> Result<Hardware, ProbeError> {
        serde_json::from_str(text).map_err(|source| ProbeError::Json { source })
    }

    /// All remarks for a user: the [refusals](Hardware::refusals) with their fixes, the notes of
    /// the processor and of each GPU, and, if there are GPUs, the libraries that are missing or too
    /// old.
    pub fn warnings(&self) -> Vec<String> {
        let refusals = self.refusals();
        let mut warnings: Vec<String> = refusals.iter().map(Fault::to_string).collect();
        warnings.extend(self.cpu.notes.iter().map(|note| format!("cpu: {note}")));
        for gpu in &self.gpus {
            warnings.extend(gpu.notes.iter().map(|note| format!("gpu{}: {note}", gpu.index)));
        }
        if let Some(absence) = &self.gpus_absent {
            warnings.push(format!("no GPUs: {}; hint: {}", absence.reason, absence.hint));
        } else {
            for (name, library) in self.software.libraries() {
                // Deepwell does not need the runtime, and a description made by hand or by a preset
                // has no information about libraries.
                let unknown = matches!(
                    library,
                    Library::Missing { looked_for, .. } if looked_for.is_empty()
                );
                let is_refused =
                    refusals.iter().any(|fault| fault.reason.starts_with(&format!("{name}: ")));
                if unknown || is_refused || name == CUDA_RUNTIME.name {
                    continue;
                }
                match library.hint() {
                    Some(hint) if library.is_found() => warnings.push(format!("{name}: {hint}")),
                    Some(hint) => warnings.push(format!("{name}: {library}; hint: {hint}")),
                    None => {}
                }
            }
        }
        warnings
    }
}
