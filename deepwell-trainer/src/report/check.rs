//! A checker of well-formed markup for the tests: small, and stricter than browsers.

/// Panics unless every element is closed in order, attributes are quoted and unique, and the text
/// contains no bare `<` or `&`.
pub(crate) fn assert_well_formed(markup: &str) {
    if let Err(what) = check(markup) {
        panic!("{what}");
    }
}

fn check(markup: &str) -> Result<(), String> {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = markup;
    while let Some(start) = rest.find('<') {
        check_text(&rest[..start])?;
        let end = rest[start..].find('>').ok_or("a tag without an end")? + start;
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            let expected = open.pop();
            if expected != Some(name) {
                return Err(format!("</{name}> closes {expected:?}"));
            }
            continue;
        }
        let (tag, is_closed) = match tag.strip_suffix('/') {
            Some(tag) => (tag, true),
            None => (tag, false),
        };
        let (name, attributes) = tag.split_once(' ').unwrap_or((tag, ""));
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric()) {
            return Err(format!("no name of an element: `{name}`"));
        }
        check_attributes(attributes).map_err(|what| format!("<{name}>: {what}"))?;
        if !is_closed {
            open.push(name);
        }
        if name == "style" {
            let end = rest.find("</style>").ok_or("<style> without an end")?;
            if rest[..end].contains('<') {
                return Err("`<` in a style sheet".to_owned());
            }
            rest = &rest[end..];
        }
    }
    check_text(rest)?;
    if open.is_empty() { Ok(()) } else { Err(format!("not closed: {open:?}")) }
}

fn check_attributes(mut rest: &str) -> Result<(), String> {
    let mut names = Vec::new();
    while !rest.trim().is_empty() {
        let (name, value) = rest.trim_start().split_once("=\"").ok_or(format!("`{rest}`"))?;
        let (value, after) = value.split_once('"').ok_or("a value without an end")?;
        if name.is_empty() || name.contains(char::is_whitespace) || names.contains(&name) {
            return Err(format!("attribute `{name}`"));
        }
        names.push(name);
        check_text(value)?;
        if !after.is_empty() && !after.starts_with(char::is_whitespace) {
            return Err(format!("`{name}` is followed by `{after}`"));
        }
        rest = after;
    }
    Ok(())
}

fn check_text(text: &str) -> Result<(), String> {
    for part in text.split('&').skip(1) {
        let entity = part.split_once(';').map(|(entity, _)| entity);
        if !matches!(entity, Some("amp" | "lt" | "gt" | "quot" | "#39")) {
            return Err(format!("a bare `&` before `{part}`"));
        }
    }
    if text.contains(['<', '>']) { Err(format!("a bare bracket in `{text}`")) } else { Ok(()) }
}

#[test]
fn the_checker_can_fail() {
    for good in ["", "a", "<p>a &amp; b</p>", "<p><b x=\"1\" y=\"\">c</b><i/></p>"] {
        assert_eq!(check(good), Ok(()), "{good}");
    }
    for bad in [
        "<p>",
        "</p>",
        "<p></b>",
        "<p><b></p></b>",
        "a & b",
        "a > b",
        "<p x=1></p>",
        "<p x=\"1></p>",
        "<p x=\"1\" x=\"2\"></p>",
        "<p x=\"1\"y=\"2\"></p>",
        "<p x=\"&\"></p>",
        "< p></p>",
        "<",
        "&nbsp;",
        "<style>a<b</style>",
    ] {
        assert!(check(bad).is_err(), "{bad}");
    }
}
