//! Functions: inlined, kept as calls of the runtime, or refused.

use super::*;

const CALLS: &str = ".func (.param .b32 r0) twice(.param .b32 x)\n{\n.reg .b32 %r<2>; .reg \
            .pred %p<1>;\n\
    ld.param.b32 %r0, [x];\nsetp.eq.s32 %p0, %r0, 0;\n@%p0 bra OUT;\nadd.s32 %r0, %r0, %r0;\n\
    OUT: st.param.b32 [r0], %r0;\nret;\n}\n\
    .extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n\
    .func loop_a()\n{\ncall.uni loop_b, ();\nret;\n}\n\
    .func loop_b()\n{\ncall.uni loop_a, ();\nret;\n}\n";

#[test]
fn functions_are_inlined_with_registers_of_their_own() {
    let text = format!(
        "{CALLS}.visible .entry k()\n{{\n.reg .b32 %r<3>; .reg .pred %p<2>;\n\
         {{ .param .b32 p0; st.param.b32 [p0], %r1; .param .b32 q0;\n\
         @%p1 call.uni (q0), twice, (p0); ld.param.b32 %r2, [q0]; }}\n\
         call (%r1), twice, (7);\nret;\n}}"
    );
    let program = program_of(&text, &GlobalAddresses::new()).expect("known");
    assert_eq!((program.word_count, program.predicate_count), (5, 3));
    let kinds: Vec<&str> = program
        .steps
        .iter()
        .map(|step| match &step.instruction {
            Instruction::Store(_) => "store",
            Instruction::Load(_) => "load",
            Instruction::Branch { .. } => "branch",
            Instruction::Scalar(_) => "scalar",
            Instruction::Exit => "exit",
            _ => "other",
        })
        .collect();
    let twice = ["load", "scalar", "branch", "scalar", "store", "branch"];
    let expected =
        [&["store", "branch"][..], &twice, &["load", "store"], &twice, &["load", "exit", "exit"]]
            .concat();
    assert_eq!(kinds, expected);
    // The guarded call is jumped over; within, the return goes to what follows.
    let target = |position: usize| match program.steps[position].instruction {
        Instruction::Branch { target, .. } => target,
        _ => panic!("no branch at {position}"),
    };
    assert_eq!((target(1), target(4), target(7)), (8, 6, 8));
    assert_eq!(program.steps[1].guard, Some(PredicateSource::Register { index: 1, negated: true }));
}

#[test]
fn functions_of_the_runtime_stay_calls() {
    let text = format!(
        "{CALLS}.visible .entry k()\n{{\n.reg .b64 %l<3>;\n.param .b64 a; .param .b64 b; \
            .param .b32 r;\n\
         call.uni (r), vprintf, (a, b);\nret;\n}}"
    );
    let program = program_of(&text, &GlobalAddresses::new()).expect("known");
    assert_eq!(
        program.steps[0].instruction,
        Instruction::ExternalCall(ExternalCall {
            function: ExternalFunction::Printf,
            arguments: Box::new([
                LocalSlot { offset: 0, bytes: 8 },
                LocalSlot { offset: 8, bytes: 8 }
            ]),
            result: Some(LocalSlot { offset: 16, bytes: 4 }),
        })
    );
    assert_eq!(program.local_bytes, 20);
}

#[test]
fn endless_calls_are_refused() {
    let text = format!("{CALLS}.visible .entry k()\n{{\ncall.uni loop_a, ();\nret;\n}}");
    let error = program_of(&text, &GlobalAddresses::new()).expect_err("endless");
    assert!(error.to_string().contains("`loop_a` calls itself"), "{error}");
}

/// Each of 40 functions calls the next twice: 2^40 calls, were they all inlined.
#[test]
fn functions_that_multiply_are_not_all_inlined() {
    let mut text = ".func f40()\n{\nret;\n}\n".to_string();
    for level in (0..40).rev() {
        let next = level + 1;
        text += &format!(".func f{level}()\n{{\ncall f{next}, ();\ncall f{next}, ();\n}}\n");
    }
    text += ".visible .entry k()\n{\ncall f0, ();\nret;\n}";
    let error = program_of(&text, &GlobalAddresses::new()).expect_err("too many");
    assert!(error.to_string().contains("too much is inlined"), "{error}");
}

/// An initializer may have fewer bits than its element, and a mask may choose no byte.
#[test]
fn initial_values_of_any_width_are_laid_out() {
    let text = ".const .b128 wide = 5;\n.global .b8 at[] = {0(wide)};\n\
        .visible .entry k()\n{\nret;\n}";
    let module = ptx::parse(&format!(".version 9.0\n.target sm_100a\n{text}")).expect("PTX");
    let addresses: GlobalAddresses = [("wide".to_string(), 64)].into();
    let images = global_images(&module, &addresses).expect("images");
    assert_eq!(images, [("at".to_string(), vec![0])]);
    let program = decode(&module, "k", &addresses).expect("a kernel");
    assert_eq!(program.constants, 5u128.to_le_bytes());
}

#[test]
fn more_constants_than_there_is_space_for_are_refused() {
    let text = ".const .b8 a[600000];\n.const .b8 b[600000];\n.visible .entry k()\n{\nret;\n}";
    let error = program_of(text, &GlobalAddresses::new()).expect_err("too much").to_string();
    assert!(error.contains("take at most 655360 bytes"), "{error}");
}
