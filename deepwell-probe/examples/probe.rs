//! Prints a description of this machine: a table, or with `--json` the whole value.
//!
//! `--measure` measures the memory bandwidth first. `--preset NAME` describes another machine.

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use deepwell_probe::{Hardware, probe};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let preset = arguments.iter().position(|argument| argument == "--preset");
    let start = Instant::now();
    let mut hardware = match preset.map(|place| arguments.get(place + 1)) {
        None => probe(),
        Some(name) => match Hardware::preset(name.map_or("", String::as_str)) {
            Ok(hardware) => hardware,
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::FAILURE;
            }
        },
    };
    let probe_ms = start.elapsed().as_secs_f64() * 1e3;
    if has("--measure") {
        let start = Instant::now();
        let measured = hardware.cpu.measure_memory_bandwidth();
        let measure_ms = start.elapsed().as_secs_f64() * 1e3;
        eprintln!("{measured:?} in {measure_ms:.1} ms");
    }
    let text = if has("--json") { hardware.to_json() + "\n" } else { hardware.table() };
    eprintln!("probed in {probe_ms:.1} ms");
    // A reader that closes the pipe early, such as `head`, is not an error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}
