//! Planted times: the table and the selection follow them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use deepwell_ir::{DType, KernelCatalog, ops};
use deepwell_kernels::cuda::tuned::{LoadedTable, TunedCatalog, source_file};
use deepwell_kernels::cuda::{Blas, CudaBackend, FakeDriver, KernelImages};
use deepwell_plan::{OptimizerSpec, PlanRequest, autoplan};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::Hardware;

use super::*;
use deepwell_trainer::Device;
use deepwell_trainer::tuned::table_text;

const OURS: &str = "cuda_sm90_bf16_gemm";
const LIBRARY: &str = "cublaslt_linear";

/// Times by the name of a kernel, microseconds; the wide tiles of ours take less. What is not
/// named fails.
struct Planted {
    times: BTreeMap<&'static str, f64>,
    calls: usize,
}

impl TimeSource for Planted {
    fn times(
        &mut self,
        _: &SingleCall,
        choices: &[KernelChoice],
    ) -> Result<Vec<Result<Vec<f64>, String>>, String> {
        self.calls += 1;
        let of = |choice: &KernelChoice| match self.times.get(choice.kernel.as_str()) {
            Some(time) => {
                let narrower = choice.tile.map_or(0.0, |tile| 1.0 / tile.n as f64);
                Ok(vec![(time + narrower) * 1e-6; 5])
            }
            None => Err("planted".to_string()),
        };
        Ok(choices.iter().map(of).collect())
    }
}

fn planted(times: &[(&'static str, f64)]) -> Planted {
    Planted { times: times.iter().copied().collect(), calls: 0 }
}

fn linear(m: usize) -> SingleCall {
    let bf16 = |shape: [usize; 2]| (DType::Bf16, shape.to_vec());
    let op = ops::Linear { bias: false };
    SingleCall::new(op, &[bf16([m, 512]), bf16([512, 512])], &[bf16([m, 512])])
}

fn hardware() -> Hardware {
    Hardware::preset("h200-x2").unwrap()
}

fn target() -> Target {
    Device::Cuda(0).target(&hardware()).unwrap()
}

fn versions(hash: &str) -> KernelVersions {
    let files = ["bf16_gemm", "sm90_bf16_gemm", "mxfp8_gemm", "sm90_mxfp8_gemm"];
    assert!(files.contains(&source_file(OURS).unwrap()));
    let sources = files.map(|file| (file.to_string(), hash.to_string()));
    KernelVersions::new(Some(BTreeMap::from(sources)))
}

fn empty() -> TunedTable {
    let target = target();
    TunedTable::new(&target.arch, &target.gpu_name.unwrap(), target.workers)
}

struct Ran {
    found: Result<Vec<Tuned>, String>,
    saved: Vec<usize>,
    seen: Vec<(usize, usize)>,
}

fn run(
    calls: &[SingleCall],
    table: &mut TunedTable,
    source: &mut dyn TimeSource,
    versions: &KernelVersions,
    again: bool,
) -> Ran {
    let (mut saved, mut seen) = (Vec::new(), Vec::new());
    let mut save = |table: &TunedTable| {
        saved.push(table.rows.len());
        Ok(())
    };
    let mut progress = |done: usize, of: usize, _: &Tuned| seen.push((done, of));
    let mut tuning = Tuning {
        target: &target(),
        driver: "580".to_string(),
        versions,
        source,
        again,
        save: &mut save,
        progress: &mut progress,
    };
    let found = tune(calls, table, &mut tuning).map_err(|error| error.to_string());
    Ran { found, saved, seen }
}

fn selected(table: &TunedTable, call: &SingleCall) -> String {
    let loaded = LoadedTable::new("t", "0123", table.clone(), &versions("a")).unwrap();
    let catalog = TunedCatalog::new(Arc::from(vec![loaded]));
    call.select(&catalog, &target()).unwrap().choice.kernel
}

#[test]
fn the_table_and_the_selection_follow_the_times() {
    let call = linear(1024);
    let check = |times: &[(&'static str, f64)], expected: &str, behind: f64| {
        let mut table = empty();
        let ran = run(
            std::slice::from_ref(&call),
            &mut table,
            &mut planted(times),
            &versions("a"),
            false,
        );
        let found = ran.found.unwrap();
        assert_eq!(selected(&table, &call), expected, "{found:?}");
        let distance = table.heuristics_behind.unwrap().worst;
        assert!((distance - behind).abs() < 1e-3, "{distance}, expected {behind}");
        assert!((found[0].behind.unwrap() - distance).abs() < 1e-9);
        assert!(found[0].heuristics == LIBRARY && found[0].runner_up.is_some());
        table.rows[0].clone()
    };
    let row = check(&[(LIBRARY, 120.0), (OURS, 100.0)], OURS, 1.2);
    // The widest tile was said to take the least.
    assert_eq!(row.times[0].tile.map(|tile| tile.n), Some(256));
    // Both kernels, one with all its tiles, and none of what failed.
    assert_eq!(row.times.iter().filter(|time| time.kernel == LIBRARY).count(), 1);
    assert!(row.times.iter().filter(|time| time.kernel == OURS).count() >= 4);
    assert!(row.times.iter().all(|time| time.kernel != "cuda_bf16_gemm"));
    check(&[(LIBRARY, 100.0), (OURS, 120.0)], LIBRARY, 1.0);
    let text = table_text(&TunedTable { rows: vec![row.clone(), row.clone()], ..empty() });
    assert_eq!(text.lines().filter(|line| line.contains("\"times\"")).count(), 2, "{text}");
    let read: TunedTable = serde_json::from_str(&text).unwrap();
    assert_eq!(read.rows, [row.clone(), row]);
    // Less than is worth it.
    check(&[(LIBRARY, 100.3), (OURS, 100.0)], LIBRARY, 1.0);
}

#[test]
fn shapes_that_are_known_are_not_measured_again() {
    let calls = [linear(1024), linear(4096)];
    let mut table = empty();
    let times = [(LIBRARY, 120.0), (OURS, 100.0), ("cuda_bf16_gemm", 500.0)];
    let mut first = planted(&times);
    let ran = run(&calls[..1], &mut table, &mut first, &versions("a"), false);
    assert_eq!((ran.saved, ran.seen, first.calls), (vec![1], vec![(1, 1)], 1));
    let mut second = planted(&times);
    let ran = run(&calls, &mut table, &mut second, &versions("a"), false);
    assert_eq!((ran.saved, ran.seen, second.calls), (vec![2], vec![(1, 2), (2, 2)], 1));
    let known: Vec<bool> = ran.found.unwrap().iter().map(|tuned| tuned.known).collect();
    assert_eq!(known, [true, false]);
    let mut again = planted(&times);
    run(&calls, &mut table, &mut again, &versions("a"), true);
    // Other kernels: measured again, and the rows replaced.
    let mut other = planted(&times);
    run(&calls, &mut table, &mut other, &versions("b"), false);
    assert_eq!((again.calls, other.calls, table.rows.len()), (2, 2, 2));
    let ours = table.rows.iter().flat_map(|row| &row.times).filter(|time| time.kernel == OURS);
    assert!(ours.into_iter().all(|time| time.source == "b"));
}

#[test]
fn what_fails_is_said_and_left_out() {
    struct Broken;
    impl TimeSource for Broken {
        fn times(
            &mut self,
            _: &SingleCall,
            _: &[KernelChoice],
        ) -> Result<Vec<Result<Vec<f64>, String>>, String> {
            Err("no memory".to_string())
        }
    }
    let calls = [linear(1024)];
    let mut table = empty();
    let ran = run(&calls, &mut table, &mut Broken, &versions("a"), false);
    let found = ran.found.unwrap();
    assert_eq!((found[0].taken.as_deref(), ran.saved.len()), (None, 0));
    assert_eq!(found[0].failures, ["no memory"]);
    assert!(table.rows.is_empty());
    // The incumbent fails: the fastest of the others is taken.
    let mut source = planted(&[(OURS, 100.0)]);
    let found = run(&calls, &mut table, &mut source, &versions("a"), false).found.unwrap();
    assert_eq!(selected(&table, &calls[0]), OURS);
    assert!(found[0].failures.contains(&format!("{LIBRARY}: planted")), "{found:?}");
    // Kernels of which nobody knows the version.
    let unknown = KernelVersions::default();
    let ran = run(&calls, &mut table, &mut Broken, &unknown, true);
    assert!(ran.found.unwrap_err().contains("`cargo xtask kernels`"));
}

/// A plan says by which table, and the same table gives the same plan.
#[test]
fn plans_follow_the_table_and_name_it() {
    let hardware = hardware();
    let model = deepwell_ir::capture::ModelConfig::preset("parity-3m").unwrap();
    let graph = model.capture(Some(256)).unwrap();
    let request = PlanRequest {
        seq: 256,
        global_batch: 2,
        policy: PrecisionPolicy::bf16(),
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: None,
        micro_batch: None,
        recompute: None,
        saved_activations: Default::default(),
    };
    let plan = |catalog: &dyn KernelCatalog| {
        autoplan(&graph, &hardware, &request, catalog, &target()).unwrap()
    };
    let before = plan(&CudaCatalog);
    assert!(before.plan.tuned.is_empty() && before.plan.kernels.iter().all(|k| k.kernel != OURS));
    let mut table = empty();
    let of_linear = |call: &&deepwell_ir::Call| matches!(call.op, deepwell_ir::Op::Linear(_));
    let calls: Vec<SingleCall> = (before.program.calls.iter().filter(of_linear))
        .map(|call| SingleCall::of(&before.program, call))
        .collect();
    let mut source = planted(&[(LIBRARY, 120.0), (OURS, 100.0)]);
    run(&calls, &mut table, &mut source, &versions("a"), false).found.unwrap();
    let tuned = || {
        let loaded = LoadedTable::new("t.json", "0123", table.clone(), &versions("a")).unwrap();
        plan(&TunedCatalog::new(Arc::from(vec![loaded])))
    };
    let after = tuned();
    assert_eq!(after.plan.tuned.len(), 1);
    let named = &after.plan.tuned[0];
    assert!(named.contains("t.json (NVIDIA H200") && named.contains("0123"), "{named}");
    assert!(after.plan.to_string().contains(&format!("  tuned         by {named}\n")));
    for call in after.program.calls.iter().filter(of_linear) {
        assert_eq!(call.choice.kernel, OURS, "{}", call.name);
        let reason = call.rejected.iter().find(|other| other.kernel == LIBRARY).unwrap();
        assert!(reason.reason.starts_with("tuned: 120.0000 us against 100.00"), "{reason}");
    }
    assert_eq!(tuned().program, after.program);
}

/// On a driver that computes nothing: every kernel of a model is prepared in one arena, recorded
/// and replayed in turns.
#[test]
fn kernels_take_turns_on_a_device() {
    let hardware = hardware();
    let device = Device::Cuda(0);
    let driver = FakeDriver::h200();
    let blas: Box<dyn Blas> = Box::new(driver.blas());
    let backend = CudaBackend::new(Box::new(driver), Some(blas), KernelImages::empty()).unwrap();
    let mut open =
        OpenDevice { backend: Box::new(backend), catalog: device.catalog(), target: target() };
    let settings = TuneSettings {
        device,
        models: vec!["parity-3m".to_string()],
        precisions: vec!["bf16".to_string(), "mxfp8-128".to_string()],
        batch_size: 2,
        seq_len: 256,
        shapes: Vec::new(),
    };
    let calls = calls_of(&settings, &hardware, &target()).unwrap();
    let mut source = OnDevice::new(&mut open, &hardware, 3);
    source.0.warm_up = Duration::ZERO;
    for call in calls.iter().step_by(3) {
        let choices = CudaCatalog.choices(&call.request(), &target());
        let times = source.times(call, &choices).unwrap();
        assert_eq!(times.len(), choices.len());
        for (times, choice) in times.iter().zip(&choices) {
            let times = times.as_ref().unwrap_or_else(|error| panic!("{choice:?}: {error}"));
            assert!(times.len() == 3 && times.iter().all(|&time| time > 0.0), "{times:?}");
        }
    }
}
