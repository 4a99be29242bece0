//! Parser for cargo's `--message-format json`.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// Returns the executable of a target of the package in `folder` from cargo's messages; `kind` is
/// `bin` or `test`.
pub(crate) fn executable(messages: &str, folder: &Path, kind: &str, name: &str) -> Option<PathBuf> {
    let manifest = folder.join("Cargo.toml");
    messages.lines().rev().find_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let target = message.get("target")?;
        let kinds = target.get("kind")?.as_array()?;
        let is_wanted = target.get("name")?.as_str()? == name
            && kinds.iter().any(|own| own.as_str() == Some(kind))
            && Path::new(message.get("manifest_path")?.as_str()?) == manifest;
        let executable = message.get("executable").filter(|_| is_wanted)?.as_str()?;
        Some(PathBuf::from(executable))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_in_cargo_messages() {
        let message = |package: &str, kind: &str, name: &str, executable: Option<&str>| {
            serde_json::json!({
                "reason": "compiler-artifact",
                "manifest_path": format!("/r/{package}/Cargo.toml"),
                "target": {"kind": [kind], "name": name},
                "executable": executable,
            })
            .to_string()
        };
        let check = |messages: &[String], expected: Option<&str>| {
            let messages = messages.join("\n");
            let found = executable(&messages, Path::new("/r/kernels"), "test", "cuda");
            assert_eq!(found.as_deref(), expected.map(Path::new), "{messages}");
        };
        let wanted = message("kernels", "test", "cuda", Some("/t/deps/cuda-1"));
        check(std::slice::from_ref(&wanted), Some("/t/deps/cuda-1"));
        check(&[message("trainer", "test", "cuda", Some("/t/cuda"))], None);
        check(&[message("kernels", "bin", "cuda", Some("/t/cuda"))], None);
        check(&[message("kernels", "test", "cpu", Some("/t/cpu"))], None);
        check(&[message("kernels", "test", "cuda", None)], None);
        check(
            &[
                message("kernels", "lib", "deepwell_kernels", None),
                wanted,
                message("trainer", "test", "cuda", Some("/t/deps/cuda-2")),
                r#"{"reason":"build-finished","success":true}"#.to_string(),
                "error: not a message".to_string(),
            ],
            Some("/t/deps/cuda-1"),
        );
        check(&[], None);
    }
}
