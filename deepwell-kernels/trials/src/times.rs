//! Runs tests, measures their times, and prints them in the line of each test, with a list of the
//! slowest at the end.
//!
//! libtest-mimic prints the result of a test when its function returns, and has no times. So the
//! functions passed to libtest-mimic run one by one and only wait for the actual tests, which a
//! thread pool runs in the same order. The lines are printed in the order of names, independent of
//! the order of completion.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use libtest_mimic::{Arguments, Completion, Failed, FormatSetting, Trial};

use crate::Test;

/// Length of the list of the slowest tests.
const SLOWEST: usize = 10;

/// Result and duration of a test.
struct Ended {
    seconds: f64,
    result: thread::Result<Completion>,
}

/// Pending tests, and the channels for their results.
type Queue = Mutex<VecDeque<(&'static Test, Sender<Ended>)>>;

/// Seconds of completed tests, with their paths.
type Times = Arc<Mutex<Vec<(String, f64)>>>;

/// Runs `tests` on the number of threads in `arguments`.
pub(crate) fn run(arguments: &Arguments, tests: BTreeMap<String, &'static Test>) -> ExitCode {
    let threads = arguments
        .test_threads
        .or_else(|| thread::available_parallelism().ok().map(Into::into))
        .unwrap_or(1);
    // No test of this harness is ignored statically or is a benchmark.
    let runs_none = arguments.list || arguments.ignored || arguments.bench;
    let is_pretty = matches!(arguments.format, None | Some(FormatSetting::Pretty))
        && !arguments.quiet
        && arguments.logfile.is_none();
    // The names were filtered before.
    let one_by_one = Arguments { test_threads: Some(1), skip: Vec::new(), ..arguments.clone() };

    let queue = Queue::default();
    let times = Times::default();
    let mut trials = Vec::new();
    for (path, test) in tests {
        let (sender, receiver) = channel();
        lock(&queue).push_back((test, sender));
        // With a single thread, a test runs within its line, on the main thread.
        let alone = (threads == 1).then_some(test);
        let times = Arc::clone(&times);
        let name = path.clone();
        trials.push(Trial::ignorable_test(path, move || {
            finish(name, alone, &receiver, &times, is_pretty)
        }));
    }
    let conclusion = thread::scope(|scope| {
        if threads > 1 && !runs_none {
            for _ in 0..threads {
                scope.spawn(|| work(&queue));
            }
        }
        libtest_mimic::run(&one_by_one, trials)
    });
    if is_pretty && !runs_none {
        print!("{}", slowest(&lock(&times)));
    }
    conclusion.exit_code()
}

/// Takes and runs tests until the queue is empty.
fn work(queue: &Queue) {
    loop {
        // The lock is released before the test runs.
        let next = lock(queue).pop_front();
        let Some((test, sender)) = next else { break };
        // The receiver is gone only if the run has already ended.
        let _ = sender.send(timed(test));
    }
}

fn timed(test: &Test) -> Ended {
    let begin = Instant::now();
    let result = std::panic::catch_unwind(|| test.run());
    Ended { seconds: begin.elapsed().as_secs_f64(), result }
}

/// Waits for a test, or runs the test `alone`; prints its time in its line.
fn finish(
    path: String,
    alone: Option<&'static Test>,
    receiver: &Receiver<Ended>,
    times: &Times,
    is_pretty: bool,
) -> Result<Completion, Failed> {
    let ended = match alone {
        Some(test) => timed(test),
        None => receiver.recv().map_err(|_| "no thread ran this test")?,
    };
    lock(times).push((path, ended.seconds));
    if is_pretty {
        print!("{:.2} s ", ended.seconds);
        let _ = std::io::stdout().flush();
    }
    ended.result.or_else(|panic| std::panic::resume_unwind(panic))
}

/// Lists the slowest tests and the sum of all times, one per line.
fn slowest(times: &[(String, f64)]) -> String {
    if times.is_empty() {
        return String::new();
    }
    let mut sorted: Vec<_> = times.iter().collect();
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
    let sum: f64 = times.iter().map(|(_, seconds)| seconds).sum();
    let mut text = "slowest tests:\n".to_string();
    for (path, seconds) in sorted.into_iter().take(SLOWEST) {
        text.push_str(&format!("{seconds:>9.2} s  {path}\n"));
    }
    text.push_str(&format!("{sum:>9.2} s  all {} tests\n\n", times.len()));
    text
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_come_first_and_no_more_than_ten() {
        assert_eq!(slowest(&[]), "");
        let of = |count: usize| -> Vec<(String, f64)> {
            (0..count).map(|index| (format!("a::t{index}"), index as f64 / 4.0)).collect()
        };
        let two = "slowest tests:\n     0.25 s  a::t1\n     0.00 s  a::t0\n     \
                   0.25 s  all 2 tests\n\n";
        assert_eq!(slowest(&of(2)), two);
        let twelve = slowest(&of(12));
        assert_eq!(twelve.lines().count(), 1 + SLOWEST + 2, "{twelve}");
        assert!(twelve.lines().nth(1).unwrap().ends_with("2.75 s  a::t11"), "{twelve}");
        assert!(!twelve.contains("a::t1\n"), "{twelve}");
    }

    fn sleeps() {
        thread::sleep(std::time::Duration::from_millis(30));
    }

    fn fails() {
        panic!("on purpose");
    }

    fn skips() {
        crate::skip("no device");
    }

    static TESTS: [Test; 4] = [
        Test::new("a", "fails", fails),
        Test::new("a", "skips", skips),
        Test::new("a", "sleeps", sleeps),
        Test::new("a", "sleeps_too", sleeps),
    ];

    #[test]
    fn each_test_runs_once_and_gives_its_result_on_any_number_of_threads() {
        for threads in [1, 3, 9] {
            let queue = Queue::default();
            let times = Times::default();
            let mut receivers = Vec::new();
            for test in &TESTS {
                let (sender, receiver) = channel();
                lock(&queue).push_back((test, sender));
                receivers.push(receiver);
            }
            thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| work(&queue));
                }
            });
            let results: Vec<&str> = TESTS
                .iter()
                .zip(&receivers)
                .map(|(test, receiver)| {
                    let wait = || finish(test.path(), None, receiver, &times, false);
                    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(wait)) {
                        Ok(Ok(Completion::Completed)) => "ok",
                        Ok(Ok(Completion::Ignored { .. })) => "ignored",
                        Ok(Err(_)) => "lost",
                        Err(_) => "failed",
                    }
                })
                .collect();
            assert_eq!(results, ["failed", "ignored", "ok", "ok"], "{threads} threads");
            let times = lock(&times);
            assert_eq!(times.len(), TESTS.len());
            assert!(times[2].1 >= 0.03 && times[3].1 >= 0.03, "{times:?}");
            assert!(lock(&queue).is_empty());
        }
    }
}
