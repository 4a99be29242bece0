//! Number formats and their conversions.
