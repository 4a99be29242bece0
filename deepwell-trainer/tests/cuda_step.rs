//! What a training step asks of a CUDA driver, counted on one that runs nothing: no GPU is needed.

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{BodyId, Instance, Op, Phase};
use deepwell_kernels::cuda::{
    Architecture, Blas, CUBLASLT, CudaBackend, CudaCatalog, FakeCounts, FakeDriver, FakeNode,
    KernelImages, cuda_target,
};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::Hardware;
use deepwell_trainer::{CompileOptions, Device, Engine, OpenDevice, compile_on};

const SEQ: usize = 128;
const BATCH: usize = 4;

fn engine(policy: PrecisionPolicy, micro_batch: usize, with_library: bool) -> (Engine, FakeCounts) {
    let driver = FakeDriver::h200();
    let counts = driver.counts();
    let blas = with_library.then(|| Box::new(driver.blas()) as Box<dyn Blas>);
    let libraries: &[&str] = if with_library { &[CUBLASLT] } else { &[] };
    let backend = CudaBackend::new(Box::new(driver), blas, KernelImages::empty()).unwrap();
    let device = OpenDevice {
        backend: Box::new(backend),
        catalog: Box::new(CudaCatalog),
        target: cuda_target(Architecture::Sm90a, 132, libraries),
    };
    let options = CompileOptions {
        micro_batch: Some(micro_batch),
        device: Device::Cuda(0),
        ..CompileOptions::new(policy, SEQ, BATCH)
    };
    let config = LlamaConfig {
        hidden_size: 256,
        intermediate_size: 512,
        head_dim: 64,
        num_heads: 4,
        num_kv_heads: 2,
        ..LlamaConfig::preset("llama-micro").unwrap()
    };
    let hardware = Hardware::preset("h200-x2").unwrap();
    let mut engine = compile_on(device, capture(&config).unwrap(), hardware, &options).unwrap();
    engine.initialize(0).unwrap();
    (engine, counts)
}

#[test]
fn a_step_is_a_graph_for_each_pass_and_the_copies_of_its_inputs() {
    let g128 = PrecisionPolicy::preset("mxfp8-128").unwrap();
    // AdamW writes all copies of weights but those in blocks of 1 x 32, so that a step does not run
    // their body, or less of it than there is for weights that are loaded.
    let policies =
        [(PrecisionPolicy::bf16(), false), (PrecisionPolicy::mxfp8(), true), (g128, false)];
    for (policy, has_apart) in policies {
        for (micro_batch, with_library) in [(BATCH, true), (BATCH / 2, true), (BATCH, false)] {
            let name = format!("{:?} {micro_batch} {with_library}", policy.format());
            let (mut engine, counts) = engine(policy.clone(), micro_batch, with_library);
            let graphs = counts.read().graphs;
            let nodes: Vec<usize> = graphs.iter().map(Vec::len).collect();
            let of_training = engine.program().instances();
            let calls = |&(body, instance): &(BodyId, Instance)| {
                let calls = engine.program().calls_of(body).iter();
                calls.filter(|call| call.runs_in(instance)).count()
            };
            let expected = of_training.iter().map(calls);
            let of_evaluation = [engine.evaluation_program().calls.len()];
            assert_eq!(nodes, expected.chain(of_evaluation).collect::<Vec<_>>(), "{name}");
            // The first backward pass overwrites loss and gradients, others add to them.
            let micro_batches = engine.program().micro_batches;
            let more = usize::from(micro_batches > 1) + usize::from(has_apart);
            assert_eq!(of_training.len(), 4 + more, "{name}");
            let of_once = if has_apart { 2 } else { 1 };
            let is_kernel = |node: &FakeNode| {
                matches!(node, FakeNode::Launch(_) | FakeNode::Group(_) | FakeNode::Copy)
            };
            assert!(graphs[0].iter().all(is_kernel), "{name}: {:?}", graphs[0]);

            let (inputs, targets) = (vec![1; BATCH * SEQ], vec![2; BATCH * SEQ]);
            let step = |engine: &mut Engine| engine.start_step(&inputs, &targets, 1e-3, 1.0);
            // The first two fill both slots of the inputs.
            let mut pending = step(&mut engine).unwrap();
            for _ in 0..3 {
                counts.take();
                let next = step(&mut engine).unwrap();
                // A step that begins behind another waits for input slots alone. It waited for its
                // own forward pass once, as only two readbacks could be under way.
                let waits = counts.read().event_synchronizations;
                assert!(micro_batches > 1 || waits <= micro_batches, "{name}: {waits}");
                engine.finish_step(std::mem::replace(&mut pending, next)).unwrap();
                let step = counts.read();
                assert_eq!(step.graph_launches, 2 * micro_batches + of_once, "{name}");
                assert_eq!((step.launches, step.matmuls, step.fills), (0, 0, 0), "{name}");
                // Tokens and targets of each micro-batch, once the loss scale and the schedule: one
                // way over the bus, then to the values' places.
                let values = 2 * micro_batches + 2;
                let copies = (step.copies_from_pinned, step.copies);
                assert_eq!(copies, (micro_batches, values), "{name}");
                // Loss, norm, counters; the counters of quantizations lie together for each pass.
                let readbacks_max = 2 + 2 * micro_batches + 2;
                assert!((1..=readbacks_max).contains(&step.copies_to_pinned), "{name}: {step:?}");
                assert_eq!((step.uploads, step.downloads), (0, 0), "{name}");
                let taken = (step.allocations, step.pinned_allocations, step.frees, step.modules);
                assert_eq!(taken, (0, 0, 0, 0), "{name}");
                // The host waits for readbacks (and for input slots that are long free), never for
                // the device to be idle.
                assert_eq!(step.synchronizations, 0, "{name}");
                let readbacks = 2 * micro_batches + 1;
                assert!(step.event_synchronizations <= readbacks + micro_batches, "{name}");
            }
        }
    }
}

#[test]
fn the_arena_that_is_predicted_is_what_is_allocated() {
    let (engine, counts) = engine(PrecisionPolicy::mxfp8(), BATCH, true);
    let reserved = engine.prediction().ranks[0].reserved_bytes;
    let arena = engine.prediction().ranks[0].arena_bytes + reserved;
    let predicted = engine.predicted_peak_bytes();
    assert_eq!(predicted, engine.prediction().ranks[0].peak_bytes);
    assert!(predicted > arena);
    assert!(counts.read().allocations > 0);
}

#[test]
fn gemms_add_matrices_and_copies_of_weights_run_beside_each_other() {
    let g128 = PrecisionPolicy::preset("mxfp8-128").unwrap();
    for (policy, kernel) in
        [(g128, "cublaslt_mx_gemm_residual"), (PrecisionPolicy::bf16(), "cublaslt_linear_residual")]
    {
        let (engine, _) = engine(policy, BATCH, true);
        let program = engine.program();
        let layers = program.calls.iter().filter_map(|call| call.layer).max().unwrap() as usize + 1;
        // Of gate and up, of query, key and value, and the residual stream's.
        let kernels = program.calls.iter().map(|call| call.choice.kernel.as_str());
        let sums: Vec<&str> = kernels.filter(|name| name.ends_with("_residual")).collect();
        assert_eq!(sums.len(), 5 * layers, "{sums:?}");
        assert!(sums.contains(&kernel), "{sums:?}");
        let apart: Vec<&str> = program
            .calls
            .iter()
            .filter(|call| matches!(call.op, Op::Add(_)))
            .map(|call| call.name.as_str())
            .collect();
        assert!(apart.is_empty(), "{apart:?}");

        let body = program.bodies.iter().find(|body| body.phase == Phase::Weights).unwrap();
        let mut streams: Vec<u32> =
            program.calls[body.calls.clone()].iter().map(|call| call.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        assert_eq!(streams, [0, 2, 3, 4], "{kernel}");
    }
}
