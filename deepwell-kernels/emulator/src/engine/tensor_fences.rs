//! Detection of kernels that order tensor memory without `tcgen05.fence::after_thread_sync`.

use crate::decode::{Instruction, Mbarrier, Program, Semantics, Tcgen05};

/// Returns the first MMA and the first load of a kernel that relies only on the acquire of its
/// mbarrier waits: no wait is followed by a `tcgen05.fence::after_thread_sync`. CUTLASS and
/// ThunderKittens have such kernels. Kernels with a single commit are excluded, because there the
/// fence was more likely forgotten, as are kernels with a relaxed wait or with a fence after a
/// wait.
pub(crate) fn left_out(program: &Program) -> Option<(u32, u32)> {
    let (mut commits, mut waits) = (0, false);
    let (mut mma, mut load) = (None, None);
    for (at, step) in (0..).zip(&program.steps) {
        match &step.instruction {
            Instruction::Mbarrier(Mbarrier::Wait { semantics: Semantics::Relaxed, .. }) => {
                return None;
            }
            Instruction::Mbarrier(Mbarrier::Wait { .. }) => waits = true,
            Instruction::Barrier(_) | Instruction::ClusterWait { .. } => waits = false,
            Instruction::Tcgen05(Tcgen05::FenceAfter) if waits => return None,
            Instruction::Tcgen05(Tcgen05::Commit { .. }) => commits += 1,
            Instruction::Tcgen05(Tcgen05::Mma(_)) => mma = mma.or(Some(at)),
            Instruction::Tcgen05(Tcgen05::Load { .. }) => load = load.or(Some(at)),
            _ => {}
        }
    }
    mma.zip(load).filter(|_| commits > 1)
}

#[cfg(test)]
mod tests {
    use super::left_out;
    use crate::decode::{GlobalAddresses, decode};
    use crate::ptx;

    const WAIT: &str = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;";
    const RELAXED: &str = "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p1, [%r1], 0;";
    const FENCE: &str = "tcgen05.fence::after_thread_sync;";
    const COMMIT: &str =
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];";
    const MMA: &str = "tcgen05.mma.cta_group::1.kind::f16 [%r1], %l1, %l2, %r2, %p1;";
    const LOAD: &str = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r1];";

    fn check(lines: &[&str], expected: Option<(u32, u32)>) {
        let text = format!(
            ".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k() {{\n\
             .reg .pred %p<8>; .reg .b32 %r<8>; .reg .b64 %l<8>;\n{}\nret; }}",
            lines.join("\n")
        );
        let module = ptx::parse(&text).expect("the lines are PTX");
        let program = decode(&module, "k", &GlobalAddresses::new()).expect("all is known");
        assert_eq!(left_out(&program), expected, "{lines:#?}");
    }

    #[test]
    fn who_never_fences_behind_a_wait_counts_on_the_acquire() {
        check(&[WAIT, MMA, COMMIT, COMMIT, WAIT, LOAD], Some((1, 5)));
        // A fence for the address of an allocation does not count for MMAs.
        check(&["bar.sync 0;", FENCE, WAIT, MMA, COMMIT, COMMIT, WAIT, LOAD], Some((3, 7)));
        check(&[WAIT, MMA, COMMIT, WAIT, LOAD], None);
        check(&[WAIT, FENCE, MMA, COMMIT, COMMIT, WAIT, LOAD], None);
        check(&[WAIT, MMA, COMMIT, COMMIT, RELAXED, LOAD], None);
    }
}
