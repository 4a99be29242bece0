//! The check of the tests that markup is well-formed.

/// Panics unless `markup`, a sequence of elements and text, is well-formed XML. A first
/// `<!DOCTYPE html>` is allowed.
pub(crate) fn assert_well_formed(markup: &str) {
    let body = markup.strip_prefix("<!DOCTYPE html>").unwrap_or(markup);
    if let Err(error) = roxmltree::Document::parse(&format!("<markup>{body}</markup>")) {
        panic!("{error}");
    }
}
