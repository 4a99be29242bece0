//! Matrix instructions of one warp.
