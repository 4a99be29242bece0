//! Ranks that split the batch train as one rank does: the same bits, on every rank.
//!
//! The reference is one rank that runs the micro-batches of the others one after the other: it
//! makes the gradients of each part whole, adds them up on the host in the order of the ranks, and
//! updates once. Its program exchanges nothing.

mod ranks;

use std::time::Duration;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::{Call, Instance, Op, Program, ValueId};
use deepwell_kernels::{
    Backend, CallAction, Comm, CommError, Exchange, InProcess, KernelError, Observer,
};
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::{CompileOptions, Device, Engine, Parallel, TrainError, World};

use ranks::reference::{Bits, CLIP, Case, LEARNING_RATE, SEED, scale};
use ranks::{graph, hardware};

const SEQ: usize = 32;
const STEPS: usize = 4;

/// How long a rank waits for another; longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// What one rank gives in the place of several.
fn reference(precision: &str, parts: usize, rows: usize) -> Bits {
    Case { device: Device::Cpu, precision, seq: SEQ, parts, rows, steps: STEPS }.run()
}

fn batch(step: usize, rows: usize) -> (Vec<i32>, Vec<i32>) {
    ranks::reference::batch(step, rows, SEQ)
}

fn options(precision: &str, ranks: usize, rows: usize) -> CompileOptions {
    let policy = PrecisionPolicy::preset(precision).unwrap();
    CompileOptions {
        micro_batch: Some(1),
        parallel: Parallel::data(ranks),
        ..CompileOptions::new(policy, SEQ, ranks * rows)
    }
}

fn world(precision: &str, ranks: usize, rows: usize) -> World {
    World::compile(graph(), hardware(), &options(precision, ranks, rows)).unwrap()
}

fn step(engine: &mut Engine, step: usize, rows: usize) -> Result<[u32; 2], TrainError> {
    let (inputs, targets) = batch(step, rows);
    let (rate, clip) = (f64::from(LEARNING_RATE), f64::from(CLIP));
    let outcome = engine.step(&inputs, &targets, rate, clip)?;
    assert!(!outcome.skipped);
    Ok([outcome.loss.to_bits(), outcome.grad_norm.to_bits()])
}

fn bits_of(engine: &mut Engine, ids: Vec<ValueId>) -> Result<Vec<u32>, TrainError> {
    let program = engine.program().clone();
    let mut bits = Vec::new();
    for id in ids {
        let mut values = vec![0u32; program.value(id).elements()];
        engine.read_value(id, cast_slice_mut(&mut values))?;
        bits.extend(values);
    }
    Ok(bits)
}

/// Masters and moments.
fn bits(engine: &mut Engine) -> Result<Vec<u32>, TrainError> {
    let program = engine.program();
    let ids = [ranks::masters_of(program), ranks::moments_of(program)].concat();
    bits_of(engine, ids)
}

/// Runs a world to the end and gives what each rank has.
fn run(mut world: World, rows: usize) -> Vec<Bits> {
    let all_rows = rows * world.size();
    let done = world.on_all(|engine| {
        engine.initialize(SEED)?;
        let steps: Result<Vec<_>, _> = (0..STEPS).map(|at| step(engine, at, all_rows)).collect();
        let ids = [ranks::masters_of(engine.program()), ranks::moments_of(engine.program())];
        let [masters, moments] = ids.map(|ids| bits_of(engine, ids));
        Ok(Bits { steps: steps?, masters: masters?, moments: moments? })
    });
    done.unwrap()
}

#[test]
fn ranks_train_as_one_does() {
    for precision in ["bf16", "mxfp8"] {
        for (ranks, rows) in [(2, 1), (3, 1), (4, 1), (2, 2)] {
            let expected = reference(precision, ranks, rows);
            for (rank, got) in run(world(precision, ranks, rows), rows).into_iter().enumerate() {
                let what = format!("{precision}, rank {rank} of {ranks}, {rows} rows");
                assert_eq!(got.steps, expected.steps, "{what}: loss and norm");
                assert!(got.masters == expected.masters, "{what}: masters");
                assert!(got.moments == expected.moments, "{what}: moments");
            }
        }
    }
}

/// Three ranks cut parameters in the middle, and fill the last slice up.
#[test]
fn ranks_that_share_the_optimizer_state_train_as_one_does() {
    for precision in ["f32", "bf16", "mxfp8"] {
        for (ranks, rows) in [(2, 2), (3, 1), (4, 1)] {
            let expected = reference(precision, ranks, rows);
            let options = options(precision, ranks, rows);
            let parallel = Parallel { zero: 1, ..options.parallel };
            let options = CompileOptions { parallel, ..options };
            let world = World::compile(graph(), hardware(), &options).unwrap();
            assert!(!world.first().program().shards.is_empty());
            for (rank, got) in run(world, rows).into_iter().enumerate() {
                let what = format!("{precision}, rank {rank} of {ranks}, {rows} rows");
                assert_eq!(got.steps, expected.steps, "{what}: loss and norm");
                assert!(got.masters == expected.masters, "{what}: masters");
                assert!(got.moments.is_empty(), "{what}: nobody has them whole");
            }
        }
    }
}

/// One rank that accumulates micro-batches in place adds each token's gradient of the embedding to
/// the sum so far, not to that of its micro-batch: the same numbers where no token comes twice in a
/// micro-batch. Its loss goes through f64 within a micro-batch.
#[test]
fn ranks_train_as_gradient_accumulation_does() {
    for (precision, ranks) in [("bf16", 2), ("bf16", 4), ("mxfp8", 3)] {
        let distinct = |step: usize| -> (Vec<i32>, Vec<i32>) {
            let token = |at: usize| ((at * 37 + step * 11) % 256) as i32;
            let rows = 0..ranks * SEQ;
            (rows.clone().map(token).collect(), rows.map(|at| token(at + 1)).collect())
        };
        let train = |engine: &mut Engine| {
            engine.initialize(SEED)?;
            let mut losses = Vec::new();
            for at in 0..STEPS {
                let (inputs, targets) = distinct(at);
                losses.push(engine.step(&inputs, &targets, 1e-2, 0.5)?.loss);
            }
            Ok((losses, bits(engine)?))
        };
        let one = CompileOptions { parallel: Parallel::default(), ..options(precision, ranks, 1) };
        let mut one = World::compile(graph(), hardware(), &one).unwrap();
        assert_eq!(one.first().program().micro_batches, ranks);
        let (expected_losses, expected) = one.on_all(train).unwrap().remove(0);
        for (losses, state) in world(precision, ranks, 1).on_all(train).unwrap() {
            assert!(state == expected, "{precision}, {ranks} ranks: masters and moments");
            for (loss, expected) in losses.iter().zip(&expected_losses) {
                // Each way rounds the loss of a micro-batch, and each sum of them, once at most.
                let bound = 2.0 * ranks as f32 * f32::EPSILON / 2.0 * expected;
                assert!((loss - expected).abs() <= bound, "{loss} beside {expected}");
            }
        }
    }
}

/// Sums in the order opposite to that of the ranks, as by who came when.
struct Reversed(InProcess);

impl Comm for Reversed {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn world_size(&self) -> u32 {
        self.0.world_size()
    }

    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let mut reversed = exchange.clone();
        reversed.group.ranks.reverse();
        self.0.exchange(&reversed, input, output)
    }

    fn abort(&mut self, reason: &str) {
        self.0.abort(reason);
    }
}

#[test]
fn another_order_of_sums_is_seen() {
    let expected = reference("bf16", 3, 1);
    let comms = InProcess::world(3, PATIENCE);
    let wrap = |comm| -> Box<dyn Comm> { Box::new(Reversed(comm)) };
    let options = options("bf16", 3, 1);
    let world = World::compile_on(comms, &wrap, graph(), hardware(), &options).unwrap();
    let got = run(world, 1);
    assert!(got[0] == got[1] && got[1] == got[2], "every rank has the same sum");
    assert!(got[0].masters != expected.masters, "floats were added in another order");
}

/// A fault in the first step of a rank.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The mean of its own tokens in place of that of all.
    OwnMean,
    /// It reads the rows of rank 0.
    FirstRows,
    /// It leaves out what others sum, with them.
    NoSum,
}

struct Planted(Fault, f32);

impl Observer for Planted {
    fn before(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        match (self.0, &call.op) {
            (Fault::OwnMean, Op::LinearCrossEntropyGrad(_)) => {
                let scale = program.host.loss_scale.expect("a scale");
                backend.write(program.value(scale).range, cast_slice(&[self.1]))?;
            }
            (Fault::NoSum, Op::Collective(_)) if call.name == "all_reduce.gradients.0" => {
                return Ok(CallAction::Skip);
            }
            _ => {}
        }
        Ok(CallAction::Run)
    }

    fn after(
        &mut self,
        _program: &Program,
        _call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        Ok(())
    }
}

#[test]
fn planted_faults_are_seen() {
    let expected = reference("bf16", 2, 1);
    for fault in [Fault::OwnMean, Fault::FirstRows, Fault::NoSum] {
        let mut world = world("bf16", 2, 1);
        let got = world.on_all(|engine| {
            engine.initialize(SEED)?;
            let (mut inputs, mut targets) = batch(0, 2);
            let own = engine.rank() * SEQ..(engine.rank() + 1) * SEQ;
            let own_scale = scale(&targets[own]);
            if matches!(fault, Fault::FirstRows) {
                inputs.copy_within(..SEQ, SEQ);
                targets.copy_within(..SEQ, SEQ);
            }
            let mut planted = Planted(fault, own_scale);
            let outcome = engine.step_observed(&inputs, &targets, 1e-2, 0.5, &mut planted)?;
            Ok([outcome.loss.to_bits(), outcome.grad_norm.to_bits()])
        });
        let got = got.unwrap();
        assert!(got.iter().any(|step| *step != expected.steps[0]), "{fault:?} changed nothing");
    }
}

/// Makes a gradient of one rank infinite or no number.
struct Poison(f32);

impl Observer for Poison {
    fn before(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        if call.name == "all_reduce.gradients.0" {
            let gradient = program.parameters[5].gradient.expect("a gradient");
            let range = program.value(gradient).range;
            let first = deepwell_ir::ByteRange { bytes: 4, ..range };
            backend.write(first, cast_slice(&[self.0]))?;
        }
        Ok(CallAction::Run)
    }

    fn after(
        &mut self,
        _program: &Program,
        _call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        Ok(())
    }
}

#[test]
fn a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() {
    for (poisoned, value) in [(0, f32::NAN), (1, f32::NAN), (2, f32::INFINITY)] {
        let mut world = world("mxfp8", 3, 1);
        let skipped = world.on_all(|engine| {
            engine.initialize(SEED)?;
            step(engine, 0, 3)?;
            let before = bits(engine)?;
            let (inputs, targets) = batch(1, 3);
            let poison = if engine.rank() == poisoned { value } else { 0.0 };
            let mut poison = Poison(poison);
            let outcome = engine.step_observed(&inputs, &targets, 1e-2, 0.5, &mut poison)?;
            assert!(outcome.skipped && !outcome.grad_norm.is_finite());
            assert!(bits(engine)? == before, "a skipped step changes nothing");
            assert_eq!(engine.applied_steps()?, (1, 1));
            // And they go on.
            step(engine, 2, 3)
        });
        let skipped = skipped.unwrap();
        assert!(skipped.iter().all(|after| *after == skipped[0]), "{skipped:?}");
    }
}

#[test]
fn ranks_fall_back_together() {
    let mut world = world("mxfp8", 2, 1);
    let ends = world.on_all(|engine| {
        engine.initialize(SEED)?;
        step(engine, 0, 2)?;
        let own = engine.statistics().to_vec();
        let all = engine.statistics_of_ranks()?;
        assert_eq!(own.len(), all.len());
        let elements = |stats: &[deepwell_trainer::OperandStats]| -> u64 {
            stats.iter().map(|it| it.stats.elements).sum()
        };
        // Activations and gradients are counted on both, as are the copies of the same weights.
        assert_eq!(elements(&all), 2 * elements(&own));
        engine.fall_back(&[7, 9, 12], "a test")?;
        let last = step(engine, 1, 2)?;
        Ok((all, last, bits(engine)?))
    });
    let ends = ends.unwrap();
    assert!(ends[0] == ends[1], "both ranks saw the same and did the same");
}

#[test]
fn a_rank_that_fails_ends_all_and_is_named() {
    type Fails<'a> = &'a (dyn Fn(&mut Engine) -> Result<(), TrainError> + Sync);
    let check = |fails: Fails<'_>, begins: &str, expected: &str| {
        let mut world = world("mxfp8", 3, 1);
        let begin = std::time::Instant::now();
        let error = world.on_all(|engine| {
            engine.initialize(SEED)?;
            if engine.rank() == 1 {
                fails(engine)?;
            }
            step(engine, 0, 3)?;
            step(engine, 1, 3)
        });
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(begins), "{error}");
        assert!(error.contains(expected), "{error}");
        assert!(begin.elapsed() < PATIENCE, "the others did not wait for it");
    };
    check(
        &|engine| engine.step(&[], &[], 0.1, 1.0).map(drop),
        "rank 1 of 3: ",
        "expected 96 inputs and targets",
    );
    // A token that is not in the vocabulary, in the part of rank 1.
    check(
        &|engine| {
            let (mut inputs, targets) = batch(0, 3);
            inputs[SEQ + 5] = 256;
            engine.step(&inputs, &targets, 0.1, 1.0).map(drop)
        },
        "rank 1 of 3: ",
        "token 256",
    );
    // It goes another way than the others; who sees it first says so.
    check(
        &|engine| {
            step(engine, 0, 3)?;
            engine.statistics_of_ranks().map(drop)
        },
        "rank ",
        "wait for each other",
    );
}

#[test]
fn a_rank_that_panics_ends_all() {
    let panics = std::panic::catch_unwind(|| {
        let mut world = world("bf16", 2, 1);
        let _ = world.on_all(|engine| {
            engine.initialize(SEED)?;
            assert!(engine.rank() == 0, "on purpose");
            step(engine, 0, 2)
        });
    });
    let message = panics.unwrap_err();
    let message = message.downcast_ref::<&str>().copied().unwrap_or("");
    assert!(message.contains("on purpose"), "{message}");
}

#[test]
fn a_batch_that_ranks_cannot_split_is_refused() {
    let options = CompileOptions { global_batch: 4, ..options("bf16", 3, 1) };
    let error = World::compile(graph(), hardware(), &options).err().unwrap().to_string();
    assert_eq!(error, "batch size: expected a multiple of the 3 ranks that split it, got 4");
}
