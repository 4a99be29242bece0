//! The Jinja environment of chat templates, set up as in transformers.

use std::fmt::Write;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// Markers of the start and end of an answer in a rendering: Unicode noncharacters.
pub(super) const BEGIN: char = '\u{fdd0}';
pub(super) const END: char = '\u{fdd1}';

/// An environment for one template.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the delimiters are those of Jinja"));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| {
        let written = match value.kind() {
            ValueKind::Undefined => Ok(()),
            ValueKind::None => out.write_str("None"),
            ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }),
            ValueKind::String | ValueKind::Number => write!(out, "{value}"),
            // Python would write its own notation here; no template intends that.
            kind => {
                let what = format!("the template writes a {kind}, expected a text");
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        };
        written.map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot write"))
    });
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |what: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, what))
    });
    environment.add_function("strftime_now", strftime_now);
    environment
}

/// Replaces `{% generation %}` tags by blocks that write [`BEGIN`] and [`END`], and returns whether
/// any tag was found.
pub(super) fn with_marks(template: &str) -> (String, bool) {
    let mut text = String::with_capacity(template.len());
    let (mut rest, mut has_any) = (template, false);
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let (tag, behind) = rest[start..].split_at(length + 2);
        let inner = &tag[2..tag.len() - 2];
        let word = inner.trim_matches(['-', '+']).trim();
        let mark = match word {
            "generation" => Some(BEGIN),
            "endgeneration" => Some(END),
            _ => None,
        };
        text.push_str(&rest[..start]);
        match mark {
            // A block, so that a line with only the tag is still removed.
            Some(mark) => {
                let sign = |c: Option<char>| c.filter(|c| "-+".contains(*c)).map(String::from);
                let before = sign(inner.chars().next()).unwrap_or_default();
                let after = sign(inner.chars().next_back()).unwrap_or_default();
                let _ = write!(text, "{{%{before} if true %}}{mark}{{% endif {after}%}}");
                has_any = true;
            }
            None => text.push_str(tag),
        }
        rest = behind;
    }
    text.push_str(rest);
    (text, has_any)
}

/// Writes JSON like Python's `json.dumps`, with keys in order and without escaping non-ASCII.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // transformers also takes this option; only its default is implemented.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut text = Vec::new();
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut text, Spaced)),
        Some(indent) => {
            let indent = " ".repeat(indent);
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut text, formatter))
        }
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let text = String::from_utf8(text)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Value::from_safe_string(text))
}

/// Formatter with a space after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        is_first: bool,
    ) -> io::Result<()> {
        if is_first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        is_first: bool,
    ) -> io::Result<()> {
        if is_first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// The date of today, in UTC.
fn strftime_now(_: &State<'_, '_>, format: String) -> Result<String, Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    strftime(now, &format).map_err(|what| Error::new(ErrorKind::InvalidOperation, what))
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

fn strftime(seconds: u64, format: &str) -> Result<String, String> {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let month_name = MONTHS[month as usize - 1];
    // 1 January 1970 was a Thursday.
    let day_name = DAYS[(days + 3) as usize % 7];
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(c) = characters.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let field = match characters.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('d') => format!("{day:02}"),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => format!("{:02}", of_day / 3600),
            Some('M') => format!("{:02}", of_day / 60 % 60),
            Some('S') => format!("{:02}", of_day % 60),
            Some('%') => "%".to_owned(),
            other => {
                let other = other.map(String::from).unwrap_or_default();
                return Err(format!(
                    "strftime_now: expected one of %Y %y %m %B %b %d %A %a %H %M %S, got `%{other}`"
                ));
            }
        };
        text.push_str(&field);
    }
    Ok(text)
}

/// Year, month and day of a number of days since 1 January 1970: Howard Hinnant's
/// `civil_from_days`.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, format, expected) in [
            (0, "%d %b %Y %A", "01 Jan 1970 Thursday"),
            (951_782_400, "%Y-%m-%d %a", "2000-02-29 Tue"),
            (1_796_000_000, "%d %B %y %H:%M:%S %%", "30 November 26 00:53:20 %"),
        ] {
            assert_eq!(strftime(seconds, format).unwrap(), expected);
        }
        assert!(strftime(0, "%Q").unwrap_err().contains("got `%Q`"));
    }

    #[test]
    fn marks_keep_the_white_space_of_their_blocks() {
        let check = |template: &str, expected: &str| {
            let (marked, has_any) = with_marks(template);
            assert_eq!(has_any, template.contains("generation"));
            let text = environment().render_str(&marked, ()).unwrap();
            assert_eq!(text.replace(BEGIN, "<").replace(END, ">"), expected, "{template:?}");
        };
        check("a{% generation %}b{% endgeneration %}c", "a<b>c");
        check("a\n  {% generation %}\nb\n  {% endgeneration %}\nc", "a\n<b\n>c");
        check("a\n  {%- generation -%}\n b \n {%- endgeneration -%} c", "a<b>c");
        check("{% if true %}x{% endif %}", "x");
        check("{{ '{% x' }}", "{% x");
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        let check = |template: &str, expected: Result<&str, &str>| {
            let value = serde_json::from_str::<Value>(r#"{"b": [1, "é<"], "a": {}, "t": true}"#);
            let context = Value::from_pairs([("x", value.unwrap())]);
            let got = environment().render_str(template, context).map_err(|e| e.to_string());
            match expected {
                Ok(expected) => assert_eq!(got.unwrap(), expected, "{template}"),
                Err(part) => assert!(got.clone().unwrap_err().contains(part), "{got:?}"),
            }
        };
        check("{{ x | tojson }}", Ok(r#"{"b": [1, "é<"], "a": {}, "t": true}"#));
        check("{{ x.b | tojson(indent=2) }}", Ok("[\n  1,\n  \"é<\"\n]"));
        check("{{ x.t }} {{ none }} {{ y }}.", Ok("True None ."));
        check("{{ x.b }}", Err("the template writes a sequence"));
        check("{{ ' a '.strip() + 'b'.upper() }}", Ok("aB"));
        check("{{ raise_exception('no') }}", Err("no"));
    }
}
