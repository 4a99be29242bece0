//! How long an MXFP8 product of 1024 x 1024 x 1024 takes on `sm100_mxfp8_gemm` of Deepwell, with
//! the hazard tracker and without.
//!
//! `cargo run --release -p deepwell-emulator --example gemm_speed -- sm100_mxfp8_gemm.ptx`

use std::error::Error;
use std::time::Instant;

use deepwell_emulator::bulk::{ElementType, Swizzle, TensorMap, TensorMapSpec};
use deepwell_emulator::launch::{Arguments, Emulator, LaunchSpec, Settings};

const SIDE: u64 = 1024;
/// Of a kernel: its name, blocks of a cluster, columns of a tile.
const KERNELS: &[(&str, u32, u32)] =
    &[("sm100_mxfp8_gemm_128x128_bf16", 1, 128), ("sm100_mxfp8_gemm_256x256_bf16", 2, 256)];

/// E4M3 codes without NaN.
fn codes(seed: u64) -> Vec<u8> {
    let mut state = seed;
    (0..SIDE * SIDE)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let code = (state >> 56) as u8;
            if code & 0x7f == 0x7f { code ^ 1 } else { code }
        })
        .collect()
}

fn seconds(ptx: &str, kernel: (&str, u32, u32), tracker: bool) -> Result<f64, Box<dyn Error>> {
    let (name, cluster, columns) = kernel;
    let mut emulator = Emulator::new(Settings { tracker, ..Settings::default() });
    let module = emulator.load(ptx)?;
    let mut arguments = Arguments::new();
    for (operand, rows) in [(1, 128), (2, columns / cluster)] {
        let matrix = emulator.allocate(SIDE * SIDE, "codes");
        emulator.write(matrix, &codes(operand))?;
        let scales = emulator.allocate(SIDE * SIDE / 32, "scales");
        emulator.write(scales, &vec![127; (SIDE * SIDE / 32) as usize])?;
        let mut map =
            TensorMapSpec::new(ElementType::U8, matrix, &[SIDE, SIDE], &[SIDE], &[128, rows]);
        map.swizzle = Swizzle::Bytes128;
        let map = TensorMap::encode(&map).map_err(|fault| fault.message)?;
        arguments = arguments.structure(&map, 64).u64(scales);
    }
    let result = emulator.allocate(2 * SIDE * SIDE, "result");
    let side = SIDE as u32;
    let spec = LaunchSpec {
        kernel: name.to_owned(),
        grid: [4, 1, 1],
        block: [256, 1, 1],
        cluster: [cluster, 1, 1],
        shared_bytes: 227 * 1024,
        arguments: arguments.u64(0).u64(result).u32(side).u32(side).u32(side).u32(0).bytes(),
        programmatic: false,
    };
    let start = Instant::now();
    let report = emulator.launch(module, &spec)?;
    let time_s = start.elapsed().as_secs_f64();
    match report.is_clean() {
        true => Ok(time_s),
        false => Err(format!("{name}: {:#?}", report.hazards).into()),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("expected the path of `sm100_mxfp8_gemm.ptx`")?;
    let ptx = std::fs::read_to_string(path)?;
    for kernel in KERNELS {
        for tracker in [false, true] {
            let time_s = seconds(&ptx, *kernel, tracker)?;
            println!("{} tracker {tracker}: {time_s:.2} s", kernel.0);
        }
    }
    Ok(())
}
