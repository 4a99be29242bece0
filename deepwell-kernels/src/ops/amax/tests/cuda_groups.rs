//! `amax_groups.cu`: the tensor scales that follow from the largest magnitudes, in quantizations of
//! groups and of stacks.

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_precision::QuantFormat;

use crate::quantize_nvfp4::transformed;
use crate::quantize_nvfp4_groups::{Parts, check};

emulated! {
    amax_groups on Sm90a: |gpu| {
        let groups = Parts::Groups(&[256, 0, 128], 128);
        for axis in [Axis::Row, Axis::Column] {
            for format in [QuantFormat::NVFP4, transformed()[0]] {
                check(gpu, groups, 208, "outlier", &Quantize { format, axis });
                check(gpu, Parts::Stack(2, 48), 144, "special", &Quantize { format, axis });
            }
        }
    }
}
