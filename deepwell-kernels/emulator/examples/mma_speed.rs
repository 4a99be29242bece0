//! Measures the multiply-adds per second of each kind of MMA, on one thread and on all threads.
//!
//! `cargo run --release -p deepwell-emulator --example mma_speed [side]`

use std::time::Instant;

use deepwell_emulator::number::{Format, Rounding, encode};
use deepwell_emulator::numerics::{
    Accumulate, ElementBits, Kind, MmaSpec, Operand, ResultMode, TensorCore, multiply,
};

/// Uniform bits (xorshift64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Approximately normal, with variance 1.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| (self.next() >> 40) as f32 / 16_777_216.0).sum::<f32>() - 6.0
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Data {
    /// All finite codes equally likely.
    ElementBits,
    /// Normal values, scaled to the range of 8-bit and smaller formats as by a quantizer.
    Normal,
}

fn elements(format: Format, data: Data, count: usize, random: &mut Random) -> Vec<u32> {
    let spread = match format {
        Format::E4M3 | Format::E5M2 => 128.0,
        Format::E3M2 | Format::E2M3 | Format::E2M1 => 2.0,
        Format::S8 | Format::U8 => 40.0,
        _ => 1.0,
    };
    (0..count)
        .map(|_| match data {
            Data::ElementBits => loop {
                let code = (random.next() >> 32) as u32 & (u32::MAX >> (32 - format.bits()));
                if deepwell_emulator::number::decode(format, code).is_finite() {
                    break code;
                }
            },
            Data::Normal => {
                let value = random.normal() * spread;
                encode(format, value, Rounding::NearestEven, true, false)
            }
        })
        .collect()
}

/// Multiply-adds per second, in units of 10^9.
fn measure(spec: &MmaSpec, side: usize, data: Data) -> f64 {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (m, n, k) = (side, side, side);
    let a = elements(spec.a, data, m * k, &mut random);
    let b = elements(spec.b, data, n * k, &mut random);
    let scales: Vec<u8> = (0..m * k / 16).map(|_| 124 + (random.next() >> 62) as u8).collect();
    let (format, block) = match spec.kind {
        Kind::Mxf4nvf4 => (Format::UE4M3, 16),
        _ => (Format::UE8M0, 32),
    };
    let scaled = matches!(spec.kind, Kind::Mxf4nvf4 | Kind::Mxf8f6f4);
    let element_bits: Vec<u8> = match format {
        Format::UE4M3 => scales.iter().map(|&code| code - 80).collect(),
        _ => scales,
    };
    let operand = |elements| {
        if scaled {
            Operand::scaled(
                ElementBits::U32(elements),
                format,
                block,
                &element_bits[..m * k / block],
            )
        } else {
            Operand::new(ElementBits::U32(elements))
        }
    };
    let (a, b) = (operand(&a), operand(&b));
    let mut accumulator = vec![0; m * n];
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let start = Instant::now();
        multiply(spec, m, n, k, &a, &b, &mut accumulator, false, false, false)
            .expect("the table below has only what goes together");
        best = best.min(start.elapsed().as_secs_f64());
    }
    (m * n * k) as f64 / best / 1e9
}

fn main() {
    let side = std::env::args().nth(1).and_then(|side| side.parse().ok()).unwrap_or(512);
    println!("GMAC/s of {side}^3, one thread (and all):");
    println!("{:<38}{:>16}{:>16}{:>16}{:>16}", "", "hw element_bits", "hw normal", "exact", "fuzz");
    use Accumulate::{F16, F32, I32};
    use TensorCore::{Ampere, Blackwell, Hopper, HopperWarp};
    for (architecture, kind, format, accumulate) in [
        (Blackwell, Kind::Mxf8f6f4, Format::E4M3, F32),
        (Blackwell, Kind::Mxf8f6f4, Format::E5M2, F32),
        (Blackwell, Kind::Mxf8f6f4, Format::E2M1, F32),
        (Blackwell, Kind::Mxf4nvf4, Format::E2M1, F32),
        (Blackwell, Kind::F8f6f4, Format::E4M3, F32),
        (Hopper, Kind::F8f6f4, Format::E4M3, F32),
        (HopperWarp, Kind::F8f6f4, Format::E4M3, F32),
        (Hopper, Kind::Bf16, Format::BF16, F32),
        (Hopper, Kind::F16, Format::F16, F32),
        (Hopper, Kind::F16, Format::F16, F16),
        (Hopper, Kind::Tf32, Format::TF32, F32),
        (Ampere, Kind::Bf16, Format::BF16, F32),
        (Hopper, Kind::I8, Format::S8, I32),
    ] {
        let mut line = String::new();
        for (model, data) in [
            (ResultMode::Hardware, Data::ElementBits),
            (ResultMode::Hardware, Data::Normal),
            (ResultMode::Exact, Data::Normal),
            (ResultMode::Fuzz(1), Data::Normal),
        ] {
            let spec = MmaSpec { model, architecture, kind, a: format, b: format, accumulate };
            let single = rayon::ThreadPoolBuilder::new().num_threads(1).build();
            let one = match single {
                Ok(pool) => pool.install(|| measure(&spec, side, data)),
                Err(error) => return eprintln!("no thread pool: {error}"),
            };
            let all = measure(&spec, side, data);
            line += &format!("{:>16}", format!("{one:.2} ({all:.2})"));
        }
        println!("{:<38}{line}", format!("{architecture:?} {kind:?} {format} {accumulate:?}"));
    }
}
