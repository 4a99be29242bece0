//! Typed instructions.
