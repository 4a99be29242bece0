//! Bad input and damaged files: each gives one clear error, never a panic.

use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use deepwell_ckpt::{
    CheckpointContents, CheckpointError, CkptDtype, SaveOptions, Section, TensorView,
    is_checkpoint, latest, list, load, save, scan, verify,
};

const VALUES: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];

fn save_step(root: &Path, step: u64) -> PathBuf {
    let mut contents = CheckpointContents::new(step);
    contents.tensors = vec![
        TensorView::from_f32(Section::Weights, "a", &[2, 3], &VALUES),
        TensorView::from_f32(Section::Weights, "b", &[4], &VALUES[..4]),
        TensorView::from_f32(Section::Master, "a", &[2, 3], &VALUES),
    ];
    save(root, &contents, &SaveOptions::default()).unwrap().path
}

fn flip_bit(path: &Path, offset: u64) {
    let mut file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.seek(SeekFrom::Start(offset)).unwrap();
    file.read_exact(&mut byte).unwrap();
    byte[0] ^= 1;
    file.seek(SeekFrom::Start(offset)).unwrap();
    file.write_all(&byte).unwrap();
}

/// Whether anybody would notice: the manifest at loading, a tensor at reading, verify always.
fn notices(path: &Path) -> (bool, bool) {
    let Ok(checkpoint) = load(path) else { return (true, true) };
    let reading = checkpoint
        .entries()
        .iter()
        .any(|tensor| checkpoint.read(tensor.section, &tensor.name).is_err());
    let verifying = verify(path).map_or(true, |report| !report.is_sound());
    (reading, verifying)
}

#[test]
fn every_flipped_bit_is_noticed() {
    let root = tempfile::tempdir().unwrap();
    let path = save_step(root.path(), 1);
    let mut flipped = 0;
    for entry in fs::read_dir(&path).unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_name().unwrap().to_str().unwrap().to_string();
        // The newline after the checksum means nothing.
        let bytes = fs::metadata(&file).unwrap().len() - u64::from(name.ends_with(".blake3"));
        let data_begin = load(&path)
            .unwrap()
            .entries()
            .iter()
            .filter(|tensor| tensor.file == name)
            .map(|tensor| tensor.begin)
            .min();
        for offset in 0..bytes {
            flip_bit(&file, offset);
            let (reading, verifying) = notices(&path);
            assert!(verifying, "byte {offset} of {name}");
            let is_header = data_begin.is_some_and(|begin| offset < begin);
            assert_eq!(reading, !is_header, "byte {offset} of {name}");
            flip_bit(&file, offset);
            flipped += 1;
        }
    }
    assert!(flipped > 1000, "expected a manifest and two shards, got {flipped} bytes");
    assert!(verify(&path).unwrap().is_sound());
}

#[test]
fn verify_names_file_tensor_offset_and_checksums() {
    let root = tempfile::tempdir().unwrap();
    let path = save_step(root.path(), 1);
    let checkpoint = load(&path).unwrap();
    let part = checkpoint.tensor(Section::Weights, "b").unwrap().entries[0];
    let entry = checkpoint.entries()[part].clone();
    flip_bit(&path.join(&entry.file), entry.begin + 5);
    let report = verify(&path).unwrap();
    assert_eq!(report.damages.len(), 1);
    let damage = &report.damages[0];
    assert_eq!(damage.file, "weights-00001.safetensors");
    assert_eq!(damage.tensor.as_deref(), Some("weights/b"));
    assert_eq!((damage.offset, damage.bytes), (entry.begin, 16));
    assert_eq!(damage.expected, entry.blake3);
    assert_ne!(damage.got, entry.blake3);
    let text = report.to_string();
    let line = format!(
        "  `weights-00001.safetensors`, tensor `weights/b`, 16 bytes at offset {}: expected {}, \
         got {}\n",
        entry.begin, entry.blake3, damage.got
    );
    assert!(text.starts_with("damaged: ") && text.ends_with(&line), "{text}");
    let error = load(&path).unwrap().read(Section::Weights, "b").unwrap_err().to_string();
    let begun =
        format!("tensor `b` (weights) is damaged: file `{}`, ", path.join(&entry.file).display());
    assert!(error.starts_with(&begun), "{error}");
}

#[test]
fn truncated_and_missing_files() {
    let check = |file: &str, damage: &dyn Fn(&Path), message: &str| {
        let root = tempfile::tempdir().unwrap();
        save_step(root.path(), 1);
        let path = save_step(root.path(), 2);
        damage(&path.join(file));
        let error = load(&path).unwrap_err().to_string();
        assert!(error.contains(message), "{file}: expected `{message}` in `{error}`");
        assert!(verify(&path).unwrap_err().is_damage(), "{file}: {error}");
        assert!(is_checkpoint(&path), "{file}: it was one");
        // The earlier one is still found, and the damaged one is named.
        let steps: Vec<_> = list(root.path()).unwrap().iter().map(|entry| entry.step).collect();
        assert_eq!(steps, [1], "{file}");
        assert_eq!(latest(root.path()).unwrap().unwrap().step, 1);
        let damaged = scan(root.path()).unwrap().damaged;
        assert_eq!(damaged.len(), 1);
        assert_eq!((damaged[0].step, &damaged[0].path), (2, &path));
        assert!(damaged[0].reason.contains(message));
        // The step can be saved again.
        save_step(root.path(), 2);
        assert!(verify(&path).unwrap().is_sound());
    };
    let remove = |path: &Path| fs::remove_file(path).unwrap();
    let shorten = |path: &Path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    };
    let empty = |path: &Path| fs::write(path, "").unwrap();
    let lengthen = |path: &Path| {
        OpenOptions::new().append(true).open(path).unwrap().write_all(b"x").unwrap();
    };
    check("manifest.json", &remove, "it has no `manifest.json`");
    check("manifest.blake3", &remove, "it has no `manifest.blake3`");
    check("manifest.json", &shorten, "is damaged: expected checksum");
    check("manifest.json", &empty, "is damaged: expected checksum");
    check("manifest.json", &lengthen, "is damaged: expected checksum");
    check("manifest.blake3", &shorten_twice, "is damaged: expected checksum");
    check("manifest.blake3", &empty, "is damaged: expected checksum");
    check("weights-00001.safetensors", &remove, "bytes, got no such file");
    check("master-00001.safetensors", &remove, "bytes, got no such file");
    check("weights-00001.safetensors", &shorten, "bytes, got");
    check("weights-00001.safetensors", &empty, "bytes, got 0");
    check("master-00001.safetensors", &lengthen, "bytes, got");
}

/// Without its newline and its last digit.
fn shorten_twice(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(63).unwrap();
}

/// Changes the manifest and its checksum, as no accident does.
fn edit_manifest(path: &Path, edit: impl FnOnce(&mut serde_json::Value)) {
    let file = path.join("manifest.json");
    let mut manifest = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    edit(&mut manifest);
    let bytes = serde_json::to_vec(&manifest).unwrap();
    fs::write(&file, &bytes).unwrap();
    fs::write(path.join("manifest.blake3"), format!("{}\n", blake3::hash(&bytes))).unwrap();
}

#[test]
fn a_manifest_that_lies() {
    let check = |edit: &dyn Fn(&mut serde_json::Value), message: &str| {
        let root = tempfile::tempdir().unwrap();
        let path = save_step(root.path(), 1);
        edit_manifest(&path, edit);
        let error = load(&path).unwrap_err().to_string();
        assert!(error.contains(message), "expected `{message}` in `{error}`");
        assert!(list(root.path()).unwrap().is_empty());
    };
    check(&|manifest| manifest["format_version"] = 2.into(), "format version 1, got 2");
    check(&|manifest| manifest["format_version"] = "1".into(), "is not valid");
    check(&|manifest| manifest["extra"] = 2.into(), "unknown field `extra`");
    check(&|manifest| *manifest = "x".into(), "is not valid");
    check(&|manifest| manifest["files"][0]["name"] = "../x".into(), "`../x` is not a plain name");
    check(&|manifest| manifest["files"][0]["name"] = "..".into(), "`..` is not a plain name");
    check(&|manifest| manifest["files"][0]["name"] = "x".into(), "in an unlisted file");
    check(&|manifest| manifest["files"][1] = manifest["files"][0].clone(), "listed twice");
    check(&|manifest| manifest["tensors"][1] = manifest["tensors"][0].clone(), "listed twice");
    check(&|manifest| manifest["tensors"][0]["begin"] = u64::MAX.into(), "end after file");
    check(&|manifest| manifest["tensors"][0]["bytes"] = 23.into(), "do not make [2, 3] F32");
    check(&|manifest| manifest["tensors"][0]["dtype"] = "F9".into(), "unknown variant `F9`");
    check(
        &|manifest| manifest["tensors"][0]["global_shape"] = vec![4, 3].into(),
        "tensor `a` (weights): parts have 6 of its 12 elements",
    );
    check(
        &|manifest| manifest["tensors"][0]["global_offset"] = vec![1, 0].into(),
        "tensor `a` (weights): a part [2, 3] at [1, 0] of [2, 3]",
    );
    // What only the bytes can tell.
    let root = tempfile::tempdir().unwrap();
    let path = save_step(root.path(), 1);
    edit_manifest(&path, |manifest| manifest["tensors"][0]["shape"] = vec![3, 2].into());
    edit_manifest(&path, |manifest| manifest["tensors"][0]["global_shape"] = vec![3, 2].into());
    let report = verify(&path).unwrap();
    assert!(report.to_string().contains("got tensor `a` as [2, 3] F32"), "{report}");
    // The folder's name and the manifest disagree.
    let root = tempfile::tempdir().unwrap();
    let path = save_step(root.path(), 1);
    fs::rename(&path, root.path().join("step-00000002")).unwrap();
    assert!(list(root.path()).unwrap().is_empty());
}

#[test]
fn tensors_that_cannot_be_saved() {
    let check = |tensors: Vec<TensorView<'_>>, message: &str| {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("checkpoints");
        let mut contents = CheckpointContents::new(1);
        contents.tensors = tensors;
        let error = save(&folder, &contents, &SaveOptions::default()).unwrap_err().to_string();
        assert!(error.starts_with(message), "expected `{message}`, got `{error}`");
        assert!(!folder.exists(), "refused before anything is written");
    };
    let view = |dtype, shape: &[usize], data| TensorView {
        name: "x",
        dtype,
        shape: shape.to_vec(),
        data,
        section: Section::Master,
    };
    let infinite = [1.0f32, f32::NEG_INFINITY];
    let good = [1.0f32];
    check(
        vec![
            TensorView::from_f32(Section::Weights, "fine", &[1], &good),
            TensorView::from_f32(Section::Master, "layers.0.wq", &[2], &infinite),
        ],
        "tensor `layers.0.wq` (master, F32): expected finite values, got -inf at element 1; \
         nothing was saved\nhint: ",
    );
    check(
        vec![TensorView::from_bf16_bits(Section::Weights, "x", &[1], &[0x7FC0])],
        "tensor `x` (weights, BF16): expected finite values, got NaN at element 0",
    );
    check(
        vec![view(CkptDtype::E4M3, &[2], &[0, 0xFF])],
        "tensor `x` (master, F8_E4M3): expected finite values, got NaN at element 1",
    );
    check(
        vec![view(CkptDtype::F32, &[2], &[0; 4])],
        "tensor `x` (master): expected 8 bytes for [2] F32, got 4",
    );
    check(
        vec![view(CkptDtype::U8, &[usize::MAX, 2], &[])],
        "tensor `x` (master): expected 36893488147419103230 bytes",
    );
    check(
        vec![view(CkptDtype::U8, &[0], &[]), view(CkptDtype::U8, &[0], &[])],
        "tensor `x` appears twice in section master",
    );
    let named = |name| TensorView { name, ..view(CkptDtype::U8, &[0], &[]) };
    check(vec![named("")], "tensor name `` cannot be stored");
    check(vec![named("__metadata__")], "tensor name `__metadata__` cannot be stored");
}

#[test]
fn options_that_make_no_sense() {
    let root = tempfile::tempdir().unwrap();
    let check = |options: SaveOptions, message: &str| {
        let error = save(root.path(), &CheckpointContents::new(1), &options).unwrap_err();
        assert_eq!(error.to_string(), message);
    };
    check(
        SaveOptions { keep_last: Some(0), ..SaveOptions::default() },
        "checkpoint option `keep_last`: expected at least 1, got 0",
    );
    check(
        SaveOptions { shard_bytes_max: 0, ..SaveOptions::default() },
        "checkpoint option `shard_bytes_max`: expected at least 1, got 0",
    );
}

#[test]
fn what_is_not_there() {
    let root = tempfile::tempdir().unwrap();
    assert!(list(&root.path().join("nowhere")).unwrap().is_empty());
    assert_eq!(latest(root.path()).unwrap(), None);
    let error = load(&root.path().join("nowhere")).unwrap_err().to_string();
    assert!(error.ends_with("is not a checkpoint: no such folder"), "{error}");
    assert!(!load(&root.path().join("nowhere")).unwrap_err().is_damage());
    assert!(!load(root.path()).unwrap_err().is_damage() && !is_checkpoint(root.path()));

    let path = save_step(root.path(), 3);
    let error = load(root.path()).unwrap_err().to_string();
    assert!(error.contains("hint: it holds checkpoints, such as"), "{error}");
    let file = root.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(matches!(list(&file), Err(CheckpointError::Io { .. })));
    let error = save(&file, &CheckpointContents::new(1), &SaveOptions::default()).unwrap_err();
    assert!(error.to_string().starts_with("cannot create `"), "{error}");

    let checkpoint = load(&path).unwrap();
    let check = |error: CheckpointError, message: &str| {
        let error = error.to_string();
        assert!(error.contains(message), "expected `{message}` in `{error}`");
    };
    let read = |section, name| checkpoint.read(section, name).unwrap_err();
    check(read(Section::Weights, "c"), "has no tensor `c` in section weights (the section has 2");
    check(read(Section::Master, "b"), "(the name is in weights)");
    check(read(Section::Scales, "c"), "(the section is empty)");
    let expect = |dtype, shape: &[usize]| {
        checkpoint.expect(Section::Weights, "a", dtype, shape).unwrap_err()
    };
    check(
        expect(CkptDtype::F32, &[3, 2]),
        "tensor `a` (weights): expected [3, 2] F32, got [2, 3] F32\nhint: ",
    );
    check(expect(CkptDtype::Bf16, &[2, 3]), "expected [2, 3] BF16, got [2, 3] F32");
    let error = checkpoint.read_into(Section::Weights, "a", &mut [0; 3]).unwrap_err();
    check(error, "expected a buffer of 24 bytes, got 3");
    let mut short = [0.0; 5];
    let error = checkpoint.read_f32_into(Section::Weights, "a", &[2, 3], &mut short).unwrap_err();
    check(error, "expected a buffer of 24 bytes, got 20");
}

#[test]
fn folders_that_are_not_ours_are_left_alone() {
    let root = tempfile::tempdir().unwrap();
    for name in ["step-1", "step-00000009", ".tmp-other", "notes"] {
        fs::create_dir(root.path().join(name)).unwrap();
    }
    // A writer that was killed.
    let stale = root.path().join(".tmp-step-00000002-4194305");
    fs::create_dir(&stale).unwrap();
    fs::write(stale.join("weights-00001.safetensors"), "half").unwrap();
    assert!(list(root.path()).unwrap().is_empty());
    save_step(root.path(), 3);
    let steps: Vec<_> = list(root.path()).unwrap().iter().map(|entry| entry.step).collect();
    assert_eq!(steps, [3]);
    assert!(!stale.exists());
    for name in ["step-1", "step-00000009", ".tmp-other", "notes"] {
        assert!(root.path().join(name).is_dir(), "{name}");
    }
}
