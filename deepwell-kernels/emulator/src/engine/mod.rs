//! Execution engine: warps, CTAs, clusters and asynchronous units.
//!
//! # Brief overview
//!
//! A launch runs on one thread. Resident clusters take turns, as do the warps of a cluster. CTAs
//! that wait for each other through device memory therefore make progress, and a launch with the
//! same seed is deterministic. A warp executes the lanes that are furthest behind, until they reach
//! other lanes; at the end of its turn, diverged lanes take turns too. Blocked lanes are parked
//! ([`warp`](self)) and wake when a check finds their wait fulfilled. When no warp can run, pending
//! asynchronous operations complete; then `try_wait`s time out. If no warp can run after that, the
//! launch is in a deadlock.

mod access;
mod asynchronous;
mod barrier;
mod cluster;
mod compact;
mod control;
mod copy;
mod execute;
mod gather;
mod landing;
mod launch_control;
mod matrix;
mod pattern;
mod random;
mod reach;
mod register_pool;
mod registers;
mod schedule;
mod special;
mod synchronize;
mod tensor;
mod tensor_fences;
mod track;
mod warp;
mod warp_group;
mod watch;
mod world;

pub(crate) use compact::share_rows;
pub(crate) use random::Random;
pub(crate) use register_pool::{SM_REGISTERS, launch_registers};
pub(crate) use registers::visit_registers;
pub(crate) use schedule::run;
pub(crate) use track::tracker_of;
pub(crate) use watch::watched;
pub(crate) use world::{Shape, World};
