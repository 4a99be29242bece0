//! Arithmetic of tensor cores.
