//! Decoding of asynchronous copies: per thread, bulk, and with tensor maps.

use super::lower::{Decoded, Lowering};
use super::memory::ATOMICS;
use super::operands::{between, exactly, parts};
use super::types::{PredicateSource, Scope, Semantics, Source, Space, Type};
use super::words::Words;
use super::{
    AtomicOperation, BulkCompletion, BulkCopy, BulkDirection, Instruction, StoreAsync, TensorCopy,
    TensorMapField, TensorMapReplace, TensorMode,
};
use crate::ptx::Operand;

impl Lowering<'_> {
    /// Decodes `cp.async`, `cp.async.bulk` and `cp.reduce.async.bulk`.
    pub(super) fn copy(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let reduces = words.take("reduce");
        words.expect(&["async"])?;
        if words.take("bulk") {
            if words.take("tensor") {
                return self.tensor_copy(reduces, words, operands);
            }
            return self.bulk_copy(reduces, words, operands);
        }
        if words.take("commit_group") {
            let [] = exactly(operands)?;
            return Ok(Instruction::CopyAsyncCommit);
        }
        if words.take("wait_all") {
            let [] = exactly(operands)?;
            return Ok(Instruction::CopyAsyncWait { pending: None });
        }
        if words.take("wait_group") {
            let [pending] = exactly(operands)?;
            let pending = Some(self.immediate(pending)? as u32);
            return Ok(Instruction::CopyAsyncWait { pending });
        }
        if words.take("mbarrier") {
            words.expect(&["arrive", "b64"])?;
            let no_increment = words.take("noinc");
            let space = words.take_space();
            let [barrier] = exactly(operands)?;
            let barrier = self.barrier_at(space, barrier)?;
            return Ok(Instruction::CopyAsyncArrive { barrier, no_increment });
        }
        self.thread_copy(words, operands)
    }

    fn thread_copy(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let past_l1 = words.take("cg");
        if !past_l1 {
            words.expect(&["ca"])?;
        }
        // The opcode names both spaces, the target first.
        if words.take_space() != Space::Shared || words.take_space() != Space::Global {
            return Err("the copy is from `.global` to `.shared`".to_string());
        }
        let has_policy = words.take_cache_hints();
        let operands = between(operands, 3, 4 + usize::from(has_policy))?;
        let bytes = self.immediate(&operands[2])? as u32;
        if !matches!(bytes, 4 | 8 | 16) || (past_l1 && bytes != 16) {
            return Err(format!("{bytes} bytes are none of 4, 8, 16 (`.cg`: 16)"));
        }
        let mut rest = &operands[3..];
        if has_policy {
            rest = rest.split_last().ok_or("the policy is missing")?.1;
        }
        let (mut source_bytes, mut ignore_source) = (None, None);
        if let Some(operand) = rest.first() {
            // A predicate disables reading the source; a number limits the bytes read.
            match self.predicate(operand) {
                Ok(predicate @ PredicateSource::Register { .. }) => {
                    ignore_source = Some(predicate);
                }
                _ => source_bytes = Some(self.source(operand, Type::U32)?),
            }
        }
        Ok(Instruction::CopyAsync {
            target: self.plain_address(&operands[0])?,
            source: self.plain_address(&operands[1])?,
            bytes,
            source_bytes,
            ignore_source,
        })
    }

    /// Takes the operation of a reduction.
    fn reduction(&mut self, words: &mut Words<'_>) -> Result<AtomicOperation, String> {
        let operation = words.take_from(ATOMICS).ok_or("the operation is missing")?;
        if matches!(operation, AtomicOperation::Exchange | AtomicOperation::CompareAndSwap) {
            return Err("a bulk copy does not exchange".to_string());
        }
        Ok(operation)
    }

    fn completion_is_group(&self, words: &mut Words<'_>) -> Result<bool, String> {
        if words.take("bulk_group") {
            return Ok(true);
        }
        words.expect(&["mbarrier::complete_tx::bytes"])?;
        Ok(false)
    }

    fn bulk_copy(&mut self, reduces: bool, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        if words.take("commit_group") {
            let [] = exactly(operands)?;
            return Ok(Instruction::BulkCommit);
        }
        if words.take("wait_group") {
            let read = words.take("read");
            let [pending] = exactly(operands)?;
            return Ok(Instruction::BulkWait { pending: self.immediate(pending)? as u32, read });
        }
        if words.take("prefetch") {
            words.expect(&["L2", "global"])?;
            let has_policy = words.take_cache_hints();
            let operands = between(operands, 2, 2 + usize::from(has_policy))?;
            let source = self.plain_address(&operands[0])?;
            return Ok(Instruction::BulkCopy(BulkCopy {
                direction: BulkDirection::Prefetch,
                target: source,
                target_is_own_cta: false,
                source,
                bytes: self.source(&operands[1], Type::U32)?,
                completion: BulkCompletion::None,
                multicast: None,
                byte_mask: None,
                reduction: None,
            }));
        }
        let (target_space, source_space) = (words.take_space(), words.take_space());
        let direction = match (target_space, source_space) {
            (Space::Shared | Space::SharedCluster, Space::Global) => BulkDirection::GlobalToShared,
            (Space::Global, Space::Shared) => BulkDirection::SharedToGlobal,
            (Space::SharedCluster, Space::Shared) => BulkDirection::SharedToShared,
            _ => return Err("these spaces are not copied between".to_string()),
        };
        if reduces && direction == BulkDirection::GlobalToShared {
            return Err("a reduction reads shared memory".to_string());
        }
        let to_global = direction == BulkDirection::SharedToGlobal;
        if self.completion_is_group(words)? != to_global {
            return Err("`.bulk_group` belongs to copies to `.global`".to_string());
        }
        let multicast = words.take("multicast::cluster");
        if multicast && target_space != Space::SharedCluster {
            return Err("`.multicast::cluster` needs `.shared::cluster`".to_string());
        }
        let has_policy = words.take_cache_hints();
        let has_mask = words.take("cp_mask");
        let reduction = if reduces {
            let operation = self.reduction(words)?;
            let no_flush = words.take("noftz");
            let element = words.take_type()?;
            check_reduction(operation, element, no_flush, to_global)?;
            Some((operation, element))
        } else {
            None
        };
        let count = 3
            + usize::from(!to_global)
            + usize::from(multicast)
            + usize::from(has_policy)
            + usize::from(has_mask);
        let operands = between(operands, count, count)?;
        let completion = if to_global {
            BulkCompletion::Group
        } else {
            BulkCompletion::Mbarrier(self.plain_address(&operands[3])?)
        };
        let mask = |lowering: &mut Self, present: bool, position: usize| -> Result<_, String> {
            if !present {
                return Ok(None);
            }
            lowering.source(&operands[position], Type::B16).map(Some)
        };
        let multicast = mask(self, multicast, 4)?;
        let byte_mask = mask(self, has_mask, count - 1)?;
        Ok(Instruction::BulkCopy(BulkCopy {
            direction,
            target: self.plain_address(&operands[0])?,
            target_is_own_cta: target_space == Space::Shared,
            source: self.plain_address(&operands[1])?,
            bytes: self.source(&operands[2], Type::U32)?,
            completion,
            multicast,
            byte_mask,
            reduction,
        }))
    }

    fn tensor_copy(
        &mut self,
        reduces: bool,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        let prefetch = words.take("prefetch");
        let rank = words
            .take_from(&[("1d", 1u32), ("2d", 2), ("3d", 3), ("4d", 4), ("5d", 5)])
            .ok_or("the rank is missing")?;
        let (direction, shared_space) = if prefetch {
            words.expect(&["L2", "global"])?;
            (BulkDirection::Prefetch, Space::Shared)
        } else {
            match (words.take_space(), words.take_space()) {
                (space @ (Space::Shared | Space::SharedCluster), Space::Global) if !reduces => {
                    (BulkDirection::GlobalToShared, space)
                }
                (Space::Global, Space::Shared) => (BulkDirection::SharedToGlobal, Space::Shared),
                _ => return Err("these spaces are not copied between".to_string()),
            }
        };
        let completion = match direction {
            BulkDirection::Prefetch => None,
            _ => Some(self.completion_is_group(words)?),
        };
        if completion.is_some_and(|group| group != (direction == BulkDirection::SharedToGlobal)) {
            return Err("`.bulk_group` belongs to copies to `.global`".to_string());
        }
        let mode = words
            .take_from(&[
                ("tile", TensorMode::Tile),
                ("tile::gather4", TensorMode::Gather4),
                ("tile::scatter4", TensorMode::Scatter4),
                ("im2col", TensorMode::Im2col),
                ("im2col_no_offs", TensorMode::Im2col),
                ("im2col::w", TensorMode::Im2colW),
                ("im2col::w::128", TensorMode::Im2colW128),
            ])
            .unwrap_or(TensorMode::Tile);
        let multicast = words.take("multicast::cluster");
        if multicast && shared_space != Space::SharedCluster {
            return Err("`.multicast::cluster` needs `.shared::cluster`".to_string());
        }
        let cta_group = words.take_from(&[("cta_group::1", 1), ("cta_group::2", 2)]);
        let has_policy = words.take_cache_hints();
        let reduction = if reduces { Some(self.reduction(words)?) } else { None };
        let offsets = match mode {
            TensorMode::Im2col | TensorMode::Im2colW | TensorMode::Im2colW128 => {
                direction != BulkDirection::SharedToGlobal
            }
            _ => false,
        };
        let loads = direction == BulkDirection::GlobalToShared;
        let count = 1 + usize::from(!prefetch) + usize::from(loads) + usize::from(offsets);
        let count = count + usize::from(multicast) + usize::from(has_policy);
        let operands = between(operands, count, count)?;
        let map_position = usize::from(loads);
        let Operand::TensorAddress { base, offset, coordinates } = &operands[map_position] else {
            return Err(format!("`{}` is no map with coordinates", operands[map_position]));
        };
        let expected = match mode {
            TensorMode::Gather4 | TensorMode::Scatter4 if rank == 2 => 5,
            TensorMode::Gather4 | TensorMode::Scatter4 => {
                return Err("four rows are gathered from rank 2".to_string());
            }
            _ => rank as usize,
        };
        if coordinates.len() != expected {
            return Err(format!("{expected} coordinates are expected, not {}", coordinates.len()));
        }
        let coordinates: Result<Box<[Source]>, String> =
            coordinates.iter().map(|one| self.source(one, Type::S32)).collect();
        let map = self.place(base.as_ref(), *offset)?.0;
        let shared = match direction {
            BulkDirection::Prefetch => Self::no_address(),
            BulkDirection::GlobalToShared => self.plain_address(&operands[0])?,
            _ => self.plain_address(&operands[1])?,
        };
        let mut next = 1 + usize::from(!prefetch);
        let completion = match completion {
            None => BulkCompletion::None,
            Some(true) => BulkCompletion::Group,
            Some(false) => {
                next += 1;
                BulkCompletion::Mbarrier(self.plain_address(&operands[next - 1])?)
            }
        };
        let im2col: Box<[Source]> = if offsets {
            next += 1;
            parts(&operands[next - 1])
                .iter()
                .map(|one| self.source(one, Type::U16))
                .collect::<Result<_, _>>()?
        } else {
            Box::default()
        };
        let multicast =
            if multicast { Some(self.source(&operands[next], Type::B16)?) } else { None };
        Ok(Instruction::TensorCopy(TensorCopy {
            direction,
            rank,
            mode,
            map,
            coordinates: coordinates?,
            shared,
            shared_is_own_cta: shared_space == Space::Shared,
            completion,
            im2col,
            multicast,
            cta_group,
            reduction,
        }))
    }

    /// Decodes `st.async` after its first two words.
    pub(super) fn store_async(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        words.take("weak");
        words.take_scope();
        self.check_async_target(words)?;
        let vector = words.take_vector();
        let element = words.take_type()?;
        if !matches!(element.bits(), 32 | 64) || vector > 4 {
            return Err(format!("{vector} elements of `.{element}` are not known here"));
        }
        let [target, values, barrier] = exactly(operands)?;
        let values = parts(values);
        if values.len() != vector {
            return Err(format!("{vector} values are expected, {} are given", values.len()));
        }
        let sources: Result<Box<[Source]>, String> =
            values.iter().map(|value| self.source(value, element)).collect();
        Ok(Instruction::StoreAsync(StoreAsync {
            target: self.plain_address(target)?,
            element,
            sources: sources?,
            barrier: self.plain_address(barrier)?,
            reduction: None,
        }))
    }

    fn check_async_target(&self, words: &mut Words<'_>) -> Result<(), String> {
        if !matches!(words.take_space(), Space::Generic | Space::SharedCluster) {
            return Err("only `.shared::cluster` is known here".to_string());
        }
        words.expect(&["mbarrier::complete_tx::bytes"])
    }

    /// Decodes `red.async` after its first two words.
    pub(super) fn reduce_async(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        if words.take_semantics() != Some(Semantics::Relaxed)
            || words.take_scope() != Some(Scope::Cluster)
        {
            return Err("only `.relaxed.cluster` is known here".to_string());
        }
        self.check_async_target(words)?;
        let operation = self.reduction(words)?;
        let element = words.take_type()?;
        use AtomicOperation as A;
        let known = match operation {
            A::Increment | A::Decrement => element == Type::U32,
            A::Min | A::Max => matches!(element, Type::U32 | Type::S32),
            A::And | A::Or | A::Xor => element == Type::B32,
            _ => matches!(element, Type::U32 | Type::S32 | Type::U64),
        };
        if !known {
            return Err(format!("type `.{element}` is not known for this operation"));
        }
        let [target, value, barrier] = exactly(operands)?;
        Ok(Instruction::StoreAsync(StoreAsync {
            target: self.plain_address(target)?,
            element,
            sources: Box::new([self.source(value, element)?]),
            barrier: self.plain_address(barrier)?,
            reduction: Some(operation),
        }))
    }

    /// Decodes `tensormap.replace` and `tensormap.cp_fenceproxy`.
    pub(super) fn tensor_map(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        if words.take("cp_fenceproxy") {
            words.expect(&[
                "global",
                "shared::cta",
                "tensormap::generic",
                "release",
                "sync",
                "aligned",
            ])?;
            let scope = words.take_scope().ok_or("the scope is missing")?;
            let [target, source, bytes] = exactly(operands)?;
            if self.immediate(bytes)? != 128 {
                return Err("a tensor map has 128 bytes".to_string());
            }
            return Ok(Instruction::TensorMapCopyFence {
                target: self.plain_address(target)?,
                source: self.plain_address(source)?,
                scope,
            });
        }
        words.expect(&["replace", "tile", "b1024"])?;
        use TensorMapField as F;
        let (field, has_ordinal, known) = words
            .take_from(&[
                ("global_address", (F::GlobalAddress, false, &[Type::B64][..])),
                ("rank", (F::Rank, false, &[Type::B32])),
                ("box_dim", (F::BoxDimension, true, &[Type::B32])),
                ("global_dim", (F::GlobalDimension, true, &[Type::B32])),
                ("global_stride", (F::GlobalStride, true, &[Type::B64])),
                ("element_stride", (F::ElementStride, true, &[Type::B32])),
                ("elemtype", (F::ElementType, false, &[Type::B32])),
                ("interleave_layout", (F::InterleaveLayout, false, &[Type::B32])),
                ("swizzle_mode", (F::SwizzleMode, false, &[Type::B32])),
                ("fill_mode", (F::FillMode, false, &[Type::B32])),
                ("swizzle_atomicity", (F::SwizzleAtomicity, false, &[Type::B32])),
            ])
            .ok_or("the field is missing")?;
        let space = words.take_space();
        let value_type = words.take_type_of(known)?;
        let (map, ordinal, value) = if has_ordinal {
            let [map, ordinal, value] = exactly(operands)?;
            (map, self.immediate(ordinal)? as u32, value)
        } else {
            let [map, value] = exactly(operands)?;
            (map, 0, value)
        };
        if ordinal > 4 {
            return Err(format!("dimension {ordinal} is none of 0 to 4"));
        }
        Ok(Instruction::TensorMapReplace(TensorMapReplace {
            field,
            ordinal,
            map: self.plain_address(map)?,
            space,
            value: self.source(value, value_type)?,
        }))
    }
}

fn check_reduction(
    operation: AtomicOperation,
    element: Type,
    no_flush: bool,
    to_global: bool,
) -> Result<(), String> {
    use AtomicOperation as A;
    use Type::{B32, B64, Bf16, F16, F32, F64, S32, S64, U32, U64};
    let allowed: &[Type] = match (operation, to_global) {
        (A::Add, true) => &[U32, S32, U64, F32, F64, F16, Bf16],
        (A::Add, false) => &[U32, S32, U64],
        (A::Min | A::Max, true) => &[U32, S32, U64, S64, F16, Bf16],
        (A::Min | A::Max, false) => &[U32, S32],
        (A::Increment | A::Decrement, _) => &[U32],
        (_, true) => &[B32, B64],
        (_, false) => &[B32],
    };
    if !allowed.contains(&element) {
        return Err(format!("type `.{element}` is not known for this operation"));
    }
    let needs = operation == A::Add && matches!(element, F16 | Bf16);
    if needs != no_flush {
        return Err(format!("`.noftz` belongs to sums of half floats, not of `.{element}`"));
    }
    Ok(())
}
