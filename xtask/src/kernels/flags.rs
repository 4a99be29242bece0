//! Flags of the compilers.

/// Flags of nvcc for every kernel.
pub(crate) const NVCC_FLAGS: [&str; 5] =
    ["-std=c++17", "-O3", "-ptx", "-lineinfo", "-allow-unsupported-compiler"];
/// `-v` prints registers; the optimization level is explicit.
pub(crate) const PTXAS_FLAGS: [&str; 2] = ["-v", "-O3"];
