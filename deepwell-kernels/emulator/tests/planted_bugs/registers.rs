//! `setmaxnreg`: registers that move between the warp groups of a CTA.

use crate::{Bug, Program, check};

/// 168 registers of a thread at launch: 40 for the producer, 232 for each of two consumers.
const ROLES: Program = Program::of(
    384,
    ".shared .align 4 .b8 word[4];",
    "setp.ge.u32 %p0, %r0, 128;
     @%p0 bra CONSUMER;
     setmaxnreg.dec.sync.aligned.u32 40; // @dec
     bra MEET;
     CONSUMER:
     setmaxnreg.inc.sync.aligned.u32 232; // @inc
     MEET:
     bar.sync 0; // @meet",
);

#[test]
fn registers_of_roles() {
    check(
        &ROLES,
        &[
            Bug("the producer keeps its registers", &[("dec", "")], "deadlock"),
            Bug(
                "the producer keeps too many",
                &[("dec", "setmaxnreg.dec.sync.aligned.u32 48;")],
                "deadlock",
            ),
            Bug(
                "consumers ask for too many",
                &[("inc", "setmaxnreg.inc.sync.aligned.u32 240;")],
                "deadlock",
            ),
            Bug(
                "a warp of the producer keeps its registers",
                &[(
                    "dec",
                    "setp.ge.u32 %p1, %r0, 32;\n\
                     @%p1 setmaxnreg.dec.sync.aligned.u32 40;",
                )],
                "deadlock",
            ),
            Bug(
                "one warp of a consumer asks for more",
                &[(
                    "inc",
                    "setp.ge.u32 %p1, %r0, 160;\n\
                     @%p1 setmaxnreg.inc.sync.aligned.u32 232;",
                )],
                "setmaxnreg-warp-group",
            ),
            Bug(
                "the consumers give registers back that they lack",
                &[("inc", "setmaxnreg.dec.sync.aligned.u32 232;")],
                "setmaxnreg-direction",
            ),
            Bug(
                "the producer asks for fewer",
                &[("dec", "setmaxnreg.inc.sync.aligned.u32 40;")],
                "setmaxnreg-direction",
            ),
            Bug(
                "a second one without a barrier",
                &[(
                    "dec",
                    "setmaxnreg.dec.sync.aligned.u32 40;\n\
                     setmaxnreg.dec.sync.aligned.u32 32;",
                )],
                "setmaxnreg-warp-group",
            ),
        ],
    );
}
