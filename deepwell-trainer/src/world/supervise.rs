//! The ranks of one machine without a launcher: a process for each GPU, and a supervising process.
//!
//! The processes get the environment variables of torchrun. A process stops in order when its
//! standard input ends, at the latest with this process; signals of a terminal reach only this
//! process.

use std::net::TcpListener;
use std::process::{Child, ChildStdin, Command, ExitStatus as ProcessStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Device, ExitStatus, Settings, TrainError};

/// How long the other ranks may take to end after a failure.
const GRACE: Duration = Duration::from_secs(60);
/// Polling interval.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Process of a rank, killed on drop if still running.
struct Rank {
    process: Child,
    input: Option<ChildStdin>,
    status: Option<ProcessStatus>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.status.is_none() {
            // The process has ended meanwhile, or is killed now.
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

/// Runs this program once for each rank of the settings, with the same arguments and `more`, until
/// all have ended or `stop` is set.
///
/// # Errors
/// GPUs or a library are missing; a process cannot be started, or ended without an explanation.
pub fn supervise(
    settings: &Settings,
    more: &[&str],
    stop: &AtomicBool,
) -> Result<ExitStatus, TrainError> {
    let Device::Cuda(first) = settings.device else { return Ok(ExitStatus::Success) };
    let hardware = deepwell_probe::probe();
    for index in first..first + settings.ranks {
        Device::Cuda(index).target(&hardware)?;
    }
    // Checked once, before any rank starts.
    super::member::library_version(settings.device)?;
    let program = std::env::current_exe().map_err(TrainError::io("this program"))?;
    let port = free_port()?;
    let mut ranks = Vec::with_capacity(settings.ranks);
    for rank in 0..settings.ranks {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).args(more);
        command.envs(environment(rank, settings.ranks, port, &|name| {
            std::env::var_os(name).is_some()
        }));
        command.env_remove("TORCHELASTIC_RESTART_COUNT").stdin(Stdio::piped());
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut process = command.spawn().map_err(TrainError::io(&program))?;
        let input = process.stdin.take();
        ranks.push(Rank { process, input, status: None });
    }
    let ended = wait_for(&mut ranks, stop)?;
    outcome(&ended)
}

/// The environment variables of torchrun, and variables that keep ranks from disturbing each other:
/// `port` is the port of rank 0.
fn environment(
    rank: usize,
    ranks: usize,
    port: u16,
    is_set: &dyn Fn(&str) -> bool,
) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", ranks.to_string()),
        ("LOCAL_WORLD_SIZE", ranks.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_string()),
        ("MASTER_PORT", (port - 1).to_string()),
    ];
    // Switches of NVLink add in any order: two runs would not have the same bits.
    variables.push(("NCCL_ALGO", "^NVLS".to_string()));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    variables.push(("RAYON_NUM_THREADS", (cores / ranks).max(1).to_string()));
    variables
        .retain(|(name, _)| !(matches!(*name, "NCCL_ALGO" | "RAYON_NUM_THREADS") && is_set(name)));
    variables
}

fn free_port() -> Result<u16, TrainError> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(TrainError::io("a port"))?;
    Ok(listener.local_addr().map_err(TrainError::io("a port"))?.port())
}

/// Returns the exit statuses of the ranks, in the order of their detection.
fn wait_for(
    ranks: &mut [Rank],
    stop: &AtomicBool,
) -> Result<Vec<(usize, ProcessStatus)>, TrainError> {
    let mut ended = Vec::new();
    let mut failed_at: Option<Instant> = None;
    while ended.len() < ranks.len() {
        for (index, rank) in ranks.iter_mut().enumerate() {
            if rank.status.is_some() {
                continue;
            }
            if stop.load(Ordering::Relaxed) {
                rank.input = None;
            }
            if failed_at.is_some_and(|at| at.elapsed() > GRACE) {
                // The process has ended meanwhile, or is killed now.
                let _ = rank.process.kill();
            }
            rank.status = rank.process.try_wait().map_err(TrainError::io("a rank's process"))?;
            if let Some(status) = rank.status {
                ended.push((index, status));
                if !status.success() {
                    failed_at.get_or_insert_with(Instant::now);
                }
            }
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(ended)
}

/// Result of the ranks: that of rank 0, unless it did not report the failure.
fn outcome(ended: &[(usize, ProcessStatus)]) -> Result<ExitStatus, TrainError> {
    let of_first = ended.iter().find(|(rank, _)| *rank == 0).and_then(|(_, status)| status.code());
    match (of_first, ended.iter().find(|(_, status)| !status.success())) {
        (_, None) => Ok(ExitStatus::Success),
        (Some(code), Some(_)) if code != 0 => Ok(ExitStatus::Reported(code as u8)),
        (_, Some((rank, status))) => {
            let reason = format!("its process ended: {status}");
            Err(TrainError::of_rank(*rank as u32, ended.len() as u32, reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks_of(scripts: &[&str]) -> Vec<Rank> {
        let spawn = |script: &&str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdin(Stdio::piped());
            let mut process = command.spawn().unwrap();
            let input = process.stdin.take();
            Rank { process, input, status: None }
        };
        scripts.iter().map(spawn).collect()
    }

    #[test]
    fn how_ranks_end() {
        let check = |scripts: &[&str], expected: Result<ExitStatus, &str>| {
            let ended = wait_for(&mut ranks_of(scripts), &AtomicBool::new(false)).unwrap();
            let got = outcome(&ended).map_err(|error| error.to_string());
            assert_eq!(got, expected.map_err(str::to_string), "{scripts:?}");
        };
        check(&["exit 0", "exit 0"], Ok(ExitStatus::Success));
        // Rank 0 has printed the error.
        check(&["exit 2", "exit 1"], Ok(ExitStatus::Reported(2)));
        check(&["exit 130", "exit 130"], Ok(ExitStatus::Reported(130)));
        check(
            &["exit 0", "sleep 0.3; exit 3"],
            Err("rank 1 of 2: its process ended: exit status: 3"),
        );
        check(
            &["kill -9 $$", "sleep 0.3; exit 1"],
            Err("rank 0 of 2: its process ended: signal: 9 (SIGKILL)"),
        );
    }

    #[test]
    fn ranks_stop_with_their_input() {
        let mut ranks = ranks_of(&["cat; exit 130", "cat; exit 130"]);
        let ended = wait_for(&mut ranks, &AtomicBool::new(true)).unwrap();
        assert!(matches!(outcome(&ended), Ok(ExitStatus::Reported(130))));
    }

    #[test]
    fn what_ranks_are_told() {
        let variables = environment(1, 2, 4321, &|name| name == "NCCL_ALGO");
        let of = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.as_str())
        };
        assert_eq!((of("RANK"), of("WORLD_SIZE")), (Some("1"), Some("2")));
        assert_eq!((of("MASTER_ADDR"), of("MASTER_PORT")), (Some("127.0.0.1"), Some("4320")));
        assert!(of("NCCL_ALGO").is_none() && of("RAYON_NUM_THREADS").is_some());
        assert_eq!(
            environment(0, 2, 2, &|_| false).iter().find(|(name, _)| *name == "NCCL_ALGO"),
            Some(&("NCCL_ALGO", "^NVLS".to_string()))
        );
    }
}
