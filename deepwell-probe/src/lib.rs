//! What hardware is here: CPUs, GPUs, links and libraries, as one value
