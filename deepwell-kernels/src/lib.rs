//! Kernel specs, registry, executor and backends
