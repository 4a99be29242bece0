//! Quantized model folders that cannot be read.

use std::fs;

use deepwell_quantize_file::dequantize;
use safetensors::tensor::TensorView;

/// Damaged or contradictory folders are errors, not panics.
#[test]
fn damaged_folders_are_refused() {
    use safetensors::Dtype::{self, F8_E4M3, F32, U8};
    type Row = (&'static str, Dtype, Vec<usize>);
    let nvfp4 = |data: Vec<usize>, scales: Vec<usize>| -> Vec<Row> {
        vec![
            ("m.weight_packed", U8, data),
            ("m.weight_scale", F8_E4M3, scales),
            ("m.weight_global_scale", F32, vec![1]),
        ]
    };
    let twice = [nvfp4(vec![2, 16], vec![2, 2]), vec![("m.weight", F32, vec![2, 32])]].concat();
    let alone = vec![("m.weight_packed", U8, vec![2, 16])];
    let fp8 = vec![("m.weight", F8_E4M3, vec![2, 32]), ("m.weight_scale", F32, vec![1])];
    for (tensors, expected) in [
        (nvfp4(vec![2, 16], vec![2, 1]), "`m.weight_scale`: expected 4 bytes, got 2"),
        (nvfp4(vec![0, usize::MAX], vec![0, 1]), "larger than a file can be"),
        (twice, "two tensors `m.weight`"),
        (alone, "expected U8 with `weight_scale`"),
        (fp8, "or MXFP8"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let (input, output) = (folder.path().join("in"), folder.path().join("out"));
        fs::create_dir(&input).expect("a folder");
        let bytes = vec![0u8; 1 << 12];
        let views = tensors.iter().map(|(name, dtype, shape)| {
            let count = shape.iter().fold(1usize, |a, &b| a.saturating_mul(b));
            let size = if *dtype == F32 { 4 } else { 1 };
            let view = TensorView::new(*dtype, shape.clone(), &bytes[..count * size]);
            ((*name).to_owned(), view.expect("bytes of the shape"))
        });
        safetensors::serialize_to_file(views, None, &input.join("model.safetensors"))
            .expect("written");
        let error = dequantize(&input, &output, false).expect_err("refused").to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!output.exists());
    }
}
