//! Rules about CUDA sources: layers, twins on the host, tests.

use crate::kernels::unit::{
    ARCHITECTURES_MARK, CUDA_FOLDER, Include, architectures_in, include_in,
};
use crate::source::{is_word, split_rust};

use super::Violation;

/// The folders below [`CUDA_FOLDER`], lowest first.
const LAYERS: [&str; 7] = ["common", "ptx", "layout", "mma", "scheduler", "epilogue", "impls"];

/// Where the host sides of the kernels are.
const TWINS: &str = "deepwell-kernels/src/cuda/kernels/";

/// Sources of the PTX that the emulator's tests run: no kernels of the product, and their PTX names
/// their lines, so that none of the rules here is for them.
pub(crate) const FIXTURES: &str = "deepwell-kernels/emulator/tests/fixtures/";

/// Where the tests of the kernels are.
const TESTS: &str = "deepwell-kernels/tests/cuda/";

/// A text file: its path from the root, with forward slashes, and what is in it.
pub(crate) type Text = (String, String);

/// Whether the rules here look at a file.
pub(crate) fn is_of_interest(path: &str) -> bool {
    if path.starts_with(FIXTURES) {
        return false;
    }
    path.ends_with(".cu")
        || path.ends_with(".cuh")
        || ((path.starts_with(TWINS) || path.starts_with(TESTS)) && path.ends_with(".rs"))
}

/// The broken rules among `texts`, which hold at least all files of interest.
pub(crate) fn check(texts: &[Text]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (path, text) in texts {
        let extension = path.rsplit('.').next().unwrap_or_default();
        if !matches!(extension, "cu" | "cuh") {
            continue;
        }
        let below = path.strip_prefix(CUDA_FOLDER).and_then(|rest| rest.strip_prefix('/'));
        let Some((layer, name)) = below.and_then(|rest| rest.split_once('/')) else {
            let message = format!("CUDA code outside of the layers; move it to {CUDA_FOLDER}/");
            violations.push(Violation::new(path, 0, message));
            continue;
        };
        let Some(rank) = rank(layer) else {
            let layers = LAYERS.join(", ");
            let message = format!("`{layer}` is no layer; use one of {layers}");
            violations.push(Violation::new(path, 0, message));
            continue;
        };
        violations.extend(check_includes(path, text, rank));
        if extension == "cuh" && !text.lines().any(|line| line.trim() == "#pragma once") {
            violations.push(Violation::new(path, 1, "no `#pragma once`; add it after the comment"));
        }
        match (extension, layer, name.strip_suffix(".cu")) {
            ("cu", "impls", Some(stem)) => violations.extend(check_kernel(path, stem, text, texts)),
            ("cu", ..) => violations.push(Violation::new(
                path,
                0,
                "a kernel below the top layer; move it to impls/, or name it `.cuh`",
            )),
            ("cuh", "impls", _) => violations.push(Violation::new(
                path,
                0,
                "a header among the kernels; move it to the layer that it belongs to",
            )),
            _ => {}
        }
    }
    violations
}

fn rank(layer: &str) -> Option<usize> {
    LAYERS.iter().position(|known| *known == layer)
}

/// A file includes what is in its own layer or in one before it, and nothing of a toolkit.
fn check_includes(path: &str, text: &str, own_rank: usize) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let message = match include_in(line) {
            None => continue,
            Some(Include::System(name)) => format!(
                "`<{name}>` is of an installed toolkit, which NVRTC has not; write what you need \
                 into common/ or ptx/"
            ),
            Some(Include::Own(name)) => {
                let layer = name.split_once('/').map_or("", |(layer, _)| layer);
                match rank(layer) {
                    None => format!(
                        "`{name}` does not begin with a layer; write it as \"common/types.cuh\""
                    ),
                    Some(rank) if rank > own_rank => format!(
                        "{}/ comes before {layer}/ and may not include `{name}`; move the shared \
                         part to a lower layer",
                        LAYERS[own_rank]
                    ),
                    Some(rank) if LAYERS[rank] == "impls" => {
                        format!("`{name}` is a kernel; move the shared part to a lower layer")
                    }
                    Some(_) => continue,
                }
            }
        };
        violations.push(Violation::new(path, index + 1, message));
    }
    violations
}

/// A kernel says what it is for, is launched by something on the host, and is tested.
fn check_kernel(path: &str, stem: &str, text: &str, texts: &[Text]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut report = |line, message: String| violations.push(Violation::new(path, line, message));
    if let Err(message) = architectures_in(text) {
        let line = text.lines().position(|line| line.trim().starts_with(ARCHITECTURES_MARK));
        report(line.map_or(1, |index| index + 1), message);
    }
    let in_folder = |folder: &'static str| {
        texts.iter().filter(move |(path, _)| path.starts_with(folder) && path.ends_with(".rs"))
    };
    let is_twin =
        |(path, text): &Text| *path == format!("{TWINS}{stem}.rs") || launches(text, stem);
    if !in_folder(TWINS).any(is_twin) {
        report(
            0,
            format!(
                "a kernel that nothing launches; add {TWINS}{stem}.rs, or call \
                 `device.function(\"{stem}\", ...)` in a file there"
            ),
        );
    }
    let is_test =
        |(path, text): &Text| *path == format!("{TESTS}{stem}.rs") || mentions(text, stem);
    if !in_folder(TESTS).any(is_test) {
        report(0, format!("a kernel without a test; add {TESTS}{stem}.rs"));
    }
    violations
}

/// Whether Rust text has `function("<stem>"`, perhaps with a line break in between.
fn launches(text: &str, stem: &str) -> bool {
    let quoted = format!("\"{stem}\"");
    let calls = text.match_indices("function(");
    calls.into_iter().any(|(at, call)| text[at + call.len()..].trim_start().starts_with(&quoted))
}

/// Whether the name is a word of the code: of an identifier's whole or a string's.
fn mentions(text: &str, stem: &str) -> bool {
    let quoted = format!("\"{stem}\"");
    text.contains(&quoted)
        || split_rust(text)
            .code
            .iter()
            .any(|line| line.split(|character| !is_word(character)).any(|word| word == stem))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = "// Adds.\n//\n// architectures: sm_90a\n";

    /// The places and the beginnings of the messages for files.
    fn check_files(files: &[(&str, &str)], expected: &[(&str, usize, &str)]) {
        let texts: Vec<Text> =
            files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect();
        let violations = check(&texts);
        assert_eq!(violations.len(), expected.len(), "{files:?}\n{violations:?}");
        for (violation, (path, line, message)) in violations.iter().zip(expected) {
            assert_eq!((violation.path.as_str(), violation.line), (*path, *line));
            assert!(violation.message.starts_with(message), "`{message}`: {violation}");
        }
    }

    #[test]
    fn layers_of_includes() {
        let check = |path: &str, include: &str, expected: Option<&str>| {
            let path = format!("deepwell-kernels/cuda/{path}");
            let text = format!("// Doc.\n#pragma once\n#include {include}\n");
            let expected: Vec<_> =
                expected.iter().map(|message| (path.as_str(), 3, *message)).collect();
            check_files(&[(&path, &text)], &expected);
        };
        check("mma/tile.cuh", "\"common/types.cuh\"", None);
        check("mma/tile.cuh", "\"layout/tile.cuh\"", None);
        check("mma/tile.cuh", "\"mma/other.cuh\"", None);
        check(
            "mma/tile.cuh",
            "\"epilogue/store.cuh\"",
            Some("mma/ comes before epilogue/ and may not include `epilogue/store.cuh`"),
        );
        check("common/types.cuh", "\"ptx/fp8.cuh\"", Some("common/ comes before ptx/"));
        check("ptx/fp8.cuh", "\"impls/add.cu\"", Some("ptx/ comes before impls/"));
        check("mma/tile.cuh", "\"tile.cuh\"", Some("`tile.cuh` does not begin with a layer"));
        check("mma/tile.cuh", "\"../ptx/a.cuh\"", Some("`../ptx/a.cuh` does not begin with"));
        check("mma/tile.cuh", "<cuda_bf16.h>", Some("`<cuda_bf16.h>` is of an installed"));
    }

    #[test]
    fn places_of_cuda_code() {
        let once = "#pragma once\n";
        let check = |path: &str, text: &str, expected: Option<(usize, &str)>| {
            let expected: Vec<_> =
                expected.iter().map(|(line, message)| (path, *line, *message)).collect();
            check_files(&[(path, text)], &expected);
        };
        check("deepwell-kernels/cuda/ptx/a.cuh", once, None);
        check("deepwell-kernels/cuda/ptx/a.cuh", "int x;\n", Some((1, "no `#pragma once`")));
        check("deepwell-kernels/cuda/a.cuh", once, Some((0, "CUDA code outside of the layers")));
        check("examples/a.cu", "", Some((0, "CUDA code outside of the layers")));
        check("deepwell-kernels/cuda/misc/a.cuh", once, Some((0, "`misc` is no layer")));
        check("deepwell-kernels/cuda/mma/a.cu", "", Some((0, "a kernel below the top layer")));
        check("deepwell-kernels/cuda/impls/a.cuh", once, Some((0, "a header among the kernels")));
    }

    #[test]
    fn kernels_their_twins_and_their_tests() {
        let kernel = "deepwell-kernels/cuda/impls/rope.cu";
        let own_twin = ("deepwell-kernels/src/cuda/kernels/rope.rs", "//! Doc.\n");
        let twin = |text| ("deepwell-kernels/src/cuda/kernels/other.rs", text);
        let own_test = ("deepwell-kernels/tests/cuda/rope.rs", "//! Doc.\n");
        let test = |text| ("deepwell-kernels/tests/cuda/other.rs", text);
        let source = (kernel, KERNEL);
        let no_twin = (kernel, 0, "a kernel that nothing launches; add deepwell-kernels/src/cuda");
        let no_test = (kernel, 0, "a kernel without a test; add deepwell-kernels/tests/cuda/rope");

        check_files(&[source], &[no_twin, no_test]);
        check_files(&[source, own_twin], &[no_test]);
        check_files(&[source, own_twin, own_test], &[]);
        let call = twin("device.function(\"rope\", entry, 0)?;\n");
        check_files(&[source, call, own_test], &[]);
        let broken_call = twin("device.function(\n    \"rope\",\n    entry)?;\n");
        check_files(&[source, broken_call, own_test], &[]);
        let other_call = twin("device.function(\"rope_backward\", entry, 0)?;\n");
        check_files(&[source, other_call, own_test], &[no_twin]);
        check_files(&[source, own_twin, test("fn rope() {}\n")], &[]);
        check_files(&[source, own_twin, test("run(\"rope\");\n")], &[]);
        check_files(&[source, own_twin, test("// rope\nfn rope_2() {}\n")], &[no_test]);
        // Elsewhere than there, a file of that name is something else.
        let far = ("deepwell-kernels/src/oracle/rope.rs", "//! Doc.\n");
        check_files(&[source, far, own_test], &[no_twin]);
    }

    #[test]
    fn kernels_name_their_architectures() {
        let check = |text: &str, expected: &[(usize, &str)]| {
            let kernel = "deepwell-kernels/cuda/impls/add.cu";
            let expected: Vec<_> =
                expected.iter().map(|(line, message)| (kernel, *line, *message)).collect();
            check_files(
                &[
                    (kernel, text),
                    ("deepwell-kernels/src/cuda/kernels/add.rs", ""),
                    ("deepwell-kernels/tests/cuda/add.rs", ""),
                ],
                &expected,
            );
        };
        check(KERNEL, &[]);
        check("// Adds.\n", &[(1, "no line `// architectures: ...`")]);
        check("// Adds.\n// architectures: sm_80\n", &[(2, "`sm_80` is no architecture")]);
    }
}
