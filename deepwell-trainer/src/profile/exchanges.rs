//! Communication of a rank in a step.

use deepwell_ir::{Op, Program};
use serde::{Deserialize, Serialize};

use super::call::{CallProfile, ratio};

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
