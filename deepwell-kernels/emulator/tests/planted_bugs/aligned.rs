//! `.aligned` instructions, which all lanes of a warp run together.

use crate::{Bug, Program, check};

const MEETING: Program = Program::of(
    64,
    ".shared .align 4 .b8 word[4];",
    "setp.ge.u32 %p0, %r0, 16;
     mov.u32 %r1, word; // @leave
     bar.sync 0; // @meet",
);

#[test]
fn lanes_leave_before_an_aligned_barrier() {
    check(
        &MEETING,
        &[
            Bug(
                "most lanes of a warp skip it",
                &[("meet", "@!%p0 bar.sync 0;")],
                "aligned-without-lanes",
            ),
            Bug(
                "most lanes of a warp branch around it",
                &[("leave", "@%p0 bra END;"), ("meet", "bar.sync 0;\nEND:")],
                "aligned-without-lanes",
            ),
        ],
    );
}
