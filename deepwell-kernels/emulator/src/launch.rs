//! What is launched and how it ended.
