//! MMAs on an H200, bit for bit. See `tests/golden/README.md`.

use std::path::PathBuf;

use deepwell_emulator::number::Format;
use deepwell_emulator::numerics::{
    Accumulate, ElementBits, Kind, MmaSpec, Operand, ResultMode, TensorCore, multiply,
};

fn read(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().unwrap())).collect()
}

/// Outputs that differ, in a model.
fn differing(kind: &str, inputs: &str, model: ResultMode, architecture: TensorCore) -> usize {
    let [a, b, d] =
        ["a", "b", "d"].map(|part| read(&format!("h200_wgmma_{kind}_{inputs}_{part}.bin")));
    let expected = words(&d);
    let mut got = vec![0x7fc0_0000; 64 * 64];
    let halves = |bytes: &[u8]| -> Vec<u16> {
        bytes.chunks_exact(2).map(|two| u16::from_le_bytes([two[0], two[1]])).collect()
    };
    let (a_halves, b_halves) = (halves(&a), halves(&b));
    let (kind, format, k, a, b) = match kind {
        "fp8" => (Kind::F8f6f4, Format::E4M3, 128, ElementBits::U8(&a), ElementBits::U8(&b)),
        _ => {
            (Kind::Bf16, Format::BF16, 64, ElementBits::U16(&a_halves), ElementBits::U16(&b_halves))
        }
    };
    let accumulate = Accumulate::F32;
    let spec = MmaSpec { model, architecture, kind, a: format, b: format, accumulate };
    let (a, b) = (Operand::new(a), Operand::new(b));
    multiply(&spec, 64, 64, k, &a, &b, &mut got, false, false, false).unwrap();
    got.iter().zip(&expected).filter(|(got, expected)| got != expected).count()
}

#[test]
fn hardware_mode_equals_an_h200() {
    for kind in ["fp8", "bf16"] {
        for inputs in ["small", "wide", "cancel", "sub"] {
            let differing = differing(kind, inputs, ResultMode::Hardware, TensorCore::Hopper);
            assert_eq!(differing, 0, "{kind} {inputs}");
        }
    }
}

/// The vectors tell models apart: what keeps other bits, or loses none, gives other outputs.
#[test]
fn other_models_do_not() {
    for (kind, model, architecture) in [
        ("fp8", ResultMode::Hardware, TensorCore::Blackwell),
        ("fp8", ResultMode::Hardware, TensorCore::HopperWarp),
        ("fp8", ResultMode::Exact, TensorCore::Hopper),
        ("fp8", ResultMode::Fuzz(1), TensorCore::Hopper),
        ("bf16", ResultMode::Hardware, TensorCore::Ampere),
        ("bf16", ResultMode::Exact, TensorCore::Hopper),
        ("bf16", ResultMode::Fuzz(1), TensorCore::Hopper),
    ] {
        let differing = differing(kind, "wide", model, architecture);
        assert!(differing > 300, "{kind} {model:?} {architecture:?}: {differing}");
    }
}
