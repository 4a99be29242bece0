//! Which tensor maps the driver of one H200 accepts, and what copies with them do there.
//!
//! Each line of the golden files is one map with its answer. Fields: type, dimensions, address,
//! extents, strides in bytes, box, element strides, interleave, swizzle, fill.

use std::str::FromStr;

use deepwell_emulator::bulk::{ElementType, Fill, Interleave, Swizzle, TensorMap, TensorMapSpec};
use deepwell_emulator::error::Fault;
use deepwell_emulator::place::{Memory, Place};

/// The fields of a line, one after the other.
struct Fields<'a>(std::str::SplitWhitespace<'a>);

impl Fields<'_> {
    fn next<T: FromStr>(&mut self) -> T {
        self.0.next().and_then(|field| field.parse().ok()).expect("a number")
    }

    fn many<T: FromStr>(&mut self, count: usize) -> Vec<T> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// A multiple of all alignments.
const BASE: u64 = 0x10_0000;

fn spec(fields: &mut Fields<'_>) -> TensorMapSpec {
    let element = ElementType::from_driver(fields.next()).expect("an element type");
    let rank: usize = fields.next();
    TensorMapSpec {
        element,
        global_address: BASE + fields.next::<u64>(),
        global_dimensions: fields.many(rank),
        global_strides_bytes: fields.many(rank.saturating_sub(1)),
        box_dimensions: fields.many(rank),
        element_strides: fields.many(rank),
        interleave: Interleave::from_code(fields.next()).expect("an interleave"),
        swizzle: Swizzle::from_driver(fields.next()).expect("a swizzle"),
        fill: Fill::from_code(fields.next()).expect("a fill"),
    }
}

#[test]
fn the_driver_accepts_the_same_maps() {
    let golden = include_str!("golden/h200_tensor_map_rules.txt");
    assert!(golden.lines().count() > 800);
    let mut wrong = Vec::new();
    for line in golden.lines() {
        let mut fields = Fields(line.split_whitespace());
        fields.0.next();
        let spec = spec(&mut fields);
        fields.0.next();
        let is_accepted = fields.next::<u32>() == 1;
        let came = TensorMap::encode(&spec).and_then(|_| spec.check_target(90));
        if came.is_ok() != is_accepted {
            wrong.push(format!("{line}: {:?}", came.err()));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}\n{}",
        wrong.len(),
        golden.lines().count(),
        wrong.join("\n")
    );
}

/// Shared memory of one CTA and some global memory.
struct Flat {
    shared: Vec<u8>,
    global: Vec<u8>,
}

const SHARED_BYTES: usize = 48 * 1024;
const GLOBAL_BYTES: usize = 512 * 1024;

impl Flat {
    fn bytes(&mut self, place: Place, count: usize) -> Result<&mut [u8], Fault> {
        let (bytes, at) = match place {
            Place::Shared { rank: 0, offset } => (&mut self.shared, offset as usize),
            Place::Global(address) => {
                (&mut self.global, (address as usize).wrapping_sub(BASE as usize))
            }
            _ => return Err(Fault::new("test-memory", format!("{place} is not there"))),
        };
        at.checked_add(count)
            .and_then(|end| bytes.get_mut(at..end))
            .ok_or_else(|| Fault::new("test-memory", format!("{count} bytes at {place}")))
    }
}

impl Memory for Flat {
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), Fault> {
        bytes.copy_from_slice(self.bytes(place, bytes.len())?);
        Ok(())
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), Fault> {
        self.bytes(place, bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }
}

/// Bytes that the golden run filled memory with.
fn pattern(count: usize, seed: u64) -> Vec<u8> {
    (0..count as u64 / 8)
        .flat_map(|index| {
            let mut z = index.wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)).to_le_bytes()
        })
        .collect()
}

fn hash(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn check_all(golden: &str, check: impl Fn(&str) -> Result<(), String>) {
    let wrong: Vec<String> = golden.lines().filter_map(|line| check(line).err()).collect();
    let count = golden.lines().count();
    assert!(wrong.is_empty(), "{} of {count}\n{}", wrong.len(), wrong.join("\n"));
}

fn check_load(line: &str, global: &[u8]) -> Result<(), String> {
    let mut fields = Fields(line.split_whitespace());
    fields.0.next();
    let spec = spec(&mut fields);
    let coordinates: Vec<i32> = fields.many(spec.box_dimensions.len());
    let offset: u32 = fields.next();
    let bytes_counted: u32 = fields.next();
    let bytes = TensorMap::encode(&spec).map_err(|fault| format!("{line}: {fault}"))?;
    let map = TensorMap::decode(&bytes).map_err(|fault| format!("{line}: {fault}"))?;
    let mut memory = Flat { shared: vec![0xee; SHARED_BYTES], global: global.to_vec() };
    let counted = map.load(&coordinates, &[0], offset, &mut memory);
    if line.ends_with("= illegal") {
        // The machine stopped with an illegal instruction.
        return match counted {
            Err(fault) if fault.rule.starts_with("tensor-copy-") => Ok(()),
            other => Err(format!("{line}: {other:?}")),
        };
    }
    let counted = counted.map_err(|fault| format!("{line}: {fault}"))?;
    if counted != bytes_counted || hash(&memory.shared) != line[line.len() - 16..] {
        return Err(format!("{line}: {counted} {}", hash(&memory.shared)));
    }
    Ok(())
}

#[test]
fn loads_leave_the_same_bytes() {
    let golden = include_str!("golden/h200_tensor_loads.txt");
    let global = pattern(GLOBAL_BYTES, 7);
    check_all(golden, |line| check_load(line, &global));
}
