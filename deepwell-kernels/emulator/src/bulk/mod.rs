//! Bulk copies and tensor maps.
