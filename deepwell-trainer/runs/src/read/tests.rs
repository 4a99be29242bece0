//! Folders as writers leave them.

use std::fs;

use serde_json::json;

use super::*;

/// A folder of a run.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(files: &[(&str, &str)]) -> Folder {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        Folder(folder)
    }

    fn read(&self) -> Run {
        read_run("run".to_owned(), self.0.path())
    }
}

/// Lines of steps with a clock of two seconds a step, and tokens of one second a step.
fn lines(steps: std::ops::RangeInclusive<u64>) -> String {
    let line = |step: u64| {
        let unix_s = 1_000_000_000.0 + 2.0 * step as f64;
        json!({"step": step, "unix_s": unix_s, "loss": 5.0 / step as f64, "grad_norm": 1.0,
            "learning_rate": 1e-3, "tokens_per_s": 512.0, "speed_of_light": 0.5})
        .to_string()
            + "\n"
    };
    steps.map(line).collect()
}

fn record(steps: u64) -> String {
    json!({"id": "0123456789abcdef0123456789abcdef", "started": "2001-09-09T01:46:40Z",
        "version": "0.1.0", "fingerprint": {"steps": steps, "seq_len": 64, "batch_size": 8,
        "data": "abc", "device": "cpu", "policy": {"format": "mxfp8"}, "seed": 3}})
    .to_string()
}

/// Reads a log, and compares the steps of its losses, the state and the notes.
#[track_caller]
fn check(log: &str, steps: &[u64], state: RunState, notes: &[&str]) {
    let run = Folder::new(&[("run.json", &record(9)), ("metrics.jsonl", log)]).read();
    let found: Vec<u64> = run.curve(Metric::Loss).iter().map(|point| point.0 as u64).collect();
    assert_eq!(found, steps, "{run:?}");
    assert_eq!(run.state, state);
    // The folder has neither facts nor a summary, which is the first note.
    assert_eq!(run.notes.len(), notes.len() + 1, "{:?}", run.notes);
    for (note, expected) in run.notes[1..].iter().zip(notes) {
        assert!(note.contains(expected), "{note}");
    }
}

#[test]
fn logs_of_writers_that_live_or_died() {
    let whole = lines(1..=9);
    check(&whole, &[1, 2, 3, 4, 5, 6, 7, 8, 9], RunState::Finished, &[]);
    check(&lines(1..=3), &[1, 2, 3], RunState::Ended, &[]);
    check("", &[], RunState::Ended, &[]);
    // Killed, or writing, in the middle of a line; after a power loss with zeros in its place.
    check(&(lines(1..=2) + "{\"step\":3,\"lo"), &[1, 2], RunState::Ended, &["line 3 of metrics"]);
    check(&(lines(1..=2) + "{\"step\":3}"), &[1, 2], RunState::Ended, &[]);
    check(&(lines(1..=2) + "\0\0\0"), &[1, 2], RunState::Ended, &["line 3 of metrics"]);
    let middle = lines(1..=1) + "no json\n\n" + &lines(2..=2);
    check(&middle, &[1, 2], RunState::Ended, &["2 lines of metrics.jsonl could not be read"]);
    // Lines that a later version may write.
    let later = lines(1..=1) + "{\"step\":1,\"novelty\":{\"a\":[1]}}\n" + &lines(2..=2);
    check(&later, &[1, 2], RunState::Ended, &[]);
    // Two logs in one file: the later values count.
    let twice = lines(1..=5) + &lines(3..=4);
    check(&twice, &[1, 2, 3, 4], RunState::Ended, &["goes back from step 5 to 3"]);
}

#[test]
fn numbers_that_are_not_finite_are_values() {
    let log = "{\"step\":1,\"loss\":\"NaN\",\"skipped\":true,\"tokens_per_s\":512}\n\
               {\"step\":2,\"loss\":null,\"tokens_per_s\":512}\n\
               {\"step\":3,\"loss\":2.5,\"tokens_per_s\":512}\n\
               {\"step\":3,\"val_loss\":\"inf\",\"val_tokens\":8}\n\
               {\"step\":3,\"val_loss\":0.0,\"val_tokens\":0}\n";
    let run = Folder::new(&[("run.json", &record(9)), ("metrics.jsonl", log)]).read();
    let losses = run.curve(Metric::Loss);
    assert!(losses[0].1.is_nan() && losses[1].1.is_nan() && losses[2] == (3.0, 2.5), "{losses:?}");
    assert_eq!(run.curve(Metric::ValLoss), [(3.0, f64::INFINITY)]);
    assert_eq!((run.loss(), run.last(Metric::ValLoss)), (Some(2.5), None));
    // 512 tokens a step at 512 tokens/s; the skipped step does not count.
    assert_eq!((run.skipped_steps, run.step_time_s), (1, 2.0));
}

#[test]
fn time_and_goodput_follow_the_clock() {
    let run = Folder::new(&[("run.json", &record(9)), ("metrics.jsonl", &lines(1..=9))]).read();
    assert_eq!(run.start_unix_s, Some(1e9));
    assert_eq!(run.times[..2], [(1.0, 2.0), (2.0, 4.0)]);
    // Steps of a second every two seconds.
    assert_eq!((run.goodput(), run.wall_s()), (Some(0.5), Some(18.0)));
    assert!(run.curve(Metric::Goodput).iter().all(|point| point.1 == 0.5));
    // Without a clock time is the sum of the steps, and goodput needs the summary.
    let log: String =
        (1..=4).map(|step| format!("{{\"step\":{step},\"tokens_per_s\":256}}\n")).collect();
    let files = [("run.json", record(4)), ("metrics.jsonl", log)];
    let mut files: Vec<(&str, &str)> =
        files.iter().map(|(name, text)| (*name, &text[..])).collect();
    let run = Folder::new(&files).read();
    assert_eq!((run.times.last(), run.has_clock, run.goodput()), (Some(&(4.0, 8.0)), false, None));
    let summary = |resumed: &str| {
        format!("{{\"wall_s\": 10.0, \"fit\": {{\"step\": 4, \"resumed_after\": {resumed}}}}}")
    };
    let (whole, resumed) = (summary("null"), summary("2"));
    files.push(("summary.json", &whole));
    assert_eq!(Folder::new(&files).read().goodput(), Some(0.8));
    files[2].1 = &resumed;
    assert_eq!(Folder::new(&files).read().goodput(), None);
}

#[test]
fn facts_come_from_the_file_that_has_them() {
    let facts = json!({
        "settings": {"model": "llama-micro", "steps": 9, "precision": "bf16", "out": "a"},
        "machine": {"name": "NVIDIA H200", "peak_bf16_flops": 1e6},
        "tokens_per_step": 512, "flops_per_step": 1000, "ranks": 1,
        "bytes_at_peak": {"weights": 5, "host": 2}, "quantized_flop_share_planned": 0.5,
        "precision": [{"tensor": "w", "format": "bf16", "reason": "role"}],
    });
    let summary = json!({
        "settings": {"model": "llama-micro", "steps": 7}, "peak_bytes_measured": 77,
        "mxfp8_flop_share": 0.4, "fit": {"interrupted": true, "step": 3},
    });
    let (facts, summary, log) = (facts.to_string(), summary.to_string(), lines(1..=3));
    let files = [
        ("run.json", &record(9)[..]),
        ("facts.json", &facts),
        ("summary.json", &summary),
        ("metrics.jsonl", &log),
    ];
    let run = Folder::new(&files).read();
    assert_eq!(run.notes, Vec::<String>::new());
    // The facts of a resumed run are newer than the summary of the process before.
    assert_eq!((run.facts.steps, run.state), (Some(9), RunState::Interrupted));
    assert_eq!(run.facts.machine.as_deref(), Some("NVIDIA H200"));
    assert_eq!(run.facts.peak_bytes_measured, Some(77.0));
    assert_eq!(run.facts.quantized_share, Some(0.4), "the name of an earlier version");
    assert_eq!(run.facts.precision, [["w", "bf16", "role"].map(str::to_owned)]);
    // 1000 FLOPs for 512 tokens at 512 tokens/s, of 1e6 FLOP/s.
    assert!((run.utilization().unwrap() - 1e-3).abs() < 1e-12);
    assert_eq!(run.settings.get("precision").map(String::as_str), Some("bf16"));
    assert!(!run.settings.contains_key("out"));
    // Without both files the fingerprint gives what it has.
    let run = Folder::new(&[files[0], files[3]]).read();
    assert_eq!((run.facts.tokens_per_step, run.facts.steps), (Some(512.0), Some(9)));
    assert_eq!(run.facts.precision_name.as_deref(), Some("mxfp8"));
    assert_eq!((run.utilization(), run.facts.machine), (None, None));
    // Nothing but a log.
    let run = Folder::new(&files[3..]).read();
    assert_eq!((run.curve(Metric::Loss).len(), run.state), (3, RunState::Unknown));
    assert!(run.notes[0].contains("run.json is missing"), "{:?}", run.notes);
    // Damaged files.
    let run = Folder::new(&[("run.json", "{"), ("metrics.jsonl", &log)]).read();
    assert!(run.notes[0].contains("run.json is no JSON"), "{:?}", run.notes);
}

#[test]
fn routing_and_events_are_summed_over_layers() {
    let log = "{\"step\":1,\"grad_norm\":1,\"experts\":[\
               {\"layer\":0,\"chosen\":[1],\"entropy\":0.9,\"largest_over_mean\":1.5,\"dead\":1},\
               {\"layer\":2,\"entropy\":0.7,\"largest_over_mean\":1.2,\"dead\":2,\"dropped\":4}]}\n\
               {\"step\":1,\"guard\":{\"step\":1,\"layer\":\"layers.3\",\"kind\":{\"to_bf16\":\
               {\"fallbacks\":1}},\"reason\":\"underflow\"}}\n\
               {\"step\":1,\"guard\":{\"step\":1,\"gemm\":\"\",\"kind\":\"non_finite_step\"}}\n\
               {\"step\":1,\"products\":[{\"ratio\":100.0},{\"ratio\":10.0},{\"ratio\":0.0}]}\n";
    let run = Folder::new(&[("metrics.jsonl", log)]).read();
    let value = |metric| run.last(metric).map(|point| point.1);
    assert_eq!(value(Metric::Entropy), Some(0.7));
    assert_eq!(value(Metric::LargestLoad), Some(1.5));
    assert_eq!((value(Metric::DeadExperts), value(Metric::Dropped)), (Some(3.0), Some(4.0)));
    assert_eq!(value(Metric::SignalToError), Some(10.0));
    let events: Vec<[&str; 2]> =
        run.events.iter().map(|event| [&event.gemm[..], &event.kind[..]]).collect();
    assert_eq!(events, [["layers.3", "to bf16"], ["", "non finite step"]]);
    assert_eq!(run.loads[&2], [(1.0, 1.2)]);
}

/// A run whose process lives is running; the lock of a dead process, or of another machine, says
/// nothing.
#[test]
fn a_run_is_running_while_its_process_lives() {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let check = |pid: u32, host: &str, expected| {
        let lock = json!({"pid": pid, "host": host, "since": ""}).to_string();
        let log = lines(1..=2);
        let files = [("run.json", record(9)), ("metrics.jsonl", log), (".deepwell.lock", lock)];
        let files: Vec<(&str, &str)> =
            files.iter().map(|(name, text)| (*name, &text[..])).collect();
        assert_eq!(Folder::new(&files).read().state, expected, "{pid} on {host}");
    };
    if host.is_empty() {
        return;
    }
    check(std::process::id(), host.trim(), RunState::Running);
    check(u32::MAX, host.trim(), RunState::Ended);
    check(std::process::id(), "elsewhere", RunState::Ended);
}

#[test]
fn times_of_records_are_seconds() {
    for (text, expected) in [
        ("1970-01-01T00:00:00Z", Some(0.0)),
        ("2000-02-29T00:00:00Z", Some(951_782_400.0)),
        ("2026-11-21T01:31:28Z", Some(1_795_224_688.0)),
        ("2026-11-21", None),
        ("yesterday", None),
    ] {
        assert_eq!(unix_s(text), expected, "{text}");
    }
}
