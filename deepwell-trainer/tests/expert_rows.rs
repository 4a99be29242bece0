//! What programs count of experts' rows: buffers have room for any choice of tokens, and kernels
//! compute the rows that tokens chose.

use deepwell_ir::Program;
use deepwell_ir::capture::ModelConfig;
use deepwell_moe::RouterTraining;
use deepwell_plan::{OptimizerSpec, Parallel, PlanRequest, autoplan_ranks};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::Hardware;
use deepwell_trainer::{Device, with_routers};

/// The program of one of so many expert-parallel ranks, each with two sequences of 2,048 tokens.
fn program(ranks: usize, capacity_factor: Option<f64>) -> Program {
    let (hardware, device) = (Hardware::preset("b200-x8").unwrap(), Device::Cuda(0));
    let target = device.target(&hardware).unwrap();
    let (parallel, target) = match ranks {
        1 => (Parallel::default(), target),
        _ => (Parallel { expert: ranks, ..Parallel::data(ranks) }, device.among_ranks(target)),
    };
    let graph = ModelConfig::preset("moe-1b-a300m").unwrap().capture(Some(2048)).unwrap();
    let training = RouterTraining { capacity_factor, ..RouterTraining::default() };
    let graph = with_routers(&graph, &training).unwrap();
    let request = PlanRequest {
        seq: 2048,
        global_batch: 2 * ranks,
        policy: PrecisionPolicy::preset("mxfp8").unwrap(),
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: Some(u64::MAX),
        micro_batch: Some(2),
        recompute: None,
    };
    let catalog = device.catalog();
    autoplan_ranks(&graph, &hardware, &request, parallel, catalog.as_ref(), &target)
        .unwrap()
        .program
}

fn gemm_flops(program: &Program) -> u64 {
    let of_experts = program.calls.iter().filter(|call| call.op.name().contains("grouped_gemm"));
    of_experts.map(|call| call.cost.flops).sum()
}

/// The least time of a mixture on eight ranks counted the FLOPs of full buffers, eight times those
/// of its tokens, and stood above the predicted time.
#[test]
fn ranks_compute_the_rows_of_their_share_of_tokens() {
    // Four experts of 512 for each of 4,096 tokens, three matrices, forward and twice backward.
    let pairs = 4096 * 4;
    let expected = 3 * 3 * 2 * pairs * 1024 * 512 * 16;
    for (ranks, capacity_factor) in
        [(1, None), (2, None), (8, None), (8, Some(1.0)), (8, Some(4.0)), (1, Some(1.0))]
    {
        let found = gemm_flops(&program(ranks, capacity_factor));
        assert_eq!(found, expected, "{ranks} ranks, {capacity_factor:?}");
    }
    let half = gemm_flops(&program(8, Some(0.5)));
    assert_eq!(half, expected / 2, "half of the pairs are dropped");
}
