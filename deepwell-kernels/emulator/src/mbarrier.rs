//! Barriers in shared memory that count arrivals and bytes.
