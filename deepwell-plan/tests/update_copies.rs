//! Copies of weights that the optimizer writes: which it does, why not the others, what a step
//! leaves out and costs then, and what the verifier says of programs that do not fit together.

mod common;

use std::collections::BTreeSet;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::ops::{AdamW, CopyKind};
use deepwell_ir::{
    Access, Call, Graph, Instance, KernelCatalog, KernelRequest, NoKernel, Op, Phase,
    PrecisionPolicy, Program, Recompute, Rejected, Selection, Target, verify_program,
};
use deepwell_plan::{Parallel, Plan, dryrun, lower};
use deepwell_precision::Format;

use common::{Kernels, graph, hardware, planned, target};

/// Kernels whose updates write copies in BF16, and quantized ones where `quantizes`.
struct Copying {
    quantizes: bool,
}

impl Copying {
    fn reject(&self, op: &Op) -> Option<String> {
        let Op::AdamW(op) = op else { return None };
        let quantized = |kind: &CopyKind| matches!(kind, CopyKind::Quantize(_));
        let has_quantized = op.copies.iter().any(|copy| quantized(&copy.kind));
        (has_quantized && !self.quantizes).then(|| "quantizes nothing".to_string())
    }
}

impl KernelCatalog for Copying {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        let Some(reason) = self.reject(request.op) else { return Kernels.select(request, target) };
        let op = request.op.name().to_string();
        let rejected = vec![Rejected { kernel: format!("plain_{op}"), reason }];
        Err(NoKernel { op, arch: target.arch.clone(), rejected, others: Vec::new() })
    }

    fn predicted_s(&self, request: &KernelRequest<'_>, target: &Target) -> Option<f64> {
        match request.op {
            Op::AdamW(_) => self.reject(request.op).is_none().then_some(1.0),
            _ => Kernels.predicted_s(request, target),
        }
    }

    fn fixed_overhead_bytes(&self, target: &Target, calls: &[Call]) -> usize {
        Kernels.fixed_overhead_bytes(target, calls)
    }
}

const MODEL: &str = "llama-micro";

fn policy() -> PrecisionPolicy {
    PrecisionPolicy::preset("mxfp8-128").unwrap().with_rule("*_proj.weight", Format::MXFP8).unwrap()
}

fn lowered_as(
    graph: &Graph,
    parallel: Parallel,
    catalog: &dyn KernelCatalog,
    policy: PrecisionPolicy,
) -> Program {
    let planned = planned(MODEL, policy, 32, 4, 1, Recompute::None);
    let stages = if parallel.pipeline == 1 { Vec::new() } else { vec![1; parallel.pipeline] };
    let plan = Plan { parallel, stages, ..planned.plan };
    lower(graph, &plan, catalog, &target().as_rank(parallel.ranks(0))).unwrap()
}

fn lowered(catalog: &dyn KernelCatalog) -> Program {
    lowered_as(&graph(MODEL), Parallel::default(), catalog, policy())
}

fn of_weights(program: &Program) -> &[Call] {
    program.calls_of(program.body_of(Phase::Weights).unwrap())
}

fn reasons(program: &Program) -> BTreeSet<String> {
    let rejected = of_weights(program).iter().flat_map(|call| &call.rejected);
    rejected.map(|rejected| format!("{}: {}", rejected.kernel, rejected.reason)).collect()
}

/// The copies that updates write, and how they are made.
fn updates(program: &Program) -> Vec<&AdamW> {
    let updates = program.calls.iter().filter_map(|call| match &call.op {
        Op::AdamW(op) => Some(op),
        _ => None,
    });
    updates.collect()
}

#[test]
fn a_step_leaves_out_what_updates_write() {
    let apart = lowered(&Kernels);
    let copies = of_weights(&apart).len();
    let quantized =
        of_weights(&apart).iter().filter(|call| matches!(call.op, Op::Quantize(_))).count();
    assert!(quantized > 0 && copies > quantized);
    let bytes = |program: &Program| program.bytes_moved();
    let of_masters = |is_counted: &dyn Fn(&&Call) -> bool| -> u64 {
        let calls = of_weights(&apart).iter().filter(is_counted);
        calls.map(|call| call.cost.bytes_read).sum()
    };
    for (catalog, written, expected_reasons) in [
        (Copying { quantizes: true }, copies, vec![]),
        (
            Copying { quantizes: false },
            copies - quantized,
            vec!["plain_adamw: quantizes nothing".to_string()],
        ),
    ] {
        let program = lowered(&catalog);
        verify_program(&program).unwrap();
        let of_updates: usize = updates(&program).iter().map(|op| op.copies.len()).sum();
        let left_out = of_weights(&program).iter().filter(|call| call.alone_only);
        assert_eq!((of_updates, left_out.count()), (written, written));
        assert_eq!(reasons(&program), expected_reasons.into_iter().collect());
        // The body runs in a step if anything of it does, and all of it after weights are loaded.
        let body = program.body_of(Phase::Weights).unwrap();
        let runs = program.schedule.iter().filter(|it| it.body == body).count();
        assert_eq!(runs, usize::from(written < copies));
        let of_body = |instance: &Instance| {
            of_weights(&program).iter().filter(|call| call.runs_in(*instance)).count()
        };
        let mut sizes: Vec<usize> = program
            .instances()
            .iter()
            .filter(|(other, _)| *other == body)
            .map(|(_, instance)| of_body(instance))
            .collect();
        sizes.sort_unstable();
        let expected = if written < copies { vec![copies - written, copies] } else { vec![copies] };
        assert_eq!(sizes, expected);
        // The same work, but that masters are not read again; the same memory.
        assert_eq!(program.flops(), apart.flops());
        assert_eq!(program.arena, apart.arena);
        let is_left_out = |call: &&Call| {
            program.calls.iter().any(|other| other.name == call.name && other.alone_only)
        };
        assert_eq!(bytes(&program), bytes(&apart) - of_masters(&is_left_out));
        let time_s = |program: &Program| dryrun(std::slice::from_ref(program), &hardware()).time_s;
        assert!(time_s(&program) < time_s(&apart));
    }
}

#[test]
fn ranks_with_parts_copy_by_themselves() {
    let catalog = Copying { quantizes: true };
    let config = LlamaConfig { num_kv_heads: 2, ..LlamaConfig::preset(MODEL).unwrap() };
    let heads_for_two = capture(&config).unwrap();
    let two = |change: &dyn Fn(&mut Parallel)| {
        let mut parallel = Parallel::default();
        change(&mut parallel);
        lowered_as(&heads_for_two, parallel, &catalog, PrecisionPolicy::bf16())
    };
    let is_whole = |program: &Program| of_weights(program).iter().all(|call| call.alone_only);
    assert!(is_whole(&two(&|it| it.data = 2)));
    for (program, reason) in [
        (two(&|it| (it.data, it.zero) = (2, 1)), "adamw: ranks have slices of the weights"),
        (two(&|it| it.tensor = 2), "adamw: ranks have parts of the model"),
        (two(&|it| it.pipeline = 2), "adamw: ranks have parts of the model"),
    ] {
        assert!(!program.calls.iter().any(|call| call.alone_only), "{reason}");
        assert!(updates(&program).iter().all(|op| op.copies.is_empty()), "{reason}");
        assert_eq!(reasons(&program), [reason.to_string()].into());
    }
}

#[test]
fn copies_that_do_not_fit_together_are_refused() {
    let sound = lowered(&Copying { quantizes: true });
    let check = |change: &dyn Fn(&mut Program), expected: &str| {
        let mut program = sound.clone();
        change(&mut program);
        let message = verify_program(&program).expect_err(expected).to_string();
        assert!(message.contains(expected), "expected `{expected}` in: {message}");
    };
    let at = |program: &Program, is_it: &dyn Fn(&Call) -> bool| {
        program.calls.iter().position(is_it).unwrap()
    };
    let update = at(&sound, &|call| matches!(call.op, Op::AdamW(_)));
    let cast = at(&sound, &|call| matches!(call.op, Op::Cast(_)) && call.alone_only);
    let name = sound.calls[cast].name.clone();
    check(
        &|p| p.calls[cast].alone_only = false,
        "writes a copy of `model.embed_tokens.weight` that no call makes alone",
    );
    check(&|p| p.calls[0].alone_only = true, "is left out of a step, expected a copy of a weight");
    let first_output = sound.calls[update].input_count;
    check(
        &|p| {
            let Op::AdamW(op) = &mut p.calls[update].op else { unreachable!() };
            assert!(matches!(op.copies.remove(0).kind, CopyKind::Cast(_)));
            p.calls[update].operands.remove(first_output);
        },
        &format!("call `{name}` is left out of a step, and no update copies"),
    );
    check(
        &|p| p.calls[update].operands[first_output].access = Access::Update,
        "expected an output for each copy",
    );
    check(
        &|p| {
            let other = p.parameters[1].master.value();
            p.calls[cast].operands[0].value = other;
        },
        &format!("copies `model.embed_tokens.weight` otherwise than `{name}` does"),
    );
    check(
        &|p| {
            p.calls[update].operands.pop();
        },
        "gives",
    );
}
