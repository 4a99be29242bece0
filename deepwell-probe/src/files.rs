//! Access to `/proc` and `/sys` behind a trait, so that tests can describe a machine as text.

/// Source of the kernel's text files.
pub(crate) trait FileTree {
    /// The whole text of the file at an absolute `path`; `None` if it cannot be read.
    fn read(&self, path: &str) -> Option<String>;

    /// The file's text without surrounding white space, as a number.
    fn read_u64(&self, path: &str) -> Option<u64> {
        self.read(path)?.trim().parse().ok()
    }
}

/// The file system of this machine.
pub(crate) struct HostFiles;

impl FileTree for HostFiles {
    fn read(&self, path: &str) -> Option<String> {
        // `/proc/cpuinfo` and similar files are text, but a model name may contain any byte.
        std::fs::read(path).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// The numbers of a kernel list such as `0-3,8,10-11`; parts that are not numbers are skipped.
///
/// Ranges are limited to 65,536 entries, more than any kernel supports, so that a damaged file
/// cannot exhaust memory.
pub(crate) fn parse_list(text: &str) -> Vec<u32> {
    const ENTRIES_MAX: u32 = 65_536;
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        match part.split_once('-') {
            None => numbers.extend(part.trim().parse::<u32>()),
            Some((first, last)) => {
                if let (Ok(first), Ok(last)) = (first.trim().parse(), last.trim().parse::<u32>()) {
                    let first: u32 = first;
                    numbers.extend(first..=last.min(first.saturating_add(ENTRIES_MAX)));
                }
            }
        }
    }
    numbers
}

/// The inverse of [`parse_list`] for ascending numbers.
pub(crate) fn format_list(numbers: &[u32]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut start = 0;
    while start < numbers.len() {
        let mut end = start;
        while end + 1 < numbers.len() && numbers[end + 1] == numbers[end] + 1 {
            end += 1;
        }
        parts.push(match end - start {
            0 => numbers[start].to_string(),
            _ => format!("{}-{}", numbers[start], numbers[end]),
        });
        start = end + 1;
    }
    parts.join(",")
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// A machine described by text: path to content.
    pub(crate) struct FakeFiles(pub(crate) BTreeMap<String, String>);

    impl FakeFiles {
        pub(crate) fn new(files: &[(&str, &str)]) -> FakeFiles {
            let owned = |(path, text): &(&str, &str)| (path.to_string(), text.to_string());
            FakeFiles(files.iter().map(owned).collect())
        }
    }

    impl FileTree for FakeFiles {
        fn read(&self, path: &str) -> Option<String> {
            self.0.get(path).cloned()
        }
    }

    #[test]
    fn lists_go_both_ways() {
        let rows: [(&str, &[u32]); 6] = [
            ("0", &[0]),
            ("0-3", &[0, 1, 2, 3]),
            ("0-1,4,6-7", &[0, 1, 4, 6, 7]),
            ("", &[]),
            ("3-1", &[]),
            ("a,2", &[2]),
        ];
        for (text, expected) in rows {
            assert_eq!(parse_list(text), expected, "{text}");
            assert_eq!(parse_list(&format_list(expected)), expected, "{text}");
        }
        assert_eq!(format_list(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert!(parse_list("0-4294967295").len() <= 65_537);
    }
}
