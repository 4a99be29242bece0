//! Code shared by several launchers; every launcher is in its op's folder.

pub(crate) mod fused_gemm;
pub(crate) mod gemm;
pub(crate) mod mx;
pub(crate) mod norm_quantize;
pub(crate) mod nvfp4;
pub(crate) mod row_lanes;
pub(crate) mod row_quantize;
pub(crate) mod rows;
pub(crate) mod support;
pub(crate) mod tcgen05;
pub(crate) mod tcgen05_cost;
pub(crate) mod tensor_list;
pub(crate) mod tensor_maps;
