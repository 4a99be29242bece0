//! Parses and decodes every kernel of the PTX files on the command line, and lists unknown forms:
//! `cargo run -p deepwell-emulator --release --example decode_ptx -- kernels/*.ptx`.

use std::process::ExitCode;
use std::time::Instant;

use deepwell_emulator::{decode, ptx};

fn main() -> ExitCode {
    let (mut files, mut kernels, mut steps, mut wrong) = (0, 0, 0, 0);
    let start = Instant::now();
    for path in std::env::args().skip(1) {
        let text = match std::fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => {
                eprintln!("{path}: {error}");
                return ExitCode::FAILURE;
            }
        };
        files += 1;
        let module = match ptx::parse(&text) {
            Ok(module) => module,
            Err(error) => {
                println!("{path}: {error}");
                wrong += 1;
                continue;
            }
        };
        // Addresses are arbitrary, because nothing runs.
        let globals: decode::GlobalAddresses = decode::global_variables(&module)
            .into_iter()
            .enumerate()
            .map(|(position, variable)| (variable.name, (position as u64 + 1) << 32))
            .collect();
        for kernel in module.kernels() {
            kernels += 1;
            match decode::decode(&module, &kernel.name, &globals) {
                Ok(program) => steps += program.steps.len(),
                Err(error) => {
                    println!("{path}: {}: {error}", kernel.name);
                    wrong += 1;
                }
            }
        }
    }
    let time_s = start.elapsed().as_secs_f64();
    println!(
        "{files} files, {kernels} kernels, {steps} instructions, {wrong} wrong, {time_s:.2} s"
    );
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
