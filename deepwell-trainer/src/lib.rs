//! Compile, engine, trainer, data and the deepwell command
