//! The command `deepwell-emulate` as a user sees it.
