//! The files of an export, as MLflow reads them.

use std::collections::BTreeMap;

use super::*;
use crate::facts::Facts;

fn run(name: &str, id: &str, folder: &Path) -> Run {
    let curves = [
        (Metric::Loss, vec![(1.0, 2.5), (2.0, f64::NAN), (3.0, 1e-7)]),
        (Metric::ValLoss, vec![(3.0, f64::INFINITY)]),
    ];
    Run {
        name: name.to_owned(),
        folder: folder.to_path_buf(),
        state: RunState::Finished,
        facts: Facts {
            id: Some(id.to_owned()),
            version: Some("0.1.0".to_owned()),
            ..Facts::default()
        },
        settings: BTreeMap::from(
            [("steps", "3"), ("guards/x", "a\nb"), ("long", &"x".repeat(7000))]
                .map(|(key, value)| (key.to_owned(), value.to_owned())),
        ),
        curves: BTreeMap::from(curves),
        times: vec![(1.0, 0.5), (2.0, 1.0), (3.0, 2.25)],
        has_clock: true,
        start_unix_s: Some(1_000.0),
        end_unix_s: Some(1_003.0),
        ..Run::default()
    }
}

const ID: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn files_are_those_of_the_file_store() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("a run");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("summary.json"), "{}").unwrap();
    let store = root.path().join("ml runs");
    let exported = export(&[run("it's a", ID, &folder)], &store, "rates: all").unwrap();
    let [one] = &exported[..] else { panic!("{exported:?}") };
    assert_eq!((one.metrics, one.points, one.params), (2, 4, 3));
    let read = |name: &str| fs::read_to_string(one.folder.join(name)).unwrap();
    assert_eq!(read("metrics/train/loss"), "1000500 2.5 1\n1001000 NaN 2\n1002250 0.0000001 3\n");
    assert_eq!(read("metrics/val/loss"), "1002250 inf 3\n");
    assert_eq!(read("params/steps"), "3");
    assert_eq!(read("params/guards_x"), "a b", "one line, and no folder");
    assert_eq!(read("params/long").len(), PARAM_MAX);
    assert_eq!(read("tags/mlflow.runName"), "it's a");
    assert_eq!(read("artifacts/summary.json"), "{}");
    let meta = read("meta.yaml");
    for line in [
        "run_id: 0123456789abcdef0123456789abcdef",
        "run_name: 'it''s a'",
        "status: 3",
        "start_time: 1000000",
        "end_time: 1003000",
        "lifecycle_stage: active",
    ] {
        assert!(meta.lines().any(|own| own == line), "{line} in\n{meta}");
    }
    assert!(meta.contains("/ml%20runs/"), "{meta}");
    let experiment = one.folder.parent().unwrap();
    let meta = fs::read_to_string(experiment.join("meta.yaml")).unwrap();
    assert!(meta.contains("name: 'rates: all'\n"), "{meta}");
    let name = experiment.file_name().unwrap().to_str().unwrap();
    assert!(name.len() == 18 && name.bytes().all(|byte| byte.is_ascii_digit()), "{name}");
    let left: Vec<String> = fs::read_dir(experiment)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with('.'))
        .collect();
    assert_eq!(left, Vec::<String>::new(), "nothing is left beside the run");
}

#[test]
fn an_experiment_is_found_by_its_name_and_a_run_is_exported_once() {
    let root = tempfile::tempdir().unwrap();
    let store = root.path().join("mlruns");
    // MLflow's own store has the experiment 0, and a folder that is no experiment.
    fs::create_dir_all(store.join("0")).unwrap();
    fs::create_dir_all(store.join("models")).unwrap();
    fs::write(store.join("0/meta.yaml"), "experiment_id: '0'\nname: Default\n").unwrap();
    let first = run("a", ID, root.path());
    let second = run("b", "ffffffffffffffffffffffffffffffff", root.path());
    let folder_of = |run: &Run, experiment: &str| {
        let exported = export(std::slice::from_ref(run), &store, experiment).unwrap();
        exported[0].folder.parent().unwrap().to_path_buf()
    };
    assert!(folder_of(&first, "Default").ends_with("0"));
    let rates = folder_of(&first, "rates");
    assert_eq!(folder_of(&second, "rates"), rates);
    // One of two is there: neither is written.
    let third = run("c", "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee", root.path());
    let error = export(&[third, first], &store, "rates").unwrap_err().to_string();
    assert!(error.contains("is there already") && error.contains("hint: "), "{error}");
    assert!(!rates.join("eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee").exists());
    fs::write(store.join("0/meta.yaml"), "nothing: 1\n").unwrap();
    let error = export(&[second], &store, "other").unwrap_err().to_string();
    assert!(error.contains("expected an experiment of MLflow's file store"), "{error}");
}

#[test]
fn a_run_without_a_record_has_an_id_of_its_folder() {
    let folder = Path::new("/runs/a");
    let mut own = run("a", "no id", folder);
    let id = run_id(&own);
    assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
    own.folder = PathBuf::from("/runs/b");
    assert_ne!(run_id(&own), id);
}
