//! Planted bugs: small kernels that are right as they stand, and what is reported when one thing
//! in them is wrong. Runs are eager, so that most of these bugs leave every value right: a report
//! owes nothing to luck.
//!
//! A program is PTX of one kernel `k`, with parameters `input` and `output` (64 KiB each, the input
//! written) and a tensor map of the input. Its lines may carry a mark, `// @name`; a bug is an edit
//! of marked lines. `WAIT address, parity` stands for a loop of `mbarrier.try_wait`, `MULTICAST`
//! for the words of a tensor copy to several CTAs of a cluster.

mod aligned;
mod bulk;
mod cluster;
mod copies;
mod grids;
mod orders;
mod registers;
mod swizzles;
mod tensor_memory;
mod threads;
mod warp_groups;

use deepwell_emulator::bulk::{ElementType, Swizzle, TensorMap, TensorMapSpec};
use deepwell_emulator::error::EmulatorError;
use deepwell_emulator::launch::{Arguments, Emulator, LaunchSpec, Report, Settings};

/// A kernel that is right.
pub(crate) struct Program {
    pub(crate) target: &'static str,
    pub(crate) grid: u32,
    pub(crate) cluster: u32,
    pub(crate) threads: u32,
    /// Declarations of shared memory.
    pub(crate) shared: &'static str,
    pub(crate) body: &'static str,
}

impl Program {
    /// One CTA of so many threads of sm_90a.
    pub(crate) const fn of(threads: u32, shared: &'static str, body: &'static str) -> Program {
        Program { target: "sm_90a", grid: 1, cluster: 1, threads, shared, body }
    }
}

/// What is wrong: each edit is a mark and what its line becomes.
pub(crate) struct Bug(
    pub(crate) &'static str,
    pub(crate) &'static [(&'static str, &'static str)],
    /// The rule of a fault, the kind of a hazard, `deadlock`, `unwritten` or `refused`.
    pub(crate) &'static str,
);

const BYTES: usize = 64 * 1024;

const MULTICAST: &str = "cp.async.bulk.tensor.2d.shared::cluster.global.tile\
                         .mbarrier::complete_tx::bytes.multicast::cluster";

/// Input rows of the tensor map: 64 of 64 words of two bytes.
const MAP_ROW: u64 = 64;

fn text(program: &Program, edits: &[(&str, &str)]) -> String {
    let mut lines: Vec<String> = Vec::new();
    for (mark, _) in edits {
        let count = program.body.lines().filter(|line| marked(line, mark)).count();
        assert_eq!(count, 1, "lines marked @{mark}");
    }
    for line in program.body.lines() {
        let edit = edits.iter().find(|(mark, _)| marked(line, mark));
        let with = edit.map_or(line, |(_, with)| *with);
        for line in with.lines() {
            match line.trim().strip_prefix("WAIT ") {
                Some(of) => {
                    let of = of.split(';').next().unwrap_or(of);
                    lines.push(format!(
                        "{{\n.reg .pred q;\nW: mbarrier.try_wait.parity.acquire.cluster\
                         .shared::cta.b64 q, {of};\n@!q bra W;\n}}"
                    ));
                }
                None => lines.push(line.replace("MULTICAST", MULTICAST)),
            }
        }
    }
    let (target, threads, shared) = (program.target, program.threads, program.shared);
    let body = lines.join("\n");
    let cluster = match program.cluster {
        1 => String::new(),
        blocks => format!(".explicitcluster\n.reqnctapercluster {blocks}, 1, 1\n"),
    };
    format!(
        ".version 9.0\n.target {target}\n.address_size 64\n.visible .entry k(\n\
         .param .u64 input,\n.param .u64 output,\n.param .align 64 .b8 map[128]\n)\n\
         .maxntid {threads}, 1, 1\n.minnctapersm 1\n{cluster}{{\n\
         .reg .pred %p<16>;\n.reg .b32 %r<64>;\n.reg .b64 %rd<32>;\n.reg .f32 %f<64>;\n{shared}\n\
         ld.param.u64 %rd0, [input];\nld.param.u64 %rd1, [output];\nmov.b64 %rd2, map;\n\
         mov.u32 %r0, %tid.x;\n{body}\nret;\n}}\n"
    )
}

fn marked(line: &str, mark: &str) -> bool {
    line.split_once("// @").is_some_and(|(_, of)| of.trim() == mark)
}

/// What was found: names of rules and kinds.
pub(crate) fn findings_with(
    program: &Program,
    edits: &[(&str, &str)],
    settings: Settings,
) -> Vec<String> {
    findings_of(program, edits, Swizzle::None, settings)
}

/// The same with a swizzle of the tensor map.
pub(crate) fn findings_of(
    program: &Program,
    edits: &[(&str, &str)],
    swizzle: Swizzle,
    settings: Settings,
) -> Vec<String> {
    match launch(program, edits, swizzle, settings) {
        Ok((report, _)) => {
            let mut found: Vec<String> =
                report.hazards.iter().map(|hazard| hazard.kind.name().to_owned()).collect();
            found.extend(report.unwritten.iter().map(|_| "unwritten".to_owned()));
            found.dedup();
            found
        }
        Err(EmulatorError::Fault(report)) => {
            vec![report.fault.rule.to_owned(), report.to_string()]
        }
        Err(error @ EmulatorError::Deadlock { .. }) => {
            vec!["deadlock".to_owned(), error.to_string()]
        }
        Err(other) => vec!["refused".to_owned(), other.to_string()],
    }
}

/// Runs a program; returns the report and the words of the output.
pub(crate) fn launch(
    program: &Program,
    edits: &[(&str, &str)],
    swizzle: Swizzle,
    settings: Settings,
) -> Result<(Report, Vec<u32>), EmulatorError> {
    let text = text(program, edits);
    // Two instructions of a thousand threads are few: a loop without end is found soon.
    let settings = Settings { step_limit: 1_000_000, ..settings };
    let mut emulator = Emulator::new(settings);
    let module = emulator.load(&text)?;
    let input = emulator.allocate(BYTES as u64, "input");
    let numbers: Vec<u8> = (0..BYTES / 2).flat_map(|at| (at as u16 % 3).to_le_bytes()).collect();
    emulator.write(input, &numbers).expect("it was allocated");
    let output = emulator.allocate(BYTES as u64, "output");
    emulator.write(output, &[0; BYTES]).expect("it was allocated");
    let mut map =
        TensorMapSpec::new(ElementType::U16, input, &[MAP_ROW, 64], &[2 * MAP_ROW], &[64, 8]);
    map.swizzle = swizzle;
    let map = TensorMap::encode(&map).expect("it is legal");
    let spec = LaunchSpec {
        kernel: "k".to_owned(),
        grid: [program.grid, 1, 1],
        block: [program.threads, 1, 1],
        cluster: [program.cluster, 1, 1],
        shared_bytes: 0,
        arguments: Arguments::new().u64(input).u64(output).structure(&map, 64).bytes(),
        programmatic: false,
    };
    let report = emulator.launch(module, &spec)?;
    let words = emulator.read(output, BYTES).expect("it was allocated").chunks_exact(4);
    let words = words.map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")));
    Ok((report, words.collect()))
}

/// Nothing is found in the program, and the right thing in each of its bugs.
pub(crate) fn check(program: &Program, bugs: &[Bug]) {
    check_with_map(program, Swizzle::None, bugs);
}

/// The same with a swizzle of the tensor map.
pub(crate) fn check_with_map(program: &Program, swizzle: Swizzle, bugs: &[Bug]) {
    let findings = |edits: &[_]| findings_of(program, edits, swizzle, Settings::default());
    let whole = findings(&[]);
    assert!(whole.is_empty(), "the program itself: {whole:#?}\n{}", text(program, &[]));
    let mut wrong = Vec::new();
    for Bug(name, edits, expected) in bugs {
        let found = findings(edits);
        if !found.iter().any(|of| of == expected) {
            wrong.push(format!("{name}: expected `{expected}`, found {found:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
