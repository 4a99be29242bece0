//! Planted times: the selection follows the table, and nothing but the table.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use deepwell_ir::ops::{Linear, LinearDgrad};
use deepwell_ir::{DType, KernelCatalog, Op, OperandType, Selection, Target, Tile};

use super::*;
use crate::SingleCall;
use crate::cuda::{Architecture, COLLECTIVES, CUBLASLT, CudaCatalog, cuda_kernels, cuda_target};

const H200: &str = "NVIDIA H200";

fn target(gpu: &str) -> Target {
    let target = cuda_target(Architecture::Sm90a, 132, &[CUBLASLT]);
    Target { gpu_name: Some(gpu.to_string()), ..target }
}

fn linear(m: usize, n: usize, k: usize) -> SingleCall {
    let bf16 = |shape: [usize; 2]| (DType::Bf16, shape.to_vec());
    let op = Linear { bias: false };
    SingleCall::new(op, &[bf16([m, k]), bf16([n, k])], &[bf16([m, n])])
}

fn versions(hash: &str) -> KernelVersions {
    let file = |file: &str| (file.to_string(), hash.to_string());
    KernelVersions::new(Some(BTreeMap::from([file("sm90_bf16_gemm"), file("bf16_gemm")])))
}

const OURS: &str = "cuda_sm90_bf16_gemm";
const LIBRARY: &str = "cublaslt_linear";

fn time(kernel: &str, tile: Option<Tile>, microseconds: f64) -> TunedTime {
    let source = versions("a").of(kernel).unwrap();
    let time_s = microseconds * 1e-6;
    TunedTime { kernel: kernel.to_string(), tile, time_s, spread: 0.01, source }
}

fn wide() -> Option<Tile> {
    Some(Tile { cluster: [2, 1], ..Tile::new(128, 256, 64) })
}

fn row(call: &SingleCall, times: Vec<TunedTime>) -> TunedRow {
    let operand = |of: &OperandType| (of.dtype, of.shape.clone());
    TunedRow {
        op: call.op.clone(),
        operands: call.operands.iter().map(operand).collect(),
        inputs: call.input_count,
        measured: "2026-01-02T03:04:05Z".to_string(),
        driver: "580".to_string(),
        times,
    }
}

fn table(rows: Vec<TunedRow>) -> TunedTable {
    TunedTable { rows, ..TunedTable::new("hopper-sm90", H200, 132) }
}

fn loaded(name: &str, table: TunedTable) -> LoadedTable {
    LoadedTable::new(name, "0123", table, &versions("a")).unwrap()
}

fn catalog(tables: Vec<LoadedTable>) -> TunedCatalog {
    TunedCatalog::new(Arc::from(tables))
}

fn taken(catalog: &TunedCatalog, call: &SingleCall, target: &Target) -> (String, Option<Tile>) {
    let Selection { choice, .. } = call.select(catalog, target).unwrap();
    // What a benchmark would time first.
    assert_eq!(catalog.choices(&call.request(), target)[0], choice);
    (choice.kernel, choice.tile)
}

#[test]
fn the_nearest_row_decides_and_far_ones_do_not() {
    let heuristics = linear(1024, 1024, 1024).select(&CudaCatalog, &target(H200)).unwrap();
    assert_eq!(heuristics.choice.kernel, LIBRARY);
    let tuned = catalog(vec![loaded(
        "t",
        table(vec![
            row(
                &linear(1000, 1000, 1000),
                vec![time(OURS, wide(), 90.0), time(LIBRARY, None, 99.0)],
            ),
            row(
                &linear(1200, 1000, 1000),
                vec![time(LIBRARY, None, 90.0), time(OURS, wide(), 99.0)],
            ),
        ]),
    )]);
    let ours = || (OURS.to_string(), wide());
    let library = || (LIBRARY.to_string(), None);
    for (call, gpu, expected) in [
        (linear(1000, 1000, 1000), H200, ours()),
        (linear(1096, 1000, 1000), H200, library()),
        (linear(1090, 1000, 1000), H200, ours()),
        (linear(800, 1250, 1000), H200, ours()),
        // Further than a quarter, and the heuristics' own.
        (linear(792, 1000, 1000), H200, library()),
        (linear(1000, 1000, 1256), H200, library()),
        // Another GPU of the same architecture.
        (linear(1000, 1000, 1000), "NVIDIA H100 80GB HBM3", library()),
    ] {
        assert_eq!(taken(&tuned, &call, &target(gpu)), expected, "{:?} {gpu}", call.operands);
    }
    // Without a name, as an emulated GPU has none; and with other SMs.
    let unnamed = Target { gpu_name: None, ..target(H200) };
    let fewer = Target { workers: 66, ..target(H200) };
    for target in [unnamed, fewer] {
        assert_eq!(taken(&tuned, &linear(1000, 1000, 1000), &target), library());
        assert!(tuned.tables(&target).is_empty());
    }
    // Another op of the same sizes.
    let bf16 = |shape: [usize; 2]| (DType::Bf16, shape.to_vec());
    let operands = [bf16([1000, 1000]), bf16([1000, 1000])];
    let dgrad = SingleCall::new(LinearDgrad {}, &operands, &[bf16([1000, 1000])]);
    assert_eq!(taken(&tuned, &dgrad, &target(H200)), library());
    assert_eq!(tuned.tables(&target(H200)).len(), 1);
}

#[test]
fn equally_near_rows_go_by_the_first_table() {
    let of = |kernel: &str, tile| {
        let others = vec![time(kernel, tile, 90.0)];
        loaded(kernel, table(vec![row(&linear(512, 512, 512), others)]))
    };
    let tables = [of(OURS, wide()), of(LIBRARY, None)];
    let call = linear(512, 512, 512);
    let [first, second] = tables.clone();
    assert_eq!(taken(&catalog(vec![first, second]), &call, &target(H200)).0, OURS);
    let [second, first] = tables;
    assert_eq!(taken(&catalog(vec![first, second]), &call, &target(H200)).0, LIBRARY);
}

#[test]
fn what_a_near_shape_refuses_gives_way_to_the_next() {
    // Rows of 1001 elements are not aligned as copies by tensor maps want them.
    let call = linear(1000, 1000, 1001);
    let refused = call.select(&CudaCatalog, &target(H200)).unwrap().rejected;
    assert!(refused.iter().any(|of| of.kernel == OURS && !of.reason.contains("predicted")));
    let measured = linear(1000, 1000, 1000);
    let unknown = Some(Tile::new(1, 1, 1));
    let next = vec![
        time(OURS, wide(), 1.0),
        time("gone", None, 2.0),
        time("cuda_bf16_gemm", None, 3.0),
        time(LIBRARY, None, 4.0),
    ];
    let tuned = catalog(vec![loaded("t", table(vec![row(&measured, next)]))]);
    assert_eq!(taken(&tuned, &call, &target(H200)).0, "cuda_bf16_gemm");
    // A tile that there is no more, and nothing else: the heuristics.
    let tuned = vec![loaded("t", table(vec![row(&measured, vec![time(OURS, unknown, 1.0)])]))];
    assert_eq!(taken(&catalog(tuned), &measured, &target(H200)).0, LIBRARY);
}

#[test]
fn reasons_say_by_how_much() {
    let call = linear(1000, 1000, 1000);
    let times = vec![time(OURS, wide(), 100.0), time(LIBRARY, None, 107.0)];
    let tuned = catalog(vec![loaded("t.json", table(vec![row(&call, times)]))]);
    let Selection { rejected, .. } = call.select(&tuned, &target(H200)).unwrap();
    let reason = |kernel: &str| {
        let of_kernel = rejected.iter().find(|of| of.kernel == kernel);
        of_kernel.map(|of| of.reason.clone()).unwrap_or_default()
    };
    let place = "(1000,1000,1000 in t.json)";
    let expected = format!("tuned: 107.0000 us against 100.0000 us, +7.0 % {place}");
    assert_eq!(reason(LIBRARY), expected);
    assert_eq!(reason(&format!("{OURS} with 256x128")), format!("tuned: not measured {place}"));
    assert_eq!(reason("cuda_bf16_gemm"), format!("tuned: not measured {place}"));
    assert_eq!(
        reason("cuda_sm100_bf16_gemm"),
        "runs on blackwell-sm100, blackwell-sm103, not on hopper-sm90"
    );
}

#[test]
fn rows_of_other_versions_are_not_used_and_said() {
    let call = linear(1000, 1000, 1000);
    let rows = vec![
        row(&call, vec![time(OURS, wide(), 1.0), time(LIBRARY, None, 2.0)]),
        row(&linear(4096, 4096, 4096), vec![time(LIBRARY, None, 2.0)]),
    ];
    let check = |versions: &KernelVersions, kernel: &str, warning: &[&str]| {
        let loaded = LoadedTable::new("t", "0123", table(rows.clone()), versions).unwrap();
        let said = loaded.warning().unwrap_or_default();
        assert_eq!(warning.is_empty(), said.is_empty(), "{said}");
        assert!(warning.iter().all(|part| said.contains(part)), "{said}");
        assert_eq!(taken(&catalog(vec![loaded]), &call, &target(H200)).0, kernel);
    };
    check(&versions("a"), OURS, &[]);
    // On a machine that has no compiled kernels, and plans.
    check(&KernelVersions::default(), OURS, &[]);
    check(&versions("b"), LIBRARY, &["1 of 2 rows", OURS, "`deepwell tune`"]);
    check(&KernelVersions::new(Some(BTreeMap::new())), LIBRARY, &["1 of 2 rows"]);
    // A table of which nothing is used is not named by plans.
    let none = LoadedTable::new("t", "", table(rows[..1].to_vec()), &versions("b")).unwrap();
    assert!(none.warning().is_some() && catalog(vec![none]).tables(&target(H200)).is_empty());
    let mut of_library = rows.clone();
    of_library[1].times[0].source = "deepwell-kernels 0.0.1".to_string();
    let loaded = LoadedTable::new("t", "", table(of_library), &versions("a")).unwrap();
    assert!(loaded.warning().is_some_and(|said| said.contains(LIBRARY)));
}

#[test]
fn tables_of_another_form_are_refused() {
    let check = |change: fn(&mut TunedTable), expected: &str| {
        let call = linear(8, 8, 8);
        let mut table = table(vec![row(&call, vec![time(LIBRARY, None, 1.0)])]);
        change(&mut table);
        let error = LoadedTable::new("t", "", table, &versions("a")).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("`deepwell tune`"), "{error}");
    };
    check(|table| table.version = 2, "of version 2");
    check(|table| table.format = "x".to_string(), "got `x`");
    check(|table| table.rows[0].times.clear(), "got 3 and 0");
    check(|table| table.rows[0].operands.clear(), "got 0 and 1");
}

#[test]
fn rows_are_sorted_and_replaced_and_survive_a_file() {
    let mut table = table(Vec::new());
    for (m, microseconds) in [(4096, 3.0), (512, 2.0), (4096, 1.0)] {
        table.insert(row(&linear(m, 512, 512), vec![time(OURS, wide(), microseconds)]));
    }
    let times: Vec<f64> = table.rows.iter().map(|row| row.times[0].time_s * 1e6).collect();
    assert_eq!(times, [1.0, 2.0]);
    assert_eq!(table.rows[0].describe(), "linear bf16 4096,512,512");
    let text = serde_json::to_string(&table).unwrap();
    assert_eq!(serde_json::from_str::<TunedTable>(&text).unwrap(), table);
}

#[test]
fn heuristics_are_compared_with_a_table() {
    // cuBLASLt is what they select of each.
    let rows = vec![
        row(&linear(1024, 512, 512), vec![time(OURS, wide(), 10.0), time(LIBRARY, None, 12.0)]),
        row(&linear(2048, 512, 512), vec![time(LIBRARY, None, 10.0), time(OURS, wide(), 11.0)]),
        row(&linear(4096, 512, 512), vec![time(OURS, wide(), 10.0), time(LIBRARY, None, 13.0)]),
        row(&linear(8192, 512, 512), vec![time(OURS, wide(), 10.0)]),
    ];
    let behind = heuristics_behind(&table(rows));
    assert_eq!((behind.rows, behind.unmeasured), (3, 1));
    assert!((behind.mean - (1.2_f64 * 1.3).powf(1.0 / 3.0)).abs() < 1e-12, "{behind:?}");
    assert!((behind.worst - 1.3).abs() < 1e-12, "{behind:?}");
    assert_eq!(behind.worst_row, "linear bf16 4096,512,512");
}

/// Predicted times may fall no further behind a committed table than when it was measured.
#[test]
fn heuristics_keep_their_distance_to_the_committed_tables() {
    for (name, text) in COMMITTED {
        let table: TunedTable = serde_json::from_str(text).unwrap();
        let was = table.heuristics_behind.clone().expect("`deepwell tune` writes the distance");
        let now = heuristics_behind(&table);
        assert_eq!(now.rows + now.unmeasured, table.rows.len(), "{name}");
        assert!(now.unmeasured <= was.unmeasured, "{name}: {now:?}, measured {was:?}");
        for (now, was) in [(now.mean, was.mean), (now.worst, was.worst)] {
            assert!(now <= was * (1.0 + 1e-9), "{name}: {now} times, {was} when it was measured");
        }
        // None of a shape that was measured is slower than its heuristics.
        for row in &table.rows {
            let fastest = row.times.iter().map(|time| time.time_s).fold(f64::MAX, f64::min);
            let spread = row.times.iter().map(|time| time.spread).fold(0.0, f64::max);
            let taken = row.times[0].time_s;
            assert!(taken <= fastest * (1.0 + 4.0 * spread), "{name}: {}", row.describe());
        }
    }
}

/// Where two kernels may take one request, both have a version.
#[test]
fn kernels_with_rivals_have_a_version() {
    let ours: BTreeSet<&str> = cuda_kernels()
        .filter(|spec| spec.library.is_none() && source_file(spec.name).is_some())
        .map(|spec| spec.name)
        .collect();
    for architecture in Architecture::ALL {
        let of_architecture =
            || cuda_kernels().filter(|spec| spec.architectures.contains(&architecture));
        for spec in of_architecture().filter(|spec| spec.library.is_none()) {
            let is_rival = of_architecture().any(|other| {
                other.name != spec.name && other.ops.iter().any(|op| spec.ops.contains(op))
            });
            let is_tuned = spec.ops.iter().any(|op| TUNED_OPS.contains(op));
            assert!(!(is_rival && is_tuned) || ours.contains(spec.name), "{}", spec.name);
        }
    }
    for spec in cuda_kernels().filter(|spec| spec.library.is_some_and(|of| of == COLLECTIVES)) {
        assert_eq!(source_file(spec.name), None);
    }
}

/// Ops whose kernels have rivals.
const TUNED_OPS: [&str; 14] = [
    "linear",
    "linear_dgrad",
    "linear_wgrad",
    "scaled_gemm",
    "grouped_gemm",
    "grouped_gemm_dgrad",
    "grouped_gemm_wgrad",
    "scaled_grouped_gemm",
    "attention",
    "attention_backward",
    "attention_part",
    "attention_part_backward",
    "linear_cross_entropy",
    "vocab_parallel_head",
];

#[test]
fn files_of_kernels_are_there() {
    let ops = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    for spec in cuda_kernels() {
        let Some(file) = source_file(spec.name) else { continue };
        let found = std::fs::read_dir(&ops).unwrap().flatten();
        let has = |op: std::fs::DirEntry| op.path().join(format!("{file}.cu")).is_file();
        assert!(found.into_iter().any(has), "{}: {file}.cu", spec.name);
    }
}

/// `Op` of a call, which must not be of more than its class.
#[test]
fn sizes_are_no_attributes() {
    let ops: Vec<Op> = [linear(8, 8, 8), linear(16, 8, 8)].map(|call| call.op).into();
    assert_eq!(ops[0], ops[1]);
}
