//! Loads a kernel, runs it, and prints statistics.
//!
//! ```sh
//! cargo run -p deepwell-emulator --example first_launch
//! ```

use deepwell_emulator::error::EmulatorError;
use deepwell_emulator::launch::{Arguments, Emulator, LaunchSpec, Settings};

/// Adds 1 to each of `count` numbers.
const PTX: &str = "
.version 9.0
.target sm_90a
.address_size 64
.visible .entry add_one(.param .u64 numbers, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [numbers];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %tid.x;
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r3, [%rd3];
    add.u32 %r4, %r3, 1;
    st.global.u32 [%rd3], %r4;
DONE:
    ret;
}
";

fn main() -> Result<(), EmulatorError> {
    let mut emulator = Emulator::new(Settings::default());
    let module = emulator.load(PTX)?;

    let numbers: Vec<u8> = (0..100u32).flat_map(u32::to_le_bytes).collect();
    let address = emulator.allocate(numbers.len() as u64, "numbers");
    emulator.write(address, &numbers)?;
    let mut launch = LaunchSpec {
        kernel: "add_one".to_owned(),
        grid: [1, 1, 1],
        block: [128, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes: 0,
        arguments: Arguments::new().u64(address).u32(100).bytes(),
        programmatic: false,
    };
    let report = emulator.launch(module, &launch)?;
    println!("numbers[99] = {}", emulator.read(address + 4 * 99, 4)?[0]);
    println!(
        "{} instructions of warps, {} bytes read, {} written, {} hazards",
        report.counts.instructions,
        report.counts.bytes.global_read,
        report.counts.bytes.global_written,
        report.hazards.len()
    );

    // 101 numbers, but only 100 are allocated.
    launch.arguments = Arguments::new().u64(address).u32(101).bytes();
    if let Err(error) = emulator.launch(module, &launch) {
        println!("{error}");
    }
    Ok(())
}
