//! The mixture-of-experts block: router, capacity, balancing losses
