//! Number formats, block quantization, scale layouts, per-layer precision policy and guards
