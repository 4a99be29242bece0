//! The profiles of all ranks of a run, with their communication.

use std::fmt;

use deepwell_ir::{Op, Program};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{CallProfile, Profile, ratio};
use crate::world::Peers;
use crate::{Engine, TrainError};

/// Communication of one kind within one group of ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExchangeProfile {
    /// Name of the op.
    pub op: String,
    /// Name of the group.
    pub group: String,
    /// Ranks of the group.
    pub ranks: usize,
    /// Calls per step.
    pub calls: usize,
    /// Bytes through a rank's link per step, in its busier direction.
    pub bytes_on_link: u64,
    /// Time per step, including waits for other ranks, each call measured without overlap.
    pub time_s: f64,
    /// Achieved bus bandwidth, 10^9 bytes per second, as in nccl-tests.
    pub bus_gbps: f64,
    /// Least time by the bandwidth of the links over the time taken.
    pub roof_share: f64,
}

/// Communication of a rank in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankExchanges {
    /// Grouped by op and group, longest first.
    pub exchanges: Vec<ExchangeProfile>,
    /// Time of the last whole step by the device's clock; none without a clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_s: Option<f64>,
    /// Exposed communication time. If communication has its own stream: the step's time less its
    /// computing calls, an upper estimate because these were measured without overlap; none if the
    /// step's time is unknown. Otherwise the time of all communication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exposed_s: Option<f64>,
}

impl RankExchanges {
    /// Communication of a program whose profile is `calls`.
    pub(super) fn of(program: &Program, calls: &[CallProfile], step_s: Option<f64>) -> Self {
        let mut exchanges: Vec<ExchangeProfile> = Vec::new();
        let (mut computing_s, mut beside) = (0.0, false);
        let of_step = program.calls_with_runs().filter(|(_, runs)| *runs > 0);
        for ((call, _), profile) in of_step.zip(calls) {
            let time_s = profile.in_step(profile.time_s);
            let Op::Collective(op) = &call.op else {
                computing_s += time_s;
                continue;
            };
            beside |= call.stream != 0;
            let group = program.target.ranks.group(op.group);
            let group = group.map_or("", |group| group.name.as_str());
            let is_it =
                |entry: &&mut ExchangeProfile| entry.op == profile.op && entry.group == group;
            let bytes = call.cost.bytes_on_link * profile.runs as u64;
            let roofline_s = profile.in_step(profile.roofline_s);
            match exchanges.iter_mut().find(is_it) {
                Some(entry) => {
                    entry.calls += profile.runs;
                    entry.bytes_on_link += bytes;
                    entry.time_s += time_s;
                    entry.roof_share += roofline_s;
                }
                None => exchanges.push(ExchangeProfile {
                    op: profile.op.clone(),
                    group: group.to_string(),
                    ranks: op.ranks as usize,
                    calls: profile.runs,
                    bytes_on_link: bytes,
                    time_s,
                    bus_gbps: 0.0,
                    roof_share: roofline_s,
                }),
            }
        }
        for exchange in &mut exchanges {
            exchange.bus_gbps = ratio(exchange.bytes_on_link as f64, exchange.time_s) / 1e9;
            exchange.roof_share = ratio(exchange.roof_share, exchange.time_s);
        }
        exchanges.sort_by(|a, b| b.time_s.total_cmp(&a.time_s));
        let all_s = exchanges.iter().map(|exchange| exchange.time_s).sum();
        let exposed_s = match beside {
            true => step_s.map(|step_s| f64::max(step_s - computing_s, 0.0)),
            false => Some(all_s),
        };
        RankExchanges { exchanges, step_s, exposed_s }
    }
}

/// The profiles of all ranks, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct RankProfiles(Vec<Profile>);

impl RankProfiles {
    /// Profiles a step on every rank, as [`Profile::of`], and returns the profiles of all ranks.
    ///
    /// # Errors
    /// A device or a rank fails.
    pub fn of(engine: &mut Engine) -> Result<RankProfiles, TrainError> {
        let own = Profile::of(engine)?;
        RankProfiles::gather(&mut engine.peers, own)
    }

    /// A profile for each rank.
    pub fn profiles(&self) -> &[Profile] {
        &self.0
    }

    fn gather(peers: &mut Peers, own: Profile) -> Result<RankProfiles, TrainError> {
        if peers.world_size() == 1 {
            return Ok(RankProfiles(vec![own]));
        }
        let text = serde_json::to_vec(&own).expect("a profile is plain data");
        let mut words = vec![text.len() as u64];
        words.extend(text.chunks(8).map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        }));
        let all = peers.gather_any(&words)?;
        let profile = |words: &Vec<u64>| {
            let bytes: Vec<u8> = words[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
            serde_json::from_slice(&bytes[..words[0] as usize]).expect("as it was sent")
        };
        Ok(RankProfiles(all.iter().map(profile).collect()))
    }

    /// The profiles as events for `chrome://tracing` and Perfetto, each rank as a process.
    pub fn to_chrome_trace(&self) -> Value {
        let events = self.0.iter().enumerate().flat_map(|(rank, profile)| {
            let name = match self.0.len() {
                1 => profile.device.clone(),
                _ => format!("rank {rank}, {}", profile.device),
            };
            profile.events(rank, &name)
        });
        json!({ "traceEvents": events.collect::<Vec<_>>(), "displayTimeUnit": "ms" })
    }
}

impl fmt::Display for RankProfiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(first) = self.0.first() {
            first.fmt(f)?;
        }
        if self.0.len() < 2 {
            return Ok(());
        }
        writeln!(
            f,
            "exchanges {:<15} {:<12} {:>5} {:>5} {:>10} {:>9} {:>9} {:>6}",
            "op", "group", "ranks", "calls", "MB", "ms", "bus GB/s", "roof"
        )?;
        for (rank, profile) in self.0.iter().enumerate() {
            for it in &profile.ranks.exchanges {
                writeln!(
                    f,
                    "  rank {rank:<2} {:<15} {:<12} {:>5} {:>5} {:>10.3} {:>9.3} {:>9.2} {:>5.1}%",
                    it.op,
                    it.group,
                    it.ranks,
                    it.calls,
                    it.bytes_on_link as f64 / 1e6,
                    it.time_s * 1e3,
                    it.bus_gbps,
                    it.roof_share * 100.0
                )?;
            }
            let exposed = match profile.ranks.exposed_s {
                Some(seconds) => format!("{:.3} ms of exchanges exposed", seconds * 1e3),
                None => "how much is exposed is not known without the device's clock".to_string(),
            };
            let step = profile.ranks.step_s.map(|it| format!(" in a step of {:.3} ms", it * 1e3));
            writeln!(f, "  rank {rank:<2} {exposed}{}", step.unwrap_or_default())?;
        }
        Ok(())
    }
}
