//! Ranks of one process that find each other over the loopback.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

const LIMIT: Duration = Duration::from_secs(20);

/// No test takes as long.
const LIMITS: Limits = Limits {
    beat: Duration::from_secs(5),
    silence: Duration::from_secs(60),
    stuck: Duration::from_secs(90),
};

/// Rank `rank` of as many, where nobody else listens.
fn launched(rank: u32, world_size: u32, port: u16) -> Launched {
    Launched {
        launcher: "a test",
        rank,
        local_rank: rank as usize,
        world_size,
        address: "127.0.0.1".to_string(),
        port,
        attempt: 0,
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}

/// As many ranks, of which each is open.
fn world(size: u32) -> Vec<Heartbeat> {
    world_with(size, LIMITS)
}

fn world_with(size: u32, limits: Limits) -> Vec<Heartbeat> {
    let port = free_port();
    let open =
        |rank| Heartbeat::open(&launched(rank, size, port), LIMIT, limits, VERSIONS).unwrap();
    (0..size).map(open).collect()
}

const VERSIONS: &str = "deepwell 1, NCCL 2.27.3";

/// Limits in milliseconds.
fn limits(beat: u64, silence: u64, stuck: u64) -> Limits {
    let [beat, silence, stuck] = [beat, silence, stuck].map(Duration::from_millis);
    Limits { beat, silence, stuck }
}

/// Waits until a rank knows of a failure.
fn failure_of(heartbeat: &Heartbeat) -> Failure {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(failure) = heartbeat.failure() {
            return failure;
        }
        assert!(Instant::now() < end, "no failure within {:?}", LIMIT);
        thread::sleep(LOOK_EVERY);
    }
}

#[test]
fn every_rank_gets_the_id_and_goes() {
    let ranks = world(3);
    ranks[0].publish(&[7; 128], LIMIT).unwrap();
    for rank in &ranks[1..] {
        assert_eq!(rank.id(LIMIT).unwrap(), [7; 128]);
    }
    // Whoever has said goodbye may go: the others go on.
    let mut ranks = ranks;
    let last = ranks.pop().unwrap();
    last.finish();
    drop(last);
    thread::sleep(4 * LOOK_EVERY);
    assert_eq!((ranks[0].failure(), ranks[1].failure()), (None, None));
    ranks[0].finish();
    ranks.remove(0);
    thread::sleep(4 * LOOK_EVERY);
    assert_eq!(ranks[0].failure(), None);
}

#[test]
fn a_failure_is_told_to_all() {
    for culprit in 0..3 {
        let ranks = world(3);
        ranks[0].publish(&[1; 128], LIMIT).unwrap();
        let told = Arc::new(AtomicU32::new(0));
        for rank in &ranks {
            let told = Arc::clone(&told);
            rank.on_failure(move |rank, reason| {
                assert_eq!((rank, reason), (culprit, "out of data"));
                told.fetch_add(1, Ordering::Relaxed);
            });
        }
        ranks[culprit as usize].fail("out of data");
        assert!(ranks[culprit as usize].is_told(), "rank 0 knows of it");
        for rank in &ranks {
            assert_eq!(failure_of(rank), (culprit, "out of data".to_string()));
        }
        // The first one counts, and is told once.
        ranks[0].fail("because of that");
        assert_eq!(failure_of(&ranks[0]).1, "out of data");
        assert_eq!(told.load(Ordering::Relaxed), 3);
    }
}

#[test]
fn a_rank_that_dies_is_named() {
    let mut ranks = world(3);
    ranks[0].publish(&[1; 128], LIMIT).unwrap();
    drop(ranks.remove(1));
    for rank in &ranks {
        let (culprit, reason) = failure_of(rank);
        assert_eq!(culprit, 1);
        assert!(reason.starts_with("its process ended without a word"), "{reason}");
    }
}

#[test]
fn a_rank_that_fails_before_the_others_come() {
    let port = free_port();
    let first = Heartbeat::open(&launched(0, 2, port), LIMIT, LIMITS, VERSIONS).unwrap();
    first.fail("no data");
    let error = first.publish(&[1; 128], LIMIT).unwrap_err().to_string();
    assert_eq!(error, "rank 0 of 2: no data");
    // Whoever comes then hears of it.
    let late = Heartbeat::open(&launched(1, 2, port), LIMIT, LIMITS, VERSIONS).unwrap();
    let error = late.id(LIMIT).unwrap_err().to_string();
    assert_eq!(error, "rank 0 of 2: no data");
}

#[test]
fn ranks_that_do_not_fit_are_named() {
    let check = |second: Launched, expected: &str| {
        let first = Heartbeat::open(&launched(0, 2, second.port), LIMIT, LIMITS, VERSIONS).unwrap();
        let second = Heartbeat::open(&second, LIMIT, LIMITS, VERSIONS).unwrap();
        let (_, reason) = failure_of(&first);
        assert_eq!(reason, expected);
        assert_eq!(failure_of(&second).1, expected);
    };
    check(launched(1, 3, free_port()), "it was told of 3 ranks, rank 0 of 2");
    check(launched(2, 2, free_port()), "two processes were told to be rank 2 of 2");
}

#[test]
fn ranks_of_other_versions_are_named() {
    let port = free_port();
    let first = Heartbeat::open(&launched(0, 2, port), LIMIT, LIMITS, VERSIONS).unwrap();
    let other = "deepwell 1, NCCL 2.22.1";
    let second = Heartbeat::open(&launched(1, 2, port), LIMIT, LIMITS, other).unwrap();
    let expected =
        "it has deepwell 1, NCCL 2.22.1, rank 0 has deepwell 1, NCCL 2.27.3\nhint: start";
    for rank in [&first, &second] {
        let (culprit, reason) = failure_of(rank);
        assert!(culprit == 1 && reason.starts_with(expected), "{reason}");
    }
}

#[test]
fn strangers_and_late_ranks_are_passed_over() {
    let port = free_port();
    let first = Heartbeat::open(&launched(0, 2, port), LIMIT, LIMITS, VERSIONS).unwrap();
    let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let late = Launched { attempt: 7, ..launched(1, 2, port) };
    let _late = Heartbeat::open(&late, LIMIT, LIMITS, VERSIONS).unwrap();
    let limit = Duration::from_millis(500);
    let error = first.publish(&[1; 128], limit).unwrap_err().to_string();
    assert!(error.contains("got nothing of rank 1 for 500ms"), "{error}");
    assert_eq!(first.failure(), None);
}

#[test]
fn nobody_is_waited_for_without_limit() {
    let limit = Duration::from_millis(300);
    let port = free_port();
    let error =
        Heartbeat::open(&launched(1, 2, port), limit, LIMITS, VERSIONS).err().unwrap().to_string();
    assert!(error.contains("expected rank 0 at `127.0.0.1`"), "{error}");
    let taken = TcpListener::bind(("0.0.0.0", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error =
        Heartbeat::open(&launched(0, 2, port), limit, LIMITS, VERSIONS).err().unwrap().to_string();
    assert!(error.contains("to be free, got ") && error.contains("MASTER_PORT"), "{error}");
}

#[test]
fn limits_are_ordered() {
    for seconds in [1, 30, 600, 1800, 100_000] {
        let exchange = Duration::from_secs(seconds);
        let Limits { beat, silence, stuck } = Limits::of(exchange);
        let ordered = Duration::ZERO < beat && 4 * beat < silence && silence < stuck;
        assert!(ordered && stuck < exchange, "{seconds}: {beat:?} {silence:?} {stuck:?}");
    }
    assert_eq!(Limits::of(Duration::from_secs(1800)).beat, Duration::from_secs(5));
}

/// A machine that lost its power: the connection stays, and nothing comes any more.
#[test]
fn a_rank_that_is_silent_is_named() {
    let port = free_port();
    let first =
        Heartbeat::open(&launched(0, 2, port), LIMIT, limits(20, 300, 5000), VERSIONS).unwrap();
    let mut silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    silent.write_all(&Hello { rank: 1, world_size: 2, attempt: 0 }.to_bytes()).unwrap();
    let begin = Instant::now();
    let (rank, reason) = failure_of(&first);
    assert_eq!((rank, reason.as_str()), (1, "gave no sign of life for 300ms"));
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

/// Ranks that live and go on, then one of them does not.
#[test]
fn a_rank_that_is_stuck_is_named() {
    for culprit in 0..3u32 {
        let ranks = world_with(3, limits(10, 3000, 400));
        // Before anything has begun nobody is stuck: data is read, kernels are compiled.
        thread::sleep(Duration::from_millis(700));
        assert!(ranks.iter().all(|rank| rank.failure().is_none()));
        for step in 1..=4u64 {
            for rank in &ranks {
                rank.begun().store(step, Ordering::Relaxed);
            }
            thread::sleep(Duration::from_millis(150));
        }
        assert!(ranks.iter().all(|rank| rank.failure().is_none()), "they go on");
        let begin = Instant::now();
        for (rank, heartbeat) in (0..).zip(&ranks) {
            heartbeat.begun().store(if rank == culprit { 4 } else { 5 }, Ordering::Relaxed);
        }
        for rank in &ranks {
            let (named, reason) = failure_of(rank);
            assert_eq!(named, culprit, "{reason}");
            assert!(reason.starts_with("it has not gone on for 400ms"), "{reason}");
        }
        assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    }
}
