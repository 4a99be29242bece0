//! Result of one measurement.

use serde::{Deserialize, Serialize};

use super::Section;
use super::peer_task::PeerTask;

/// Time of another library for the same work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerTime {
    /// Name of the peer, `torch.compile` for example.
    pub name: String,
    /// Median time of the peer, seconds; none after a failure, and for memory.
    pub time_s: Option<f64>,
    /// The peer's time over Deepwell's: above 1 the peer is slower. For memory, the ratio of bytes.
    pub ratio: Option<f64>,
    /// Reason for a missing time, or another remark.
    pub note: Option<String>,
}

/// One measurement; a failed one has a [`Row::failure`] and no time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Section of the benchmark.
    pub section: Section,
    /// The op or the trained model.
    pub what: String,
    /// Sizes, in the order of the op's documentation.
    pub shape: String,
    /// Element type of the inputs, or the precision of a model.
    pub dtype: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Median time, seconds.
    pub time_s: Option<f64>,
    /// Tenth and ninetieth percentile of the samples, seconds.
    pub spread_s: Option<(f64, f64)>,
    /// Achieved rate.
    pub rate: Option<f64>,
    /// Unit of the rate: `TFLOP/s`, `GB/s`, `tokens/s`, `MiB`.
    pub rate_unit: String,
    /// Least time by the roofline, seconds.
    #[serde(alias = "floor_s")]
    pub roofline_s: Option<f64>,
    /// Source of the roofline time: `compute`, `memory`, `prediction`.
    pub bound: String,
    /// Roofline time over time. In the section `memory`: predicted over measured bytes.
    #[serde(alias = "floor_share")]
    pub roofline_share: Option<f64>,
    /// Results of peers on the same work.
    pub peers: Vec<PeerTime>,
    /// Names and values of further measurements and choices.
    pub details: Vec<(String, String)>,
    /// Reason for a missing time.
    pub failure: Option<String>,
    /// Tasks for the peers.
    pub peer_tasks: Vec<PeerTask>,
}

impl Row {
    /// A row without any measurement yet.
    pub fn new(section: Section, what: impl Into<String>) -> Row {
        Row {
            section,
            what: what.into(),
            shape: String::new(),
            dtype: String::new(),
            kernel: String::new(),
            time_s: None,
            spread_s: None,
            rate: None,
            rate_unit: String::new(),
            roofline_s: None,
            bound: String::new(),
            roofline_share: None,
            peers: Vec::new(),
            details: Vec::new(),
            failure: None,
            peer_tasks: Vec::new(),
        }
    }

    /// A row of a failed measurement.
    pub fn failed(section: Section, what: impl Into<String>, failure: impl ToString) -> Row {
        Row { failure: Some(failure.to_string()), ..Row::new(section, what) }
    }

    /// Adds a detail.
    pub fn with_detail(mut self, name: &str, value: impl ToString) -> Row {
        self.details.push((name.to_string(), value.to_string()));
        self
    }

    /// Adds a peer's peak memory, in bytes.
    pub fn add_peer_memory(&mut self, name: &str, bytes: f64, note: Option<String>) {
        let own = self.rate.map(|mib| mib * f64::from(1u32 << 20));
        let ratio = own.filter(|&own| own > 0.0).map(|own| bytes / own);
        self.peers.push(PeerTime { name: name.to_string(), time_s: None, ratio, note });
    }

    /// Adds a peer's time.
    pub fn add_peer(&mut self, name: &str, time_s: Option<f64>, note: Option<String>) {
        let ratio = match (time_s, self.time_s) {
            (Some(peer), Some(own)) if own > 0.0 => Some(peer / own),
            _ => None,
        };
        self.peers.push(PeerTime { name: name.to_string(), time_s, ratio, note });
    }
}

/// Progress of a benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowEvent {
    /// A longer task begins.
    Note(String),
    /// A row was measured.
    Row(Box<Row>),
    /// A copy was measured, 10⁹ bytes read and written per second.
    Copy(f64),
}

/// Geometric mean of positive numbers; none of no numbers.
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0usize);
    for value in values {
        if value > 0.0 && value.is_finite() {
            sum += value.ln();
            count += 1;
        }
    }
    (count > 0).then(|| (sum / count as f64).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_the_peers_time_over_ours() {
        let mut row = Row { time_s: Some(2.0), ..Row::new(Section::Gemm, "linear") };
        row.add_peer("slower", Some(3.0), None);
        row.add_peer("failed", None, Some("no GPU".to_string()));
        assert_eq!((row.peers[0].ratio, row.peers[1].ratio), (Some(1.5), None));
        let mut failed = Row::failed(Section::Gemm, "linear", "no kernel");
        failed.add_peer("slower", Some(3.0), None);
        assert_eq!(failed.peers[0].ratio, None);
    }

    #[test]
    fn ratios_of_memory_are_the_peers_bytes_over_ours() {
        let mut row = Row { rate: Some(4.0), ..Row::new(Section::Memory, "peak") };
        row.add_peer_memory("larger", f64::from(6 << 20), None);
        assert_eq!((row.peers[0].ratio, row.peers[0].time_s), (Some(1.5), None));
    }

    #[test]
    fn means() {
        assert_eq!(geometric_mean([]), None);
        assert_eq!(geometric_mean([0.0, f64::NAN]), None);
        let mean = geometric_mean([1.0, 4.0]).unwrap();
        assert!((mean - 2.0).abs() < 1e-15, "{mean}");
    }
}
