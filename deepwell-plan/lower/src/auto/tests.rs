//! The choice among formats with given times.

use deepwell_ir::TensorId;
use deepwell_precision::Format;

use super::choice::{Layer, Priced, fastest, total_s};
use super::report::report;

/// A layer that reads `input`: its time in BF16, then the time alone and of its input's
/// quantization in MXFP8 and in NVFP4.
type Row = (u32, f64, Option<(f64, f64)>, Option<(f64, f64)>);

fn layer((input, bf16_s, mxfp8, nvfp4): Row) -> Layer {
    let priced =
        |times: Option<(f64, f64)>| times.map(|(own_s, input_s)| Priced { own_s, input_s });
    Layer {
        name: "w".to_string(),
        kind: (None, [vec![1], vec![1], vec![1]]),
        input: TensorId(input),
        bf16_s,
        formats: vec![Format::MXFP8, Format::NVFP4],
        priced: [mxfp8, nvfp4].map(priced).to_vec(),
    }
}

/// One letter for each layer: b, m or n.
fn letters(rows: &[Row]) -> (String, f64) {
    let layers: Vec<Layer> = rows.iter().copied().map(layer).collect();
    let chosen = fastest(&layers);
    let letter = |choice: &Option<usize>| ["b", "m", "n"][choice.map_or(0, |preset| preset + 1)];
    let total = total_s(&layers, &chosen);
    let counts = report(&layers, &chosen).into_iter().next().unwrap();
    let text: String = chosen.iter().map(letter).collect();
    let count = |letters: &str| text.chars().filter(|it| letters.contains(*it)).count();
    let expected = (rows.len(), count("mn"), count("n"));
    assert_eq!((counts.count, counts.quantized, counts.nvfp4), expected, "{text}");
    (text, total)
}

#[test]
fn each_layer_takes_the_fastest_of_its_formats() {
    let check = |rows: &[Row], expected: (&str, f64)| {
        assert_eq!(letters(rows), (expected.0.to_string(), expected.1), "{rows:?}");
    };
    check(&[(0, 9.0, Some((5.0, 2.0)), Some((3.0, 3.0)))], ("n", 6.0));
    check(&[(0, 9.0, Some((5.0, 2.0)), Some((3.0, 5.0)))], ("m", 7.0));
    check(&[(0, 6.0, Some((5.0, 2.0)), Some((3.0, 5.0)))], ("b", 6.0));
    // A tie keeps more bits.
    check(&[(0, 7.0, Some((5.0, 2.0)), Some((3.0, 4.0)))], ("b", 7.0));
    check(&[(0, 8.0, Some((5.0, 2.0)), Some((3.0, 4.0)))], ("m", 7.0));
    // Without kernels, or where the policy has an exception.
    check(&[(0, 9.0, Some((5.0, 2.0)), None)], ("m", 7.0));
    check(&[(0, 9.0, None, Some((3.0, 5.0)))], ("n", 8.0));
    check(&[(0, 9.0, None, None)], ("b", 9.0));
    // One quantization of an input serves all readers: alone, none would be faster than MXFP8.
    let reader = (1, 9.0, Some((5.0, 1.0)), Some((4.0, 2.5)));
    check(&[reader], ("m", 6.0));
    check(&[reader, reader], ("nn", 10.5));
    let of_other_input = (2, reader.1, reader.2, reader.3);
    check(&[reader, of_other_input], ("mm", 12.0));
    // A second format for a shared input costs a second quantization.
    let narrow = (1, 3.0, Some((2.4, 1.0)), Some((2.5, 2.5)));
    check(&[reader, reader, narrow], ("nnn", 13.0));
    check(&[(0, 9.0, Some((2.0, 1.0)), Some((4.0, 2.0))), (0, 9.0, None, None)], ("mb", 12.0));
}
