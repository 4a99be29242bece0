//! Warps, CTAs, clusters and what runs beside them.
//!
//! # Brief overview
//!
//! A launch runs on one thread: clusters that are resident on the machine take turns, and in each
//! the warps do, so that CTAs that wait for each other through device memory make progress, and
//! so that a launch with the same seed runs the same way again. A warp runs the instructions of
//! those lanes that are furthest behind, until they join others; when its turn ends, lanes that
//! went apart take turns too. What cannot go on waits ([`warp`](self)) and is woken by looking at
//! what it waits for; when nothing runs, pending asynchronous operations are completed, then
//! `try_wait`s give up, and what remains is a deadlock.

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
mod matrix;
mod pattern;
mod random;
mod reach;
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
pub(crate) use schedule::run;
pub(crate) use track::tracker_of;
pub(crate) use watch::watched;
pub(crate) use world::{Shape, World};
