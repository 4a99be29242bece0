//! Registers of asynchronous MMAs and tensor-memory loads.

use super::cluster::ClusterState;
use super::warp::Warp;
use super::world::World;
use crate::decode::{
    Instruction, Program, Register, ScalarInstruction, Source, Tcgen05, WarpGroupOperand,
};
use crate::hazard::{Direction, Unit};

/// 32-bit registers that an instruction reads and writes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Touches {
    reads: Vec<u32>,
    writes: Vec<u32>,
}

impl Touches {
    fn read(&mut self, source: &Source) {
        if let Source::Register(Register::Word(index) | Register::Half(index)) = source {
            self.reads.push(*index);
        }
    }

    fn write(&mut self, register: &Register) {
        if let Register::Word(index) | Register::Half(index) = register {
            self.writes.push(*index);
        }
    }

    fn all<'a>(
        mut self,
        reads: impl IntoIterator<Item = &'a Source>,
        writes: impl IntoIterator<Item = &'a Register>,
    ) -> Touches {
        reads.into_iter().for_each(|source| self.read(source));
        writes.into_iter().for_each(|register| self.write(register));
        self
    }
}

/// Returns the registers of an ordinary instruction. MMAs and tensor-memory loads report their own
/// registers.
fn touches(instruction: &Instruction) -> Touches {
    use Instruction as I;
    let none = Touches::default();
    match instruction {
        I::Scalar(scalar) => of_scalar(scalar),
        I::Special { destination, .. } | I::ActiveMask { destination } => {
            none.all([], [destination])
        }
        I::Load(load) => none.all([&load.address.base], load.destinations.iter().flatten()),
        I::Store(store) => none.all(store.sources.iter().chain([&store.address.base]), []),
        I::Atomic(atomic) => none.all(
            atomic.values.iter().chain(&atomic.compare).chain([&atomic.address.base]),
            atomic.destinations.iter().flatten(),
        ),
        I::Shuffle(shuffle) => none.all(
            [&shuffle.source, &shuffle.lane, &shuffle.control, &shuffle.mask],
            &shuffle.destination,
        ),
        I::Redux { destination, source, .. } => none.all([source], [destination]),
        I::Match(matching) => none.all([&matching.source], &matching.destination),
        I::StoreMatrix(store) => none.all(store.sources.iter().chain([&store.address.base]), []),
        I::LoadMatrix(load) => none.all([&load.address.base], load.destinations.iter().flatten()),
        I::MoveMatrix { destination, source } => none.all([source], [destination]),
        I::WarpMma(mma) => {
            none.all(mma.a.iter().chain(&mma.b).chain(&mma.c), mma.d.iter().flatten())
        }
        I::StoreAsync(store) => none.all(&store.sources, []),
        I::Tcgen05(Tcgen05::Store { sources, address, .. }) => {
            none.all(sources.iter().chain([&address.base]), [])
        }
        _ => none,
    }
}

fn of_scalar(scalar: &ScalarInstruction) -> Touches {
    use ScalarInstruction as S;
    let none = Touches::default();
    match scalar {
        S::Move { destination, source } => none.all([source], [destination]),
        S::Pack { destination, sources, .. } => none.all(sources, [destination]),
        S::Unpack { destinations, source, .. } => none.all([source], destinations.iter().flatten()),
        S::Unary { destination, a, .. } => none.all([a], [destination]),
        S::Binary { destination, a, b, .. } => none.all([a, b], [destination]),
        S::Ternary { destination, a, b, c, .. } => none.all([a, b, c], [destination]),
        S::InsertBits { destination, a, b, position, length, .. } => {
            none.all([a, b, position, length], [destination])
        }
        S::Convert { destination, sources, extra, .. } => {
            none.all(sources.iter().chain(extra), [destination])
        }
        S::ConvertPack { destination, a, b, c, .. } => {
            none.all([a, b].into_iter().chain(c), [destination])
        }
        S::MixedPrecision { destination, a, b, c, .. } => none.all([a, b, c], [destination]),
        S::SetPredicate { a, b, .. } => none.all([a, b], []),
        S::Set { destination, a, b, .. } | S::Select { destination, a, b, .. } => {
            none.all([a, b], [destination])
        }
        S::TestFloat { a, .. } => none.all([a], []),
        S::MovePredicate { .. } | S::CombinePredicates { .. } => none,
    }
}

/// Marks the 32-bit registers of `wgmma` and `tcgen05.ld`, and registers copied from or to these.
/// Empty if there are none.
pub(crate) fn in_flight(program: &Program) -> Vec<bool> {
    let mut used = vec![false; program.word_count as usize];
    let mut mark = |register: &Register| {
        if let Register::Word(index) | Register::Half(index) = register
            && let Some(used) = used.get_mut(*index as usize)
        {
            *used = true;
        }
    };
    for step in &program.steps {
        match &step.instruction {
            Instruction::WarpGroupMma(mma) => {
                mma.d.iter().for_each(&mut mark);
                if let WarpGroupOperand::Registers(sources) = &mma.a {
                    for source in sources {
                        if let Source::Register(register) = source {
                            mark(register);
                        }
                    }
                }
            }
            Instruction::Tcgen05(Tcgen05::Load { destinations, .. }) => {
                destinations.iter().flatten().for_each(&mut mark);
            }
            _ => {}
        }
    }
    if !used.contains(&true) {
        return Vec::new();
    }
    let mut grows = true;
    while grows {
        grows = false;
        for step in &program.steps {
            if let Instruction::Scalar(ScalarInstruction::Move {
                destination: Register::Word(to),
                source: Source::Register(Register::Word(from)),
            }) = &step.instruction
            {
                let (to, from) = (*to as usize, *from as usize);
                if used[to] != used[from] {
                    (used[to], used[from], grows) = (true, true, true);
                }
            }
        }
    }
    used
}

/// Returns, for each instruction, its accesses to registers of asynchronous instructions.
pub(crate) fn watched(program: &Program) -> Vec<Option<Box<Touches>>> {
    let used = in_flight(program);
    if used.is_empty() {
        return Vec::new();
    }
    (program.steps.iter())
        .map(|step| {
            let mut found = touches(&step.instruction);
            found.reads.retain(|register| used[*register as usize]);
            found.writes.retain(|register| used[*register as usize]);
            let some = !found.reads.is_empty() || !found.writes.is_empty();
            some.then(|| Box::new(found))
        })
        .collect()
}

/// Reports the register accesses of a warp's current instruction.
#[cold]
pub(crate) fn touch(
    instruction: &Instruction,
    touches: &Touches,
    warp: &mut Warp,
    cluster: &ClusterState,
    world: &mut World<'_>,
    mask: u32,
) {
    let pc = warp.pc;
    if let Instruction::Scalar(ScalarInstruction::Move {
        destination: Register::Word(to),
        source: Source::Register(Register::Word(from)),
    }) = instruction
    {
        warp.watch.copy(*from, *to);
        return;
    }
    if let Instruction::Scalar(ScalarInstruction::Move {
        destination: Register::Word(to),
        source: Source::Immediate(_),
    }) = instruction
    {
        // A `mov` of a constant is no access: the assembler moves the constant to a legal position.
        warp.watch.copy(u32::MAX, *to);
        return;
    }
    let directions = (touches.reads.iter().map(|register| (*register, Direction::Read)))
        .chain(touches.writes.iter().map(|register| (*register, Direction::Write)));
    for (register, direction) in directions {
        if let Some(found) = warp.watch.touch(register, direction, pc)
            && let Some(thread) = world.thread(warp, cluster, mask)
        {
            let earlier = world.program.steps.get(found.1 as usize);
            let is_load = earlier.is_some_and(|step| {
                matches!(step.instruction, Instruction::Tcgen05(Tcgen05::Load { .. }))
            });
            let unit = if is_load { Unit::TensorLoad } else { Unit::WarpGroupMma };
            if let Some(tracker) = &mut world.tracker {
                tracker.report_register(thread, unit, found);
            }
        }
    }
}

/// Filters the 32-bit registers.
pub(crate) fn words<'a>(registers: impl IntoIterator<Item = &'a Register>) -> Vec<u32> {
    (registers.into_iter())
        .filter_map(|register| match register {
            Register::Word(index) | Register::Half(index) => Some(*index),
            Register::Long(_) => None,
        })
        .collect()
}
