//! The profiles of all ranks of a run, with their communication.

use std::fmt;
use std::path::Path;

use serde_json::{Value, json};

use super::step::Profile;
use crate::peers::Peers;
use crate::{Engine, TrainError};

/// The profiles of all ranks, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct RankProfiles(Vec<Profile>);

impl RankProfiles {
    /// Writes `profile.json` of the first rank, `profile.txt`, and `trace.json` of all ranks to a
    /// folder.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), TrainError> {
        std::fs::create_dir_all(folder).map_err(TrainError::io(folder))?;
        let json = serde_json::to_string_pretty(&self.profiles().first())
            .expect("a profile is plain data");
        let files = [
            ("profile.json", json),
            ("profile.txt", self.to_string()),
            ("trace.json", self.to_chrome_trace().to_string()),
        ];
        for (name, text) in files {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(TrainError::io(&path))?;
        }
        Ok(())
    }

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
