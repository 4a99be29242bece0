//! Values of weight files.

use std::fs;
use std::path::Path;

use deepwell_ir::capture::Weights;
use half::{bf16, f16};
use safetensors::{Dtype, serialize_to_file, tensor::TensorView};

/// Writes a file with the safetensors crate, not with ours.
fn write_file(path: &Path, tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap())
    });
    serialize_to_file(views.collect::<Vec<_>>(), None, path).unwrap();
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn one_file_of_every_float_type() {
    let folder = tempfile::tempdir().unwrap();
    let values = [1.0f32, -0.5, 448.0, 0.0, 3.0, -65504.0];
    let halves = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
    let brains = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
    write_file(
        &folder.path().join("model.safetensors"),
        &[
            ("wide", Dtype::F32, &[2, 3], f32_bytes(&values)),
            ("half", Dtype::F16, &[6], halves),
            ("brain", Dtype::BF16, &[3, 2], brains),
            ("scalar", Dtype::F32, &[], f32_bytes(&[7.0])),
            ("nothing", Dtype::F32, &[0, 4], Vec::new()),
            ("bytes", Dtype::U8, &[2], vec![1, 255]),
        ],
    );
    let model = Weights::open(folder.path()).unwrap();
    let names: Vec<_> = model.tensors().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["brain", "bytes", "half", "nothing", "scalar", "wide"]);
    let brain = model.tensor("brain").unwrap();
    assert_eq!((brain.dtype, brain.shape.as_slice()), (Dtype::BF16, &[3, 2][..]));
    let check = |name: &str, shape: &[usize], expected: &[f32]| {
        assert_eq!(model.read_f32(name, shape).unwrap(), expected, "{name}");
    };
    check("wide", &[2, 3], &values);
    check("half", &[6], &values);
    // -65504 is an F16 value; BF16 has eight bits of mantissa.
    check("brain", &[3, 2], &[1.0, -0.5, 448.0, 0.0, 3.0, -65536.0]);
    check("scalar", &[], &[7.0]);
    check("nothing", &[0, 4], &[]);
    assert_eq!(model.read_bytes("bytes", &[2], Dtype::U8).unwrap(), [1, 255]);
}

#[test]
fn larger_than_the_read_buffer() {
    let folder = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..600_001).map(|index| index as f32).collect();
    let halves: Vec<u8> = (0..600_001u32)
        .flat_map(|index| bf16::from_f32((index % 256) as f32).to_le_bytes())
        .collect();
    write_file(
        &folder.path().join("model.safetensors"),
        &[
            ("wide", Dtype::F32, &[600_001], f32_bytes(&values)),
            ("brain", Dtype::BF16, &[600_001], halves),
        ],
    );
    let model = Weights::open(folder.path()).unwrap();
    assert!(model.read_f32("wide", &[600_001]).unwrap() == values);
    let brain = model.read_f32("brain", &[600_001]).unwrap();
    assert!(brain.iter().enumerate().all(|(index, &value)| value == (index % 256) as f32));
}

/// A tensor comes from the file whose header was checked, also after another file took its name.
#[test]
fn every_file_is_opened_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let one = |name, value| [(name, Dtype::F32, &[1][..], f32_bytes(&[value]))];
    let files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    write_file(&path.join(files[0]), &one("a", 1.0));
    write_file(&path.join(files[1]), &one("b", 2.0));
    let model = Weights::open(path).unwrap();
    for file in files {
        fs::remove_file(path.join(file)).unwrap();
        fs::write(path.join(file), "of another model").unwrap();
    }
    let values = ["a", "b"].map(|name| model.read_f32(name, &[1]).unwrap());
    assert_eq!(values, [[1.0], [2.0]]);
}

#[test]
fn folders_without_weights() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().join("nowhere"), folder.path().to_path_buf()] {
        let error = Weights::open(&path).unwrap_err().to_string();
        assert_eq!(
            error.replace(&path.display().to_string(), "DIR"),
            "`DIR`: expected `model.safetensors`, or `model.safetensors.index.json` and its \
             shards\nhint: download the weights too; the config.json alone begins from fresh \
             weights"
        );
    }
}

#[test]
fn tensors_that_do_not_fit_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let many: Vec<f32> =
        (0..300_000).map(|index| if index == 270_000 { f32::NAN } else { 1.0 }).collect();
    write_file(
        &path,
        &[
            ("model.norm.weight", Dtype::F32, &[2], f32_bytes(&[1.0, f32::INFINITY])),
            ("codes", Dtype::U8, &[2], vec![1, 2]),
            ("large", Dtype::F32, &[300_000], f32_bytes(&many)),
        ],
    );
    let model = Weights::open(folder.path()).unwrap();
    let check = |name: &str, shape: &[usize], expected: &str| {
        let error = model.read_f32(name, shape).unwrap_err().to_string();
        assert!(error.contains(expected), "expected `{expected}` in `{error}`");
    };
    check("norm.weight", &[2], "expected shape [2], found in no file of `");
    check("norm.weight", &[2], "hint: did you mean `model.norm.weight`?");
    check("lm_head.weight", &[2], "hint: the files hold 3 tensors, such as `codes`");
    check("codes", &[2], "expected one of F32, BF16, F16, got U8");
    check("model.norm.weight", &[3], "expected shape [3], got shape [2]");
    check("model.norm.weight", &[2, 1], "expected shape [2, 1], got shape [2]");
    check("model.norm.weight", &[2], "expected finite values, got inf at element 1");
    check("large", &[300_000], "expected finite values, got NaN at element 270000");
    let error = model.read_f32_into("model.norm.weight", &[2], &mut [0.0]).unwrap_err();
    assert!(error.to_string().contains("expected a buffer of 2 elements, got 1"), "{error}");
    let error = model.read_bytes("model.norm.weight", &[2], Dtype::U8).unwrap_err();
    assert!(error.to_string().contains("expected U8, got F32"), "{error}");
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(100).unwrap();
    check("large", &[300_000], "it became shorter while tensor `large` was read");
}
