//! Model folders as Hugging Face writes them, whole and broken.

use std::fs;
use std::path::Path;

use deepwell_ckpt::CkptDtype;
use deepwell_ckpt::hf::{
    FolderOptions, FolderTensor, HfError, WriteTensor, open_model_folder, write, write_folder,
};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, serialize_to_file, tensor::TensorView};

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
        ],
    );
    let model = open_model_folder(folder.path()).unwrap();
    let names: Vec<_> = model.tensors().map(|(name, _)| name).collect();
    assert_eq!(names, ["brain", "half", "nothing", "scalar", "wide"]);
    assert_eq!(model.tensor("brain").unwrap().dtype, "BF16");
    assert_eq!(model.tensor("brain").unwrap().shape, [3, 2]);
    let check = |name: &str, shape: &[usize], expected: &[f32]| {
        assert_eq!(model.read_f32(name, shape).unwrap(), expected, "{name}");
        let mut bits = vec![0; expected.len()];
        model.read_bf16_bits_into(name, shape, &mut bits).unwrap();
        let rounded: Vec<_> =
            expected.iter().map(|&value| bf16::from_f32(value).to_bits()).collect();
        assert_eq!(bits, rounded, "{name}");
    };
    check("wide", &[2, 3], &values);
    check("half", &[6], &values);
    // -65504 is an F16 value; BF16 has eight bits of mantissa.
    check("brain", &[3, 2], &[1.0, -0.5, 448.0, 0.0, 3.0, -65536.0]);
    check("scalar", &[], &[7.0]);
    check("nothing", &[0, 4], &[]);
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
    let model = open_model_folder(folder.path()).unwrap();
    assert!(model.read_f32("wide", &[600_001]).unwrap() == values);
    let brain = model.read_f32("brain", &[600_001]).unwrap();
    assert!(brain.iter().enumerate().all(|(index, &value)| value == (index % 256) as f32));
}

#[test]
fn shards_with_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let one = |name, value| [(name, Dtype::F32, &[1][..], f32_bytes(&[value]))];
    write_file(&path.join("model-00001-of-00002.safetensors"), &one("a", 1.0));
    write_file(&path.join("model-00002-of-00002.safetensors"), &one("b", 2.0));
    let check = |index: &str, expected: Result<&[f32], &str>| {
        fs::write(path.join("model.safetensors.index.json"), index).unwrap();
        let read = open_model_folder(path).and_then(|model| {
            let names: Vec<_> = model.tensors().map(|(name, _)| name.to_string()).collect();
            let values = names.iter().map(|name| Ok(model.read_f32(name, &[1])?[0]));
            values.collect::<Result<Vec<f32>, HfError>>()
        });
        match (read, expected) {
            (Ok(values), Ok(expected)) => assert_eq!(values, expected),
            (Err(error), Err(expected)) => {
                let error = error.to_string();
                assert!(error.contains(expected), "expected `{expected}` in `{error}`");
            }
            (read, _) => panic!("{index}: got {read:?}"),
        }
    };
    let index = |file_of_b: &str| {
        format!(
            r#"{{"metadata": {{"total_size": 8}}, "weight_map":
            {{"a": "model-00001-of-00002.safetensors", "b": "{file_of_b}"}}}}"#
        )
    };
    check(&index("model-00002-of-00002.safetensors"), Ok(&[1.0, 2.0]));
    check(
        &index("model-00001-of-00002.safetensors"),
        Err("tensor `b` is not in it, though `model.safetensors.index.json` says so, nor in \
             another listed file\nhint: `model-00002-of-00002.safetensors` holds it"),
    );
    check(
        &index("model-00003-of-00002.safetensors"),
        Err("expected a shard listed in `model.safetensors.index.json`\nhint: download the"),
    );
    check(&index("../secret"), Err("expected a file name, got \"../secret\""));
    check("{}", Err("expected an object `weight_map` of tensor to file"));
    check("{", Err("EOF while parsing"));
    check("", Err("EOF while parsing"));
}

#[test]
fn folders_without_weights() {
    let folder = tempfile::tempdir().unwrap();
    let check = |path: &Path, expected: &str| {
        let error = open_model_folder(path).unwrap_err().to_string();
        assert!(error.starts_with("no weights in `") && error.contains(expected), "{error}");
    };
    check(&folder.path().join("nowhere"), "there is no such folder");
    check(folder.path(), "expected `model.safetensors`, or `model.safetensors.index.json`");
    fs::write(folder.path().join("pytorch_model.bin"), "x").unwrap();
    check(folder.path(), "got `pytorch_model.bin`\nhint: pickles of PyTorch are not read");
}

#[test]
fn files_that_are_not_safetensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_file(&path, &[("a", Dtype::F32, &[2], f32_bytes(&[1.0, 2.0]))]);
    let good = fs::read(&path).unwrap();
    let check = |bytes: &[u8], expected: &str| {
        fs::write(&path, bytes).unwrap();
        let error = open_model_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "expected `{expected}` in `{error}`");
    };
    check(b"", "expected a safetensors file, got 0 bytes");
    check(&good[..7], "expected a safetensors file, got 7 bytes");
    check(&good[..20], "expected a safetensors header, got a length of");
    check(&good[..good.len() - 1], "bytes from its header, got");
    check(&[&good[..], b"x"].concat(), "bytes from its header, got");
    check(&[0xFF; 64], "got a length of 18446744073709551615 bytes");
    check(&[&8u64.to_le_bytes()[..], b"not json"].concat(), "broken safetensors header");
    let tensor = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    let overlapping = format!(r#"{{"a":{tensor},"b":{tensor}}}"#).into_bytes();
    let length = (overlapping.len() as u64).to_le_bytes();
    check(&[&length[..], &overlapping, &[0; 4]].concat(), "broken safetensors header");
}

#[test]
fn tensors_that_do_not_fit_the_model() {
    let folder = tempfile::tempdir().unwrap();
    write_file(
        &folder.path().join("model.safetensors"),
        &[
            ("model.norm.weight", Dtype::F32, &[2], f32_bytes(&[1.0, f32::INFINITY])),
            ("codes", Dtype::U8, &[2], vec![1, 2]),
            ("large", Dtype::F32, &[2], f32_bytes(&[1.0, f32::MAX])),
        ],
    );
    let model = open_model_folder(folder.path()).unwrap();
    let check = |name: &str, shape: &[usize], expected: &str| {
        let error = model.read_f32(name, shape).unwrap_err().to_string();
        assert!(error.contains(expected), "expected `{expected}` in `{error}`");
    };
    check("norm.weight", &[2], "is missing in `");
    check("norm.weight", &[2], "(did you mean `model.norm.weight`?)");
    check("lm_head.weight", &[2], "(it has 3 tensors, such as `codes`)");
    check("codes", &[2], "expected one of F32, BF16, F16, got U8");
    check("model.norm.weight", &[3], "expected shape [3], got [2]");
    check("model.norm.weight", &[2, 1], "expected shape [2, 1], got [2]");
    check("model.norm.weight", &[2], "expected finite values, got inf at element 1");
    let mut short = [0.0];
    let error = model.read_f32_into("large", &[2], &mut short).unwrap_err().to_string();
    assert_eq!(error, "tensor `large`: expected a buffer of 2 elements, got 1");
    assert_eq!(model.read_f32("large", &[2]).unwrap(), [1.0, f32::MAX]);
    let error = model.read_bf16_bits_into("large", &[2], &mut [0; 2]).unwrap_err().to_string();
    assert!(error.contains("got 3.4028235e38, beyond the range of BF16, at element 1"), "{error}");
}

#[test]
fn written_files_are_read_by_the_safetensors_crate() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let wide = [1.5f32, -2.0];
    let brain = [0x3F80u16, 0xC000, 0x0000];
    // The second time over the first.
    for _ in 0..2 {
        write(
            &path,
            &[
                WriteTensor::from_bf16_bits("brain", &[3], &brain),
                WriteTensor::from_f32("wide", &[1, 2], &wide),
                WriteTensor::from_f32("none", &[0], &[]),
            ],
        )
        .unwrap();
    }
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor("wide").unwrap();
    assert_eq!((view.dtype(), view.shape()), (Dtype::F32, &[1, 2][..]));
    assert_eq!(view.data(), f32_bytes(&wide));
    let view = file.tensor("brain").unwrap();
    assert_eq!((view.dtype(), view.shape()), (Dtype::BF16, &[3][..]));
    assert_eq!(view.data(), [0x80, 0x3F, 0x00, 0xC0, 0, 0]);
    assert_eq!(file.tensor("none").unwrap().shape(), [0]);
    // What Hugging Face's loaders look for.
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn tensors_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, "former").unwrap();
    let check = |path: &Path, tensors: &[WriteTensor<'_>], expected: &str| {
        let error = write(path, tensors).unwrap_err().to_string();
        assert!(error.contains(expected), "expected `{expected}` in `{error}`");
        assert_eq!(fs::read_to_string(folder.path().join("model.safetensors")).unwrap(), "former");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    };
    let one = [1.0f32];
    let nan = [f32::NAN];
    let good = || WriteTensor::from_f32("x", &[1], &one);
    check(&path, &[good(), good()], "tensor `x` cannot be written: the name occurs twice");
    check(&path, &[WriteTensor { name: "", ..good() }], "the name is empty or reserved");
    check(
        &path,
        &[WriteTensor { dtype: CkptDtype::E4M3, shape: vec![4], ..good() }],
        "expected F32 or BF16, got F8_E4M3",
    );
    check(&path, &[WriteTensor { shape: vec![2], ..good() }], "4 bytes do not make [2] F32");
    check(
        &path,
        &[WriteTensor::from_f32("x", &[1], &nan)],
        "expected finite values, got NaN at element 0",
    );
    check(&folder.path().join("no/where"), &[good()], "cannot create `");
}

/// Writes three tensors of 4, 2 and 6 elements, the last with `last` at its end, and a
/// configuration.
fn written(to: &Path, dtype: CkptDtype, shard_bytes_max: u64, last: f32) -> Result<u64, HfError> {
    let tensor = |name: &str, shape: &[usize]| FolderTensor {
        name: name.to_string(),
        shape: shape.to_vec(),
        keeps_f32: false,
    };
    let tensors = [tensor("b", &[2, 2]), tensor("a", &[2]), tensor("c", &[3, 2])];
    let fill = |tensor: &FolderTensor, values: &mut [f32]| {
        for (index, value) in values.iter_mut().enumerate() {
            *value = index as f32;
        }
        if tensor.name == "c" {
            values[5] = last;
        }
        Ok::<(), HfError>(())
    };
    let mut told = 0;
    let files = [("config.json".to_string(), b"{}".to_vec())];
    let options = FolderOptions { dtype, shard_bytes_max };
    let folder = write_folder(to, &files, &tensors, options, fill, |bytes| told = bytes)?;
    assert_eq!((told, folder.tensors), (folder.tensor_bytes, 3));
    assert_eq!(folder.files[0], "config.json");
    Ok(folder.files.len() as u64 - 1)
}

#[test]
fn folders_are_whole_or_in_shards() {
    use CkptDtype::{Bf16, F32};
    // Files of weights and the index, if there is one. Sizes in F32: 16, 8 and 24 bytes.
    for (dtype, shard_bytes_max, files) in [
        (F32, 48, 1),
        (F32, 47, 3),
        (F32, 24, 3),
        (F32, 23, 4),
        (F32, 1, 4),
        (Bf16, 24, 1),
        (Bf16, 12, 3),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("deep/to");
        assert_eq!(written(&to, dtype, shard_bytes_max, 9.0).unwrap(), files, "{shard_bytes_max}");
        let model = open_model_folder(&to).unwrap();
        assert_eq!(model.read_f32("c", &[3, 2]).unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 9.0]);
        assert_eq!(model.read_f32("b", &[2, 2]).unwrap(), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(model.tensor("a").unwrap().dtype, dtype.name());
        assert_eq!(fs::read(to.join("config.json")).unwrap(), b"{}");
    }
}

#[test]
fn a_folder_is_complete_or_absent() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("to");
    let check = |dtype, last, expected: &str| {
        let error = written(&to, dtype, 24, last).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{expected}");
    };
    check(CkptDtype::F32, f32::NAN, "expected finite values, got NaN at element 5");
    // It rounds up, to more than BF16 has.
    check(CkptDtype::Bf16, f32::MAX, "expected finite values, got inf at element 5");
    check(CkptDtype::F16, 1.0, "expected F32 or BF16, got F16");
    // An empty folder gives way; what is there stays.
    fs::create_dir(&to).unwrap();
    written(&to, CkptDtype::F32, 1000, 1.0).unwrap();
    let error = written(&to, CkptDtype::F32, 1000, 2.0).unwrap_err();
    assert!(matches!(error, HfError::Exists { .. }), "{error}");
    assert_eq!(open_model_folder(&to).unwrap().read_f32("c", &[3, 2]).unwrap()[5], 1.0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
