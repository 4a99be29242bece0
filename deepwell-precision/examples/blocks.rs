//! Block-quantizes a matrix for other programs. Input: little-endian f32 of whole rows on standard
//! input. Output: the tensor scale (NVFP4 only, f32), all scales, all quantized data, in the layout
//! of this crate. Used by `scripts/compare_ml_dtypes.py`.
//!
//! `cargo run -p deepwell-precision --example blocks -- COLS e2m1 rceil < numbers > bytes`,
//! `cargo run -p deepwell-precision --example blocks -- COLS nvfp4 row 448 < numbers > bytes`

use std::error::Error;
use std::io::{self, Read, Write};

use deepwell_precision::{QuantFormat, ScaleFormat, nvfp4, packed, quantize_rows, scales_len};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [cols, rest @ ..] = &arguments[..] else {
        return Err("expected a number of columns and a format".into());
    };
    let cols: usize = cols.parse()?;
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes)?;
    let numbers = bytes.as_chunks::<4>().0.iter();
    let numbers: Vec<f32> = numbers.map(|&number| f32::from_le_bytes(number)).collect();
    let rows = numbers.len().checked_div(cols).ok_or("expected at least one column, got 0")?;
    let mut out = io::stdout().lock();
    match rest {
        [name, block, bound] if name == "nvfp4" => {
            let scale = ScaleFormat::Ue4m3(bound.parse()?);
            let format = QuantFormat { scale, ..QuantFormat::NVFP4 }.with_shape(block.parse()?);
            let mut scales = vec![0; nvfp4::scales_len(rows, cols)];
            let mut data = vec![0; packed::fp4_len(rows, cols)];
            let common = nvfp4::Common::nearest(nvfp4::amax(&numbers));
            let (scale, _) = nvfp4::quantize_rows(
                &numbers,
                rows,
                cols,
                &format,
                &common,
                &mut data,
                &mut scales,
            )?;
            out.write_all(&scale.to_le_bytes())?;
            out.write_all(&scales)?;
            out.write_all(&data)?;
        }
        [element, rule] => {
            let format = QuantFormat::mx(element.parse()?).with_scale_rule(rule.parse()?);
            let mut scales = vec![0; scales_len(rows, cols)];
            let mut data = vec![0; numbers.len()];
            quantize_rows(&numbers, rows, cols, &format, &mut data, &mut scales)?;
            out.write_all(&scales)?;
            out.write_all(&data)?;
        }
        _ => return Err("expected `ELEMENT RULE` or `nvfp4 BLOCK BOUND` after the columns".into()),
    }
    Ok(())
}
