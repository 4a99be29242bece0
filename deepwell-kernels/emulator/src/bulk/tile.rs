//! Tensor copies of boxes and rows.

use super::element::ElementType;
use super::reduction::{ReduceElement, ReduceOperation};
use super::swizzle::{Swizzle, SwizzleAtom, swizzle_address};
use super::tensor_map::{Fill, TensorMap};
use crate::error::Fault;
use crate::place::{Memory, Place};

/// Alignment of a box in shared memory.
const SHARED_ALIGNMENT: u32 = 128;
/// Bytes of a line of the swizzle patterns.
const LINE_BYTES: usize = 128;
/// Bytes that all patterns keep together, except for the exchange of halves.
const CHUNK_BYTES: usize = 16;
/// Value of padding after a load. The padding is undefined, so kernels must not depend on it.
const PADDING: u8 = 0xdb;

/// One row of a box, located in the tensor.
#[derive(Clone, Copy, Debug)]
struct Row {
    /// Address of the element with innermost coordinate 0 of this row.
    base: i128,
    /// Whether all coordinates but the innermost are inside of the tensor.
    inside: bool,
}

/// The in-bounds elements of a row.
struct Inside {
    /// Address of the first in-bounds byte in global memory.
    address: u64,
    /// Range of the in-bounds bytes in the packed row.
    range: std::ops::Range<usize>,
}

/// Direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Load,
    Store,
}

/// Checks that a stored box begins inside of the tensor; only the far borders may be exceeded. This
/// rule is not in the ISA but in the CUDA programming guide (asynchronous copies of tensors,
/// negative indices).
fn check_corner(coordinates: &[i32], direction: Direction) -> Result<(), Fault> {
    if direction == Direction::Load || coordinates.iter().all(|&at| at >= 0) {
        return Ok(());
    }
    Err(Fault::new(
        "tensor-store-negative-corner",
        format!(
            "a box that is stored or added begins at coordinates of 0 and up, got {coordinates:?}; \
             only loads may begin before the tensor"
        ),
    ))
}

impl TensorMap {
    /// Bytes of one row of a box in shared memory, including padding of elements.
    fn row_bytes(&self) -> usize {
        (u64::from(self.spec.box_dimensions[0]) * self.spec.element.shared_bits() / 8) as usize
    }

    /// Bytes from one row to the next in shared memory.
    fn row_pitch(&self) -> usize {
        self.row_bytes()
    }

    /// Bytes of one row of a box in global memory.
    fn packed_row_bytes(&self) -> usize {
        (u64::from(self.spec.box_dimensions[0]) * self.spec.element.global_bits() / 8) as usize
    }

    /// Elements of a box along a dimension, without skipped elements.
    fn taken(&self, dimension: usize) -> u32 {
        let stride = if dimension == 0 { 1 } else { self.spec.element_strides[dimension] };
        self.spec.box_dimensions[dimension].div_ceil(stride)
    }

    /// Bytes of a box in shared memory, including out-of-bounds elements and padding.
    pub fn shared_bytes(&self) -> u32 {
        let rows: u32 = (1..self.rank()).map(|dimension| self.taken(dimension)).product();
        rows * self.row_pitch() as u32
    }

    /// Copies a box from global to shared memory. The box begins at `coordinates` (innermost first;
    /// may be negative or beyond the end) and is written to `offset` in the shared memory of each
    /// of `ranks`. Returns the bytes counted by the mbarrier of each rank: all elements of the box,
    /// including out-of-bounds elements, without padding. The ISA does not mention padding; CUTLASS
    /// and DeepGEMM both expect that it does not count.
    ///
    /// # Errors
    /// `tensor-copy-rank`, `tensor-copy-shared-alignment`, `tensor-copy-coordinate`,
    /// `tensor-copy-direction`, and the errors of the memory.
    pub fn load(
        &self,
        coordinates: &[i32],
        ranks: &[u32],
        offset: u32,
        memory: &mut dyn Memory,
    ) -> Result<u32, Fault> {
        self.check(coordinates, offset, Direction::Load)?;
        self.load_rows(coordinates[0], &self.rows(coordinates), ranks, offset, memory)
    }

    /// Copies a box from shared to global memory. Out-of-bounds elements are not written, except up
    /// to the end of the 16 bytes in which a row of the tensor ends. Returns the number of bytes
    /// written.
    ///
    /// # Errors
    /// The errors of [`TensorMap::load`]; `tensor-store-negative-corner` for a box that begins
    /// before the tensor.
    pub fn store(
        &self,
        coordinates: &[i32],
        rank: u32,
        offset: u32,
        memory: &mut dyn Memory,
    ) -> Result<u64, Fault> {
        self.check(coordinates, offset, Direction::Store)?;
        self.store_rows(coordinates[0], &self.rows(coordinates), (rank, offset), None, memory)
    }

    /// [`TensorMap::store`] that combines each element with the value in memory.
    ///
    /// # Errors
    /// The errors of [`TensorMap::store`]; `bulk-reduce-type` for an illegal element type.
    pub fn reduce(
        &self,
        coordinates: &[i32],
        rank: u32,
        offset: u32,
        operation: ReduceOperation,
        memory: &mut dyn Memory,
    ) -> Result<u64, Fault> {
        self.check(coordinates, offset, Direction::Store)?;
        let element = self.reduce_element(operation)?;
        element.check(operation, true)?;
        let rows = self.rows(coordinates);
        let reduction = Some((operation, element));
        self.store_rows(coordinates[0], &rows, (rank, offset), reduction, memory)
    }

    /// `.tile::gather4`: loads four rows of a two-dimensional tensor. `coordinates` holds the
    /// column, then the four rows.
    ///
    /// # Errors
    /// The errors of [`TensorMap::load`]; `tensor-copy-gather` for a map of other than two
    /// dimensions or a box of more than one row.
    pub fn gather4(
        &self,
        coordinates: &[i32],
        ranks: &[u32],
        offset: u32,
        memory: &mut dyn Memory,
    ) -> Result<u32, Fault> {
        let rows = self.four_rows(coordinates, offset, Direction::Load)?;
        self.load_rows(coordinates[0], &rows, ranks, offset, memory)
    }

    /// `.tile::scatter4`: stores four rows; see [`TensorMap::gather4`].
    ///
    /// # Errors
    /// The errors of [`TensorMap::gather4`].
    pub fn scatter4(
        &self,
        coordinates: &[i32],
        rank: u32,
        offset: u32,
        memory: &mut dyn Memory,
    ) -> Result<u64, Fault> {
        let rows = self.four_rows(coordinates, offset, Direction::Store)?;
        self.store_rows(coordinates[0], &rows, (rank, offset), None, memory)
    }

    fn four_rows(
        &self,
        coordinates: &[i32],
        offset: u32,
        direction: Direction,
    ) -> Result<Vec<Row>, Fault> {
        let refuse = |message: String| Err(Fault::new("tensor-copy-gather", message));
        if coordinates.len() != 5 || self.rank() != 2 {
            return refuse(format!(
                "gather and scatter of four rows take 5 coordinates and a map of 2 dimensions, got \
                 {} and {}",
                coordinates.len(),
                self.rank()
            ));
        }
        if self.taken(1) != 1 {
            return refuse(format!(
                "gather and scatter of four rows need boxes of 1 row, got {}",
                self.spec.box_dimensions[1]
            ));
        }
        // Rows are checked separately. No rule forbids a scattered row before the tensor.
        self.check(&[coordinates[0], 0], offset, direction)?;
        let row = |&at: &i32| self.rows(&[coordinates[0], at])[0];
        Ok(coordinates[1..].iter().map(row).collect())
    }

    fn check(&self, coordinates: &[i32], offset: u32, direction: Direction) -> Result<(), Fault> {
        if coordinates.len() != self.rank() {
            return Err(Fault::new(
                "tensor-copy-rank",
                format!(
                    "the instruction has {} coordinates, its tensor map {} dimensions",
                    coordinates.len(),
                    self.rank()
                ),
            ));
        }
        check_corner(coordinates, direction)?;
        if !offset.is_multiple_of(SHARED_ALIGNMENT) {
            return Err(Fault::new(
                "tensor-copy-shared-alignment",
                format!(
                    "a box must begin at a multiple of {SHARED_ALIGNMENT} bytes of shared \
                     memory, got {offset:#x}"
                ),
            ));
        }
        let element = self.spec.element;
        // The ISA requires that the address of a box is a multiple of 16 bytes. The driver guide
        // omits this rule, but an H200 stops with an illegal instruction.
        let multiple = if element.is_padded() { 128 } else { 128 / element.global_bits() as i32 };
        if coordinates[0] % multiple != 0 {
            return Err(Fault::new(
                "tensor-copy-coordinate",
                format!(
                    "the innermost coordinate of {element:?} elements must be a multiple of \
                     {multiple} ({}), got {}",
                    if element.is_padded() { "for padded elements" } else { "16 bytes" },
                    coordinates[0]
                ),
            ));
        }
        let narrow = self.spec.swizzle.span_bytes().filter(|&span| span > self.row_bytes() as u32);
        if let Some(span) = narrow {
            return Err(Fault::new(
                "tensor-copy-narrow-swizzle",
                format!(
                    "boxes narrower than the {span} bytes of their swizzle are not emulated, as \
                     their place in shared memory is not documented; got {} bytes",
                    self.row_bytes()
                ),
            ));
        }
        let wrong_way = match direction {
            Direction::Load => {
                element == ElementType::B6x16Pad32 && self.spec.swizzle == Swizzle::Bytes128Atom64
            }
            Direction::Store => element == ElementType::B4x16Pad64,
        };
        if wrong_way {
            return Err(Fault::new(
                "tensor-copy-direction",
                format!(
                    "{element:?} elements with swizzle {:?} can only be copied {} shared memory",
                    self.spec.swizzle,
                    if direction == Direction::Load { "out of" } else { "into" }
                ),
            ));
        }
        Ok(())
    }

    /// Returns all rows of the box, in the order of shared memory.
    fn rows(&self, coordinates: &[i32]) -> Vec<Row> {
        let spec = &self.spec;
        let mut rows = vec![Row { base: i128::from(spec.global_address), inside: true }];
        for dimension in (1..self.rank()).rev() {
            let stride = i128::from(spec.global_strides_bytes[dimension - 1]);
            let extent = i128::from(spec.global_dimensions[dimension]);
            let step = i128::from(spec.element_strides[dimension]);
            let taken = i128::from(self.taken(dimension));
            rows = rows
                .iter()
                .flat_map(|row| {
                    (0..taken).map(move |index| {
                        let at = i128::from(coordinates[dimension]) + index * step;
                        Row {
                            base: row.base + at * stride,
                            inside: row.inside && (0..extent).contains(&at),
                        }
                    })
                })
                .collect();
        }
        rows
    }

    /// Returns the in-bounds part of a row.
    fn inside(&self, row: Row, first: i32) -> Option<Inside> {
        let extent = i128::from(self.spec.global_dimensions[0]);
        let width = i128::from(self.spec.box_dimensions[0]);
        let first = i128::from(first);
        let begin = (-first).clamp(0, width);
        let end = (extent - first).clamp(0, width);
        if !row.inside || begin >= end {
            return None;
        }
        let bits = i128::from(self.spec.element.global_bits());
        Some(Inside {
            // In-bounds offsets are not negative. Addresses beyond 64 bits wrap, and the memory
            // rejects them.
            address: (row.base + (first + begin) * bits / 8) as u64,
            range: (begin * bits / 8) as usize..(end * bits / 8) as usize,
        })
    }

    fn load_rows(
        &self,
        first: i32,
        rows: &[Row],
        ranks: &[u32],
        offset: u32,
        memory: &mut dyn Memory,
    ) -> Result<u32, Fault> {
        let element = self.spec.element;
        let fill = match self.spec.fill {
            Fill::Zero => None,
            Fill::NotANumber => element.not_a_number(),
        };
        let mut packed = vec![0; self.packed_row_bytes()];
        let mut image = vec![0; rows.len() * self.row_pitch()];
        for (&row, target) in rows.iter().zip(image.chunks_exact_mut(self.row_pitch())) {
            match fill {
                None => packed.fill(0),
                Some(code) => {
                    packed.chunks_exact_mut(code.len()).for_each(|one| one.copy_from_slice(code));
                }
            }
            if let Some(inside) = self.inside(row, first) {
                let bytes = &mut packed[inside.range];
                memory.read(Place::Global(inside.address), bytes)?;
                element.convert_on_load(bytes);
            }
            unpack(element, &packed, &mut target[..self.row_bytes()]);
        }
        let lines = swizzle_lines(self.spec.swizzle, offset, image, self.row_bytes());
        for &rank in ranks {
            for line in &lines {
                let place = Place::Shared { rank, offset: line.address };
                memory.write(place, &line.bytes)?;
            }
        }
        Ok((rows.len() * self.packed_row_bytes()) as u32)
    }

    fn store_rows(
        &self,
        first: i32,
        rows: &[Row],
        (rank, offset): (u32, u32),
        reduction: Option<(ReduceOperation, ReduceElement)>,
        memory: &mut dyn Memory,
    ) -> Result<u64, Fault> {
        let image = self.read_image(rows.len() * self.row_pitch(), rank, offset, memory)?;
        let mut packed = vec![0; self.packed_row_bytes()];
        let mut bytes_written = 0;
        for (&row, source) in rows.iter().zip(image.chunks_exact(self.row_pitch())) {
            let Some(mut inside) = self.inside(row, first) else { continue };
            if reduction.is_none() && !self.spec.element.is_padded() {
                // An H200 stores whole 16-byte units at the end of a row. The tensor has room
                // because its rows are multiples of 16 bytes apart.
                let whole = inside.range.end.next_multiple_of(CHUNK_BYTES);
                inside.range.end = whole.min(packed.len());
            }
            pack(self.spec.element, &source[..self.row_bytes()], &mut packed);
            let place = Place::Global(inside.address);
            let bytes = &mut packed[inside.range];
            if let Some((operation, element)) = reduction {
                let mut old = vec![0; bytes.len()];
                memory.read(place, &mut old)?;
                element.combine(operation, &mut old, bytes);
                bytes.copy_from_slice(&old);
            }
            memory.write(place, bytes)?;
            bytes_written += bytes.len() as u64;
        }
        Ok(bytes_written)
    }

    /// Reads a box from shared memory into tensor order.
    fn read_image(
        &self,
        image_bytes: usize,
        rank: u32,
        offset: u32,
        memory: &mut dyn Memory,
    ) -> Result<Vec<u8>, Fault> {
        let mut image = vec![0; image_bytes];
        let swizzle = self.spec.swizzle;
        if swizzle == Swizzle::None {
            memory.read(Place::Shared { rank, offset }, &mut image)?;
            return Ok(image);
        }
        for (index, chunk) in image.chunks_exact_mut(CHUNK_BYTES).enumerate() {
            let from = swizzle_address(swizzle, offset + (index * CHUNK_BYTES) as u32);
            let place = Place::Shared { rank, offset: from & !(CHUNK_BYTES as u32 - 1) };
            memory.read(place, chunk)?;
            if is_flipped(swizzle, from) {
                chunk.rotate_left(8);
            }
        }
        Ok(image)
    }

    fn reduce_element(&self, operation: ReduceOperation) -> Result<ReduceElement, Fault> {
        let element = self.spec.element;
        ReduceElement::of_map(element).ok_or_else(|| {
            Fault::new(
                "bulk-reduce-type",
                format!("{operation:?} does not know elements of a map of {element:?}"),
            )
        })
    }
}

/// Contiguous bytes of shared memory.
struct Line {
    address: u32,
    bytes: Vec<u8>,
}

fn is_flipped(swizzle: Swizzle, address: u32) -> bool {
    swizzle.atom() == SwizzleAtom::Bytes32Flip8 && (address >> 7) & 1 == 1
}

/// Swizzles an image in tensor order. A run of bytes that stays contiguous is one write.
fn swizzle_lines(swizzle: Swizzle, offset: u32, image: Vec<u8>, row_bytes: usize) -> Vec<Line> {
    debug_assert!(row_bytes.is_multiple_of(CHUNK_BYTES));
    if swizzle == Swizzle::None {
        return vec![Line { address: offset, bytes: image }];
    }
    let mut lines = Vec::new();
    for (index, line) in image.chunks(LINE_BYTES).enumerate() {
        let first = offset + (index * LINE_BYTES) as u32;
        let mut moved = [0; LINE_BYTES];
        let mut present = [false; LINE_BYTES / CHUNK_BYTES];
        for (chunk, bytes) in line.chunks_exact(CHUNK_BYTES).enumerate() {
            let to = swizzle_address(swizzle, first + (chunk * CHUNK_BYTES) as u32);
            let at = (to - first) as usize / CHUNK_BYTES;
            let target = &mut moved[at * CHUNK_BYTES..(at + 1) * CHUNK_BYTES];
            target.copy_from_slice(bytes);
            if is_flipped(swizzle, to) {
                target.rotate_left(8);
            }
            present[at] = true;
        }
        let mut at = 0;
        while at < present.len() {
            let run = present[at..].iter().take_while(|&&is_present| is_present).count();
            if run > 0 {
                lines.push(Line {
                    address: first + (at * CHUNK_BYTES) as u32,
                    bytes: moved[at * CHUNK_BYTES..(at + run) * CHUNK_BYTES].to_vec(),
                });
            }
            at += run.max(1);
        }
    }
    lines
}

/// Converts packed bytes of global memory to the layout of shared memory.
fn unpack(element: ElementType, packed: &[u8], target: &mut [u8]) {
    if !element.is_padded() {
        target.copy_from_slice(packed);
        return;
    }
    let group = 2 * element.global_bits() as usize;
    for (source, target) in packed.chunks_exact(group).zip(target.chunks_exact_mut(16)) {
        target.fill(PADDING);
        target[..group].copy_from_slice(source);
    }
}

/// Converts bytes of shared memory to the packed layout of global memory. Each 6-bit element is in
/// the low bits of a byte.
fn pack(element: ElementType, source: &[u8], packed: &mut [u8]) {
    if element != ElementType::B6x16Pad32 {
        packed.copy_from_slice(source);
        return;
    }
    for (four, target) in source.chunks_exact(4).zip(packed.chunks_exact_mut(3)) {
        let bits = (0..4).fold(0, |bits, i| bits | u32::from(four[i] & 0x3f) << (6 * i));
        target.copy_from_slice(&bits.to_le_bytes()[..3]);
    }
}
