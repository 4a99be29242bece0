//! Outputs of a GPU, kept as a hash and the first words of each case.
//!
//! A group without golden vectors fails, and so does a case without them. One that waits for a GPU
//! to record it stands in its file under `unrecorded`: its test is reported as ignored, with the
//! command.

use std::collections::BTreeMap;
use std::path::PathBuf;

use deepwell_kernels::cuda::DeviceProperties;
use deepwell_trials::{note, skip};
use serde::{Deserialize, Serialize};

use super::bench::ONLY_VARIABLE;

/// Names the folder that a GPU's outputs are written to.
const OUT_VARIABLE: &str = "DEEPWELL_GOLDEN_OUT";
/// Names a folder to compare with instead of the repository's: the one that a GPU wrote holds
/// complete outputs beside the hashes.
const FOLDER_VARIABLE: &str = "DEEPWELL_GOLDEN_DIR";
/// Where golden vectors are in the repository.
const FOLDER: &str = "deepwell-kernels/tests/cuda/golden";

/// The files there as of when the tests were built: a machine with a GPU may have no sources.
macro_rules! files {
    ($($group:literal)*) => {
        &[$(($group, include_str!(concat!("../golden/", $group, ".json")))),*]
    };
}

const FILES: &[(&str, &str)] = files! {
    "approximations" "arithmetic" "conversions" "copies" "gradients" "kernels" "reductions"
    "stores" "sums" "warp_mma" "wgmma"
};

/// What a device that is none is called.
const EMULATED: &str = "emulated";
/// Bytes of an output that are kept: 64 words of 32 bits.
const HEAD_BYTES: usize = 256;
/// Complaints that a failed test shows.
const SHOWN: usize = 40;

/// One output as the file has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Kept {
    bytes: usize,
    /// First 128 bits of BLAKE3, in hexadecimal.
    hash: String,
    /// The first bytes, in hexadecimal.
    head: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct File {
    device: String,
    /// Newest CUDA version that its driver serves.
    cuda_version: u32,
    cases: BTreeMap<String, Kept>,
    /// Cases that no GPU has run yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unrecorded: Vec<String>,
}

fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_string()
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.chars().map(|digit| digit.to_digit(16).expect("a digit") as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    let word = |chunk: &[u8]| chunk.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
    bytes.chunks(4).map(word).collect()
}

/// The cases of one group, and what is wrong with them.
pub(super) struct Group {
    name: &'static str,
    cases: BTreeMap<String, Vec<u8>>,
    complaints: Vec<String>,
    /// Cases that were not compared, because no GPU has run them yet.
    unrecorded: usize,
}

impl Group {
    pub(super) fn new(name: &'static str) -> Group {
        Group { name, cases: BTreeMap::new(), complaints: Vec::new(), unrecorded: 0 }
    }

    /// Takes an output of the device.
    pub(super) fn record(&mut self, name: &str, bytes: &[u8]) {
        let before = self.cases.insert(name.to_string(), bytes.to_vec());
        assert!(before.is_none(), "{}: two cases are called {name}", self.name);
    }

    /// Takes what a loose reference found.
    pub(super) fn complain(&mut self, complaint: String) {
        self.complaints.push(complaint);
    }

    /// Writes or compares, and fails if there was anything to complain of.
    pub(super) fn finish(mut self, device: &DeviceProperties) {
        let is_partial = std::env::var_os(ONLY_VARIABLE).is_some();
        match std::env::var_os(OUT_VARIABLE) {
            // What is wrong with the launches that ran is reported all the same.
            _ if is_partial => note(|| format!("{}: {ONLY_VARIABLE} is set", self.name)),
            Some(folder) => self.write(&PathBuf::from(folder), device),
            None => self.compare(),
        }
        let count = self.complaints.len();
        self.complaints.truncate(SHOWN);
        let shown = self.complaints.join("\n");
        let name = self.name;
        assert!(count == 0, "{name}: {count} differ on {}\n{shown}", device.name);
        if is_partial {
            skip(format!("{ONLY_VARIABLE} is set: not compared"));
        }
        if self.unrecorded > 0 {
            skip(format!(
                "no GPU has run {} of {} cases: run `calibration::` on an H200 with \
                 {OUT_VARIABLE}=FOLDER and keep FOLDER/{name}.json in {FOLDER}",
                self.unrecorded,
                self.cases.len()
            ));
        }
    }

    fn write(&self, folder: &std::path::Path, device: &DeviceProperties) {
        let kept = |bytes: &Vec<u8>| Kept {
            bytes: bytes.len(),
            hash: hash(bytes),
            head: to_hex(&bytes[..bytes.len().min(HEAD_BYTES)]),
        };
        let file = File {
            device: device.name.clone(),
            cuda_version: device.cuda_version,
            cases: self.cases.iter().map(|(name, b)| (name.clone(), kept(b))).collect(),
            unrecorded: Vec::new(),
        };
        let text = serde_json::to_string_pretty(&file).unwrap() + "\n";
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(format!("{}.json", self.name)), text).unwrap();
        let all: Vec<u8> = self.cases.values().flatten().copied().collect();
        std::fs::write(folder.join(format!("{}.bin", self.name)), all).unwrap();
        let (name, count) = (self.name, self.cases.len());
        note(|| format!("{name}: {count} cases written to {}", folder.display()));
    }

    fn compare(&mut self) {
        let (text, all) = find(self.name);
        let file: File = serde_json::from_str(&text).unwrap();
        assert!(
            !file.device.starts_with(EMULATED),
            "{}: these vectors are of {}, expected a GPU's",
            self.name,
            file.device
        );
        let mut offset = 0;
        let mut equal = 0;
        for (name, kept) in &file.cases {
            let range = offset..offset + kept.bytes;
            offset = range.end;
            let Some(bytes) = self.cases.get(name) else {
                self.complaints.push(format!("{name}: golden vectors of a case that is no more"));
                continue;
            };
            if hash(bytes) == kept.hash {
                equal += 1;
                continue;
            }
            let expected =
                all.get(range).map(<[u8]>::to_vec).unwrap_or_else(|| from_hex(&kept.head));
            self.complaints.push(format!("{name}: {}", difference(bytes, kept, &expected)));
        }
        for name in self.cases.keys().filter(|name| !file.cases.contains_key(*name)) {
            match file.unrecorded.contains(name) {
                true => self.unrecorded += 1,
                false => self.complaints.push(format!("{name}: no golden vectors of this case")),
            }
        }
        let (name, count) = (self.name, file.cases.len());
        note(|| format!("{name}: {equal} of {count} cases are bit-equal to {}", file.device));
    }
}

/// What a difference is. `expected` is all of the output, or its beginning.
fn difference(bytes: &[u8], kept: &Kept, expected: &[u8]) -> String {
    if bytes.len() != kept.bytes {
        return format!("{} bytes, expected {}", bytes.len(), kept.bytes);
    }
    let (got, expected) = (words(&bytes[..expected.len()]), words(expected));
    let differ: Vec<_> =
        got.iter().zip(&expected).enumerate().filter(|(_, (a, b))| a != b).collect();
    let first = differ
        .first()
        .map(|(index, (a, b))| format!("; first word {index}: {a:#010x}, expected {b:#010x}"));
    format!("{} of {} words kept differ{}", differ.len(), expected.len(), first.unwrap_or_default())
}

/// The golden vectors of a group: those of the folder that is named, or those that the tests were
/// built with. Beside them the complete outputs, one after the other by name, where a GPU just
/// wrote them.
fn find(group: &str) -> (String, Vec<u8>) {
    if let Some(folder) = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from) {
        let path = folder.join(format!("{group}.json"));
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{FOLDER_VARIABLE}: {}: {error}", path.display()));
        let all = std::fs::read(folder.join(format!("{group}.bin"))).unwrap_or_default();
        return (text, all);
    }
    let file = FILES.iter().find(|(name, _)| *name == group);
    let (_, text) = file.unwrap_or_else(|| {
        panic!(
            "no golden vectors of `{group}`: run this test on an H200 with {OUT_VARIABLE}=FOLDER, \
             keep FOLDER/{group}.json in {FOLDER}, and name it in calibration/golden.rs"
        )
    });
    (text.to_string(), Vec::new())
}
