//! Warps, blocks, clusters and what runs beside them.
