//! Digests of all that the verdict on a launch depends on: the emulator and the PTX.
//!
//! A table of digests that were found right spares a run whose digest stands in it. Comments,
//! blank lines and debug information change no digest.

/// Digest of this crate's sources without tests and comments, 16 hexadecimal digits.
pub const SOURCES_DIGEST: &str = env!("DEEPWELL_EMULATOR_SOURCES");

/// Lines of debug information: files, and lines of the source.
const DEBUG_DIRECTIVES: [&str; 2] = [".loc", ".file"];

/// Digest of PTX text, 16 hexadecimal digits: without comments, without the directives that name
/// lines of the source, and without sections of debug information, whose names depend on the folder
/// of the compiler's run.
///
/// ```
/// use deepwell_emulator::proof::ptx_digest;
///
/// let code = "ret;\n";
/// assert_eq!(ptx_digest("// nvcc\n\t.loc\t1 12 3\nret;\n"), ptx_digest(code));
/// assert_eq!(ptx_digest("ret;\n.section .debug_info\n{\n.b8 95\n}\n"), ptx_digest(code));
/// assert_ne!(ptx_digest("bar.sync 0;\nret;\n"), ptx_digest(code));
/// ```
pub fn ptx_digest(text: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut is_section = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with(".section") && line.contains(".debug") {
            is_section = true;
        }
        if is_section {
            is_section = line != "}";
            continue;
        }
        let is_debug = DEBUG_DIRECTIVES.iter().any(|directive| {
            let rest = line.strip_prefix(directive);
            rest.is_some_and(|rest| rest.starts_with(char::is_whitespace))
        });
        if !is_debug && !line.starts_with("//") && !line.is_empty() {
            hasher.update(line.as_bytes()).update(b"\n");
        }
    }
    short(&hasher)
}

/// The first 16 hexadecimal digits of a digest.
pub fn short(hasher: &blake3::Hasher) -> String {
    hasher.finalize().to_hex()[..16].to_string()
}

/// Whether a proof is tried again nevertheless: one in ten is, chosen by `seed` and its name.
pub fn is_drawn(seed: &str, name: &str) -> bool {
    const ONE_IN: u8 = 10;
    let digest = blake3::hash(format!("{seed} {name}").as_bytes());
    // 256 is no multiple of ten: the first six of the rests come up once more in 256.
    digest.as_bytes()[0].is_multiple_of(ONE_IN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn about_a_tenth_is_drawn_and_each_seed_draws_others() {
        let drawn = |seed: &str| -> Vec<usize> {
            (0..1000).filter(|index| is_drawn(seed, &format!("kernel {index}"))).collect()
        };
        let (first, second) = (drawn("a"), drawn("b"));
        // Binomial: 100 of 1000 with a deviation of 9.5; five of these to each side.
        assert!((52..=150).contains(&first.len()), "{}", first.len());
        assert_ne!(first, second);
    }

    #[test]
    fn what_changes_the_digest_of_ptx() {
        let text = ".file 1 \"/here/a.cu\"\n.entry a()\n{\n\t.loc 1 5 7\n\tret;\n}\n";
        let check = |other: &str, is_equal: bool| {
            assert_eq!(ptx_digest(other) == ptx_digest(text), is_equal, "{other}");
        };
        check(&text.replace("here", "there").replace("5 7", "6 1"), true);
        check(&text.replace("\tret", "// why\n  ret"), true);
        check(&text.replace("ret", "exit"), false);
        check(&text.replace(".entry a()", ".local .b8 a;\n.entry a()"), false);
    }
}
