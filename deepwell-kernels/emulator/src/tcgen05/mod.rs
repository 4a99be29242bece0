//! Tensor memory and the tensor cores of sm_100.
