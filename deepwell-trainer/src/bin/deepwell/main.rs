//! The `deepwell` command.
fn main() {}
