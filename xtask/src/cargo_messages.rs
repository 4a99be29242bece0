//! What cargo says under `--message-format json`.

use std::path::PathBuf;

use serde_json::Value;

/// The executable of a target, `kind` being `bin` or `test`, in cargo's messages. The last one
/// counts: cargo repeats a target for each set of its features.
pub(crate) fn executable(messages: &str, kind: &str, name: &str) -> Option<PathBuf> {
    messages.lines().rev().find_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let target = message.get("target")?;
        let kinds = target.get("kind")?.as_array()?;
        let is_wanted = target.get("name")?.as_str()? == name
            && kinds.iter().any(|own| own.as_str() == Some(kind));
        let executable = message.get("executable").filter(|_| is_wanted)?.as_str()?;
        Some(PathBuf::from(executable))
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn executables_in_cargo_messages() {
        let message = |kind: &str, name: &str, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"kind":["{kind}"],"name":"{name}"}},"#
            ) + &format!(r#""executable":{executable},"fresh":true}}"#)
        };
        let check = |messages: &[String], expected: Option<&str>| {
            let found = executable(&messages.join("\n"), "test", "cuda");
            assert_eq!(found.as_deref(), expected.map(Path::new), "{messages:?}");
        };
        check(&[message("test", "cuda", r#""/t/deps/cuda-1""#)], Some("/t/deps/cuda-1"));
        check(&[message("test", "cuda", r#""C:\\t\\cuda.exe""#)], Some("C:\\t\\cuda.exe"));
        check(&[message("bin", "cuda", r#""/t/cuda""#)], None);
        check(&[message("test", "cpu", r#""/t/cpu""#)], None);
        check(&[message("test", "cuda", "null")], None);
        check(
            &[
                message("test", "cuda", r#""/t/old""#),
                message("test", "cuda", r#""/t/new""#),
                message("test", "cpu", r#""/t/cpu""#),
                r#"{"reason":"build-finished","success":true}"#.to_string(),
                "error: not a message".to_string(),
            ],
            Some("/t/new"),
        );
        check(&[], None);
    }
}
