//! Weights as Hugging Face reads them: a file or a folder, complete or absent.

use std::fs;
use std::path::Path;

use deepwell_ckpt::CkptDtype;
use deepwell_ckpt::hf::{FolderOptions, FolderTensor, HfError, WriteTensor, write, write_folder};
use deepwell_ir::capture::Weights;
use safetensors::{Dtype, SafeTensors};

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
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
        let model = Weights::open(&to).unwrap();
        assert_eq!(model.read_f32("c", &[3, 2]).unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 9.0]);
        assert_eq!(model.read_f32("b", &[2, 2]).unwrap(), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(model.tensor("a").unwrap().dtype.to_string(), dtype.name());
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
    assert_eq!(Weights::open(&to).unwrap().read_f32("c", &[3, 2]).unwrap()[5], 1.0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
