//! Registers read and written by instructions.

use crate::decode::{
    Address, BarrierAction, BulkCompletion, Instruction, Mbarrier, MbarrierPhase, Register,
    ScalarInstruction, Source, Tcgen05, Tcgen05Operand, VoteMode, WarpGroupOperand,
};

/// Calls a function for each register; the flag is true for a write.
struct Visitor<'v>(&'v mut dyn FnMut(&mut Register, bool));

impl Visitor<'_> {
    fn read(&mut self, source: &mut Source) {
        if let Source::Register(register) = source {
            (self.0)(register, false);
        }
    }

    fn reads<'s>(&mut self, sources: impl IntoIterator<Item = &'s mut Source>) {
        sources.into_iter().for_each(|source| self.read(source));
    }

    fn address(&mut self, address: &mut Address) {
        self.read(&mut address.base);
    }

    fn write(&mut self, register: &mut Register) {
        (self.0)(register, true);
    }

    fn writes<'r>(&mut self, registers: impl IntoIterator<Item = &'r mut Register>) {
        registers.into_iter().for_each(|register| self.write(register));
    }
}

/// Visits every register of `instruction`, source registers first. `visit` may replace the
/// register; the flag is true for a write.
pub(crate) fn visit_registers(
    instruction: &mut Instruction,
    visit: &mut dyn FnMut(&mut Register, bool),
) {
    use Instruction as I;
    let v = &mut Visitor(visit);
    match instruction {
        I::Scalar(scalar) => of_scalar(scalar, v),
        I::Special { destination, .. }
        | I::CreatePolicy { destination }
        | I::ActiveMask { destination } => v.write(destination),
        I::BranchIndexed { index, .. } => v.read(index),
        I::Load(load) => {
            v.address(&mut load.address);
            v.writes(load.destinations.iter_mut().flatten());
        }
        I::Store(store) => {
            v.address(&mut store.address);
            v.reads(&mut store.sources);
        }
        I::Atomic(atomic) => {
            v.address(&mut atomic.address);
            v.reads(&mut atomic.values);
            v.reads(&mut atomic.compare);
            v.writes(atomic.destinations.iter_mut().flatten());
        }
        I::ConvertAddress { destination, source, .. }
        | I::CtaRank { destination, source, .. }
        | I::MoveMatrix { destination, source } => {
            v.read(source);
            v.write(destination);
        }
        I::IsSpace { source, .. } => v.read(source),
        I::MapAddress { destination, source, rank, .. } => {
            v.reads([source, rank]);
            v.write(destination);
        }
        I::Barrier(barrier) => {
            v.read(&mut barrier.barrier);
            v.reads(&mut barrier.threads);
            if let BarrierAction::CountPredicates { destination, .. } = &mut barrier.action {
                v.write(destination);
            }
        }
        I::WarpBarrier { mask } => v.read(mask),
        I::Fence(fence) => {
            if let crate::decode::Fence::TensorMapAcquire { address, bytes, .. } = fence {
                v.address(address);
                v.read(bytes);
            }
        }
        I::Shuffle(shuffle) => {
            v.reads([
                &mut shuffle.source,
                &mut shuffle.lane,
                &mut shuffle.control,
                &mut shuffle.mask,
            ]);
            v.writes(&mut shuffle.destination);
        }
        I::Vote(vote) => {
            v.read(&mut vote.mask);
            if let VoteMode::Ballot(destination) = &mut vote.mode {
                v.write(destination);
            }
        }
        I::Match(matching) => {
            v.reads([&mut matching.source, &mut matching.mask]);
            v.writes(&mut matching.destination);
        }
        I::Elect { destination, mask, .. } => {
            v.read(mask);
            v.writes(destination);
        }
        I::Redux { destination, source, mask, .. } => {
            v.reads([source, mask]);
            v.write(destination);
        }
        I::TryCancel { response, barrier, .. } => {
            v.address(response);
            v.address(barrier);
        }
        I::QueryCanceled { response, .. } => v.reads(response),
        I::QueryFirstCta { destinations, response } => {
            v.reads(response);
            v.writes(destinations.iter_mut().flatten());
        }
        I::Mbarrier(operation) => of_mbarrier(operation, v),
        I::CopyAsync { target, source, source_bytes, .. } => {
            v.address(target);
            v.address(source);
            v.reads(source_bytes);
        }
        I::CopyAsyncArrive { barrier, .. } => v.address(&mut barrier.address),
        I::StoreAsync(store) => {
            v.address(&mut store.target);
            v.address(&mut store.barrier);
            v.reads(&mut store.sources);
        }
        I::BulkCopy(copy) => {
            v.address(&mut copy.target);
            v.address(&mut copy.source);
            v.read(&mut copy.bytes);
            v.reads(&mut copy.multicast);
            v.reads(&mut copy.byte_mask);
            completion(&mut copy.completion, v);
        }
        I::TensorCopy(copy) => {
            v.address(&mut copy.map);
            v.address(&mut copy.shared);
            v.reads(&mut copy.coordinates);
            v.reads(&mut copy.im2col);
            v.reads(&mut copy.multicast);
            completion(&mut copy.completion, v);
        }
        I::TensorMapReplace(replace) => {
            v.address(&mut replace.map);
            v.read(&mut replace.value);
        }
        I::TensorMapCopyFence { target, source, .. } => {
            v.address(target);
            v.address(source);
        }
        I::LoadMatrix(load) => {
            v.address(&mut load.address);
            v.writes(load.destinations.iter_mut().flatten());
        }
        I::StoreMatrix(store) => {
            v.address(&mut store.address);
            v.reads(&mut store.sources);
        }
        I::WarpMma(mma) => {
            v.reads(&mut mma.a);
            v.reads(&mut mma.b);
            v.reads(&mut mma.c);
            if let Some(scales) = &mut mma.scales {
                for side in [&mut scales.a, &mut scales.b] {
                    v.reads([&mut side.data, &mut side.byte_id, &mut side.thread_id]);
                }
            }
            v.writes(mma.d.iter_mut().flatten());
        }
        I::WarpGroupMma(mma) => {
            match &mut mma.a {
                WarpGroupOperand::Descriptor(source) => v.read(source),
                WarpGroupOperand::Registers(sources) => v.reads(sources.iter_mut()),
            }
            v.read(&mut mma.b);
            // Read and written, but visited once. The read must not be missed, because it keeps the
            // value live.
            mma.d.iter_mut().for_each(|register| (v.0)(register, false));
        }
        I::Tcgen05(operation) => of_tcgen05(operation, v),
        I::Branch { .. }
        | I::Exit
        | I::Trap
        | I::ExternalCall(_)
        | I::Hint
        | I::ClusterArrive { .. }
        | I::ClusterWait { .. }
        | I::SetMaxRegisters { .. }
        | I::LaunchDependents
        | I::DependencyWait
        | I::CopyAsyncCommit
        | I::CopyAsyncWait { .. }
        | I::BulkCommit
        | I::BulkWait { .. }
        | I::WarpGroupFence
        | I::WarpGroupCommit
        | I::WarpGroupWait { .. } => {}
    }
}

fn completion(completion: &mut BulkCompletion, v: &mut Visitor<'_>) {
    if let BulkCompletion::Mbarrier(address) = completion {
        v.address(address);
    }
}

fn of_mbarrier(operation: &mut Mbarrier, v: &mut Visitor<'_>) {
    match operation {
        Mbarrier::Init { barrier, count } => {
            v.address(&mut barrier.address);
            v.read(count);
        }
        Mbarrier::Invalidate { barrier } => v.address(&mut barrier.address),
        Mbarrier::ExpectTransaction { barrier, bytes }
        | Mbarrier::CompleteTransaction { barrier, bytes } => {
            v.address(&mut barrier.address);
            v.read(bytes);
        }
        Mbarrier::Arrive { barrier, state, count, expect_bytes, .. } => {
            v.address(&mut barrier.address);
            v.reads(count);
            v.reads(expect_bytes);
            v.writes(state);
        }
        Mbarrier::Wait { barrier, phase, .. } => {
            v.address(&mut barrier.address);
            match phase {
                MbarrierPhase::State(source) | MbarrierPhase::Parity(source) => v.read(source),
            }
        }
        Mbarrier::PendingCount { destination, state } => {
            v.read(state);
            v.write(destination);
        }
    }
}

fn of_tcgen05(operation: &mut Tcgen05, v: &mut Visitor<'_>) {
    match operation {
        Tcgen05::Allocate { target, columns, .. } => {
            v.address(target);
            v.read(columns);
        }
        Tcgen05::Deallocate { address, columns, .. } => v.reads([address, columns]),
        Tcgen05::Mma(mma) => {
            v.address(&mut mma.d);
            match &mut mma.a {
                Tcgen05Operand::Descriptor(source) => v.read(source),
                Tcgen05Operand::Tensor(address) => v.address(address),
            }
            v.reads([&mut mma.b, &mut mma.instruction_descriptor]);
            v.reads(&mut mma.disable_output_lanes);
            if let Some(scales) = &mut mma.scales {
                v.address(&mut scales.a);
                v.address(&mut scales.b);
            }
        }
        Tcgen05::Copy { target, descriptor, .. } => {
            v.address(target);
            v.read(descriptor);
        }
        Tcgen05::Shift { address, .. } => v.address(address),
        Tcgen05::Commit { barrier, multicast, .. } => {
            v.address(barrier);
            v.reads(multicast);
        }
        Tcgen05::Load { destinations, address, .. } => {
            v.address(address);
            v.writes(destinations.iter_mut().flatten());
        }
        Tcgen05::Store { sources, address, .. } => {
            v.address(address);
            v.reads(sources);
        }
        Tcgen05::Relinquish { .. }
        | Tcgen05::WaitLoad
        | Tcgen05::WaitStore
        | Tcgen05::FenceBefore
        | Tcgen05::FenceAfter => {}
    }
}

fn of_scalar(scalar: &mut ScalarInstruction, v: &mut Visitor<'_>) {
    use ScalarInstruction as S;
    match scalar {
        S::Move { destination, source } => {
            v.read(source);
            v.write(destination);
        }
        S::Pack { destination, sources, .. } => {
            v.reads(sources);
            v.write(destination);
        }
        S::Unpack { destinations, source, .. } => {
            v.read(source);
            v.writes(destinations.iter_mut().flatten());
        }
        S::Unary { destination, a, .. } => {
            v.read(a);
            v.write(destination);
        }
        S::Binary { destination, a, b, .. }
        | S::Set { destination, a, b, .. }
        | S::Select { destination, a, b, .. } => {
            v.reads([a, b]);
            v.write(destination);
        }
        S::Ternary { destination, a, b, c, .. }
        | S::MixedPrecision { destination, a, b, c, .. } => {
            v.reads([a, b, c]);
            v.write(destination);
        }
        S::InsertBits { destination, a, b, position, length, .. } => {
            v.reads([a, b, position, length]);
            v.write(destination);
        }
        S::Convert { destination, sources, extra, .. } => {
            v.reads(sources);
            v.reads(extra);
            v.write(destination);
        }
        S::ConvertPack { destination, a, b, c, .. } => {
            v.reads([a, b]);
            v.reads(c);
            v.write(destination);
        }
        S::SetPredicate { a, b, .. } => v.reads([a, b]),
        S::TestFloat { a, .. } => v.read(a),
        S::MovePredicate { .. } | S::CombinePredicates { .. } => {}
    }
}
