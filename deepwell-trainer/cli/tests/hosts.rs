//! Ranks that are processes, connected by TCP: on one machine, and on hosts of their own, which are
//! network namespaces. The test starts the processes with the variables that torchrun sets.

mod run_in_folder;

use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use deepwell_trials::{skip, trial};

use crate::run_in_folder::{PATIENCE, TestFolder, end_of, free_port, metrics, text};

/// Hosts in networks of their own, with a cable each to a router.
struct Hosts {
    /// Names of the namespaces; the last is the router.
    names: Vec<String>,
}

/// Runs `ip` with these words; returns whether it succeeded.
fn ip(words: &str) -> bool {
    let output = Command::new("ip").args(words.split(' ')).output();
    output.is_ok_and(|output| output.status.success())
}

impl Hosts {
    /// Skips the test where this user may not make namespaces.
    fn new(count: usize) -> Hosts {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = |index: usize| format!("dw{}-{number}-{index}", std::process::id());
        let hosts = Hosts { names: (0..=count).map(name).collect() };
        let router = &hosts.names[count];
        let is_made = hosts.names.iter().all(|name| ip(&format!("netns add {name}")))
            && ip(&format!("netns exec {router} sysctl -q net.ipv4.ip_forward=1"))
            && (0..count).all(|index| hosts.connect(index));
        if !is_made {
            skip("no network namespaces: `ip netns` of iproute2, as root");
        }
        hosts
    }

    /// Lays a cable from a host to the router.
    fn connect(&self, index: usize) -> bool {
        let (host, router) = (&self.names[index], &self.names[self.names.len() - 1]);
        let [own, gateway] = [Hosts::address(index), format!("10.77.{index}.1")];
        [
            format!("-n {host} link add net type veth peer name port{index} netns {router}"),
            format!("-n {router} address add {gateway}/24 dev port{index}"),
            format!("-n {router} link set port{index} up"),
            format!("-n {host} address add {own}/24 dev net"),
            format!("-n {host} link set net up"),
            format!("-n {host} link set lo up"),
            format!("-n {host} route add default via {gateway}"),
        ]
        .iter()
        .all(|words| ip(words))
    }

    fn address(index: usize) -> String {
        format!("10.77.{index}.2")
    }

    /// Cuts or mends the cable of a host.
    fn set_cable(&self, index: usize, state: &str) {
        let router = &self.names[self.names.len() - 1];
        assert!(ip(&format!("-n {router} link set port{index} {state}")), "port {index} {state}");
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| {
            ip(&format!("netns delete {name}"));
        });
    }
}

/// Starts a rank of `train` on a host, or on this machine.
fn rank(train: &str, [rank, ranks]: [usize; 2], hosts: Option<&Hosts>, port: u16) -> Child {
    let first = hosts.map_or("127.0.0.1".to_string(), |_| Hosts::address(0));
    let mut words = train.split_whitespace();
    let mut command = match hosts {
        Some(hosts) => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &hosts.names[rank]]);
            command
        }
        None => Command::new(words.next().expect("a command")),
    };
    command.args(words).args(["--launched", "--device", "cpu"]);
    let (local_rank, local) = if hosts.is_some() { (0, 1) } else { (rank, ranks) };
    for (name, value) in [
        ("RANK", rank),
        ("LOCAL_RANK", local_rank),
        ("WORLD_SIZE", ranks),
        ("LOCAL_WORLD_SIZE", local),
        ("MASTER_PORT", port.into()),
        ("TORCHELASTIC_RESTART_COUNT", 0),
        ("RAYON_NUM_THREADS", 1),
    ] {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", first);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().expect("a process")
}

/// Starts all ranks.
fn all_ranks(train: &str, ranks: usize, hosts: Option<&Hosts>) -> Vec<Child> {
    let port = free_port();
    (0..ranks).map(|index| rank(train, [index, ranks], hosts, port)).collect()
}

/// Trains on processes and on threads, and compares losses and norms.
fn check(name: &str, plan: &str, ranks: usize, hosts: Option<&Hosts>) {
    let place = TestFolder::new();
    let plan = format!("{plan} --batch-size 12 --steps 3 --no-checkpoints");
    for process in all_ranks(&place.train("processes", &plan), ranks, hosts) {
        let output = end_of(process);
        assert!(output.status.success(), "{name}: {}", text(&output));
    }
    let threads = place.train("threads", &format!("{plan} --devices cpu:{ranks}"));
    let output = Command::new("sh").args(["-c", &format!("exec {threads}")]).output();
    let output = output.expect("a shell");
    assert!(output.status.success(), "{name}: {}", text(&output));
    let [expected, got] = ["threads", "processes"].map(|out| metrics(&place.path(out)));
    assert!(expected.iter().any(|line| line[1].is_some() && line[2].is_some()), "{name}");
    assert_eq!(got, expected, "{name}");
}

trial!(processes_over_tcp_have_the_bits_of_threads);
fn processes_over_tcp_have_the_bits_of_threads() {
    check("shares", "--model llama-micro --zero 3", 4, None);
    check("stages", "--model gpt2-micro --tp 2 --pp 2", 4, None);
    check("experts", "--model moe-micro --ep 2 --cp 2 --zero 1", 4, None);
}

trial!(hosts_have_the_bits_of_threads);
fn hosts_have_the_bits_of_threads() {
    for ranks in [2, 3] {
        let hosts = Hosts::new(ranks);
        check("hosts", "--model llama-micro --zero 1", ranks, Some(&hosts));
    }
}

trial!(a_cut_cable_ends_all_ranks_and_the_run_goes_on);
/// A cut cable sends no word: heartbeats end, and so do all ranks, within the limit of
/// `--rank-timeout`. The run goes on from its last checkpoint.
fn a_cut_cable_ends_all_ranks_and_the_run_goes_on() {
    const LIMIT: Duration = Duration::from_secs(24);
    let hosts = Hosts::new(3);
    let place = TestFolder::new();
    let plan = |steps: u64, more: &str| {
        let limit = LIMIT.as_secs();
        let plan = format!("--model llama-micro --batch-size 3 --steps {steps} {more}");
        place.train("out", &format!("{plan} --checkpoint-every 5 --rank-timeout {limit}"))
    };
    let mut processes = all_ranks(&plan(100_000, ""), 3, Some(&hosts));
    let begin = Instant::now();
    let newest = || {
        let entries = deepwell_ckpt::list(&place.path("out").join("checkpoints"));
        entries.ok().and_then(|entries| entries.last().map(|entry| entry.step))
    };
    while newest().is_none() {
        let has_ended = processes[0].try_wait().expect("a process").is_some();
        if has_ended || begin.elapsed() > PATIENCE {
            panic!("no checkpoint: {}", text(&end_of(processes.swap_remove(0))));
        }
        thread::sleep(Duration::from_millis(50));
    }
    hosts.set_cable(2, "down");
    let cut = Instant::now();
    let outputs: Vec<_> = processes.into_iter().map(end_of).collect();
    let took = cut.elapsed();
    assert!(took < LIMIT, "it took {took:?}");
    for output in &outputs {
        assert!(!output.status.success(), "{}", text(output));
    }
    let said = text(&outputs[0]);
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    assert!(errors[0].contains("rank 2 of 3"), "{said}");

    hosts.set_cable(2, "up");
    let last = newest().expect("a checkpoint") + 2;
    let resumed = plan(last, "--resume --accept-changes");
    for process in all_ranks(&resumed, 3, Some(&hosts)) {
        let output = end_of(process);
        assert!(output.status.success(), "{}", text(&output));
    }
    let steps = metrics(&place.path("out")).into_iter().filter(|line| line[1].is_some());
    let steps: Vec<u64> = steps.filter_map(|line| line[0]).collect();
    assert_eq!(steps.iter().max(), Some(&last), "{steps:?}");
}

fn main() -> ExitCode {
    deepwell_trials::run()
}
