//! Measures an MXFP8 GEMM of 1024 x 1024 x 1024 with the kernels of Deepwell's `sm100_mxfp8_gemm`,
//! with and without the hazard tracker: wall time, and CPU time of all threads.
//!
//! ```console
//! cargo xtask kernels --arch sm_100a
//! cargo run --release -p deepwell-emulator --example gemm_speed -- \
//!     target/kernels/sm_100a/sm100_mxfp8_gemm.ptx [words of the kernel's name]
//! ```

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use deepwell_emulator::bulk::{ElementType, Swizzle, TensorMap, TensorMapSpec};
use deepwell_emulator::launch::{Arguments, Emulator, LaunchSpec, Settings};
use deepwell_emulator::ptx;

const HINT: &str = "expected the path of `sm100_mxfp8_gemm.ptx`\n\
    hint: `cargo xtask kernels --arch sm_100a` writes target/kernels/sm_100a/sm100_mxfp8_gemm.ptx; \
    words behind the path, such as `256x256`, choose among its kernels";

const SIDE: u64 = 1024;

/// A kernel that writes BF16. The name gives the tile shape.
#[derive(Clone, Debug)]
struct Kernel {
    name: String,
    /// CTAs per tile.
    cluster: u32,
    /// Columns of a tile.
    columns: u32,
}

impl Kernel {
    fn of(name: &str) -> Option<Kernel> {
        let tile = name.strip_prefix("sm100_mxfp8_gemm_bf16_")?;
        let (rows, columns) = tile.split_once('x')?;
        let (rows, columns): (u32, u32) = (rows.parse().ok()?, columns.parse().ok()?);
        Some(Kernel { name: name.to_owned(), cluster: rows / 128, columns })
    }
}

/// Measured times in seconds.
#[derive(Clone, Copy, Debug)]
struct Took {
    wall_s: f64,
    /// CPU time of all threads, if the system provides it.
    processors_s: Option<f64>,
}

/// CPU time of this process so far, in seconds; Linux reports hundredths.
fn processors_s() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name is in parentheses and may contain blanks. The state and ten numbers precede the user
    // time and the system time.
    let (_, rest) = text.rsplit_once(") ")?;
    let mut times = rest.split_whitespace().skip(11).map(str::parse::<f64>);
    Some((times.next()?.ok()? + times.next()?.ok()?) / 100.0)
}

/// E4M3 bit patterns without NaN.
fn element_bits(seed: u64) -> Vec<u8> {
    let mut state = seed;
    (0..SIDE * SIDE)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let code = (state >> 56) as u8;
            if code & 0x7f == 0x7f { code ^ 1 } else { code }
        })
        .collect()
}

fn run(text: &str, kernel: &Kernel, tracker: bool) -> Result<Took, Box<dyn Error>> {
    let mut emulator = Emulator::new(Settings { tracker, ..Settings::default() });
    let module = emulator.load(text)?;
    let mut arguments = Arguments::new();
    for (operand, rows) in [(1, 128), (2, kernel.columns / kernel.cluster)] {
        let matrix = emulator.allocate(SIDE * SIDE, "element_bits");
        emulator.write(matrix, &element_bits(operand))?;
        // Tiles of 512 bytes, contiguous, in boxes of two rows of 256.
        let scales = emulator.allocate(SIDE * SIDE / 32, "scales");
        emulator.write(scales, &vec![127; (SIDE * SIDE / 32) as usize])?;
        let boxes = [256, SIDE * SIDE / 32 / 256];
        let of_scales = TensorMapSpec::new(ElementType::U8, scales, &boxes, &[256], &[256, 2]);
        let of_scales = TensorMap::encode(&of_scales).map_err(|fault| fault.message)?;
        let mut map =
            TensorMapSpec::new(ElementType::U8, matrix, &[SIDE, SIDE], &[SIDE], &[128, rows]);
        map.swizzle = Swizzle::Bytes128;
        let map = TensorMap::encode(&map).map_err(|fault| fault.message)?;
        arguments = arguments.structure(&map, 64).structure(&of_scales, 64);
    }
    let result = emulator.allocate(2 * SIDE * SIDE, "result");
    let side = SIDE as u32;
    let spec = LaunchSpec {
        kernel: kernel.name.clone(),
        grid: [4, 1, 1],
        block: [256, 1, 1],
        cluster: [kernel.cluster, 1, 1],
        shared_bytes: 227 * 1024,
        arguments: arguments.u64(0).u64(result).u32(side).u32(side).u32(side).u32(0).bytes(),
        programmatic: false,
    };
    let (start, before) = (Instant::now(), processors_s());
    let report = emulator.launch(module, &spec)?;
    let wall_s = start.elapsed().as_secs_f64();
    let processors_s = processors_s().zip(before).map(|(after, before)| after - before);
    match report.is_clean() {
        true => Ok(Took { wall_s, processors_s }),
        false => Err(format!("{}: {:#?}", kernel.name, report.hazards).into()),
    }
}

fn main() -> ExitCode {
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or(HINT)?;
    let words: Vec<String> = arguments.collect();
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}\n{HINT}"))?;
    let module = ptx::parse(&text)?;
    let kernels: Vec<Kernel> = module
        .kernels()
        .filter(|kernel| words.iter().all(|word| kernel.name.contains(word.as_str())))
        .filter_map(|kernel| Kernel::of(&kernel.name))
        .collect();
    if kernels.is_empty() {
        let names: Vec<&str> = module.kernels().map(|kernel| &*kernel.name).collect();
        return Err(format!(
            "expected kernels named `sm100_mxfp8_gemm_bf16_ROWSxCOLUMNS`{}, {path} has {}",
            words.iter().map(|word| format!(" with `{word}`")).collect::<String>(),
            names.join(", ")
        )
        .into());
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{SIDE} x {SIDE} x {SIDE} on {threads} processors");
    for kernel in &kernels {
        for tracker in [false, true] {
            let took = run(&text, kernel, tracker)?;
            let name = &kernel.name;
            let tracker = if tracker { "on " } else { "off" };
            let of_all = match took.processors_s {
                Some(seconds) => {
                    let rate = SIDE.pow(3) as f64 / seconds / 1e9;
                    format!(", {seconds:.2} s of processors, {rate:.2} GMAC/s of one")
                }
                None => String::new(),
            };
            println!("{name} tracker {tracker}: {:.2} s{of_all}", took.wall_s);
        }
    }
    Ok(())
}
