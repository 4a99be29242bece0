//! Text to HTML.

use std::borrow::Cow;

/// Escapes any text for an element or a quoted attribute of HTML or SVG. Control characters that
/// are invalid in both become U+FFFD.
pub fn escape(text: &str) -> Cow<'_, str> {
    let is_special = |c: char| matches!(c, '&' | '<' | '>' | '"' | '\'') || is_forbidden(c);
    if !text.contains(is_special) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if is_forbidden(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

fn is_forbidden(c: char) -> bool {
    c.is_control() && !matches!(c, '\t' | '\n' | '\r') || matches!(c, '\u{fffe}' | '\u{ffff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes() {
        for (text, expected) in [
            ("plain \u{e9}\n", "plain \u{e9}\n"),
            (
                "<script>alert('1' & \"2\")</script>",
                "&lt;script&gt;alert(&#39;1&#39; &amp; &quot;2&quot;)&lt;/script&gt;",
            ),
            ("a\0\u{1b}[31mb", "a\u{fffd}\u{fffd}[31mb"),
            ("&amp;", "&amp;amp;"),
        ] {
            assert_eq!(escape(text), expected);
        }
        assert!(matches!(escape("plain"), Cow::Borrowed(_)));
    }
}
