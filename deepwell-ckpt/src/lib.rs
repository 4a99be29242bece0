//! Checkpoint format v1: complete or absent, checksummed, re-shardable
