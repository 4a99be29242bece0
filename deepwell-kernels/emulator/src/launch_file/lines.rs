//! Source lines of PTX lines, including the calls through which they were inlined.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// A line of a source file.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceLine {
    /// Path in the `.file` directive.
    pub file: String,
    /// Line, from 1.
    pub line: u32,
}

impl fmt::Display for SourceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// File, line, column.
type Position = (u32, u32, u32);

#[derive(Clone, Copy, Debug)]
struct Location {
    at: Position,
    inlined_at: Option<Position>,
}

/// Contents of the `.loc` and `.file` directives of a PTX text.
#[derive(Clone, Debug, Default)]
pub struct SourceLines {
    files: HashMap<u32, String>,
    /// Locations by PTX line; `None` at the beginning of a function.
    locations: BTreeMap<u32, Option<Location>>,
}

/// Most inlined calls that are followed.
const DEPTH: usize = 64;

impl SourceLines {
    /// Parses a PTX text.
    pub fn new(ptx: &str) -> SourceLines {
        let mut lines = SourceLines::default();
        for (index, line) in ptx.lines().enumerate() {
            let (ptx_line, line) = (index as u32 + 1, line.trim_start());
            if let Some(rest) = line.strip_prefix(".loc") {
                if let Some(location) = location(rest) {
                    lines.locations.insert(ptx_line, Some(location));
                }
            } else if let Some(rest) = line.strip_prefix(".file") {
                let (number, path) = rest.split_once('"').unwrap_or_default();
                if let Ok(number) = number.trim().parse() {
                    let path = path.split('"').next().unwrap_or_default();
                    lines.files.insert(number, path.to_owned());
                }
            } else if line.contains(".entry ") || line.contains(".func ") {
                lines.locations.insert(ptx_line, None);
            }
        }
        lines
    }

    /// Returns the source lines of a PTX line: first the line of the code, then the calls through
    /// which it was inlined, from the inside out. Empty without line information.
    pub fn chain(&self, ptx_line: u32) -> Vec<SourceLine> {
        let mut chain = Vec::new();
        let mut found = self
            .locations
            .range(..=ptx_line)
            .next_back()
            .and_then(|(line, location)| location.map(|location| (*line, location)));
        while let Some((line, location)) = found {
            chain.push(self.source_line(location.at));
            let Some(caller) = location.inlined_at else { break };
            if chain.len() == DEPTH {
                break;
            }
            // Before the inlined code, the call has its own `.loc`, with the location at which the
            // caller is inlined.
            found = self
                .locations
                .range(..line)
                .rev()
                .map_while(|(line, location)| location.map(|location| (*line, location)))
                .find(|(_, location)| location.at == caller);
            if found.is_none() {
                chain.push(self.source_line(caller));
            }
        }
        chain
    }

    fn source_line(&self, (file, line, _): Position) -> SourceLine {
        let file = self.files.get(&file).cloned().unwrap_or_else(|| format!("file {file}"));
        SourceLine { file, line }
    }
}

fn location(rest: &str) -> Option<Location> {
    let (at, attributes) = rest.split_once(',').unwrap_or((rest, ""));
    let inlined_at =
        attributes.split("inlined_at").nth(1).and_then(|position| numbers(position.trim()));
    Some(Location { at: numbers(at)?, inlined_at })
}

fn numbers(text: &str) -> Option<Position> {
    let mut numbers = text.split_whitespace().map(|word| word.trim_matches(',').parse().ok());
    Some((numbers.next()??, numbers.next()??, numbers.next()??))
}
