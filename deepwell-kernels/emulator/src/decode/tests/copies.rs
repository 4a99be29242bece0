//! Copies of registers that an instruction before has read from elsewhere.

use super::*;

/// `mov` of an address made one instruction of two lines, of which the first register got nothing:
/// a kernel that kept both computed addresses from zero.
#[test]
fn a_copy_leaves_its_source_where_it_is() {
    let text = ".extern .shared .align 16 .b8 dynamic[];\n.visible .entry k()\n{\n\
        .reg .b32 %r<4>;\nmov.u32 %r0, dynamic;\nmov.u32 %r1, %r0;\nmov.u32 %r2, %tid.x;\n\
        mov.b32 %r3, %r2;\nret;\n}";
    let program = program_of(text, &GlobalAddresses::new()).expect("known");
    let kinds: Vec<&str> = program
        .steps
        .iter()
        .map(|step| match &step.instruction {
            Instruction::Special { .. } => "special",
            Instruction::Scalar(ScalarInstruction::Move { .. }) => "move",
            Instruction::Exit => "exit",
            _ => "other",
        })
        .collect();
    assert_eq!(kinds, ["special", "move", "special", "move", "exit", "exit"]);
}
