//! What is saved comes back, byte for byte, and the shards are ordinary safetensors files.

use std::fs;

use deepwell_ckpt::{
    CheckpointContents, CkptDtype, SaveOptions, Section, TensorView, inspect, latest, load, save,
    verify,
};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// A tensor that owns its bytes.
#[derive(Debug, Clone)]
struct Owned {
    name: String,
    section: Section,
    dtype: CkptDtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl Owned {
    fn view(&self) -> TensorView<'_> {
        TensorView {
            name: &self.name,
            dtype: self.dtype,
            shape: self.shape.clone(),
            data: &self.data,
            section: self.section,
        }
    }
}

/// Any bytes, with the top of each exponent cleared so that no floating type has a NaN.
fn finite_bytes(dtype: CkptDtype, mut bytes: Vec<u8>) -> Vec<u8> {
    let width = dtype.element_bytes();
    match dtype {
        CkptDtype::F64 | CkptDtype::F32 | CkptDtype::F16 | CkptDtype::Bf16 => {
            // The second-highest bit of a little-endian element is the top bit of its exponent.
            bytes.iter_mut().skip(width - 1).step_by(width).for_each(|byte| *byte &= 0xBF);
        }
        CkptDtype::E4M3 | CkptDtype::E5M2 | CkptDtype::E8M0 => {
            bytes.iter_mut().for_each(|byte| *byte &= 0xBF);
        }
        _ => {}
    }
    bytes
}

fn tensors() -> impl Strategy<Value = Vec<Owned>> {
    let shape = prop::collection::vec(0usize..6, 0..4);
    let dtype = prop::sample::select(&CkptDtype::ALL[..]);
    let section = prop::sample::select(&Section::ALL[..]);
    let tensor = (dtype, shape, section).prop_flat_map(|(dtype, shape, section)| {
        let bytes = shape.iter().product::<usize>() * dtype.element_bytes();
        prop::collection::vec(any::<u8>(), bytes).prop_map(move |bytes| Owned {
            name: String::new(),
            section,
            dtype,
            shape: shape.clone(),
            data: finite_bytes(dtype, bytes),
        })
    });
    let names = prop::collection::btree_set("[a-z.\"\\\\é/ ]{1,12}", 0..12);
    (names, prop::collection::vec(tensor, 12)).prop_map(|(names, tensors)| {
        let named = names.into_iter().zip(tensors);
        named.map(|(name, tensor)| Owned { name, ..tensor }).collect()
    })
}

proptest! {
    // Each case waits for the disk a dozen times.
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn tensors_round_trip(tensors in tensors(), shard_bytes_max in 1u64..500) {
        let root = tempfile::tempdir().unwrap();
        let mut contents = CheckpointContents::new(7);
        contents.tensors = tensors.iter().map(Owned::view).collect();
        let options = SaveOptions { shard_bytes_max, ..SaveOptions::default() };
        let saved = save(root.path(), &contents, &options).unwrap();
        prop_assert_eq!(&saved.warnings, &Vec::<String>::new());
        let on_disk: u64 = fs::read_dir(&saved.path)
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len())
            .sum();
        prop_assert_eq!(saved.bytes, on_disk);

        let checkpoint = load(&saved.path).unwrap();
        prop_assert_eq!(checkpoint.tensors().len(), tensors.len());
        for tensor in &tensors {
            checkpoint
                .expect(tensor.section, &tensor.name, tensor.dtype, &tensor.shape)
                .unwrap();
            let bytes = checkpoint.read(tensor.section, &tensor.name).unwrap();
            prop_assert_eq!(&bytes, &tensor.data);
        }
        let report = verify(&saved.path).unwrap();
        prop_assert!(report.is_sound(), "{}", report);
        prop_assert_eq!(report.tensors, tensors.len());

        // An independent reader sees the same, aligned.
        let mut seen = 0;
        for file in checkpoint.files() {
            let bytes = fs::read(saved.path.join(&file.name)).unwrap();
            let shard = SafeTensors::deserialize(&bytes).unwrap();
            let payload: usize = shard.iter().map(|(_, view)| view.data().len()).sum();
            prop_assert!(payload as u64 <= shard_bytes_max || shard.len() == 1
                || shard.iter().filter(|(_, view)| !view.data().is_empty()).count() == 1);
            for (name, view) in shard.iter() {
                let prefix = file.name.split('-').next().unwrap();
                let tensor = tensors
                    .iter()
                    .find(|tensor| tensor.name == name && tensor.section.name() == prefix)
                    .unwrap();
                prop_assert_eq!(view.data(), &tensor.data[..]);
                let offset = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
                prop_assert_eq!(offset % tensor.dtype.element_bytes(), 0);
                seen += 1;
            }
        }
        prop_assert_eq!(seen, tensors.len());
    }

    #[test]
    fn json_numbers_round_trip_to_the_last_bit(
        doubles in prop::collection::vec(
            any::<u64>().prop_map(f64::from_bits).prop_filter("JSON", |value| value.is_finite()),
            1..50,
        ),
        integers in prop::collection::vec(any::<u64>(), 1..10),
    ) {
        let root = tempfile::tempdir().unwrap();
        let mut contents = CheckpointContents::new(1);
        contents.guards = json!(doubles);
        contents.rng = json!(integers);
        let saved = save(root.path(), &contents, &SaveOptions::default()).unwrap();
        let checkpoint = load(&saved.path).unwrap();
        let back: Vec<f64> = serde_json::from_value(checkpoint.guards().clone()).unwrap();
        let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&back), bits(&doubles));
        let back: Vec<u64> = serde_json::from_value(checkpoint.rng().clone()).unwrap();
        prop_assert_eq!(back, integers);
    }
}

#[test]
fn json_sections_come_back_each_in_its_place() {
    let root = tempfile::tempdir().unwrap();
    let contents = CheckpointContents {
        step: 120,
        tensors: Vec::new(),
        plan: json!({ "stages": [1, 2] }),
        policy: json!("default = \"mxfp8\"\n"),
        guards: json!({ "fallbacks": [] }),
        rng: json!([1, u64::MAX]),
        data_position: json!({ "batch": 120 }),
        run: Value::Null,
    };
    let saved = save(root.path(), &contents, &SaveOptions::default()).unwrap();
    assert_eq!(saved.path, root.path().join("step-00000120"));
    let checkpoint = load(&latest(root.path()).unwrap().unwrap().path).unwrap();
    assert_eq!(checkpoint.step(), 120);
    assert_eq!(*checkpoint.plan(), contents.plan);
    assert_eq!(*checkpoint.policy(), contents.policy);
    assert_eq!(*checkpoint.guards(), contents.guards);
    assert_eq!(*checkpoint.rng(), contents.rng);
    assert_eq!(*checkpoint.data_position(), contents.data_position);
    assert_eq!(*checkpoint.run(), contents.run);
}

#[test]
fn the_same_contents_give_the_same_bytes() {
    let values = [1.0f32, 2.0];
    let files = || {
        let root = tempfile::tempdir().unwrap();
        let mut contents = CheckpointContents::new(3);
        contents.run = json!({ "b": 1, "a": 2 });
        contents.tensors = ["x", "y", "z"]
            .map(|name| TensorView::from_f32(Section::Weights, name, &[2], &values))
            .to_vec();
        let saved = save(root.path(), &contents, &SaveOptions::default()).unwrap();
        let mut files: Vec<_> = fs::read_dir(saved.path)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| (path.file_name().unwrap().to_owned(), fs::read(path).unwrap()))
            .collect();
        files.sort();
        files
    };
    assert_eq!(files(), files());
}

#[test]
fn saving_a_step_again_replaces_it() {
    let root = tempfile::tempdir().unwrap();
    for value in [1.0f32, 2.0] {
        let values = [value];
        let mut contents = CheckpointContents::new(5);
        contents.tensors = vec![TensorView::from_f32(Section::Weights, "x", &[], &values)];
        let saved = save(root.path(), &contents, &SaveOptions::default()).unwrap();
        let mut read = [0.0];
        let checkpoint = load(&saved.path).unwrap();
        checkpoint.read_f32_into(Section::Weights, "x", &[], &mut read).unwrap();
        assert_eq!(read, values);
    }
    assert_eq!(deepwell_ckpt::list(root.path()).unwrap().len(), 1);
    let mut names: Vec<_> = fs::read_dir(root.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, [".lock", "step-00000005"]);
}

#[test]
fn inspection_counts_and_prints() {
    let root = tempfile::tempdir().unwrap();
    let values = vec![1.0f32; 12];
    let bits = vec![0x3F80u16; 12];
    let mut contents = CheckpointContents::new(9);
    contents.tensors = vec![
        TensorView::from_bf16_bits(Section::Weights, "w", &[3, 4], &bits),
        TensorView::from_f32(Section::Weights, "norm", &[2], &values[..2]),
        TensorView::from_f32(Section::Master, "w", &[3, 4], &values),
    ];
    contents.rng = json!([42]);
    let saved = save(root.path(), &contents, &SaveOptions::default()).unwrap();
    let inspection = inspect(&saved.path).unwrap();
    assert_eq!(inspection.tensor_bytes, 24 + 8 + 48);
    assert_eq!(inspection.sections.len(), 2);
    let weights = &inspection.sections[0];
    assert_eq!((weights.tensors, weights.elements, weights.bytes), (2, 14, 32));
    assert_eq!(weights.dtypes, [CkptDtype::F32, CkptDtype::Bf16]);
    let text = inspection.to_string();
    for line in [
        "step        9",
        "weights               2               14               32      1  F32 BF16",
        "master                1               12               48      1  F32",
        "total                 3               26               80      2",
        "rng            [42]",
    ] {
        assert!(text.lines().any(|printed| printed == line), "no line `{line}` in\n{text}");
    }
    let all = format!("{inspection:#}");
    assert!(all.contains("weights        BF16     [3, 4]               w\n"), "{all}");
    let json = serde_json::to_value(&inspection).unwrap();
    assert_eq!(json["sections"][1]["section"], "master");
}
