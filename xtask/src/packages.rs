//! Packages of the workspace, from their manifests.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use toml::{Table, Value};

use crate::source::read;

/// A dependency in a Cargo.toml.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Dependency {
    /// Package name, from `package = "..."` if present.
    pub(crate) name: String,
    /// Line in Cargo.toml, counted from 1.
    pub(crate) line: usize,
}

/// A member of the workspace.
#[derive(Debug, Clone)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    /// Keys of `[package]`, such as `version` or `license.workspace`.
    pub(crate) keys: Vec<String>,
    /// Whether crates.io gets the package.
    pub(crate) is_published: bool,
    /// Normal, development and build dependencies, then those of targets.
    pub(crate) dependencies: Vec<Dependency>,
    /// Names under `[features]`, except `default`.
    pub(crate) features: Vec<String>,
    /// Whether `[lints]` inherits the workspace's lints.
    pub(crate) has_workspace_lints: bool,
}

/// Tables of dependencies in a manifest and in each of its targets.
const DEPENDENCIES: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

/// Returns the members of the workspace at `root`, in order.
pub(crate) fn packages(root: &Path) -> Result<Vec<Package>> {
    let manifest: Table = read(&root.join("Cargo.toml"))?.parse().context("Cargo.toml")?;
    let members = manifest.get("workspace").and_then(|workspace| workspace.get("members"));
    let members = members.and_then(Value::as_array).context("Cargo.toml has no members")?;
    let package = |member: &Value| {
        let folder = root.join(member.as_str().context("a member is a folder")?);
        let text = read(&folder.join("Cargo.toml"))?;
        parse_package(&text, folder.clone()).with_context(|| folder.display().to_string())
    };
    members.iter().map(package).collect()
}

/// Reads a Cargo.toml.
pub(crate) fn parse_package(text: &str, folder: PathBuf) -> Result<Package> {
    let manifest: Table = text.parse()?;
    let table = |name: &str| manifest.get(name).and_then(Value::as_table);
    let package = table("package");
    let get = |key: &str| package.and_then(|package| package.get(key));
    let key = |(name, value): (&String, &Value)| match value.get("workspace") {
        Some(_) => format!("{name}.workspace"),
        None => name.clone(),
    };
    let targets = table("target").into_iter().flat_map(|targets| targets.values());
    let tables = targets.filter_map(Value::as_table);
    let mut dependencies = Vec::new();
    for table in std::iter::once(&manifest).chain(tables) {
        for kind in DEPENDENCIES {
            let named = table.get(kind).and_then(Value::as_table).into_iter().flatten();
            dependencies.extend(named.map(|(alias, value)| dependency(text, alias, value)));
        }
    }
    let features = table("features").into_iter().flat_map(|features| features.keys());
    Ok(Package {
        name: get("name").and_then(Value::as_str).unwrap_or_default().to_string(),
        folder,
        keys: package.into_iter().flatten().map(key).collect(),
        is_published: get("publish").and_then(Value::as_bool).unwrap_or(true),
        dependencies,
        features: features.filter(|name| *name != "default").cloned().collect(),
        has_workspace_lints: table("lints").is_some_and(|lints| lints.contains_key("workspace")),
    })
}

fn dependency(text: &str, alias: &str, value: &Value) -> Dependency {
    let name = value.get("package").and_then(Value::as_str).unwrap_or(alias);
    let names_it = |line: &str| {
        let line = line.trim_start_matches('[');
        let key = line.rsplit_once("dependencies.").map_or(line, |(_, key)| key);
        key.trim_start()
            .strip_prefix(alias)
            .is_some_and(|rest| rest.starts_with([' ', '.', '=', ']']))
    };
    let line = text.lines().position(names_it).map_or(0, |index| index + 1);
    Dependency { name: name.to_string(), line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_are_read() {
        let text = r#"
[package]
name = "a"
version = "0.1.0"
license.workspace = true

[dependencies]
one.workspace = true
two = { version = "1", features = [
    "x = y",
] }
# three = "1"
alias = { package = "four", version = "1" }

[target.'cfg(unix)'.dependencies]
five = "1"

[dev-dependencies.six]
version = "1"

[features]
default = ["fast"]
fast = [
    "dep:one",
]

[lints]
workspace = true
"#;
        let package = parse_package(text, PathBuf::new()).expect("TOML");
        assert_eq!(package.name, "a");
        let names: Vec<_> =
            package.dependencies.iter().map(|dependency| dependency.name.as_str()).collect();
        assert_eq!(names, ["four", "one", "two", "six", "five"]);
        assert_eq!(package.dependencies[0], Dependency { name: "four".to_string(), line: 13 });
        assert!(package.has_workspace_lints);
        assert_eq!(package.features, ["fast"]);
        assert_eq!(package.keys, ["license.workspace", "name", "version"]);
    }
}
