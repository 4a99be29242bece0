//! Rules about CUDA sources: header layers, kernels in the folders of ops, launchers, tests.

use crate::kernels::unit::{
    ARCHITECTURES_MARK, CUDA_FOLDER, Include, OPS_FOLDER, architectures_in, include_in,
};
use crate::source::{is_word, split_rust};

use super::Violation;

/// The folders in [`CUDA_FOLDER`], lowest layer first.
const LAYERS: [&str; 6] = ["common", "ptx", "layout", "mma", "scheduler", "epilogue"];

/// Sources of the PTX of the emulator's tests. The rules do not apply: these sources do not ship,
/// and the PTX refers to source lines.
pub(crate) const FIXTURES: &str = "deepwell-kernels/emulator/tests/fixtures/";

/// Folder of tests of several kernels; tests of a single kernel are in `tests/` in the folder of
/// its op.
const TESTS: &str = "deepwell-kernels/tests/cuda/";

/// A text file: path relative to the root, with forward slashes, and contents.
pub(crate) type Text = (String, String);

/// Whether these rules apply to a file.
pub(crate) fn is_of_interest(path: &str) -> bool {
    if path.starts_with(FIXTURES) {
        return false;
    }
    path.ends_with(".cu")
        || path.ends_with(".cuh")
        || ((path.starts_with(OPS_FOLDER) || path.starts_with(TESTS)) && path.ends_with(".rs"))
}

/// Returns the violations in `texts`, which contain at least all files of interest.
pub(crate) fn check(texts: &[Text]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (path, text) in texts {
        let below = |folder| path.strip_prefix(folder)?.strip_prefix('/')?.split_once('/');
        if let Some(stem) = path.strip_suffix(".cu").map(|path| path.rsplit('/').next()) {
            violations.extend(check_includes(path, text, LAYERS.len()));
            match (below(OPS_FOLDER), stem) {
                (Some((op, name)), Some(stem)) if !name.contains('/') => {
                    violations.extend(check_kernel(path, op, stem, text, texts));
                }
                _ => {
                    let message = format!(
                        "a kernel outside of the ops; move it to {OPS_FOLDER}/<op>/, or name it \
                         `.cuh`"
                    );
                    violations.push(Violation::new(path, 0, message));
                }
            }
        } else if path.ends_with(".cuh") {
            violations.extend(check_header(path, text, below(CUDA_FOLDER).map(|(layer, _)| layer)));
        }
    }
    violations
}

/// Checks that a header is in a layer, has `#pragma once`, and includes no higher layer.
fn check_header(path: &str, text: &str, layer: Option<&str>) -> Vec<Violation> {
    let Some(layer) = layer else {
        let message = format!("a header outside of the layers; move it to {CUDA_FOLDER}/");
        return vec![Violation::new(path, 0, message)];
    };
    let Some(rank) = rank(layer) else {
        let layers = LAYERS.join(", ");
        let message = format!("`{layer}` is no layer; use one of {layers}");
        return vec![Violation::new(path, 0, message)];
    };
    let mut violations = check_includes(path, text, rank);
    if !text.lines().any(|line| line.trim() == "#pragma once") {
        violations.push(Violation::new(path, 1, "no `#pragma once`; add it after the comment"));
    }
    violations
}

fn rank(layer: &str) -> Option<usize> {
    LAYERS.iter().position(|known| *known == layer)
}

/// Checks that a file includes only its own and lower layers, and no header of a toolkit; kernels
/// come after all layers.
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
                    Some(_) => continue,
                }
            }
        };
        violations.push(Violation::new(path, index + 1, message));
    }
    violations
}

/// Checks that a kernel names its architectures, has a launcher in the folder of its op, and has a
/// test.
fn check_kernel(path: &str, op: &str, stem: &str, text: &str, texts: &[Text]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut report = |line, message: String| violations.push(Violation::new(path, line, message));
    if let Err(message) = architectures_in(text) {
        let line = text.lines().position(|line| line.trim().starts_with(ARCHITECTURES_MARK));
        report(line.map_or(1, |index| index + 1), message);
    }
    let folder = format!("{OPS_FOLDER}/{op}/");
    let tests = format!("{folder}tests/");
    let rust = || texts.iter().filter(|(path, _)| path.ends_with(".rs"));
    let quoted = format!("\"{stem}\"");
    let is_launcher = |(path, text): &Text| {
        path.starts_with(&folder) && !path.starts_with(&tests) && text.contains(&quoted)
    };
    if !rust().any(is_launcher) {
        report(
            0,
            format!(
                "a kernel that nothing launches; add {folder}cuda.rs, with \
                 `device.function({quoted}, ...)`"
            ),
        );
    }
    let is_test = |(path, text): &Text| {
        (path.starts_with(&tests) || path.starts_with(TESTS)) && mentions(text, stem)
    };
    if !rust().any(is_test) {
        report(0, format!("a kernel without a test; add one that names it to {tests}"));
    }
    violations
}

/// Whether the code contains the name as a complete identifier or string.
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
        check("ptx/fp8.cuh", "\"ops/add.cu\"", Some("`ops/add.cu` does not begin with a layer"));
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
        check("deepwell-kernels/cuda/a.cuh", once, Some((0, "a header outside of the layers")));
        check("deepwell-kernels/src/ops/add/a.cuh", once, Some((0, "a header outside of the")));
        check("deepwell-kernels/cuda/misc/a.cuh", once, Some((0, "`misc` is no layer")));
        for path in ["examples/a.cu", "deepwell-kernels/cuda/mma/a.cu", "deepwell-kernels/a.cu"] {
            check(path, "", Some((0, "a kernel outside of the ops; move it to deepwell-kernels/")));
        }
        check("deepwell-kernels/src/ops/add/tests/a.cu", "", Some((0, "a kernel outside of the")));
    }

    #[test]
    fn kernels_their_launchers_and_their_tests() {
        let kernel = "deepwell-kernels/src/ops/rope/rope_back.cu";
        let of_op = |text| ("deepwell-kernels/src/ops/rope/cuda.rs", text);
        let of_other = |text| ("deepwell-kernels/src/ops/add/cuda.rs", text);
        let test = |text| ("deepwell-kernels/src/ops/rope/tests/cuda.rs", text);
        let shared_test = |text| ("deepwell-kernels/tests/cuda/other.rs", text);
        let source = (kernel, KERNEL);
        let no_launcher =
            (kernel, 0, "a kernel that nothing launches; add deepwell-kernels/src/ops/rope/cuda");
        let no_test =
            (kernel, 0, "a kernel without a test; add one that names it to deepwell-kernels/src/");
        let call = "device.function(\n    \"rope_back\",\n    entry)?;\n";
        let other_call = "device.function(\"rope_back_2\", entry, 0)?;\n";

        check_files(&[source], &[no_launcher, no_test]);
        check_files(&[source, of_op(call)], &[no_test]);
        check_files(&[source, of_op(call), test("fn rope_back() {}\n")], &[]);
        check_files(&[source, of_op(call), shared_test("run(\"rope_back\");\n")], &[]);
        check_files(&[source, of_op(call), test("// rope_back\nfn rope() {}\n")], &[no_test]);
        check_files(&[source, of_op(other_call), test(call)], &[no_launcher]);
        check_files(&[source, of_other(call), test(call)], &[no_launcher]);
        // A test in any other place is no test of CUDA kernels.
        let far = ("deepwell-kernels/src/ops/add/tests/cuda.rs", call);
        check_files(&[source, of_op(call), far], &[no_test]);
    }

    #[test]
    fn kernels_name_their_architectures() {
        let check = |text: &str, expected: &[(usize, &str)]| {
            let kernel = "deepwell-kernels/src/ops/add/add.cu";
            let expected: Vec<_> =
                expected.iter().map(|(line, message)| (kernel, *line, *message)).collect();
            check_files(
                &[
                    (kernel, text),
                    ("deepwell-kernels/src/ops/add/cuda.rs", "launch(\"add\")"),
                    ("deepwell-kernels/tests/cuda/add.rs", "run(\"add\")"),
                ],
                &expected,
            );
        };
        check(KERNEL, &[]);
        check("// Adds.\n", &[(1, "no line `// architectures: ...`")]);
        check("// Adds.\n// architectures: sm_80\n", &[(2, "`sm_80` is no architecture")]);
    }
}
