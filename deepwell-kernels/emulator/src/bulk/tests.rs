//! Copies of boxes against a definition per element, and one row for each rule.

use super::*;
use crate::error::Fault;
use crate::place::{Memory, Place};

mod flat;

use flat::{Flat, Random};

const BASE: u64 = 0x4000_0000;
const SHARED_BYTES: usize = 64 * 1024;
const UNTOUCHED: u8 = 0xee;

/// Which chunk of 16 bytes is where in each line of 128 bytes: the tables of the ISA.
fn chunk_table(swizzle: Swizzle) -> &'static [[u8; 8]] {
    match swizzle {
        Swizzle::None => &[[0, 1, 2, 3, 4, 5, 6, 7]],
        Swizzle::Bytes32 => &[[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 2, 5, 4, 7, 6]],
        Swizzle::Bytes64 => &[
            [0, 1, 2, 3, 4, 5, 6, 7],
            [1, 0, 3, 2, 5, 4, 7, 6],
            [2, 3, 0, 1, 6, 7, 4, 5],
            [3, 2, 1, 0, 7, 6, 5, 4],
        ],
        Swizzle::Bytes128 => &[
            [0, 1, 2, 3, 4, 5, 6, 7],
            [1, 0, 3, 2, 5, 4, 7, 6],
            [2, 3, 0, 1, 6, 7, 4, 5],
            [3, 2, 1, 0, 7, 6, 5, 4],
            [4, 5, 6, 7, 0, 1, 2, 3],
            [5, 4, 7, 6, 1, 0, 3, 2],
            [6, 7, 4, 5, 2, 3, 0, 1],
            [7, 6, 5, 4, 3, 2, 1, 0],
        ],
        Swizzle::Bytes128Atom32 | Swizzle::Bytes128Atom32Flip8 => &[
            [0, 1, 2, 3, 4, 5, 6, 7],
            [2, 3, 0, 1, 6, 7, 4, 5],
            [4, 5, 6, 7, 0, 1, 2, 3],
            [6, 7, 4, 5, 2, 3, 0, 1],
        ],
        Swizzle::Bytes128Atom64 => &[[0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]],
    }
}

/// Where byte `linear` of a box that begins at `offset` is.
fn byte_place(swizzle: Swizzle, offset: usize, linear: usize) -> usize {
    let address = offset + linear;
    let line = address / 128;
    let table = chunk_table(swizzle);
    let row = table[line % table.len()];
    let chunk = row.iter().position(|&at| usize::from(at) == address % 128 / 16).expect("a chunk");
    let flip = if swizzle == Swizzle::Bytes128Atom32Flip8 && line % 2 == 1 { 8 } else { 0 };
    line * 128 + chunk * 16 + ((address % 16) ^ flip)
}

/// A map with a tensor that fits in memory, and coordinates around it.
fn random_map(random: &mut Random, elements: &[ElementType]) -> (TensorMapSpec, Vec<i32>) {
    let element = elements[random.below(elements.len() as u64) as usize];
    let bits = element.global_bits();
    let rank = 1 + random.below(5) as usize;
    let swizzle = loop {
        let swizzle = Swizzle::ALL[random.below(7) as usize];
        let is_legal = match element {
            ElementType::B4x16Pad64 => {
                matches!(swizzle, Swizzle::None | Swizzle::Bytes128 | Swizzle::Bytes128Atom32)
            }
            ElementType::B6x16Pad32 => {
                matches!(swizzle, Swizzle::None | Swizzle::Bytes128 | Swizzle::Bytes128Atom32)
            }
            _ => true,
        };
        if is_legal {
            break swizzle;
        }
    };
    let chunks_max = u64::from(swizzle.span_bytes().unwrap_or(256)) / 16;
    let inner = if element.is_padded() {
        128
    } else {
        let chunks = match swizzle {
            Swizzle::None => (1 + random.below(chunks_max)).min(256 * bits / 128).max(1),
            _ => chunks_max,
        };
        chunks * 128 / bits
    };
    let multiple = if element.is_padded() { 128 } else { 2 };
    let mut dimensions = vec![multiple * (1 + random.below(2 * inner / multiple + 1))];
    let mut boxes = vec![inner as u32];
    let mut strides = Vec::new();
    let mut element_strides = vec![1 + random.below(2) as u32];
    let mut bytes = (dimensions[0] * bits / 8).div_ceil(32) * 32;
    for dimension in 1..rank {
        strides.push(bytes);
        dimensions.push(1 + random.below(if dimension == 1 { 12 } else { 4 }));
        boxes.push(1 + random.below(if dimension == 1 { 16 } else { 3 }) as u32);
        element_strides.push(if random.below(3) == 0 { 1 + random.below(3) as u32 } else { 1 });
        bytes = bytes * dimensions[dimension] + 32 * random.below(3);
    }
    let coordinates = (0..rank)
        .map(|dimension| {
            let box_extent = i64::from(boxes[dimension]);
            let span = 2 * box_extent + dimensions[dimension] as i64 + 2;
            let at = random.below(span as u64) as i64 - box_extent - 1;
            let step = match dimension {
                0 if element.is_padded() => 128,
                0 => 128 / bits as i64,
                _ => 1,
            };
            (at / step * step) as i32
        })
        .collect();
    let spec = TensorMapSpec {
        element,
        global_address: BASE + 32 * random.below(4),
        global_dimensions: dimensions,
        global_strides_bytes: strides,
        box_dimensions: boxes,
        element_strides,
        interleave: Interleave::None,
        swizzle,
        fill: if element.is_float() && random.below(2) == 1 {
            Fill::NotANumber
        } else {
            Fill::Zero
        },
    };
    (spec, coordinates)
}

/// Calls `each` for all elements of a box with the place in the box, in elements, and the bit in
/// global memory, if it is in the tensor.
fn for_each_element(
    spec: &TensorMapSpec,
    coordinates: &[i32],
    mut each: impl FnMut(usize, Option<u64>),
) {
    let rank = spec.box_dimensions.len();
    let step = |d: usize| if d == 0 { 1 } else { spec.element_strides[d] };
    let taken: Vec<u32> = (0..rank).map(|d| spec.box_dimensions[d].div_ceil(step(d))).collect();
    let mut index = vec![0; rank];
    for place in 0..taken.iter().product::<u32>() as usize {
        let mut is_inside = true;
        let mut bit = 0;
        for d in 0..rank {
            let at = i64::from(coordinates[d]) + i64::from(index[d] * step(d));
            is_inside &= at >= 0 && at < spec.global_dimensions[d] as i64;
            bit += at
                * match d {
                    0 => spec.element.global_bits() as i64,
                    _ => 8 * spec.global_strides_bytes[d - 1] as i64,
                };
        }
        each(place, is_inside.then(|| (spec.global_address - BASE) * 8 + bit as u64));
        for d in 0..rank {
            index[d] += 1;
            if index[d] < taken[d] {
                break;
            }
            index[d] = 0;
        }
    }
}

/// Bits of memory, low bits first.
fn get_bits(bytes: &[u8], bit: u64, count: u64) -> u64 {
    (0..count).fold(0, |value, i| {
        let at = bit + i;
        value | u64::from(bytes[(at / 8) as usize] >> (at % 8) & 1) << i
    })
}

fn put_bits(bytes: &mut [u8], bit: u64, count: u64, value: u64) {
    for i in 0..count {
        let (at, mask) = (((bit + i) / 8) as usize, 1 << ((bit + i) % 8));
        bytes[at] = if value >> i & 1 == 1 { bytes[at] | mask } else { bytes[at] & !mask };
    }
}

/// Bit of an element in a box: of 16 elements of a padded type only the first 8 or 12 bytes hold
/// anything.
fn shared_bit(element: ElementType, place: usize) -> u64 {
    if element.is_padded() {
        128 * (place as u64 / 16) + element.global_bits() * (place as u64 % 16)
    } else {
        element.global_bits() * place as u64
    }
}

const COPIED: [ElementType; 10] = [
    ElementType::U8,
    ElementType::U16,
    ElementType::S32,
    ElementType::U64,
    ElementType::F16,
    ElementType::F32,
    ElementType::F64,
    ElementType::Bf16,
    ElementType::B4x16,
    ElementType::B4x16Pad64,
];

#[test]
fn loads_are_as_defined_per_element() {
    let mut random = Random(1);
    let mut elements = COPIED.to_vec();
    elements.push(ElementType::B6x16Pad32);
    for case in 0..600 {
        let (spec, coordinates) = random_map(&mut random, &elements);
        let map = TensorMap::decode(&TensorMap::encode(&spec).expect("legal")).expect("a map");
        assert_eq!(map.spec(), &spec);
        let mut memory = Flat::new(random.bytes(512 * 1024));
        let offset = 128 * random.below(8) as usize;
        let counted = map.load(&coordinates, &[0, 1], offset as u32, &mut memory);
        let element = spec.element;
        let mut image = Vec::new();
        for_each_element(&spec, &coordinates, |place, bit| {
            let nan = element.not_a_number().map_or(0, |bytes| {
                bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
            });
            let value = match (bit, spec.fill) {
                (Some(bit), _) => get_bits(&memory.global, bit, element.global_bits()),
                (None, Fill::Zero) => 0,
                (None, Fill::NotANumber) => nan,
            };
            let bit = shared_bit(element, place);
            let bytes = (bit / 8 + element.global_bits().div_ceil(8) + 1) as usize;
            image.resize(image.len().max(bytes.next_multiple_of(16)), 0);
            put_bits(&mut image, bit, element.global_bits(), value);
        });
        image.truncate(map.shared_bytes() as usize);
        // Padding is not counted: 8 of 16 bytes, 4 of 16.
        let bytes = image.len() as u32;
        let data = match element {
            ElementType::B4x16Pad64 => bytes / 2,
            ElementType::B6x16Pad32 => bytes / 4 * 3,
            _ => bytes,
        };
        assert_eq!(counted, Ok(data), "case {case}: {spec:?}");
        let mut expected = vec![UNTOUCHED; SHARED_BYTES];
        for (linear, &byte) in image.iter().enumerate() {
            let at = byte_place(spec.swizzle, offset, linear);
            let is_padding = match element {
                ElementType::B4x16Pad64 => linear % 16 >= 8,
                ElementType::B6x16Pad32 => linear % 16 >= 12,
                _ => false,
            };
            // Padding is undefined: whatever came is right.
            expected[at] = if is_padding { memory.shared[0][at] } else { byte };
        }
        assert!(memory.shared[0] == expected, "case {case}: {spec:?} at {coordinates:?}");
        assert!(memory.shared[1] == expected, "case {case}: the second CTA");
    }
}

#[test]
fn stores_are_as_defined_per_element() {
    let mut random = Random(2);
    let elements: Vec<ElementType> =
        COPIED.into_iter().filter(|&one| one != ElementType::B4x16Pad64).collect();
    for case in 0..600 {
        let (spec, mut coordinates) = random_map(&mut random, &elements);
        let map = TensorMap::decode(&TensorMap::encode(&spec).expect("legal")).expect("a map");
        let mut memory = Flat::new(random.bytes(512 * 1024));
        memory.shared[1] = random.bytes(SHARED_BYTES);
        if coordinates.iter().any(|&at| at < 0) {
            let fault = map.store(&coordinates, 1, 0, &mut memory).expect_err("a negative corner");
            assert_eq!(fault.rule, "tensor-store-negative-corner");
            coordinates.iter_mut().for_each(|at| *at = (*at).max(0));
        }
        let offset = 128 * random.below(8) as usize;
        let mut expected = memory.global.clone();
        let bits = spec.element.global_bits();
        let mut bits_written = 0;
        let image: Vec<u8> = (0..map.shared_bytes() as usize)
            .map(|linear| memory.shared[1][byte_place(spec.swizzle, offset, linear)])
            .collect();
        // Rows are stored to the end of 16 bytes.
        let mut whole = spec.clone();
        if !spec.element.is_padded() {
            let of_chunk = 128 / bits;
            whole.global_dimensions[0] = spec.global_dimensions[0].next_multiple_of(of_chunk);
        }
        for_each_element(&whole, &coordinates, |place, bit| {
            let Some(bit) = bit else { return };
            put_bits(&mut expected, bit, bits, get_bits(&image, bits * place as u64, bits));
            bits_written += bits;
        });
        let written = map.store(&coordinates, 1, offset as u32, &mut memory);
        assert_eq!(written, Ok(bits_written / 8), "case {case}: {spec:?}");
        assert!(memory.global == expected, "case {case}: {spec:?} at {coordinates:?}");
    }
}

#[test]
fn stores_of_six_bits_drop_two_of_each_byte() {
    let mut random = Random(3);
    let spec = TensorMapSpec::new(ElementType::B6x16Pad32, BASE, &[256, 4], &[192], &[128, 2]);
    let map = TensorMap::decode(&TensorMap::encode(&spec).expect("legal")).expect("a map");
    let mut memory = Flat::new(vec![0; 1024]);
    memory.shared[0] = random.bytes(SHARED_BYTES);
    assert_eq!(map.store(&[128, 1], 0, 256, &mut memory), Ok(192));
    for row in 0..2 {
        for column in 0..128 {
            let bit = 8 * 192 * (1 + row) + 6 * (128 + column);
            let byte = memory.shared[0][256 + 128 * row as usize + column as usize];
            assert_eq!(get_bits(&memory.global, bit, 6), u64::from(byte & 0x3f));
        }
    }
    assert!(memory.global[..192 + 96].iter().all(|&byte| byte == 0));
}

#[test]
fn four_rows_are_gathered_and_scattered() {
    let mut random = Random(4);
    let spec = TensorMapSpec {
        swizzle: Swizzle::Bytes128,
        ..TensorMapSpec::new(ElementType::Bf16, BASE, &[80, 10], &[160], &[64, 1])
    };
    let map = TensorMap::decode(&TensorMap::encode(&spec).expect("legal")).expect("a map");
    let mut memory = Flat::new(random.bytes(4096));
    let rows = [7, -1, 0, 12];
    let coordinates = [32, rows[0], rows[1], rows[2], rows[3]];
    assert_eq!(map.gather4(&coordinates, &[0], 1024, &mut memory), Ok(512));
    for (index, row) in rows.into_iter().enumerate() {
        for byte in 0..128 {
            let at = byte_place(Swizzle::Bytes128, 1024, 128 * index + byte);
            let is_inside = (0..10).contains(&row) && byte < 96;
            let expected = match is_inside {
                true => memory.global[row as usize * 160 + 64 + byte],
                false => 0,
            };
            assert_eq!(memory.shared[0][at], expected, "row {row} byte {byte}");
        }
    }
    let before = memory.global.clone();
    memory.global[7 * 160 + 64..7 * 160 + 160].fill(0);
    memory.global[64..160].fill(0);
    assert_eq!(map.scatter4(&coordinates, 0, 1024, &mut memory), Ok(192));
    assert!(memory.global == before);
    let refused = map.gather4(&[0, 1, 2, 3], &[0], 0, &mut memory).expect_err("4 coordinates");
    assert_eq!(refused.rule, "tensor-copy-gather");
}

fn legal() -> TensorMapSpec {
    TensorMapSpec::new(ElementType::Bf16, BASE, &[256, 64, 4], &[512, 32768], &[64, 8, 2])
}

#[test]
fn every_rule_of_a_map_has_a_name() {
    let check = |rule: &str, change: &dyn Fn(&mut TensorMapSpec)| {
        let mut spec = legal();
        TensorMap::encode(&spec).expect("legal before the change");
        change(&mut spec);
        let fault = TensorMap::encode(&spec).expect_err(rule);
        assert_eq!(fault.rule, rule, "{fault}");
    };
    let padded = |spec: &mut TensorMapSpec| {
        spec.element = ElementType::B4x16Pad64;
        spec.box_dimensions[0] = 128;
        TensorMap::encode(spec).expect("legal");
    };
    check("tensor-map-rank", &|spec| spec.global_dimensions.clear());
    check("tensor-map-rank", &|spec| spec.global_dimensions = vec![8; 6]);
    check("tensor-map-rank", &|spec| spec.global_strides_bytes.push(512));
    check("tensor-map-rank", &|spec| spec.box_dimensions.truncate(2));
    check("tensor-map-rank", &|spec| spec.element_strides.push(1));
    check("tensor-map-interleave", &|spec| spec.interleave = Interleave::Bytes16);
    check("tensor-map-interleave", &|spec| spec.interleave = Interleave::Bytes32);
    check("tensor-map-global-address", &|spec| spec.global_address += 8);
    check("tensor-map-global-address", &|spec| {
        padded(spec);
        spec.global_address += 16;
    });
    check("tensor-map-global-dimension", &|spec| spec.global_dimensions[1] = 0);
    check("tensor-map-global-dimension", &|spec| spec.global_dimensions[2] = (1 << 32) + 1);
    check("tensor-map-global-dimension", &|spec| {
        padded(spec);
        spec.global_dimensions[0] = 192;
    });
    check("tensor-map-global-dimension", &|spec| {
        spec.element = ElementType::B4x16;
        spec.global_dimensions[0] = 255;
    });
    check("tensor-map-global-stride", &|spec| spec.global_strides_bytes[0] += 8);
    check("tensor-map-global-stride", &|spec| spec.global_strides_bytes[1] = 1 << 40);
    check("tensor-map-global-stride", &|spec| {
        padded(spec);
        spec.global_strides_bytes[0] += 16;
    });
    check("tensor-map-box-dimension", &|spec| spec.box_dimensions[1] = 0);
    check("tensor-map-box-dimension", &|spec| spec.box_dimensions[1] = 257);
    check("tensor-map-box-inner", &|spec| spec.box_dimensions[0] = 4);
    check("tensor-map-box-inner", &|spec| {
        padded(spec);
        spec.box_dimensions[0] = 64;
    });
    check("tensor-map-box-size", &|spec| spec.box_dimensions = vec![64, 256, 8]);
    check("tensor-map-element-stride", &|spec| spec.element_strides[1] = 0);
    check("tensor-map-element-stride", &|spec| spec.element_strides[2] = 9);
    check("tensor-map-swizzle-span", &|spec| {
        spec.swizzle = Swizzle::Bytes64;
    });
    check("tensor-map-swizzle-span", &|spec| {
        spec.swizzle = Swizzle::Bytes128Atom64;
        spec.box_dimensions[0] = 128;
    });
    check("tensor-map-swizzle", &|spec| {
        padded(spec);
        spec.swizzle = Swizzle::Bytes128Atom64;
    });
    check("tensor-map-fill", &|spec| {
        spec.element = ElementType::U16;
        spec.fill = Fill::NotANumber;
    });
    let mut spec = legal();
    spec.swizzle = Swizzle::Bytes128Atom32;
    assert_eq!(spec.check_target(90).expect_err("sm_90").rule, "tensor-map-target");
    assert_eq!(spec.check_target(100), Ok(()));
}

#[test]
fn wrong_copies_have_a_name() {
    let map = TensorMap::decode(&TensorMap::encode(&legal()).expect("legal")).expect("a map");
    let mut memory = Flat::new(vec![0; 1 << 18]);
    let mut load = |coordinates: &[i32], offset| {
        map.load(coordinates, &[0], offset, &mut memory).expect_err("refused").rule
    };
    assert_eq!(load(&[0, 0], 0), "tensor-copy-rank");
    assert_eq!(load(&[0, 0, 0], 64), "tensor-copy-shared-alignment");
    assert_eq!(load(&[4, 0, 0], 0), "tensor-copy-coordinate");
    assert_eq!(load(&[-1, 0, 0], 0), "tensor-copy-coordinate");
    assert_eq!(load(&[0, 0, 0], SHARED_BYTES as u32 - 128), "test-memory");
    let narrow = TensorMapSpec {
        swizzle: Swizzle::Bytes128,
        ..TensorMapSpec::new(ElementType::Bf16, BASE, &[256, 64], &[512], &[32, 8])
    };
    let narrow = TensorMap::decode(&TensorMap::encode(&narrow).expect("legal")).expect("a map");
    let fault = narrow.load(&[0, 0], &[0], 0, &mut memory).expect_err("a narrow box");
    assert_eq!(fault.rule, "tensor-copy-narrow-swizzle");
    let padded = TensorMapSpec::new(ElementType::B4x16Pad64, BASE, &[256], &[], &[128]);
    let padded = TensorMap::decode(&TensorMap::encode(&padded).expect("legal")).expect("a map");
    let fault = padded.load(&[64], &[0], 0, &mut memory).expect_err("coordinate");
    assert_eq!(fault.rule, "tensor-copy-coordinate");
    let fault = padded.store(&[0], 0, 0, &mut memory).expect_err("a store");
    assert_eq!(fault.rule, "tensor-copy-direction");
    let fault = map.store(&[64, 0, -1], 0, 0, &mut memory).expect_err("a store");
    assert_eq!(fault.rule, "tensor-store-negative-corner");
    let add = ReduceOperation::Add;
    let fault = map.reduce(&[-64, 0, 0], 0, 0, add, &mut memory).expect_err("a sum");
    assert_eq!(fault.rule, "tensor-store-negative-corner");
    let fault = TensorMap::decode(&[0; TENSOR_MAP_BYTES]).expect_err("no map");
    assert_eq!(fault.rule, "tensor-map-invalid");
}

#[test]
fn replaced_fields_are_those_of_a_new_map() {
    let mut bytes = TensorMap::encode(&legal()).expect("legal");
    let wanted = TensorMapSpec {
        element: ElementType::F32,
        global_address: BASE + 4096,
        global_dimensions: vec![40, 12],
        global_strides_bytes: vec![256],
        box_dimensions: vec![32, 4],
        element_strides: vec![1, 2],
        interleave: Interleave::None,
        swizzle: Swizzle::Bytes128Atom32,
        fill: Fill::NotANumber,
    };
    for (field, value) in [
        (MapField::GlobalAddress, BASE + 4096),
        (MapField::Rank, 1),
        (MapField::GlobalDimension(0), 40),
        (MapField::GlobalDimension(1), 12),
        (MapField::GlobalStride(0), 256),
        (MapField::BoxDimension(0), 32),
        (MapField::BoxDimension(1), 4),
        (MapField::ElementStride(1), 2),
        (MapField::ElementType, 7),
        (MapField::InterleaveLayout, 0),
        (MapField::SwizzleMode, 3),
        (MapField::SwizzleAtomicity, 1),
        (MapField::FillMode, 1),
    ] {
        replace_field(&mut bytes, field, value).expect("a field");
    }
    assert_eq!(TensorMap::decode(&bytes).expect("a map").spec(), &wanted);
    let mut check = |rule: &str, field, value| {
        let done = replace_field(&mut bytes, field, value);
        let fault = done.and_then(|()| TensorMap::decode(&bytes).map(drop)).expect_err(rule);
        assert_eq!(fault.rule, rule, "{fault}");
    };
    check("tensor-map-replace", MapField::Rank, 5);
    check("tensor-map-replace", MapField::GlobalStride(4), 16);
    check("tensor-map-replace", MapField::FillMode, 2);
    check("tensor-map-global-address", MapField::GlobalAddress, BASE + 1);
}

#[test]
fn plain_copies_move_what_they_say() {
    let mut random = Random(5);
    let mut memory = Flat::new(random.bytes(1024));
    assert_eq!(copy_to_shared(BASE + 32, &[0, 1], 64, 48, &mut memory), Ok(48));
    for rank in 0..2 {
        assert_eq!(memory.shared[rank][64..112], memory.global[32..80]);
        assert_eq!(memory.shared[rank][112], UNTOUCHED);
    }
    assert_eq!(copy_between_shared((0, 64), (1, 0), 32, &mut memory), Ok(32));
    assert_eq!(memory.shared[1][..32], memory.global[32..64]);
    let before = memory.global.clone();
    assert_eq!(copy_to_global((0, 64), BASE + 512, 32, Some(0x8001), &mut memory), Ok(4));
    for i in 0..32 {
        let expected = if matches!(i % 16, 0 | 15) { before[32 + i] } else { before[512 + i] };
        assert_eq!(memory.global[512 + i], expected);
    }
    for (fault, rule) in [
        (copy_to_shared(BASE + 8, &[0], 0, 16, &mut memory), "bulk-copy-alignment"),
        (copy_to_shared(BASE, &[0], 8, 16, &mut memory), "bulk-copy-alignment"),
        (copy_to_shared(BASE, &[0], 0, 24, &mut memory), "bulk-copy-size"),
        (copy_between_shared((1, 0), (1, 64), 16, &mut memory), "bulk-copy-same-cta"),
    ] {
        assert_eq!(fault.expect_err(rule).rule, rule);
    }
}

#[test]
fn reductions_combine_values() {
    use ReduceElement as E;
    use ReduceOperation as O;
    let f32_of = |value: f32| u64::from(value.to_bits());
    let rows: &[(E, O, u64, u64, u64)] = &[
        (E::U32, O::Add, 0xffff_ffff, 2, 1),
        (E::U64, O::Add, u64::MAX, 3, 2),
        (E::S32, O::Min, 0xffff_fffe, 5, 0xffff_fffe),
        (E::S32, O::Max, 0xffff_fffe, 5, 5),
        (E::U32, O::Min, 0xffff_fffe, 5, 5),
        (E::S64, O::Min, u64::MAX, 5, u64::MAX),
        (E::U32, O::Increment, 4, 5, 5),
        (E::U32, O::Increment, 5, 5, 0),
        (E::U32, O::Decrement, 4, 5, 3),
        (E::U32, O::Decrement, 0, 5, 5),
        (E::U32, O::Decrement, 6, 5, 5),
        (E::B32, O::And, 0b1100, 0b1010, 0b1000),
        (E::B32, O::Or, 0b1100, 0b1010, 0b1110),
        (E::B64, O::Xor, 0b1100, 0b1010, 0b0110),
        (E::F32, O::Add, f32_of(1.5), f32_of(2.25), f32_of(3.75)),
        // Subnormal values count as zeros.
        (E::F32, O::Add, 0x0000_0001, 0x8040_0000, 0x803f_ffff),
        (E::F64, O::Add, 1.5f64.to_bits(), 2.0f64.to_bits(), 3.5f64.to_bits()),
        // 2048 + 1 lies between two values of binary16; the even one is taken.
        (E::F16, O::Add, 0x6800, 0x3c00, 0x6800),
        (E::F16, O::Add, 0x0001, 0x0001, 0x0002),
        (E::Bf16, O::Add, 0x3f80, 0x4000, 0x4040),
        (E::Bf16, O::Min, 0x3f80, 0xc000, 0xc000),
        (E::F16, O::Max, 0x3c00, 0x7e00, 0x3c00),
    ];
    for &(element, operation, old, new, expected) in rows {
        let size = element.bytes();
        let mut memory = Flat::new(vec![0; 64]);
        for at in (0..16).step_by(size) {
            memory.global[at..at + size].copy_from_slice(&old.to_le_bytes()[..size]);
            memory.shared[0][at..at + size].copy_from_slice(&new.to_le_bytes()[..size]);
        }
        let done = reduce_to_global((0, 0), BASE, 16, operation, element, &mut memory);
        assert_eq!(done, Ok(16));
        for at in (0..16).step_by(size) {
            let came = &memory.global[at..at + size];
            let what = format!("{operation:?} of {element:?}: {came:x?}");
            assert_eq!(came, &expected.to_le_bytes()[..size], "{what}");
        }
    }
    let mut memory = Flat::new(vec![0; 64]);
    for (operation, element) in
        [(O::Min, E::F32), (O::Increment, E::S32), (O::And, E::F16), (O::Add, E::B32)]
    {
        let fault = reduce_to_global((0, 0), BASE, 16, operation, element, &mut memory);
        assert_eq!(fault.expect_err("refused").rule, "bulk-reduce-type");
    }
    let fault = reduce_to_shared((0, 0), (1, 0), 16, O::Add, E::F32, &mut memory);
    assert_eq!(fault.expect_err("refused").rule, "bulk-reduce-type");
    memory.shared[0][..16].fill(1);
    memory.shared[1][..16].fill(2);
    assert_eq!(reduce_to_shared((0, 0), (1, 0), 16, O::Add, E::U32, &mut memory), Ok(16));
    assert_eq!(memory.shared[1][..16], [3; 16]);
}
