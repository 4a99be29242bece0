//! Tiles on the tensor cores of three architectures, against sums in double precision, in all
//! completion modes and result modes; and what happens when one synchronizing instruction is left
//! out.

use deepwell_emulator::error::EmulatorError;
use deepwell_emulator::launch::{Arguments, Completion, Emulator, LaunchSpec, Report, Settings};
use deepwell_emulator::number::{Format, decode};
use deepwell_emulator::numerics::ResultMode;

const TCGEN05: &str = include_str!("fixtures/tcgen05.ptx");
const WGMMA: &str = include_str!("fixtures/wgmma.ptx");
const WARP_MMA: &str = include_str!("fixtures/warp_mma.ptx");

/// Random numbers of a linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    /// E4M3 bit patterns without NaN.
    fn e4m3(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.below(0x7F) as u8 | ((self.below(2) as u8) << 7)).collect()
    }

    /// BF16 bit patterns of numbers about 1.
    fn bf16(&mut self, count: usize) -> Vec<u8> {
        let code =
            |random: &mut Random| ((0x3E00 + random.below(0x300)) | (random.below(2) << 15)) as u16;
        (0..count).flat_map(|_| code(self).to_le_bytes()).collect()
    }

    /// UE8M0 bit patterns about 1.
    fn scales(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| 120 + self.below(14) as u8).collect()
    }
}

/// An MMA with its operands as the kernel takes them and as numbers.
struct Case {
    ptx: &'static str,
    kernel: &'static str,
    threads: u32,
    inputs: Vec<Vec<u8>>,
    shape: [usize; 3],
    /// `[m, k]` and `[n, k]`, scales included.
    a: Vec<f64>,
    b: Vec<f64>,
    /// Of the sum of magnitudes.
    tolerance: f64,
}

fn numbers(element_bits: &[u8], scales: Option<&[u8]>, k: usize) -> Vec<f64> {
    let value = |(at, code): (usize, &u8)| {
        let scale = scales.map_or(1.0, |scales| {
            let (row, column) = (at / k, at % k);
            2f64.powi(i32::from(scales[row * (k / 32) + column / 32]) - 127)
        });
        f64::from(decode(Format::E4M3, u32::from(*code))) * scale
    };
    element_bits.iter().enumerate().map(value).collect()
}

fn bf16_numbers(bytes: &[u8]) -> Vec<f64> {
    let word = |pair: &[u8]| u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16;
    bytes.chunks(2).map(|pair| f64::from(f32::from_bits(word(pair)))).collect()
}

fn cases() -> Vec<Case> {
    let mut random = Random(1);
    let (m, n, k) = (64, 64, 128);
    let (a, b) = (random.e4m3(m * k), random.e4m3(n * k));
    let fp8 = Case {
        ptx: WGMMA,
        kernel: "proof_sm90a_fp8",
        threads: 128,
        shape: [m, n, k],
        a: numbers(&a, None, k),
        b: numbers(&b, None, k),
        inputs: vec![a, b],
        // 13 bits of fraction below the largest product, cut off in each of 33 terms of 4 sums.
        tolerance: 4.0 * 33.0 / 8192.0,
    };
    let k = 64;
    let (a, b) = (random.bf16(m * k), random.bf16(n * k));
    let bf16 = Case {
        ptx: WGMMA,
        kernel: "proof_sm90a_bf16",
        threads: 128,
        shape: [m, n, k],
        a: bf16_numbers(&a),
        b: bf16_numbers(&b),
        inputs: vec![a, b],
        // 24 bits of fraction or more in every mode, 17 terms of 4 sums.
        tolerance: 4.0 * 17.0 / 16_777_216.0,
    };
    let (m, n, k) = (128, 128, 128);
    let (a, b) = (random.e4m3(m * k), random.e4m3(n * k));
    let (a_scales, b_scales) = (random.scales(m * k / 32), random.scales(n * k / 32));
    let scaled = Case {
        ptx: TCGEN05,
        kernel: "proof_sm100a",
        threads: 128,
        shape: [m, n, k],
        a: numbers(&a, Some(&a_scales), k),
        b: numbers(&b, Some(&b_scales), k),
        inputs: vec![a, b, a_scales, b_scales],
        tolerance: 4.0 * 33.0 / 16_777_216.0,
    };
    let (m, n, k) = (16, 8, 32);
    let (a, b) = (random.e4m3(m * k), random.e4m3(n * k));
    let (a_scales, b_scales) = (random.scales(m), random.scales(n));
    let warp = Case {
        ptx: WARP_MMA,
        kernel: "proof_sm120a",
        threads: 32,
        shape: [m, n, k],
        a: numbers(&a, Some(&a_scales), k),
        b: numbers(&b, Some(&b_scales), k),
        inputs: vec![a, b, a_scales, b_scales],
        tolerance: 33.0 / 16_777_216.0,
    };
    vec![fp8, bf16, scaled, warp]
}

/// Runs a case; returns what D is.
fn run(case: &Case, ptx: &str, settings: Settings) -> Result<(Report, Vec<f32>), EmulatorError> {
    let mut emulator = Emulator::new(settings);
    let module = emulator.load(ptx)?;
    let mut arguments = Arguments::new();
    for input in &case.inputs {
        let address = emulator.allocate(input.len() as u64, "input");
        emulator.write(address, input)?;
        arguments = arguments.u64(address);
    }
    let [m, n, _] = case.shape;
    let d = emulator.allocate((m * n * 4) as u64, "d");
    let spec = LaunchSpec {
        kernel: case.kernel.to_owned(),
        grid: [1, 1, 1],
        block: [case.threads, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes: 0,
        arguments: arguments.u64(d).bytes(),
        programmatic: false,
    };
    let report = emulator.launch(module, &spec)?;
    let bytes = emulator.read(d, m * n * 4)?;
    let word = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    Ok((report, bytes.chunks(4).map(word).collect()))
}

/// The greatest difference from the sum in double precision, in sums of magnitudes.
fn difference(case: &Case, d: &[f32]) -> f64 {
    let [_, n, k] = case.shape;
    let mut worst = 0f64;
    for (at, found) in d.iter().enumerate() {
        let (a, b) = (&case.a[at / n * k..][..k], &case.b[at % n * k..][..k]);
        let (mut sum, mut magnitude) = (0.0, 0.0);
        for (a, b) in a.iter().zip(b) {
            sum += a * b;
            magnitude += (a * b).abs();
        }
        let off = (f64::from(*found) - sum).abs() / magnitude;
        worst = if off.is_nan() { f64::INFINITY } else { worst.max(off) };
    }
    worst
}

fn completions() -> [Completion; 5] {
    let lazy = |seed| Completion::Lazy { seed };
    [Completion::Eager, Completion::Demand, lazy(1), lazy(2), lazy(3)]
}

#[test]
fn mmas_are_right_in_every_mode() {
    for case in cases() {
        for completion in completions() {
            for results in [ResultMode::Hardware, ResultMode::Exact, ResultMode::Fuzz(7)] {
                let settings = Settings { completion, results, ..Settings::default() };
                let (report, d) = run(&case, case.ptx, settings).unwrap();
                let what = format!("{} {completion:?} {results:?}", case.kernel);
                assert!(report.is_clean(), "{what}: {:#?}", report.hazards);
                let off = difference(&case, &d);
                assert!(off <= case.tolerance, "{what}: {off:e}");
                let [m, n, k] = case.shape;
                assert_eq!(report.counts.multiply_adds, (m * n * k) as u64, "{what}");
            }
        }
    }
}

/// Words of instructions that synchronize.
const SYNCHRONIZING: &[&str] = &[
    "fence.proxy.async",
    "fence.mbarrier_init",
    "bar.sync",
    "tcgen05.fence::before",
    "tcgen05.fence::after",
    "tcgen05.commit",
    "tcgen05.wait::ld",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
    "mbarrier.try_wait",
];

/// What may be left out: the kernel, the word, which of the lines with it, and why.
const REDUNDANT: &[(&str, &str, usize, &str)] = &[
    ("proof_sm100a", "fence.mbarrier_init", 0, "`fence.proxy.async` and `bar.sync` follow it"),
    ("proof_sm100a", "tcgen05.fence::before", 0, "only `tcgen05.alloc` came before"),
    ("proof_sm100a", "tcgen05.fence::after", 0, "only `tcgen05.alloc` came before"),
    ("proof_sm100a", "tcgen05.fence::before", 1, "`tcgen05.wait::ld` ended all before `dealloc`"),
];

#[test]
fn a_missing_synchronization_is_reported_though_values_are_right() {
    let mut wrong = Vec::new();
    let mut tried = 0;
    for case in cases() {
        // Of the two kernels of a file, only the lines of this one.
        let lines: Vec<&str> = case.ptx.lines().collect();
        let start =
            lines.iter().position(|line| line.contains(&format!(".entry {}(", case.kernel)));
        let start = start.expect("the kernel is there");
        for at in start..lines.len() {
            if at > start && lines[at].contains(".entry") {
                break;
            }
            let words = lines[at].trim();
            let Some(word) = SYNCHRONIZING.iter().find(|word| words.contains(**word)) else {
                continue;
            };
            let mut mutated: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
            // A wait that is left out is one that succeeds at once.
            mutated[at] = if *word == "mbarrier.try_wait" {
                "setp.eq.u32 p, 0, 0;".to_owned()
            } else {
                String::new()
            };
            let which = lines[start..at].iter().filter(|line| line.contains(*word)).count();
            tried += 1;
            let noticed = match run(&case, &mutated.join("\n"), Settings::default()) {
                Err(_) => true,
                Ok((report, _)) => !report.hazards.is_empty() || !report.unwritten.is_empty(),
            };
            let redundant =
                REDUNDANT.iter().any(|row| (row.0, row.1, row.2) == (case.kernel, *word, which));
            if noticed == redundant {
                wrong.push(format!("{}: line {}: {words}: {noticed}", case.kernel, at + 1));
            }
        }
    }
    assert_eq!(tried, 24, "lines were left out");
    assert!(wrong.is_empty(), "noticed, or not, against expectation: {wrong:#?}");
}
