//! A program by hand: its JSON, and each of its rules broken.

use deepwell_ir::ops::{Add, Cast};
use deepwell_ir::{
    Access, Arena, ByteRange, Call, Cost, DType, HostInterface, KernelChoice, MathUnit, MemoryKind,
    Mode, Op, Operand, ParameterState, Phase, Program, Tag, Target, Value, ValueId, verify_program,
};

fn value(name: &str, memory: MemoryKind, offset: usize) -> Value {
    let range = ByteRange { offset, bytes: 64 };
    Value { name: name.to_string(), dtype: DType::F32, shape: vec![4, 4], memory, range }
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
        accumulate: false,
        workspace: ByteRange { offset: 320, bytes: workspace },
        phase: Phase::Forward,
        micro_batch: 0,
        tag: Tag::Mlp,
        layer: Some(0),
        recomputes: false,
        unit: MathUnit::F32,
        cost: Cost { flops: 16, bytes_read: 128, bytes_written: 64 },
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
        arena: Arena { bytes: 384, transient_offset: 128, transient_lower_bound_bytes: 256 },
        host: HostInterface::default(),
        parameters: vec![ParameterState {
            name: "w".to_string(),
            master: ValueId(W),
            first_moment: None,
            second_moment: None,
            gradient: Some(ValueId(GRAD)),
        }],
        precision: Vec::new(),
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
    check(|p| p.host.tokens = vec![ValueId(9)], "the host interface names value 9");
    check(
        |p| p.host.statistics = vec![("a".to_string(), ValueId(9))],
        "the host interface names value 9",
    );
    check(|p| p.parameters[0].master = ValueId(9), "parameter `w` names value 9");
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
        },
        "call `third` reads `b`, which is not there (any more)",
    );
    // Overwritten by a value that lies in the same place.
    check(
        |p| {
            p.values.push(value("d", MemoryKind::Activations, 128));
            p.calls.insert(2, call("between", Cast { to: DType::F32 }, &[B], 5, 0));
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
}
