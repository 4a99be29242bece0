//! Tests of the launch files.
