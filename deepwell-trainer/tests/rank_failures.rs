//! A rank that fails, panics or is stuck at any of its exchanges ends the step on every rank,
//! within a limit, with one error that names it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use deepwell_ir::Graph;
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_kernels::{Comm, CommError, Exchange, InProcess};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Parallel, TrainError, World};

const SEQ: usize = 16;
const ROWS: usize = 4;
/// How long a rank waits for another: a hundred times what one of these steps takes.
const PATIENCE: Duration = Duration::from_secs(4);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Error,
    Panic,
    Stuck,
}

/// A rank whose exchange goes wrong in its own way.
struct Faulty {
    inner: InProcess,
    fault: Fault,
    culprit: u32,
    /// Which exchange of the culprit, counted from 0.
    at: u64,
    count: Arc<AtomicU64>,
    is_released: Arc<AtomicBool>,
}

impl Comm for Faulty {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        if self.rank() == self.culprit && self.count.fetch_add(1, Ordering::Relaxed) == self.at {
            match self.fault {
                Fault::Error => {
                    let (what, reason) = ("a planted fault".to_string(), "no memory".to_string());
                    return Err(CommError::Request { what, reason });
                }
                Fault::Panic => panic!("a planted panic"),
                Fault::Stuck => {
                    while !self.is_released.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                }
            }
        }
        self.inner.exchange(exchange, input, output)
    }

    fn abort(&mut self, reason: &str) {
        self.inner.abort(reason);
    }
}

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn graph(parallel: Parallel) -> Graph {
    let name = if parallel.expert > 1 { "moe-micro" } else { "llama-micro" };
    let config = LlamaConfig::preset(name).expect("a preset");
    let config = match parallel.tensor {
        1 => config,
        _ => LlamaConfig { num_heads: 2, num_kv_heads: 2, head_dim: 32, ..config },
    };
    capture(&config).expect("a graph")
}

/// What a world of two steps ends with: the error, or the panic's words; and exchanges of the
/// culprit.
fn run(
    parallel: Parallel,
    (fault, culprit, at): (Fault, u32, u64),
    patience: Duration,
) -> (Result<(), String>, u64) {
    let (count, is_released) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let wrap = |inner: InProcess| -> Box<dyn Comm> {
        let (count, is_released) = (Arc::clone(&count), Arc::clone(&is_released));
        Box::new(Faulty { inner, fault, culprit, at, count, is_released })
    };
    let policy = PrecisionPolicy::preset("bf16").expect("a preset");
    let options = CompileOptions::new(policy, SEQ, ROWS);
    let options = CompileOptions { micro_batch: Some(1), parallel, ..options };
    let comms = InProcess::world(parallel.world_size() as u32, patience);
    let world = World::compile_on(comms, &wrap, graph(parallel), hardware(), &options);
    let mut world = world.expect("a world");
    let released = Arc::clone(&is_released);
    let told = Arc::new(std::sync::Mutex::new(None));
    let keep = Arc::clone(&told);
    world.when_stuck(Duration::from_millis(100), move |error| {
        *keep.lock().expect("nobody panics here") = Some(error.to_string());
        // What a command ends its process for.
        released.store(true, Ordering::Relaxed);
    });
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let done = world.on_all(|engine| {
            engine.initialize(1)?;
            let tokens: Vec<i32> = (0..ROWS * SEQ).map(|at| (at * 37 % 256) as i32).collect();
            (0..2).try_for_each(|_| engine.step(&tokens, &tokens, 1e-3, 1.0).map(drop))
        });
        done.map(drop).map_err(|error: TrainError| error.to_string())
    }));
    let done = match done {
        Ok(done) => done,
        Err(panic) => Err(panic.downcast_ref::<&str>().map_or("?", |words| words).to_string()),
    };
    if let Some(told) = told.lock().expect("nobody panics here").take() {
        assert_eq!(fault, Fault::Stuck, "{told}");
        assert!(told.starts_with(&format!("rank {culprit} of ")), "{told}");
        assert!(told.contains("it has not ended for 100ms"), "{told}");
    }
    (done, count.load(Ordering::Relaxed))
}

#[test]
fn a_rank_that_fails_at_any_exchange_ends_all_and_is_named() {
    let of =
        |tensor, pipeline, data, zero| Parallel { tensor, pipeline, zero, ..Parallel::data(data) };
    let never = (Fault::Error, 0, u64::MAX);
    for parallel in [
        of(1, 1, 2, 0),
        of(1, 1, 4, 3),
        of(2, 1, 1, 0),
        of(1, 2, 1, 0),
        of(2, 2, 2, 1),
        Parallel { expert: 2, ..Parallel::data(2) },
    ] {
        let (sound, _) = run(parallel, never, PATIENCE);
        assert_eq!(sound, Ok(()), "{parallel}");
        let world_size = parallel.world_size() as u32;
        for culprit in [0, world_size - 1] {
            let (_, exchanges) = run(parallel, (Fault::Error, culprit, u64::MAX), PATIENCE);
            assert!(exchanges > 2, "{parallel}: {exchanges}");
            for fault in [Fault::Error, Fault::Panic, Fault::Stuck] {
                // The first, one in the middle of a step, and the last.
                let places = [0, exchanges / 3, exchanges - 1];
                // A stuck one takes the limit each time.
                let places = if fault == Fault::Stuck { &places[1..2] } else { &places[..] };
                for &at in places {
                    let what = format!("{parallel}: {fault:?} of rank {culprit} at {at}");
                    let patience = match fault {
                        Fault::Stuck => Duration::from_millis(400),
                        _ => PATIENCE,
                    };
                    let begin = Instant::now();
                    let (done, _) = run(parallel, (fault, culprit, at), patience);
                    let took = begin.elapsed();
                    assert!(took < PATIENCE, "{what}: {took:?}");
                    let error = done.expect_err(&what);
                    let expected = match fault {
                        Fault::Error => {
                            let named = format!("rank {culprit} of {world_size}: call `");
                            assert!(error.starts_with(&named), "{what}: {error}");
                            "a planted fault: no memory".to_string()
                        }
                        Fault::Panic => "a planted panic".to_string(),
                        Fault::Stuck => format!("not there: rank {culprit}"),
                    };
                    assert!(
                        error.contains(&expected),
                        "{what}: expected `{expected}` in `{error}`"
                    );
                }
            }
        }
    }
}
