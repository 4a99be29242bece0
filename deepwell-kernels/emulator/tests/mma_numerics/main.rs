//! MMAs against their definition (`reference`), for random elements of many kinds.

mod data;
mod hardware;
mod modes;
mod reference;
