//! Swizzle patterns of tensor maps and descriptors, for the tracker.

use crate::hazard::Patterns;
use crate::{bulk, tcgen05, wgmma};

/// Pattern of a tensor map.
pub(crate) fn of_map(swizzle: bulk::Swizzle) -> Patterns {
    match swizzle {
        bulk::Swizzle::None => Patterns::IN_ORDER,
        bulk::Swizzle::Bytes32 => Patterns::BYTES_32,
        bulk::Swizzle::Bytes64 => Patterns::BYTES_64,
        bulk::Swizzle::Bytes128 => Patterns::BYTES_128,
        bulk::Swizzle::Bytes128Atom32 => Patterns::BYTES_128_ATOM_32,
        _ => Patterns::OTHER,
    }
}

/// Pattern of a `tcgen05` descriptor.
pub(crate) fn of_tensor(descriptor: u64) -> Patterns {
    let decoded = tcgen05::SharedDescriptor::decode("a matrix", descriptor);
    decoded.map_or(Patterns::default(), |descriptor| match descriptor.swizzle {
        tcgen05::Swizzle::None => Patterns::IN_ORDER,
        tcgen05::Swizzle::Bytes32 => Patterns::BYTES_32,
        tcgen05::Swizzle::Bytes64 => Patterns::BYTES_64,
        tcgen05::Swizzle::Bytes128 => Patterns::BYTES_128,
        tcgen05::Swizzle::Bytes128Atom32 => Patterns::BYTES_128_ATOM_32,
    })
}

/// Pattern of a `wgmma` descriptor.
pub(crate) fn of_group(descriptor: u64) -> Patterns {
    let decoded = wgmma::Descriptor::decode(descriptor);
    decoded.map_or(Patterns::default(), |descriptor| match descriptor.swizzle {
        wgmma::Swizzle::None => Patterns::IN_ORDER,
        wgmma::Swizzle::Bytes32 => Patterns::BYTES_32,
        wgmma::Swizzle::Bytes64 => Patterns::BYTES_64,
        wgmma::Swizzle::Bytes128 => Patterns::BYTES_128,
    })
}
