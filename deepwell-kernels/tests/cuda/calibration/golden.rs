//! Outputs of a GPU, kept as a hash and the first words of each case.

use std::collections::BTreeMap;
use std::path::PathBuf;

use deepwell_kernels::cuda::DeviceProperties;
use serde::{Deserialize, Serialize};

use super::bench::ONLY_VARIABLE;

/// Names the folder that a GPU's outputs are written to.
const OUT_VARIABLE: &str = "DEEPWELL_GOLDEN_OUT";
/// Names a folder to compare with instead of the repository's: the one that a GPU wrote holds
/// complete outputs beside the hashes.
const FOLDER_VARIABLE: &str = "DEEPWELL_GOLDEN_DIR";
/// Where golden vectors are in the repository.
const FOLDER: &str = "deepwell-kernels/tests/cuda/golden";
/// What a device that is none is called.
const EMULATED: &str = "emulated";
/// Bytes of an output that are kept: 64 words of 32 bits.
const HEAD_BYTES: usize = 256;
/// Complaints that a failed test shows.
const SHOWN: usize = 40;

/// How equal two devices must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Matching {
    /// In every bit.
    Bits,
    /// Words are FP32, so many units in the last place or so much apart at most: for instructions
    /// of which the ISA gives only a bound. What is compared are the words that are kept.
    Within { ulps: u32, absolute: f32 },
    /// Words are pairs of 16-bit floats, each at most so many units apart.
    HalfUlps(u32),
    /// For kernels that compute with such instructions: no comparison but the reference's.
    Reference,
}

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

/// Steps between two floats of `bits` bits; NaNs are equal, and far from all numbers.
fn distance(a: u32, b: u32, bits: u32, infinity: u32) -> u32 {
    let sign = 1 << (bits - 1);
    let is_nan = |x: u32| x & (sign - 1) > infinity;
    if is_nan(a) || is_nan(b) {
        return if is_nan(a) && is_nan(b) { 0 } else { u32::MAX };
    }
    let place = |x: u32| {
        let magnitude = i64::from(x & (sign - 1));
        if x & sign == 0 { magnitude } else { -magnitude }
    };
    u32::try_from(place(a).abs_diff(place(b))).unwrap_or(u32::MAX)
}

impl Matching {
    fn distance(self, a: u32, b: u32) -> u32 {
        match self {
            Matching::Bits | Matching::Reference => u32::from(a != b),
            Matching::Within { absolute, .. } => {
                let is_near = (f32::from_bits(a) - f32::from_bits(b)).abs() <= absolute;
                if is_near { 0 } else { distance(a, b, 32, 0x7f80_0000) }
            }
            Matching::HalfUlps(_) => {
                // BF16's infinity is the larger code: as bounds of NaN go, F16's are inside.
                let half =
                    |shift: u32| distance(a >> shift & 0xffff, b >> shift & 0xffff, 16, 0x7f80);
                half(0).max(half(16))
            }
        }
    }

    fn allowed(self) -> u32 {
        match self {
            Matching::Bits => 0,
            Matching::Within { ulps, .. } | Matching::HalfUlps(ulps) => ulps,
            Matching::Reference => u32::MAX,
        }
    }
}

/// The cases of one group, and what is wrong with them.
pub(super) struct Group {
    name: &'static str,
    cases: BTreeMap<String, (Vec<u8>, Matching)>,
    complaints: Vec<String>,
}

impl Group {
    pub(super) fn new(name: &'static str) -> Group {
        Group { name, cases: BTreeMap::new(), complaints: Vec::new() }
    }

    /// Takes an output of the device.
    pub(super) fn record(&mut self, name: &str, bytes: &[u8], matching: Matching) {
        let before = self.cases.insert(name.to_string(), (bytes.to_vec(), matching));
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
            _ if is_partial => eprintln!("{}: {ONLY_VARIABLE} is set: not compared", self.name),
            Some(folder) => self.write(&PathBuf::from(folder), device),
            None => self.compare(),
        }
        let count = self.complaints.len();
        self.complaints.truncate(SHOWN);
        let shown = self.complaints.join("\n");
        assert!(count == 0, "{}: {count} differ on {}\n{shown}", self.name, device.name);
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
            cases: self.cases.iter().map(|(name, (b, _))| (name.clone(), kept(b))).collect(),
        };
        let text = serde_json::to_string_pretty(&file).unwrap() + "\n";
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(format!("{}.json", self.name)), text).unwrap();
        let all: Vec<u8> = self.cases.values().flat_map(|(bytes, _)| bytes).copied().collect();
        std::fs::write(folder.join(format!("{}.bin", self.name)), all).unwrap();
        eprintln!("{}: {} cases written to {}", self.name, self.cases.len(), folder.display());
    }

    fn compare(&mut self) {
        let Some((folder, text)) = find(self.name) else {
            eprintln!(
                "{}: no golden vectors ({FOLDER}/{}.json) for {} cases: run this test on an H200 \
                 with {OUT_VARIABLE}=<folder> and keep the .json files it writes",
                self.name,
                self.name,
                self.cases.len()
            );
            return;
        };
        let file: File = serde_json::from_str(&text).unwrap();
        assert!(
            !file.device.starts_with(EMULATED),
            "{}: these vectors are of {}, expected a GPU's",
            self.name,
            file.device
        );
        // Complete outputs, one after the other by name, where a GPU just wrote them.
        let all = std::fs::read(folder.join(format!("{}.bin", self.name))).unwrap_or_default();
        let mut offset = 0;
        let mut equal = 0;
        for (name, kept) in &file.cases {
            let range = offset..offset + kept.bytes;
            offset = range.end;
            let Some((bytes, matching)) = self.cases.get(name) else {
                self.complaints.push(format!("{name}: golden vectors of a case that is no more"));
                continue;
            };
            if hash(bytes) == kept.hash {
                equal += 1;
                continue;
            }
            let expected =
                all.get(range).map(<[u8]>::to_vec).unwrap_or_else(|| from_hex(&kept.head));
            match difference(bytes, kept, &expected, *matching) {
                (true, text) => self.complaints.push(format!("{name}: {text}")),
                (false, text) => eprintln!("{}: {name}: {text}", self.name),
            }
        }
        for name in self.cases.keys().filter(|name| !file.cases.contains_key(*name)) {
            self.complaints.push(format!("{name}: no golden vectors of this case"));
        }
        eprintln!(
            "{}: {equal} of {} cases are bit-equal to {}",
            self.name,
            file.cases.len(),
            file.device
        );
    }
}

/// Whether a difference is too large, and what it is. `expected` is all of the output, or its
/// beginning.
fn difference(bytes: &[u8], kept: &Kept, expected: &[u8], matching: Matching) -> (bool, String) {
    if bytes.len() != kept.bytes {
        return (true, format!("{} bytes, expected {}", bytes.len(), kept.bytes));
    }
    let (got, expected) = (words(&bytes[..expected.len()]), words(expected));
    let pairs = || got.iter().zip(&expected).enumerate();
    let worst = pairs().map(|(_, (&a, &b))| matching.distance(a, b)).max().unwrap_or(0);
    let differ = pairs().filter(|(_, (a, b))| a != b).count();
    let first = pairs()
        .find(|(_, (a, b))| a != b)
        .map(|(index, (a, b))| format!("; first word {index}: {a:#010x}, expected {b:#010x}"));
    let text = format!(
        "{differ} of {} words kept differ, by {worst} at most{}",
        expected.len(),
        first.unwrap_or_default()
    );
    let is_hidden = matching == Matching::Bits && differ == 0;
    (worst > matching.allowed() || is_hidden, text)
}

/// The folder that has golden vectors of a group, and their text.
fn find(group: &str) -> Option<(PathBuf, String)> {
    let named = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from);
    let here = std::env::current_dir().ok()?;
    let folders = named.into_iter().chain(here.ancestors().map(|above| above.join(FOLDER)));
    folders.into_iter().find_map(|folder| {
        let text = std::fs::read_to_string(folder.join(format!("{group}.json"))).ok()?;
        Some((folder, text))
    })
}
