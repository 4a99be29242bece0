//! A program by hand: its JSON, and each of its rules broken.

use deepwell_ir::ops::{Add, Cast};
use deepwell_ir::{
    Access, Accumulate, Arena, Body, BodyId, ByteRange, Call, Cost, DType, HostInterface,
    Invocation, KernelChoice, Master, MathUnit, MemoryKind, Mode, NodeId, Op, Operand,
    ParameterState, Phase, Program, Tag, Target, Value, ValueId, verify_program,
};

fn value(name: &str, memory: MemoryKind, offset: usize) -> Value {
    let range = ByteRange { offset, bytes: 64 };
    Value::new(name, DType::F32, vec![4, 4], memory, range)
}

fn call(name: &str, op: impl Into<Op>, inputs: &[u32], output: u32, workspace: usize) -> Call {
    let read = |&id: &u32| Operand { value: ValueId(id), access: Access::Read };
    let mut operands: Vec<Operand> = inputs.iter().map(read).collect();
    operands.push(Operand { value: ValueId(output), access: Access::Write });
    Call {
        name: name.to_string(),
        op: op.into(),
        choice: KernelChoice {
            kernel: "kernel".to_string(),
            tile: None,
            workspace_bytes: workspace,
        },
        input_count: inputs.len(),
        operands,
        accumulate: Accumulate::Never,
        last_only: false,
        alone_only: false,
        accumulator_bytes: 0,
        workspace: ByteRange { offset: 320, bytes: workspace },
        phase: Phase::Forward,
        tag: Tag::Mlp,
        layer: Some(0),
        source: NodeId(0),
        recomputes: false,
        unit: MathUnit::F32,
        peak_share: 1.0,
        cost: Cost { flops: 16, bytes_read: 128, bytes_written: 64, ..Cost::default() },
        stream: 0,
        waits: Vec::new(),
        records: None,
        rejected: Vec::new(),
    }
}

const W: u32 = 0;
const GRAD: u32 = 1;
const A: u32 = 2;
const B: u32 = 3;
const C: u32 = 4;

/// `a = w + w; b = a + w; c = b + a; grad = cast c`, with w and grad persistent.
fn program() -> Program {
    let cast = Cast { to: DType::F32 };
    Program {
        name: "by hand".to_string(),
        mode: Mode::Train,
        rank: 0,
        target: Target::cpu(1, Vec::new()),
        batch: 1,
        seq: 4,
        micro_batches: 1,
        slots: 1,
        bodies: vec![Body { phase: Phase::Forward, chunk: 0, calls: 0..4 }],
        schedule: vec![Invocation { body: BodyId(0), micro_batch: 0, slot: 0 }],
        values: vec![
            value("w", MemoryKind::Optimizer, 0),
            value("grad", MemoryKind::Gradients, 64),
            value("a", MemoryKind::Activations, 128),
            value("b", MemoryKind::Activations, 192),
            value("c", MemoryKind::Activations, 256),
        ],
        calls: vec![
            call("first", Add {}, &[W, W], A, 64),
            call("second", Add {}, &[A, W], B, 0),
            call("third", Add {}, &[B, A], C, 64),
            call("fourth", cast, &[C], GRAD, 0),
        ],
        arena: Arena {
            bytes: 384,
            transient_offset: 128,
            transient_lower_bound_bytes: 256,
            ..Arena::default()
        },
        host: HostInterface::default(),
        parameters: vec![ParameterState {
            split: None,
            name: "w".to_string(),
            master: Master::Whole(ValueId(W)),
            first_moment: None,
            second_moment: None,
            gradient: Some(ValueId(GRAD)),
        }],
        precision: Vec::new(),
        shards: Vec::new(),
        unstored: Vec::new(),
        handover: None,
        fixed_overhead_bytes: 0,
    }
}

/// Breaks a sound program and wants the verifier to say so in these words.
fn check(change: impl FnOnce(&mut Program), expected: &str) {
    let mut program = program();
    verify_program(&program).unwrap();
    change(&mut program);
    let message = verify_program(&program).expect_err(expected).to_string();
    assert!(message.contains(expected), "expected `{expected}` in: {message}");
    let refused = Program::from_json(&program.to_json()).expect_err(expected).to_string();
    assert_eq!(refused, message);
}

fn at(offset: usize) -> ByteRange {
    ByteRange { offset, bytes: 64 }
}

#[test]
fn json_gives_the_program_back() {
    let mut program = program();
    program.calls[1].waits = vec![3];
    program.calls[0].records = Some(3);
    assert_eq!(Program::from_json(&program.to_json()).unwrap(), program);
    let error = Program::from_json("[]").unwrap_err().to_string();
    assert!(error.starts_with("not a valid program: "), "{error}");
}

#[test]
fn program_as_text() {
    insta::assert_snapshot!(program().to_string());
}

#[test]
fn names_and_ids() {
    check(|p| p.values[1].name = "w".to_string(), "two values are named `w`");
    check(|p| p.calls[1].name = "first".to_string(), "two calls are named `first`");
    for operand in 0..3 {
        check(|p| p.calls[0].operands[operand].value = ValueId(9), "call `first` names value 9");
    }
    check(|p| p.host.loss = Some(ValueId(9)), "the host interface names value 9");
    check(|p| p.host.tokens = Some(ValueId(9)), "the host interface names value 9");
    check(
        |p| p.host.statistics = vec![("a".to_string(), ValueId(9))],
        "the host interface names value 9",
    );
    check(|p| p.parameters[0].master = Master::Whole(ValueId(9)), "parameter `w` names value 9");
    check(|p| p.parameters[0].gradient = Some(ValueId(9)), "parameter `w` names value 9");
    check(|p| p.calls[0].input_count = 4, "call `first` has too few operands");
}

#[test]
fn ranges_lie_in_their_part_of_the_arena() {
    check(|p| p.values[4].range = at(384), "`c` ends at 448 outside the arena");
    check(|p| p.values[4].range = at(352), "`c` ends at 416 outside the arena");
    check(|p| p.values[4].range.offset = usize::MAX, "outside the arena");
    check(|p| p.values[4].range = at(264), "`c` starts at 264, not aligned");
    check(|p| p.values[4].range.bytes = 32, "value `c` of 64 bytes lies in 32");
    check(|p| p.values[4].shape = vec![usize::MAX, 2], "value `c` has more elements than");
    check(|p| p.values[4].range = at(64), "value `c` (activations) lies in the wrong part");
    check(|p| p.values[0].range = at(320), "value `w` (optimizer) lies in the wrong part");
    check(|p| p.values[1].range = at(0), "`w` and `grad` overlap");
    check(
        |p| {
            p.arena.transient_offset = 96;
            p.values[1].range = at(64);
        },
        "`grad` (gradients) reaches into the transient part",
    );
    check(|p| p.calls[0].workspace.offset = 384, "`first` ends at 448 outside the arena");
    check(|p| p.calls[0].workspace.offset = 313, "`first` starts at 313, not aligned");
    check(
        |p| p.calls[0].workspace = at(0),
        "workspace of `first` reaches into the persistent part",
    );
    check(
        |p| p.calls[1].workspace = at(320),
        "call `second` has 64 bytes of workspace, its kernel",
    );
}

#[test]
fn operands_of_a_call_share_no_byte() {
    check(|p| p.values[3].range = at(128), "call `second`: operands `a` and `b` overlap");
    check(|p| p.calls[0].workspace = at(128), "call `first`: workspace overlaps operand `a`");
    check(
        |p| p.calls[3].operands[1].value = ValueId(C),
        "call `fourth`: operands `c` and `c` overlap",
    );
}

#[test]
fn transient_values_are_read_while_they_are_there() {
    check(|p| p.calls.swap(0, 1), "call `second` reads `a`, which is not there (any more)");
    // Only read with its own bytes: never written.
    check(
        |p| {
            p.calls.remove(1);
            p.bodies[0].calls.end = 3;
        },
        "call `third` reads `b`, which is not there (any more)",
    );
    // Overwritten by a value that lies in the same place.
    check(
        |p| {
            p.values.push(value("d", MemoryKind::Activations, 128));
            p.calls.insert(2, call("between", Cast { to: DType::F32 }, &[B], 5, 0));
            p.bodies[0].calls.end = 5;
        },
        "call `third` reads `a`, which is not there (any more)",
    );
    // Overwritten by the scratch of a call in between.
    check(
        |p| {
            p.calls[1].choice.workspace_bytes = 64;
            p.calls[1].workspace = at(128);
            p.calls[1].operands[0].value = ValueId(W);
        },
        "call `third` reads `a`, which is not there (any more)",
    );
    // An update reads too.
    check(
        |p| p.calls[0].operands[2].access = Access::Update,
        "call `first` reads `a`, which is not there (any more)",
    );
}

#[test]
fn events_are_recorded_before_they_are_waited_for() {
    check(|p| p.calls[0].waits = vec![1], "call `first` waits for event 1");
    check(
        |p| {
            p.calls[1].waits = vec![1];
            p.calls[2].records = Some(1);
        },
        "call `second` waits for event 1",
    );
    // An event of one body orders nothing in another: streams join between them.
    check(
        |p| {
            p.calls[0].records = Some(1);
            p.calls[2].waits = vec![1];
            p.bodies = [(Phase::Forward, 0..2), (Phase::Optimizer, 2..4)]
                .map(|(phase, calls)| Body { phase, chunk: 0, calls })
                .to_vec();
        },
        "call `third` waits for event 1",
    );
}

/// Runs `second` and `third` beside each other on two streams.
fn on_two_streams(p: &mut Program) {
    p.calls[1].operands[0].value = ValueId(W);
    p.calls[2].operands[0].value = ValueId(A);
    p.calls[0].records = Some(0);
    p.calls[2].stream = 1;
    p.calls[2].waits = vec![0];
    p.calls[2].records = Some(1);
    p.calls[3].waits = vec![1];
}

#[test]
fn calls_on_two_streams_are_ordered_where_they_share_bytes() {
    let mut sound = program();
    on_two_streams(&mut sound);
    verify_program(&sound).unwrap();
    let check = |change: fn(&mut Program), expected: &str| {
        check(
            |p| {
                on_two_streams(p);
                change(p);
            },
            expected,
        );
    };
    // What is read has been written.
    check(|p| p.calls[2].waits.clear(), "calls `first` and `third` use bytes 128..192");
    check(|p| p.calls[3].waits.clear(), "calls `third` and `fourth` use bytes 256..320");
    // What is written is not read any more: the scratch of `third` is what `second` writes.
    check(
        |p| {
            p.calls[2].choice.workspace_bytes = 128;
            p.calls[2].workspace = ByteRange { offset: 320, bytes: 128 };
            p.calls[1].choice.workspace_bytes = 64;
            p.calls[1].workspace = ByteRange { offset: 384, bytes: 64 };
            p.arena.bytes = 448;
        },
        "calls `second` and `third` use bytes 320..448",
    );
    // Persistent values too.
    check(
        |p| {
            p.calls[1].operands[2].value = ValueId(GRAD);
            p.calls[2].operands[1].value = ValueId(GRAD);
        },
        "calls `second` and `third` use bytes 64..128",
    );
}

#[test]
fn bodies_cover_all_calls() {
    check(|p| p.bodies[0].calls.end = 3, "call `fourth` is in no body");
    check(|p| p.bodies[0].calls.end = 5, "has calls 0..5, expected them to begin at 0");
    check(|p| p.bodies[0].calls.start = 1, "has calls 1..4, expected them to begin at 0");
    check(
        |p| {
            let body = |calls| Body { phase: Phase::Forward, chunk: 0, calls };
            p.bodies = vec![body(0..2), body(2..4)];
        },
        "two bodies are of forward",
    );
}

/// Forward and backward of four micro-batches in two slots: `a` lives from the one to the other.
fn in_two_slots(p: &mut Program) {
    p.slots = 2;
    p.micro_batches = 2;
    p.calls[2].operands[0].value = ValueId(W);
    p.bodies = [(Phase::Forward, 0..2), (Phase::Backward, 2..4)]
        .map(|(phase, calls)| Body { phase, chunk: 0, calls })
        .to_vec();
    p.schedule = [(0, 0), (0, 1), (1, 0), (1, 1)]
        .map(|(body, slot)| Invocation { body: BodyId(body), micro_batch: slot, slot })
        .to_vec();
    p.values[2].slot_stride_bytes = 64;
    // Behind the two slots of `a`: `b`, `c` and the scratch.
    p.values[3].range = at(256);
    p.values[4].range = at(320);
    for call in &mut p.calls {
        call.workspace.offset = 384;
    }
    p.arena.bytes = 448;
}

#[test]
fn schedules_run_each_micro_batch_forward_and_backward_in_one_slot() {
    let mut sound = program();
    in_two_slots(&mut sound);
    verify_program(&sound).unwrap();
    let check = |change: fn(&mut Program), expected: &str| {
        check(
            |p| {
                in_two_slots(p);
                change(p);
            },
            expected,
        );
    };
    check(|p| p.schedule[0].body = BodyId(7), "the schedule names body 7, there are 2");
    check(|p| p.schedule[1].slot = 2, "the schedule names slot 2, there are 2");
    check(
        |p| p.schedule[1].slot = 0,
        "forward of micro-batch 1 finds micro-batch 0 in slot 0, expected none",
    );
    check(
        |p| p.schedule[2].slot = 1,
        "backward of micro-batch 0 finds micro-batch 1 in slot 1, expected micro-batch 0",
    );
    check(|p| p.schedule.swap(0, 1), "forward of micro-batch 1, expected 0");
    check(|p| p.schedule.swap(2, 3), "backward of micro-batch 1, expected 0");
    check(|p| p.micro_batches = 3, "runs 2 forward and 2 backward passes, expected 3");
    check(
        |p| {
            p.bodies[1].calls.end = 3;
            p.bodies.push(Body { phase: Phase::Optimizer, chunk: 0, calls: 3..4 });
            let optimizer = Invocation { body: BodyId(2), micro_batch: 0, slot: 0 };
            p.values[4].slot_stride_bytes = 64;
            p.schedule.insert(2, optimizer);
        },
        "optimizer runs while micro-batch 0 is under way",
    );
    check(|p| p.values[2].slot_stride_bytes = 0, "`a` lives from forward to backward");
    check(|p| p.values[2].slot_stride_bytes = 32, "has slots of 32 bytes, which overlap");
    check(
        |p| p.values[2].slot_stride_bytes = 512,
        "has slots of 512 bytes, which overlap or leave",
    );
    check(|p| p.values[3].range = at(192), "`b` lies in the slots of the activations");
    check(|p| p.calls[0].workspace.offset = 192, "`first` lies in the slots of the activations");
}
