//! Line information in PTX: kept in the `.ptx` file for readers, removed for ptxas.
//!
//! With `-lineinfo`, nvcc only adds `.loc`, `.file` and a section of names to the PTX. SASS with
//! line tables would be four times as large.

use std::fmt::Write;
use std::path::Path;

/// Returns the PTX without line information.
pub(super) fn without(ptx: &str) -> String {
    let mut kept = String::with_capacity(ptx.len());
    let mut in_names = false;
    for line in ptx.lines() {
        let text = line.trim_start();
        in_names |= text.starts_with(".section") && text.contains(".debug_str");
        // `.local` is a state space.
        let is_place = matches!(text.split_whitespace().next(), Some(".loc" | ".file"));
        if !in_names && !is_place {
            kept.push_str(line);
            kept.push('\n');
        }
        in_names &= text != "}";
    }
    kept
}

/// Returns the PTX with paths relative to the workspace, so that the text does not depend on the
/// location of the checkout; other files keep only the file name.
pub(super) fn with_relative_files(ptx: &str, root: &Path) -> String {
    let mut changed = String::with_capacity(ptx.len());
    for line in ptx.lines() {
        let file = line.trim_start().strip_prefix(".file").and_then(|rest| {
            let (number, path) = rest.split_once('"')?;
            Some((number.trim(), path.split('"').next()?))
        });
        // Writing to a string does not fail.
        let _ = match file {
            Some((number, path)) => {
                writeln!(changed, "\t.file\t{number} \"{}\"", shown(Path::new(path), root))
            }
            None => writeln!(changed, "{line}"),
        };
    }
    changed
}

fn shown(path: &Path, root: &Path) -> String {
    let inside = path.strip_prefix(root).ok().map(|path| path.to_string_lossy());
    let name = path.file_name().map(|name| name.to_string_lossy());
    inside.or(name).unwrap_or_default().replace('\\', "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "\
.version 9.0
.visible .entry add(
)
{
\t.local .align 4 .b8 depot[4];
\t.loc\t1 20 0
\tmov.u32 \t%r1, %tid.x;
\t.loc\t2 5 3, function_name $L__info_string0, inlined_at 1 21 7
\tret;
}
\t.file\t1 \"/here/work/cuda/add.cu\"
\t.file\t2 \"/opt/cuda/include/x.hpp\"
\t.section\t.debug_str
\t{
$L__info_string0:
.b8 95
\t}
";

    #[test]
    fn lines_are_taken_out() {
        let expected = "\
.version 9.0
.visible .entry add(
)
{
\t.local .align 4 .b8 depot[4];
\tmov.u32 \t%r1, %tid.x;
\tret;
}
";
        assert_eq!(without(PTX), expected);
        assert_eq!(without(expected), expected);
    }

    #[test]
    fn files_do_not_depend_on_the_place() {
        let changed = with_relative_files(PTX, Path::new("/here/work"));
        assert!(changed.contains("\t.file\t1 \"cuda/add.cu\"\n"), "{changed}");
        assert!(changed.contains("\t.file\t2 \"x.hpp\"\n"), "{changed}");
        assert_eq!(changed.lines().count(), PTX.lines().count());
        assert_eq!(without(&changed), without(PTX));
    }
}
