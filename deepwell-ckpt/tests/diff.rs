//! What `diff` says of two checkpoints.

use std::fs;
use std::path::{Path, PathBuf};

use deepwell_ckpt::{
    CheckpointContents, CheckpointDiff, CheckpointError, CkptDtype, SaveOptions, Section,
    TensorView, diff, save,
};
use serde_json::{Value, json};

/// Saves a checkpoint in a folder of its own.
fn checkpoint(root: &Path, step: u64, tensors: &[TensorView<'_>], run: Value) -> PathBuf {
    let mut contents = CheckpointContents::new(step);
    contents.tensors = tensors.to_vec();
    contents.run = run;
    save(root, &contents, &SaveOptions::default()).unwrap().path
}

fn head(values: &[f32]) -> TensorView<'_> {
    TensorView::from_f32(Section::Master, "head", &[values.len()], values)
}

fn compare(a: &[TensorView<'_>], b: &[TensorView<'_>]) -> CheckpointDiff {
    let roots = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let a = checkpoint(roots[0].path(), 3, a, Value::Null);
    let b = checkpoint(roots[1].path(), 3, b, Value::Null);
    diff(&a, &b).unwrap()
}

#[test]
fn values_that_differ() {
    let check = |a: &[f32], b: &[f32], expected: Option<(u64, f64, u64, Option<f64>)>| {
        let found = compare(&[head(a)], &[head(b)]);
        let got = found.differing.first().map(|tensor| {
            assert_eq!(tensor.elements, a.len() as u64);
            (tensor.differing, tensor.max_abs, tensor.max_abs_at, tensor.relative)
        });
        assert_eq!(got, expected, "{a:?} {b:?}");
        assert_eq!(found.is_equal(), expected.is_none());
        assert_eq!(found.equal, usize::from(expected.is_none()));
    };
    check(&[1.0, 2.0], &[1.0, 2.0], None);
    check(&[], &[], None);
    check(&[3.0, 4.0], &[3.0, 4.5], Some((1, 0.5, 1, Some(0.1))));
    check(&[3.0, 4.0], &[6.0, 8.0], Some((2, 4.0, 1, Some(1.0))));
    check(&[0.0, 0.0], &[0.0, 1.0], Some((1, 1.0, 1, None)));
    // Two zeros of other bits: they differ, by nothing.
    check(&[0.0, 1.0], &[-0.0, 1.0], Some((1, 0.0, 0, Some(0.0))));
    // Across pieces of 1 MiB: the last element of many, and one in the first piece.
    let long: Vec<f32> = vec![1.0; 600_000];
    let mut other = long.clone();
    (other[5], other[599_999]) = (1.5, 3.0);
    let relative = ((0.25f64 + 4.0) / 600_000.0).sqrt();
    check(&long, &other, Some((2, 2.0, 599_999, Some(relative))));
}

#[test]
fn tensors_that_only_one_has() {
    let (one, two) = ([1.0f32], [1.0f32, 2.0]);
    let moment = TensorView::from_f32(Section::MomentFirst, "head", &[1], &one);
    let bits = TensorView::from_bf16_bits(Section::Weights, "head", &[1], &[0x3F80]);
    let found = compare(&[head(&one), moment], &[head(&two), bits]);
    assert!(!found.has_equal_tensors());
    assert_eq!(found.missing.len(), 1);
    assert_eq!(
        (found.missing[0].section, &found.missing[0].shape),
        (Section::MomentFirst, &vec![1])
    );
    assert_eq!((found.added[0].section, found.added[0].dtype), (Section::Weights, CkptDtype::Bf16));
    assert_eq!(found.changed[0].shapes, [vec![1], vec![2]]);
    assert!(found.differing.is_empty());
}

#[test]
fn settings_and_steps_that_differ() {
    let roots = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let values = [1.0f32];
    let tensors = [head(&values)];
    let a = checkpoint(roots[0].path(), 3, &tensors, json!({ "settings": { "seed": 1 } }));
    let b = checkpoint(roots[1].path(), 4, &tensors, json!({ "settings": { "seed": 2 } }));
    let found = diff(&a, &b).unwrap();
    assert!(found.has_equal_tensors() && !found.is_equal());
    assert_eq!((found.steps, found.equal), ([3, 4], 1));
    let texts: Vec<String> = found.sections.iter().map(ToString::to_string).collect();
    assert_eq!(texts, ["run.settings.seed: 1 / 2"]);
    assert!(diff(&a, &a).unwrap().is_equal());
}

/// A tensor that has to be read is checked; one that is equal by its checksum is not read.
#[test]
fn damage_is_an_error_where_it_is_read() {
    let root = tempfile::tempdir().unwrap();
    let a = checkpoint(root.path(), 1, &[head(&[1.0, 2.0])], Value::Null);
    let b = checkpoint(root.path(), 2, &[head(&[1.0, 3.0])], Value::Null);
    let shard = b.join("master-00001.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, &bytes).unwrap();
    assert!(matches!(diff(&a, &b), Err(CheckpointError::TensorChecksum { .. })));
    assert!(matches!(
        diff(&a, &root.path().join("none")),
        Err(CheckpointError::NotACheckpoint { .. })
    ));
}
