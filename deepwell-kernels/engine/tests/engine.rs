//! An engine of an archive that PyTorch wrote, through the C interface.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::ptr;

use deepwell_engine::*;
use deepwell_ir::capture::Pt2Model;

const BATCH: usize = 2;

fn archive() -> String {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../deepwell-ir/tests/pt2/gpt2.pt2").to_string()
}

fn last_error() -> String {
    // SAFETY: the last call of this thread left a string.
    unsafe { CStr::from_ptr(dw_engine_last_error()) }.to_str().unwrap().to_string()
}

fn create(options: &str) -> Result<*mut DwEngine, String> {
    let options = CString::new(options).unwrap();
    let mut engine = ptr::null_mut();
    // SAFETY: a string, and memory for a pointer.
    match unsafe { dw_engine_create(options.as_ptr(), &mut engine) } {
        DwEngineStatus::Ok => Ok(engine),
        _ => Err(last_error()),
    }
}

fn gpt2(seq: usize) -> *mut DwEngine {
    create(&format!(
        r#"{{"archive": "{}", "device": "cpu", "precision": "f32", "seq": {seq},
            "batch": {BATCH}}}"#,
        archive()
    ))
    .unwrap()
}

fn read(engine: *mut DwEngine, name: &str, count: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; count];
    let name = CString::new(name).unwrap();
    // SAFETY: an engine, a string and as many numbers.
    let status =
        unsafe { dw_engine_read_tensor(engine, name.as_ptr(), values.as_mut_ptr(), count) };
    assert_eq!(status, DwEngineStatus::Ok, "{}", last_error());
    values
}

/// Loss of a step, or the error.
fn step(engine: *mut DwEngine, inputs: &[i32], targets: &[i32], rate: f64) -> Result<f32, String> {
    let mut result = DwStepResult::default();
    let (from, to) = (inputs.as_ptr(), targets.as_ptr());
    // SAFETY: an engine, and as many numbers.
    match unsafe { dw_engine_step(engine, from, to, inputs.len(), rate, 1.0, &mut result) } {
        DwEngineStatus::Ok => Ok(result.loss),
        _ => Err(last_error()),
    }
}

fn evaluate(engine: *mut DwEngine, inputs: &[i32], targets: &[i32]) -> f32 {
    let mut loss = f32::NAN;
    let (from, to) = (inputs.as_ptr(), targets.as_ptr());
    // SAFETY: an engine, and as many numbers.
    let status = unsafe { dw_engine_evaluate(engine, from, to, inputs.len(), &mut loss) };
    assert_eq!(status, DwEngineStatus::Ok, "{}", last_error());
    loss
}

#[test]
fn weights_go_in_train_and_come_back() {
    let mut model = Pt2Model::open(archive()).unwrap();
    let seq = model.exported_for.1;
    let engine = gpt2(seq);
    // SAFETY: an engine; the text lives as long as the engine.
    let described = unsafe { CStr::from_ptr(dw_engine_describe(engine)) }.to_str().unwrap();
    let described: serde_json::Value = serde_json::from_str(described).unwrap();
    assert_eq!(described["tokens_per_step"], BATCH * seq);
    // Three projections of attention are three parameters of the engine and one tensor of PyTorch.
    let name = "transformer.h.0.attn.c_attn.weight";
    let trained: Vec<&str> =
        described["tensors"].as_array().unwrap().iter().filter_map(|name| name.as_str()).collect();
    assert!(trained.contains(&name), "{trained:?}");
    for stored in model.stored() {
        if trained.contains(&stored.name.as_str()) {
            let expected = model.read_stored(&stored.name).unwrap();
            assert_eq!(read(engine, &stored.name, expected.len()), expected, "{}", stored.name);
        }
    }
    let before = model.read_stored(name).unwrap();
    let inputs: Vec<i32> = (0..(BATCH * seq) as i32).map(|at| at % 7).collect();
    let targets: Vec<i32> = inputs.iter().map(|id| (id + 1) % 7).collect();
    let untrained = evaluate(engine, &inputs, &targets);
    let losses: Vec<f32> =
        (0..10).map(|_| step(engine, &inputs, &targets, 1e-2).unwrap()).collect();
    assert!((untrained - losses[0]).abs() < 1e-5, "{untrained} {losses:?}");
    assert!(losses[9] < 0.5 * losses[0], "{losses:?}");
    let after = read(engine, name, before.len());
    // Each of the three was trained, in columns of the stored matrix.
    for third in 0..3 {
        assert_ne!(after[32 * third..][..32], before[32 * third..][..32], "projection {third}");
    }
    // The first weights again give the first loss again.
    for stored in model.stored() {
        if trained.contains(&stored.name.as_str()) {
            let values = model.read_stored(&stored.name).unwrap();
            let tensor = CString::new(stored.name.clone()).unwrap();
            let (from, count) = (values.as_ptr(), values.len());
            // SAFETY: an engine, a string and as many numbers.
            let status = unsafe { dw_engine_write_tensor(engine, tensor.as_ptr(), from, count) };
            assert_eq!(status, DwEngineStatus::Ok, "{}", last_error());
        }
    }
    assert_eq!(evaluate(engine, &inputs, &targets), untrained);
    // SAFETY: made above and not used after.
    unsafe { dw_engine_destroy(engine) };
}

#[test]
fn ignored_targets_do_not_count() {
    let seq = Pt2Model::open(archive()).unwrap().exported_for.1;
    let engine = gpt2(seq);
    let inputs = vec![3; BATCH * seq];
    let mut targets = vec![-100; BATCH * seq];
    targets[0] = 5;
    let first = step(engine, &inputs, &targets, 0.0).unwrap();
    targets[seq] = 5;
    let both = step(engine, &inputs, &targets, 0.0).unwrap();
    // Two equal sequences have one mean.
    assert!((first - both).abs() < 1e-5 && first > 0.0, "{first} {both}");
    assert!((evaluate(engine, &inputs, &targets) - both).abs() < 1e-5);
    // SAFETY: made above and not used after.
    unsafe { dw_engine_destroy(engine) };
}

#[test]
fn what_is_wrong_is_said() {
    let check = |result: Result<*mut DwEngine, String>, expected: &str| {
        let message = result.unwrap_err();
        assert!(message.contains(expected), "expected `{expected}`, got `{message}`");
    };
    check(create("{"), "`options`: EOF");
    check(create(r#"{"archives": ""}"#), "unknown field `archives`");
    let with = |archive: &str, device: &str| {
        create(&format!(
            r#"{{"archive": "{archive}", "device": "{device}", "precision": "f32", "seq": 8,
                "batch": {BATCH}}}"#
        ))
    };
    check(with(&archive(), "tpu"), "got `tpu`");
    check(with("gone.pt2", "cpu"), "got `gone.pt2`");
    let seq = Pt2Model::open(archive()).unwrap().exported_for.1;
    let engine = gpt2(seq);
    let ids = vec![1; BATCH * seq];
    let mut wrong = ids.clone();
    wrong[3] = 1_000_000;
    assert!(step(engine, &wrong, &ids, 0.0).unwrap_err().contains("got 1000000"));
    assert!(step(engine, &ids, &wrong, 0.0).unwrap_err().contains("got 1000000"));
    assert!(step(engine, &ids[1..], &ids[1..], 0.0).unwrap_err().contains("inputs and targets"));
    let mut value = [0f32; 1];
    let read = |name: &CStr, values: &mut [f32]| {
        // SAFETY: an engine, a string and one number.
        let status = unsafe {
            dw_engine_read_tensor(engine, name.as_ptr(), values.as_mut_ptr(), values.len())
        };
        assert_eq!(status, DwEngineStatus::InvalidArgument);
        last_error()
    };
    assert!(read(c"gone", &mut value).contains("got `gone`"));
    let name = c"transformer.h.0.attn.c_attn.weight";
    assert!(read(name, &mut value).contains("expected 3072 elements, got 1"));
    // SAFETY: made above and not used after; null is allowed.
    unsafe {
        dw_engine_destroy(engine);
        dw_engine_destroy(ptr::null_mut());
    }
}
