//! A record of what ran.
