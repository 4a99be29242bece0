//! Predictions of memory and time.

use std::collections::BTreeMap;
use std::fmt;

use deepwell_ir::Target;
use serde::{Deserialize, Serialize};

use super::experts::ExpertRoom;
use crate::format_bytes;
use crate::schedule::PipelineSchedule;

/// Bound of a call: the largest of three times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// FLOPs over the peak of the unit.
    Compute,
    /// Bytes over the memory bandwidth.
    Memory,
    /// Bytes to other ranks over the bandwidth of the link.
    Link,
}

impl Bound {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Compute => "compute",
            Bound::Memory => "memory",
            Bound::Link => "link",
        }
    }
}

/// Sum over the calls of one op and kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpTime {
    /// Name of the op.
    pub op: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Calls per step.
    pub calls: usize,
    /// FLOPs per step.
    pub flops: u64,
    /// Bytes moved per step.
    pub bytes: u64,
    /// Least time per step.
    pub time_s: f64,
    /// The bound of most of this time.
    pub bound: Bound,
}

/// Time of collectives on their own stream.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExchangeTime {
    /// Least time of all collectives per step.
    pub time_s: f64,
    /// Difference to the least time of a step with free collectives.
    pub exposed_s: f64,
}

/// Prediction for one rank, and for the ranks with the same program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// The rank.
    pub rank: u32,
    /// Other ranks with the same program and prediction.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alike: Vec<u32>,
    /// Arena and the backend's fixed overhead.
    pub peak_bytes: u64,
    /// Size of the arena.
    pub arena_bytes: u64,
    /// Optimizer state in host memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_bytes: u64,
    /// Reserved in addition for GEMMs with BF16 fallback.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub reserved_bytes: u64,
    /// Largest sum of live values at one call: a lower bound of any arena.
    pub arena_lower_bound_bytes: u64,
    /// Bytes by kind at the call with the largest sum.
    pub bytes_at_peak: BTreeMap<String, u64>,
    /// Name of the call with the largest sum.
    pub peak_call: String,
    /// FLOPs per step.
    pub flops: u64,
    /// Bytes moved per step.
    pub bytes: u64,
    /// Bytes through the link to other ranks per step, in the busier direction.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_on_link: u64,
    /// Bytes copied to and from host memory per step, both directions together.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_to_host: u64,
    /// Least time per step by roofline: the end of the last stream.
    pub time_s: f64,
    /// Collectives on their own stream; `None` if collectives are on the main stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchanges: Option<ExchangeTime>,
    /// Rows of a layer's experts; `None` for a model without experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_room: Option<ExpertRoom>,
    /// Ops, longest time first.
    pub ops: Vec<OpTime>,
}

/// Prediction for a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DryRun {
    /// Tokens per step over all ranks.
    pub tokens: u64,
    /// Least time per step of the slowest rank.
    pub time_s: f64,
    /// Each rank.
    pub ranks: Vec<RankReport>,
    /// Share of a step that the busiest pipeline stage waits for other stages, with a device for
    /// each stage; `None` for one stage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bubble: Option<f64>,
    /// Chunks of layers of each stage; several chunks are interleaved.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub chunks: usize,
    /// Gain and memory of a zero-bubble schedule; `None` without separate weight-gradient passes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero_bubble: Option<ZeroBubble>,
    /// Speedup over the same model in BF16, if BF16 was predicted too.
    pub expected_speedup_over_bf16: Option<f64>,
}

/// A zero-bubble schedule compared with 1F1B over the same stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ZeroBubble {
    /// [`DryRun::bubble`] of 1F1B.
    pub bubble_1f1b: f64,
    /// Bytes kept from pass to pass on each stage, for all micro-batches in flight.
    pub kept_bytes: Vec<u64>,
    /// Bytes kept from pass to pass under 1F1B.
    pub kept_bytes_1f1b: Vec<u64>,
}

fn one() -> usize {
    1
}

fn is_one(chunks: &usize) -> bool {
    *chunks == 1
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

impl RankReport {
    /// `rank 0`, or `each of 4 ranks`.
    fn names(&self) -> String {
        match self.alike.len() {
            0 => format!("rank {}", self.rank),
            others => format!("each of {} ranks", others + 1),
        }
    }

    /// Writes peak, memory by kind, exchanges and ops.
    fn fmt_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: peak {} at `{}`; arena {} (lower bound {})",
            self.names(),
            format_bytes(self.peak_bytes),
            self.peak_call,
            format_bytes(self.arena_bytes),
            format_bytes(self.arena_lower_bound_bytes)
        )?;
        for (kind, bytes) in &self.bytes_at_peak {
            writeln!(f, "  {kind:<12} {:>12}", format_bytes(*bytes))?;
        }
        if self.host_bytes > 0 {
            let bytes = format_bytes(self.host_bytes);
            writeln!(f, "  {:<12} {bytes:>12} of optimizer state in host memory", "offloaded")?;
        }
        if self.bytes_on_link > 0 {
            let bytes = format_bytes(self.bytes_on_link);
            writeln!(f, "  {:<12} {bytes:>12} to other ranks a step", "link")?;
        }
        if self.bytes_to_host > 0 {
            let bytes = format_bytes(self.bytes_to_host);
            writeln!(f, "  {:<12} {bytes:>12} to and from host memory a step", "PCIe")?;
        }
        if let Some(ExchangeTime { time_s, exposed_s }) = self.exchanges {
            let [all, exposed] = [time_s, exposed_s].map(|seconds| seconds * 1e3);
            let what = format!("ms of exchanges, {exposed:.3} of them exposed");
            writeln!(f, "  {:<12} {all:>12.3} {what}", "exchanges")?;
        }
        if let Some(room) = self.expert_room {
            writeln!(f, "  {:<12} {room:>12}", "experts")?;
        }
        writeln!(
            f,
            "  {:<26} {:>5} {:>10} {:>11} {:>10}  bound by",
            "op", "calls", "GFLOP", "bytes", "ms"
        )?;
        for op in &self.ops {
            writeln!(
                f,
                "  {:<26} {:>5} {:>10.3} {:>11} {:>10.4}  {}",
                op.op,
                op.calls,
                op.flops as f64 / 1e9,
                format_bytes(op.bytes),
                op.time_s * 1e3,
                op.bound.name()
            )?;
        }
        Ok(())
    }
}

impl DryRun {
    /// Counts an arena of `arena_bytes` for the rank of `target`, although its program uses only a
    /// part. CPU memory is committed on first touch, so on a CPU the rest does not count.
    pub fn reserve(&mut self, arena_bytes: usize, target: &Target) {
        let own = target.ranks.rank;
        let is_own = |rank: &&mut RankReport| rank.rank == own || rank.alike.contains(&own);
        let report = self.ranks.iter_mut().find(is_own);
        let Some(rank) = report.filter(|_| target.arch != "cpu") else { return };
        let device_bytes = (arena_bytes as u64).saturating_sub(rank.host_bytes);
        let reserved_bytes = device_bytes.saturating_sub(rank.arena_bytes);
        rank.peak_bytes = rank.peak_bytes - rank.reserved_bytes + reserved_bytes;
        rank.reserved_bytes = reserved_bytes;
        rank.bytes_at_peak.insert("reserved".to_string(), reserved_bytes);
    }

    /// The largest peak of a rank, in bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.peak_bytes).max().unwrap_or(0)
    }
}

impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "step of {} tokens: at least {:.3} ms, at most {:.0} tokens/s",
            self.tokens,
            self.time_s * 1e3,
            if self.time_s > 0.0 { self.tokens as f64 / self.time_s } else { 0.0 }
        )?;
        if let Some(speedup) = self.expected_speedup_over_bf16 {
            writeln!(f, "expected speedup over BF16: {speedup:.2}")?;
        }
        if let Some(bubble) = self.bubble {
            let stages = self.ranks.len();
            let percent = bubble * 100.0;
            let order = match (self.chunks, &self.zero_bubble) {
                (_, Some(_)) => PipelineSchedule::ZbH1.to_string(),
                (1, None) => PipelineSchedule::OneFOneB.to_string(),
                (chunks, None) => format!("interleaved 1f1b over {chunks} chunks each"),
            };
            writeln!(f, "pipeline of {stages} stages by {order}: bubble {percent:.1} % of a step")?;
        }
        if let Some(ZeroBubble { bubble_1f1b, kept_bytes, kept_bytes_1f1b }) = &self.zero_bubble {
            let list = |bytes: &[u64]| -> String {
                let bytes: Vec<String> = bytes.iter().map(|&bytes| format_bytes(bytes)).collect();
                bytes.join(", ")
            };
            let percent = bubble_1f1b * 100.0;
            writeln!(f, "  1f1b would have a bubble of {percent:.1} %")?;
            let (kept, kept_1f1b) = (list(kept_bytes), list(kept_bytes_1f1b));
            writeln!(f, "  stages keep {kept} from pass to pass; by 1f1b {kept_1f1b}")?;
        }
        for (stage, rank) in self.ranks.iter().enumerate() {
            if self.bubble.is_some() {
                write!(f, "stage {stage}, ")?;
            }
            rank.fmt_lines(f)?;
        }
        Ok(())
    }
}
