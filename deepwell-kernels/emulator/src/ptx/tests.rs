//! Texts and what they say.

use super::{
    InitialValue, Instruction, Module, Operand, ParseError, Statement, StatementKind, parse,
};
use crate::decode::{Space, Type};

const HEAD: &str = ".version 9.0\n.target sm_100a, debug\n.address_size 64\n";

fn module(text: &str) -> Module {
    parse(&format!("{HEAD}{text}")).expect("this is PTX")
}

fn body(text: &str) -> Vec<Statement> {
    let module = module(&format!(".visible .entry k()\n{{\n{text}\n}}"));
    module.functions.into_iter().next().and_then(|function| function.body).expect("a body")
}

fn line(text: &str) -> Instruction {
    let statements = body(text);
    match &statements[0].kind {
        StatementKind::Instruction(instruction) => (**instruction).clone(),
        other => panic!("{text}: {other:?}"),
    }
}

fn wrong(text: &str) -> ParseError {
    parse(&format!("{HEAD}{text}")).expect_err("this is no PTX")
}

#[test]
fn instructions_print_as_they_were_read() {
    // (as written, as printed).
    let rows = [
        ("add.s32 %r1, %r2, -4;", "add.s32 %r1, %r2, -4;"),
        ("@%p1 bra $L__BB0_1;", "@%p1 bra $L__BB0_1;"),
        ("@!p mov.b64 {%r1, _}, %rd1;", "@!p mov.b64 {%r1, _}, %rd1;"),
        ("setp.ne.and.s32 %p1|%p2, %r1, 0x10, !%p3;", "setp.ne.and.s32 %p1|%p2, %r1, 16, !%p3;"),
        (
            "ld.shared.v4.u32 {%r1,%r2,%r3,%r4}, [%r5+-16];",
            "ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r5+-16];",
        ),
        ("st.global.f32 [%rd1-4], 0f3F800000;", "st.global.f32 [%rd1+-4], 0f3F800000;"),
        ("mov.f64 %fd1, 0d3FF0000000000000;", "mov.f64 %fd1, 0d3FF0000000000000;"),
        ("mov.f64 %fd1, 1.5e-3;", "mov.f64 %fd1, 0d3F589374BC6A7EFA;"),
        ("mov.u64 %rd1, table+8;", "mov.u64 %rd1, table+8;"),
        ("ld.param.u64 %rd1, [k_param_0+8];", "ld.param.u64 %rd1, [k_param_0+8];"),
        ("ld.shared.u32 %r1, [64];", "ld.shared.u32 %r1, [64];"),
        ("mov.u32 %r1, (1<<4)|3;", "mov.u32 %r1, 19;"),
        ("mov.u32 %r1, WARP_SZ;", "mov.u32 %r1, 32;"),
        ("mov.u32 %r1, ~0;", "mov.u32 %r1, -1;"),
        ("mov.u32 %r1, 0b101;", "mov.u32 %r1, 5;"),
        ("mov.u32 %r1, 017U;", "mov.u32 %r1, 15;"),
        ("mov.u32 %r1, %tid.x;", "mov.u32 %r1, %tid.x;"),
        ("ld.global .v2 .u32 {%r1, %r2}, [%rd1];", "ld.global.v2.u32 {%r1, %r2}, [%rd1];"),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes \
            [%r1], [%rd1, {%r2, %r3}], [%r4];",
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes \
            [%r1], [%rd1, {%r2, %r3}], [%r4];",
        ),
        ("call.uni (retval0), f, (param0, 7);", "call.uni (retval0), f, (param0, 7);"),
        ("elect.sync _|P1, 0xffffffff;", "elect.sync _|P1, 4294967295;"),
    ];
    for (text, printed) in rows {
        assert_eq!(line(text).to_string(), printed, "{text}");
    }
}

#[test]
fn bodies_keep_scopes_labels_and_lines() {
    let statements = body(
        "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2;\n\
         @!p bra W;\n}\n;\n.pragma \"nounroll\";\n\
         $T: .branchtargets $A, $B;\nbrx.idx %r1, $T;\n$A: $B:\nret;",
    );
    let kinds: Vec<String> = statements
        .iter()
        .map(|statement| match &statement.kind {
            StatementKind::ScopeBegin => "{".to_string(),
            StatementKind::ScopeEnd => "}".to_string(),
            StatementKind::Label(name) => format!("{name}:"),
            StatementKind::BranchTargets { targets, .. } => format!("{} targets", targets.len()),
            StatementKind::Registers(declaration) => declaration.register_type.to_string(),
            StatementKind::Instruction(line) => line.opcode.words[0].to_string(),
            other => format!("{other:?}"),
        })
        .collect();
    let expected =
        ["{", "pred", "W:", "mbarrier", "bra", "}", "2 targets", "brx", "$A:", "$B:", "ret"];
    assert_eq!(kinds, expected);
    // Six lines stand before the body.
    assert_eq!(statements[0].ptx_line, 6);
    assert_eq!(statements[4].ptx_line, 9);
}

#[test]
fn places_in_the_source_follow_loc() {
    let module = module(
        ".visible .entry k()\n{\nmov.u32 %r1, 1;\n.loc 2 17 5\nmov.u32 %r1, 2;\n\
         .loc 1 40 3, function_name $L__info_string0+8, inlined_at 2 17 5\n\
         mov.u32 %r1, 3;\nret;\n}\n\
         .file 1 \"/a/layout.cuh\"\n.file 2 \"/a/kernel.cu\", 1700000000, 123\n\
         .section .debug_str\n{\n$L__info_string0:\n.b8 95,90\n}",
    );
    let body = module.functions[0].body.as_ref().expect("a body");
    let sources: Vec<_> = body
        .iter()
        .filter_map(|statement| match &statement.kind {
            StatementKind::Instruction(line) => {
                Some(line.source.map(|(file, line)| (module.files[file as usize].as_str(), line)))
            }
            _ => None,
        })
        .collect();
    let (kernel, layout) = ("/a/kernel.cu", "/a/layout.cuh");
    assert_eq!(sources, [None, Some((kernel, 17)), Some((layout, 40)), Some((layout, 40))]);
}

#[test]
fn variables_have_sizes_and_values() {
    let module = module(
        ".extern .shared .align 128 .b8 dynamic[];\n\
         .shared .align 16 .b8 tile[2][64];\n\
         .global .align 4 .b8 table[8] = {1, 2, 0xFF};\n\
         .const .align 8 .u64 pointers[2] = {generic(table)+4, tile};\n\
         .visible .global .v2 .f32 pair = {0f3F800000, 2.0};\n\
         .global .u32 open[] = {1, 2, 3};\n\
         .global .attribute(.managed) .u32 managed;",
    );
    let sizes: Vec<(&str, u64, u32)> = module
        .variables
        .iter()
        .map(|variable| (&*variable.name, variable.bytes(), variable.alignment))
        .collect();
    let expected = [
        ("dynamic", 0, 128),
        ("tile", 128, 16),
        ("table", 8, 4),
        ("pointers", 16, 8),
        ("pair", 8, 8),
        ("open", 12, 4),
        ("managed", 4, 4),
    ];
    assert_eq!(sizes, expected);
    assert!(module.variables[0].is_extern);
    assert_eq!(module.variables[1].space, Some(Space::Shared));
    assert_eq!(module.variables[2].initial[2], InitialValue::Bits(0xff));
    assert_eq!(
        module.variables[3].initial[1],
        InitialValue::Address { name: "tile".into(), offset: 0, generic: false, byte: None }
    );
}

#[test]
fn functions_have_parameters_and_directives() {
    let module = module(
        ".extern .func (.param .b32 func_retval0) vprintf(.param .b64 a, .param .b64 b)\n;\n\
         .func  (.param .align 8 .b8 func_retval0[8]) helper(.param .align 16 .b8 x[16])\n\
         .noreturn\n{\nret;\n}\n\
         .visible .entry k(\n.param .u64 .ptr .global .align 16 k_param_0,\n\
         .param .align 64 .b8 k_param_1[128]\n)\n.maxntid 256, 1, 1\n.minnctapersm 1\n\
         .reqnctapercluster 2\n.explicitcluster\n{\nret;\n}",
    );
    assert_eq!(module.functions.len(), 3);
    assert_eq!(&*module.target[0], "sm_100a");
    assert_eq!(module.version, (9, 0));
    let external = module.function("vprintf").expect("a prototype");
    assert!(external.body.is_none() && external.is_extern);
    let kernel = module.kernels().next().expect("a kernel");
    assert_eq!(kernel.parameters[0].element, Type::U64);
    assert_eq!((kernel.parameters[1].bytes(), kernel.parameters[1].alignment), (128, 64));
    let directives: Vec<(&str, &[u64])> = kernel
        .directives
        .iter()
        .map(|directive| (&*directive.name, directive.values.as_slice()))
        .collect();
    let expected: [(&str, &[u64]); 4] = [
        ("maxntid", &[256, 1, 1]),
        ("minnctapersm", &[1]),
        ("reqnctapercluster", &[2]),
        ("explicitcluster", &[]),
    ];
    assert_eq!(directives, expected);
}

#[test]
fn registers_may_be_counted() {
    let statements = body(".reg .b32 %r<9>, a;");
    let StatementKind::Registers(declaration) = &statements[0].kind else { panic!("registers") };
    assert_eq!(declaration.names, [("%r".into(), Some(9)), ("a".into(), None)]);
}

#[test]
fn comments_and_preprocessor_lines_are_skipped() {
    let instruction = line("# 1 \"x.cu\"\n/* a\nb */ mov.u32 %r1, // c\n 7;");
    assert_eq!(instruction.operands, [Operand::Name("%r1".into()), Operand::Integer(7)]);
}

#[test]
fn errors_say_where_and_what() {
    let rows = [
        (".visible .entry k()\n{\nmov.u32 %r1 7;\n}", 6, "expected `,`, got `7`"),
        (".visible .entry k()\n{\nmov.u32 %r1, ];\n}", 6, "expected an operand, got `]`"),
        (".visible .entry k()\n{\nret;", 6, "expected a statement, got the end of the text"),
        (".global .b33 x;", 4, "`.b33` says nothing about a variable"),
        ("hello", 4, "expected a directive, got `hello`"),
        (".file 1 \"x", 4, "expected `\"` at the end of a string"),
        ("/* x", 4, "expected `*/` at the end of a comment"),
        (".visible .entry k()\n{\nmov.u32 %r1, 1/0;\n}", 6, "division by zero"),
    ];
    for (text, line, message) in rows {
        let error = wrong(text);
        assert_eq!((error.line, error.message.as_str()), (line, message), "{text}");
    }
}

/// Text that nobody compiled: sizes that wrap around or take all memory, and a parser that calls
/// itself until its stack is full.
#[test]
fn texts_beyond_any_compiler_are_refused() {
    let nested = |open: &str, close: &str| {
        format!(".global .b8 x[{}1{}];", open.repeat(100_000), close.repeat(100_000))
    };
    let operand = format!(".visible .entry k()\n{{\nmov.u32 %r1, {}", "{".repeat(100_000));
    let negated = format!(".visible .entry k()\n{{\nmov.u32 %r1, {}", "!".repeat(100_000));
    let values = format!(".global .b8 x[] = {}", "{".repeat(100_000));
    for (text, expected) in [
        (".global .b8 x[1099511627776];", "less than 4 GiB of `x`, got 1099511627776 bytes"),
        (".global .b64 x[4294967296][4294967296];", "less than 4 GiB of `x`"),
        (".visible .entry k(.param .b8 x[4294967296]) { ret; }", "less than 4 GiB of `x`"),
        (".shared .align 3 .b8 x;", "expected a power of two up to 2097152 as alignment, got 3"),
        (".shared .align 4294967296 .b8 x;", "as alignment, got 4294967296"),
        (&nested("(", ")"), "at most 64 parentheses"),
        (&nested("-", ""), "at most 64 parentheses"),
        (&operand, "at most 64 parentheses"),
        (&negated, "at most 64 parentheses"),
        (&values, "at most 64 parentheses"),
    ] {
        let message = wrong(text).message;
        assert!(message.contains(expected), "expected `{expected}` in: {message}");
    }
}
