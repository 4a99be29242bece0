//! What is searched for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::collectives::{Fabric, Generation};
use crate::gpu_model::GpuModel;
use crate::memory::MemoryRules;
use crate::model_shape::{ExpertShape, LatentAttention};
use crate::schedule::PipelineSchedule;
use crate::step_time::{StepRules, StepTime, step_time_estimate};
use crate::{ModelShape, Parallelism, PlanError};

use super::Candidate;

/// A dimension of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dimension {
    /// Pipeline stages.
    Pp,
    /// Chunks of a stage.
    Vpp,
    /// Schedule, by its place in [`PipelineSchedule::ALL`].
    Schedule,
    /// Tensor-parallel ranks.
    Tp,
    /// Context-parallel ranks.
    Cp,
    /// Expert-parallel ranks.
    Ep,
    /// Tensor-parallel ranks of an expert.
    Etp,
    /// Data-parallel ranks.
    Dp,
    /// ZeRO stage.
    Zero,
    /// Sequences of a micro-batch.
    Mbs,
    /// Recomputation: 0 none, 1 selective, 2 full.
    Recompute,
    /// GPUs.
    Gpus,
}

impl Dimension {
    /// All of them.
    pub const ALL: [Dimension; 12] = [
        Dimension::Pp,
        Dimension::Vpp,
        Dimension::Schedule,
        Dimension::Tp,
        Dimension::Cp,
        Dimension::Ep,
        Dimension::Etp,
        Dimension::Dp,
        Dimension::Zero,
        Dimension::Mbs,
        Dimension::Recompute,
        Dimension::Gpus,
    ];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Dimension::Pp => "pp",
            Dimension::Vpp => "vpp",
            Dimension::Schedule => "schedule",
            Dimension::Tp => "tp",
            Dimension::Cp => "cp",
            Dimension::Ep => "ep",
            Dimension::Etp => "etp",
            Dimension::Dp => "dp",
            Dimension::Zero => "zero",
            Dimension::Mbs => "mbs",
            Dimension::Recompute => "recompute",
            Dimension::Gpus => "gpus",
        }
    }

    /// Its value in a plan.
    pub fn of(self, at: &Parallelism) -> usize {
        match self {
            Dimension::Pp => at.pp,
            Dimension::Vpp => at.vpp,
            Dimension::Schedule => at.schedule as usize,
            Dimension::Tp => at.tp,
            Dimension::Cp => at.cp,
            Dimension::Ep => at.ep,
            Dimension::Etp => at.etp,
            Dimension::Dp => at.dp,
            Dimension::Zero => usize::from(at.zero),
            Dimension::Mbs => at.micro_batch,
            Dimension::Recompute => at.recompute as usize,
            Dimension::Gpus => at.gpus(),
        }
    }
}

impl fmt::Display for Dimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A dimension held at a value: `tp=4`, or kept from it: `tp!=4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// The dimension.
    pub dimension: Dimension,
    /// The value.
    pub value: usize,
    /// Whether the value is the one that is forbidden.
    pub forbidden: bool,
}

impl Pin {
    /// Whether a plan obeys it.
    pub fn allows(&self, at: &Parallelism) -> bool {
        (self.dimension.of(at) == self.value) != self.forbidden
    }
}

impl FromStr for Pin {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Pin, PlanError> {
        let wrong = || PlanError::Request {
            what: "pin",
            expected: format!(
                "one of {}, then `=` or `!=`, then a number or name",
                Dimension::ALL.map(Dimension::name).join(", ")
            ),
            got: format!("`{text}`"),
        };
        let (name, value) = text.split_once('=').ok_or_else(wrong)?;
        let forbidden = name.ends_with('!');
        let name = name.trim_end_matches('!').trim();
        let dimension = Dimension::ALL.into_iter().find(|known| known.name() == name);
        let dimension = dimension.ok_or_else(wrong)?;
        let value = match (dimension, value.trim()) {
            (Dimension::Schedule, name) => name.parse::<PipelineSchedule>()? as usize,
            (Dimension::Recompute, "none") => 0,
            (Dimension::Recompute, "selective") => 1,
            (Dimension::Recompute, "full") => 2,
            (_, value) => value.parse().map_err(|_| wrong())?,
        };
        Ok(Pin { dimension, value, forbidden })
    }
}

/// Model, batch, machines, and what is fixed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SearchRequest {
    /// The model.
    pub shape: ModelShape,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Sequences of a step.
    pub global_batch: usize,
    /// Numbers of GPUs to try.
    pub gpus: Vec<usize>,
    /// The GPU.
    pub gpu: GpuModel,
    /// Networks.
    pub fabric: Fabric,
    /// Memory rules.
    pub memory: MemoryRules,
    /// Context and NCCL, outside of the allocator.
    pub outside_bytes: f64,
    /// Memory that a GPU may use; none is 95 % of what it has.
    pub gpu_memory_bytes: Option<f64>,
    /// Fixed or forbidden values.
    pub pins: Vec<Pin>,
    /// Precisions of linear layers to try: FP8 or not.
    pub fp8: Vec<bool>,
    /// Price of a GPU for an hour.
    pub price_per_gpu_hour: Option<f64>,
}

impl SearchRequest {
    /// A request for `gpus` of one kind: NVLink domains of eight, or of 72 in Grace racks.
    pub fn new(
        shape: ModelShape,
        seq: usize,
        global_batch: usize,
        gpu: GpuModel,
        gpus: usize,
    ) -> SearchRequest {
        let domain_gpus = if gpu.name.starts_with('g') { 72 } else { 8 };
        let nic_gbps = match gpu.generation {
            Generation::Ampere => 25.0,
            Generation::Hopper => 50.0,
            Generation::Blackwell if gpu.name.ends_with("300") => 100.0,
            Generation::Blackwell => 50.0,
        };
        SearchRequest {
            shape,
            seq,
            global_batch,
            gpus: vec![gpus],
            fabric: Fabric { generation: gpu.generation, domain_gpus, nic_gbps },
            gpu,
            memory: MemoryRules::lean(),
            outside_bytes: 3e9,
            gpu_memory_bytes: None,
            pins: Vec::new(),
            fp8: vec![false],
            price_per_gpu_hour: None,
        }
    }

    /// Bytes that a GPU may use.
    pub fn memory_limit_bytes(&self) -> f64 {
        self.gpu_memory_bytes.unwrap_or(0.95 * self.gpu.memory_bytes)
    }

    pub(super) fn step_rules(&self, fp8: bool) -> StepRules {
        StepRules { fp8, loss_traffic: (8.0, 6.0), ..StepRules::MODERN }
    }

    pub(super) fn estimate(&self, candidate: &Candidate) -> StepTime {
        let rules = self.step_rules(candidate.fp8);
        step_time_estimate(&self.shape, &candidate.at, &self.gpu, &self.fabric, &rules, self.seq)
    }

    pub(super) fn check(&self) -> Result<(), PlanError> {
        let shape = &self.shape;
        let sizes = [
            ("tokens of a sequence", self.seq),
            ("sequences of a step", self.global_batch),
            ("layers", shape.layers),
            ("hidden size", shape.hidden),
            ("heads", shape.heads),
            ("GPUs", self.gpus.iter().copied().min().unwrap_or(0)),
            ("precisions", self.fp8.len()),
        ];
        for (what, size) in sizes {
            if size == 0 {
                let expected = "at least 1".to_string();
                return Err(PlanError::Request { what, expected, got: "0".to_string() });
            }
        }
        Ok(())
    }
}

/// Shapes of models that many know, by name.
pub fn known_model(name: &str) -> Option<ModelShape> {
    let llama = |name: &str, layers, hidden, ffn, heads, vocab| ModelShape {
        name: name.to_string(),
        ffn,
        kv_heads: 8,
        gated: true,
        tied: false,
        bias: false,
        norm_vectors: 1,
        positions: 0,
        ..ModelShape::gpt(layers, hidden, heads, vocab, 0)
    };
    let latent =
        LatentAttention { q_rank: 1536, kv_rank: 512, qk_dim: 128, rope_dim: 64, v_dim: 128 };
    Some(match name {
        "llama3-8b" => llama(name, 32, 4096, 14336, 32, 128_256),
        "llama3-70b" => llama(name, 80, 8192, 28672, 64, 128_256),
        "llama3.1-405b" => llama(name, 126, 16384, 53248, 128, 128_256),
        "mixtral-8x7b" => ModelShape {
            experts: Some(ExpertShape {
                experts: 8,
                top_k: 2,
                ffn: 14336,
                shared_ffn: 0,
                dense_layers: 0,
            }),
            ..llama(name, 32, 4096, 14336, 32, 32000)
        },
        "deepseek-v3" => ModelShape {
            kv_heads: 128,
            latent: Some(latent),
            experts: Some(ExpertShape {
                experts: 256,
                top_k: 8,
                ffn: 2048,
                shared_ffn: 2048,
                dense_layers: 3,
            }),
            ..llama(name, 61, 7168, 18432, 128, 129_280)
        },
        "gpt3-175b" => {
            ModelShape { name: name.to_string(), ..ModelShape::gpt(96, 12288, 96, 51200, 2048) }
        }
        _ => return None,
    })
}
