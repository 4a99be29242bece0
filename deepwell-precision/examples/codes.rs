//! Encodes numbers for other programs: little-endian f32 from standard input, one byte each to
//! standard output, rounded to nearest even and saturating. Used by `scripts/compare_ml_dtypes.py`.
//!
//! `cargo run -p deepwell-precision --example codes -- e2m1 < numbers > codes`

use std::io::{self, Read, Write};

use deepwell_precision::{ElementFormat, Overflow, Rounding, e8m0, ue4m3};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).ok_or("expected a format, such as `e2m1`")?;
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes)?;
    let (nearest, saturate) = (Rounding::NearestEven, Overflow::Saturate);
    let encode: Box<dyn Fn(f32) -> u8> = match name.as_str() {
        "ue4m3" => Box::new(|x| ue4m3::encode(x, nearest, saturate)),
        "e8m0" => Box::new(|x| e8m0::encode(x, nearest, saturate)),
        name => {
            let element: ElementFormat = name.parse()?;
            Box::new(move |x| element.encode(x, nearest, saturate))
        }
    };
    let numbers = bytes.as_chunks::<4>().0.iter();
    let codes: Vec<u8> = numbers.map(|&number| encode(f32::from_le_bytes(number))).collect();
    io::stdout().lock().write_all(&codes)?;
    Ok(())
}
