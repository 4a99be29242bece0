//! PyTorch on the same shapes: an embedded Python program reads shapes and prints times.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::peer_task::PeerTask;
use super::{Row, Section};
use deepwell_trainer::Device;

/// The program, run by `python3 -c`.
const SCRIPT: &str = include_str!("peers.py");
/// The interpreter, found through `PATH`.
const INTERPRETER: &str = "python3";
/// Maximum number of concurrent compile processes: each holds the operands of its task.
const COMPILERS_MAX: usize = 8;
/// Environment of a compile process: by default each would start as many workers as cores.
const COMPILER: &[(&str, &str)] = &[("TORCHINDUCTOR_COMPILE_THREADS", "4")];

#[derive(Serialize)]
struct Request<'a> {
    id: i64,
    device: String,
    samples: usize,
    task: &'a PeerTask,
    compile_only: bool,
}

#[derive(Debug, Deserialize)]
struct Answer {
    id: i64,
    peer: String,
    time_s: Option<f64>,
    note: Option<String>,
    /// Peak memory of a training task.
    #[serde(default)]
    bytes: Option<f64>,
    /// Marks the end of a task in place of a peer's result.
    #[serde(default)]
    done: bool,
}

/// Sends the tasks of all `rows` to PyTorch and stores the answers in the rows. Rows of the same
/// task are measured once. If a peer cannot run, its answer gives the reason. Returns a description
/// of the peers' software.
pub fn measure(
    rows: &mut [Row],
    device: Device,
    samples: usize,
    progress: &mut dyn FnMut(&str),
) -> String {
    let mut tasks: Vec<PeerTask> = Vec::new();
    for task in rows.iter().flat_map(|row| &row.peer_tasks) {
        if !tasks.contains(task) {
            tasks.push(task.clone());
        }
    }
    if tasks.is_empty() {
        return String::new();
    }
    let mut environment = String::new();
    let mut answers: BTreeMap<i64, Vec<Answer>> = BTreeMap::new();
    let mut failures: BTreeMap<i64, String> = BTreeMap::new();
    // On a CPU, concurrent compilers would compete for the cores.
    if device != Device::Cpu {
        progress(&format!("{} tasks: what is compiled is compiled ahead", tasks.len()));
        compile_ahead(&tasks, device);
    }
    // A crash loses only the task that caused it; the remaining tasks go to a new process.
    let mut first = 0;
    while first < tasks.len() {
        let (mut done, mut began) = (first, false);
        let mut take = |answer: Answer| {
            if answer.id < 0 {
                began = true;
                environment = answer.note.unwrap_or_default();
                progress(&environment);
            } else if answer.done {
                done = done.max(answer.id as usize + 1);
            } else {
                progress(&format!("{} of {} tasks: {}", answer.id + 1, tasks.len(), answer.peer));
                answers.entry(answer.id).or_default().push(answer);
            }
        };
        let rest = tasks.iter().enumerate().skip(first);
        let ended = ask(requests(rest, device, samples, false), &[], &mut take);
        if done == tasks.len() || environment.starts_with("no torch") {
            break;
        }
        let why = ended.err().unwrap_or_else(|| "no answer".to_string());
        progress(&format!("{} of {} tasks: failed: {why}", done + 1, tasks.len()));
        // A process that does not start will not start for the next task either.
        let lost = if began { done..done + 1 } else { done..tasks.len() };
        first = lost.end;
        failures.extend(lost.map(|id| (id as i64, why.clone())));
    }
    for row in rows {
        for task in row.peer_tasks.clone() {
            let Some(id) = tasks.iter().position(|other| *other == task) else { continue };
            let id = id as i64;
            let without_torch = environment.starts_with("no torch").then_some(&environment);
            if let Some(why) = failures.get(&id).or(without_torch) {
                row.add_peer("torch", None, Some(why.clone()));
            }
            for Answer { peer, time_s, note, bytes, .. } in answers.get(&id).into_iter().flatten() {
                match (row.section, *bytes, time_s) {
                    (Section::Memory, Some(bytes), _) => {
                        row.add_peer_memory(peer, bytes, note.clone());
                    }
                    (Section::Memory, None, Some(_)) => {}
                    _ => row.add_peer(peer, *time_s, note.clone()),
                }
            }
        }
    }
    environment
}

/// Requests to the program, a line for each task.
fn requests<'a>(
    tasks: impl Iterator<Item = (usize, &'a PeerTask)>,
    device: Device,
    samples: usize,
    compile_only: bool,
) -> Vec<String> {
    let device = device.to_string();
    let request = |(id, task)| {
        let request =
            Request { id: id as i64, device: device.clone(), samples, task, compile_only };
        serde_json::to_string(&request).expect("a task is plain data")
    };
    tasks.map(request).collect()
}

/// Fills PyTorch's cache of compiled code with several processes, because compiling takes longer
/// than all the timing. Compile errors are reported when the task is timed.
fn compile_ahead(tasks: &[PeerTask], device: Device) {
    let compiles = |task: &PeerTask| {
        // Layers of experts at once would not fit.
        !matches!(
            task,
            PeerTask::Gemm { fp8: true, .. }
                | PeerTask::GroupedGemm { .. }
                | PeerTask::MoeLayer { .. }
        )
    };
    // The longest tasks first, dealt to the processes in turn.
    let mut order: Vec<(usize, &PeerTask)> =
        tasks.iter().enumerate().filter(|(_, task)| compiles(task)).collect();
    order.sort_by_key(|(_, task)| match task {
        PeerTask::Train { .. } | PeerTask::Forward { .. } => 0,
        PeerTask::AdamW { .. } => 1,
        _ => 2,
    });
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let processes = (threads / 2).clamp(1, COMPILERS_MAX).min(order.len());
    let workers: Vec<_> = (0..processes)
        .map(|worker| {
            let tasks = order.iter().copied().skip(worker).step_by(processes);
            let requests = requests(tasks, device, 1, true);
            std::thread::spawn(move || ask(requests, COMPILER, &mut |_| {}))
        })
        .collect();
    for worker in workers {
        // A task that failed to compile here is compiled when it is timed.
        let _ = worker.join();
    }
}

/// Sends requests to one process with additional environment variables.
fn ask(
    requests: Vec<String>,
    environment: &[(&str, &str)],
    take: &mut dyn FnMut(Answer),
) -> Result<(), String> {
    let mut child = Command::new(INTERPRETER)
        .args(["-c", SCRIPT])
        .envs(environment.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("`{INTERPRETER}` cannot be started: {error}"))?;
    let (Some(mut input), Some(output), Some(errors)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(format!("`{INTERPRETER}` has no pipes"));
    };
    // Drain stderr: libraries warn at length, and a full pipe would block the process.
    let errors = std::thread::spawn(move || {
        let lines = BufReader::new(errors).lines().map_while(Result::ok);
        lines.filter(|line| !line.trim().is_empty()).last().unwrap_or_default()
    });
    // A process without torch does not read its input; the error is in its answer.
    let writer = std::thread::spawn(move || writeln!(input, "{}", requests.join("\n")).is_ok());
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        // Other lines are printed by libraries.
        if let Ok(answer) = serde_json::from_str::<Answer>(&line) {
            take(answer);
        }
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    let last_error = errors.join().unwrap_or_default();
    let _ = writer.join();
    if status.success() { Ok(()) } else { Err(format!("{INTERPRETER}: {status}: {last_error}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_what_the_program_reads() {
        let check = |task: PeerTask, expected: &str| {
            let text = serde_json::to_string(&task).unwrap();
            assert_eq!(text, expected);
            let kind = text.split('"').nth(3).unwrap();
            assert!(SCRIPT.contains(&format!("    \"{kind}\": {kind},")), "{kind}");
            assert_eq!(serde_json::from_str::<PeerTask>(&text).unwrap(), task);
        };
        check(PeerTask::AdamW { lengths: vec![3] }, r#"{"kind":"adamw","lengths":[3]}"#);
        check(
            PeerTask::GroupedGemm {
                gemm: "wgrad".to_string(),
                rows: vec![1, 0],
                n: 2,
                k: 3,
                fp8: true,
            },
            r#"{"kind":"grouped_gemm","gemm":"wgrad","rows":[1,0],"n":2,"k":3,"fp8":true}"#,
        );
        check(
            PeerTask::MoeLayer {
                tokens: 4,
                hidden: 8,
                width: 16,
                top_k: 1,
                pairs: vec![3, 1],
                fp8: false,
            },
            "{\"kind\":\"moe_layer\",\"tokens\":4,\"hidden\":8,\"width\":16,\"top_k\":1,\
             \"pairs\":[3,1],\"fp8\":false}",
        );
        check(PeerTask::GradNorm { lengths: vec![] }, r#"{"kind":"grad_norm","lengths":[]}"#);
        check(
            PeerTask::Rope { batch: 1, seq: 2, heads: 3, head_dim: 4, backward: true },
            r#"{"kind":"rope","batch":1,"seq":2,"heads":3,"head_dim":4,"backward":true}"#,
        );
        check(
            PeerTask::Quantize {
                rows: 1,
                columns: 2,
                dtype: "f32".to_string(),
                axis: "row".to_string(),
                block: 32,
                square: false,
            },
            "{\"kind\":\"quantize\",\"rows\":1,\"columns\":2,\"dtype\":\"f32\",\"axis\":\"row\",\
             \"block\":32,\"square\":false}",
        );
    }

    #[test]
    fn rows_without_a_task_ask_nobody() {
        let mut rows = [Row::new(Section::Memory, "peak")];
        let said = measure(&mut rows, Device::Cpu, 1, &mut |_| panic!("nobody was to be asked"));
        assert_eq!((said.as_str(), rows[0].peers.len()), ("", 0));
    }
}
