//! Answers of a catalog that are kept are those that it gives.

mod common;

use std::cell::Cell;
use std::rc::Rc;

use deepwell_ir::{
    Call, KernelCatalog, KernelRequest, MathUnit, NoKernel, PrecisionPolicy, Selection, Target,
};
use deepwell_plan::{KnownKernels, Parallel, Plan, lower};

use common::{Kernels, graph, planned, target};

/// Counts how often it is asked. Its kernels have the names of the op's attributes and of the
/// device, so that an answer to another question is seen.
struct Asked(Rc<Cell<usize>>);

impl KernelCatalog for Asked {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        self.0.set(self.0.get() + 1);
        let mut selection = Kernels.select(request, target)?;
        let (attributes, workers) = (request.op.rule().attributes(), target.workers);
        selection.choice.kernel += &format!(" {attributes} of {workers}");
        Ok(selection)
    }

    fn predicted_s(&self, request: &KernelRequest<'_>, target: &Target) -> Option<f64> {
        self.0.set(self.0.get() + 1);
        Kernels.predicted_s(request, target)
    }

    fn unit_of(&self, _kernel: &str, unit: MathUnit) -> MathUnit {
        unit
    }

    fn fixed_overhead_bytes(&self, target: &Target, calls: &[Call]) -> usize {
        Kernels.fixed_overhead_bytes(target, calls)
    }
}

#[test]
fn programs_are_those_of_the_catalog() {
    let graph = graph("llama-micro");
    let [asked, kept] = [(); 2].map(|()| Rc::new(Cell::new(0)));
    let known = KnownKernels::new(Box::new(Asked(kept.clone())));
    let recompute = deepwell_ir::Recompute::None;
    let alone = planned("llama-micro", PrecisionPolicy::mxfp8(), 32, 4, 1, recompute).plan;
    let check = |plan: &Plan, target: &Target| {
        let expected = lower(&graph, plan, &Asked(asked.clone()), target).unwrap();
        assert!(lower(&graph, plan, &known, target).unwrap() == expected, "{plan}");
    };
    let among = Plan { parallel: Parallel { zero: 1, ..Parallel::data(2) }, ..alone.clone() };
    let in_bf16 = Plan { policy: PrecisionPolicy::bf16(), ..alone.clone() };
    let larger = Plan { micro_batch: 2, micro_batches: 2, ..alone.clone() };
    let more_workers = Target { workers: 4, ..target() };
    for _ in 0..2 {
        for plan in [&alone, &in_bf16, &larger] {
            check(plan, &target());
        }
        check(&alone, &more_workers);
        for rank in 0..2 {
            check(&among, &target().as_rank(among.parallel.ranks(rank)));
        }
    }
    let (asked, kept) = (asked.get(), kept.get());
    assert!(kept * 5 < asked, "{kept} of {asked} questions");
    // What there is no kernel for is known as well.
    let missing = Target { arch: "hopper-sm90".to_string(), ..target() };
    let errors = [(); 2].map(|()| lower(&graph, &alone, &known, &missing).unwrap_err().to_string());
    assert!(errors[0] == errors[1] && errors[0].contains("runs on a cpu"), "{}", errors[0]);
}
