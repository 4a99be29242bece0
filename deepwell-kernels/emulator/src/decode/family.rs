//! Instruction families for reports.

use super::instruction::Instruction;
use super::tensor_instruction::Tcgen05;

impl Instruction {
    /// Whether all lanes of a warp must run the instruction together (`.aligned`).
    pub fn is_aligned(&self) -> bool {
        use Instruction as I;
        match self {
            I::Barrier(barrier) => barrier.aligned,
            I::ClusterArrive { aligned, .. } | I::ClusterWait { aligned, .. } => *aligned,
            I::Tcgen05(operation) => !matches!(
                operation,
                Tcgen05::Mma(_)
                    | Tcgen05::Copy { .. }
                    | Tcgen05::Shift { .. }
                    | Tcgen05::Commit { .. }
                    | Tcgen05::FenceBefore
                    | Tcgen05::FenceAfter
            ),
            I::SetMaxRegisters { .. }
            | I::LoadMatrix(_)
            | I::StoreMatrix(_)
            | I::MoveMatrix { .. }
            | I::WarpMma(_)
            | I::WarpGroupMma(_)
            | I::WarpGroupFence
            | I::WarpGroupCommit
            | I::WarpGroupWait { .. } => true,
            _ => false,
        }
    }

    /// Returns the family's short name: the first word of the opcode, such as `tcgen05`, if that is
    /// descriptive, otherwise a description.
    pub fn family(&self) -> &'static str {
        use Instruction as I;
        match self {
            I::Scalar(_) => "arithmetic",
            I::Special { .. } => "special registers",
            I::Branch { .. } | I::BranchIndexed { .. } | I::Exit | I::Trap => "control flow",
            I::ExternalCall(_) | I::Hint | I::CreatePolicy { .. } | I::SetMaxRegisters { .. } => {
                "other"
            }
            I::Load(_) => "ld",
            I::Store(_) => "st",
            I::Atomic(_) => "atom",
            I::ConvertAddress { .. }
            | I::IsSpace { .. }
            | I::MapAddress { .. }
            | I::CtaRank { .. } => "addresses",
            I::Barrier(_)
            | I::WarpBarrier { .. }
            | I::ClusterArrive { .. }
            | I::ClusterWait { .. } => "barrier",
            I::Fence(_) | I::TensorMapCopyFence { .. } => "fence",
            I::Shuffle(_)
            | I::Vote(_)
            | I::Match(_)
            | I::ActiveMask { .. }
            | I::Elect { .. }
            | I::Redux { .. } => "within a warp",
            I::LaunchDependents | I::DependencyWait => "griddepcontrol",
            I::TryCancel { .. } | I::QueryCanceled { .. } | I::QueryFirstCta { .. } => {
                "clusterlaunchcontrol"
            }
            I::Mbarrier(_) => "mbarrier",
            I::CopyAsync { .. }
            | I::CopyAsyncCommit
            | I::CopyAsyncWait { .. }
            | I::CopyAsyncArrive { .. } => "cp.async",
            I::StoreAsync(_) => "st.async",
            I::BulkCopy(_) | I::TensorCopy(_) | I::BulkCommit | I::BulkWait { .. } => {
                "cp.async.bulk"
            }
            I::TensorMapReplace(_) => "tensormap",
            I::LoadMatrix(_) | I::StoreMatrix(_) | I::MoveMatrix { .. } => "ldmatrix, stmatrix",
            I::WarpMma(_) => "mma.sync",
            I::WarpGroupMma(_)
            | I::WarpGroupFence
            | I::WarpGroupCommit
            | I::WarpGroupWait { .. } => "wgmma",
            I::Tcgen05(_) => "tcgen05",
        }
    }
}
