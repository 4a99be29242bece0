//! Matrix instructions of a warp group.
