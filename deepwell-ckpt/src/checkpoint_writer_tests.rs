//! Checkpoints that several ranks write, with a kill of each of them at each of its operations.

use std::thread;

use super::{Fault, FaultyIo, aside_folders, scan_is_undamaged};
use crate::checkpoint_writer::{
    CheckpointWriter, RankShards, TemporaryFolder, write_shards, write_slices,
};
use crate::error::CheckpointError;
use crate::folder::list;
use crate::load::load;
use crate::region::Region;
use crate::save::{CheckpointContents, SaveOptions};
use crate::tensor::{Section, SliceView, TensorView};
use crate::verify::verify;

const RANKS: u32 = 4;
const SHAPE: [usize; 2] = [5, 6];

/// The elements of a tensor of a step.
fn whole(step: u64, section: Section) -> Vec<f32> {
    let base = step * 1000 + section as u64 * 100;
    (0..SHAPE.iter().product::<usize>()).map(|index| (base + index as u64) as f32).collect()
}

/// What a rank has: a fourth of the elements of two tensors, cut anywhere, and columns of a third.
struct Own {
    slices: Vec<(Section, Region, Vec<f32>)>,
}

impl Own {
    fn of(step: u64, rank: u32) -> Own {
        let elements: usize = SHAPE.iter().product();
        let cut = |rank: u32| (elements * rank as usize).div_ceil(RANKS as usize);
        let mut slices = Vec::new();
        for section in [Section::Master, Section::MomentFirst] {
            let values = whole(step, section);
            let mut begin = cut(rank);
            for region in Region::of_range(&SHAPE, cut(rank)..cut(rank + 1)) {
                let end = begin + region.elements();
                slices.push((section, region, values[begin..end].to_vec()));
                begin = end;
            }
        }
        // Two ranks have three columns each.
        if rank < 2 {
            let first = 3 * rank as usize;
            let values = whole(step, Section::MomentSecond);
            let columns = values.chunks(SHAPE[1]).flat_map(|row| row[first..first + 3].to_vec());
            let region = Region { offset: vec![0, first], shape: vec![SHAPE[0], 3] };
            slices.push((Section::MomentSecond, region, columns.collect()));
        }
        Own { slices }
    }

    fn views(&self) -> Vec<SliceView<'_>> {
        self.slices
            .iter()
            .map(|(section, region, values)| SliceView {
                view: TensorView::from_f32(*section, "w", &region.shape, values),
                global_shape: SHAPE.to_vec(),
                global_offset: region.offset.clone(),
            })
            .collect()
    }
}

/// Saves a step by all ranks at the same time, each on a disk of its own; what rank 0 says.
fn save_by_all(
    root: &std::path::Path,
    step: u64,
    fault: Option<(u32, usize)>,
    reached: &mut bool,
) -> Result<(), CheckpointError> {
    let io_of = |rank: u32| {
        FaultyIo::new(fault.and_then(|(of, at)| (of == rank).then_some((at, Fault::Kill))))
    };
    let first = io_of(0);
    let options = SaveOptions::default();
    let temporary = TemporaryFolder::begin(&first, root, step);
    *reached = fault.is_some_and(|(of, _)| of == 0) && first.reached();
    let temporary = temporary?;
    let folder = temporary.folder.clone();
    let written: Vec<(Result<RankShards, CheckpointError>, bool)> = thread::scope(|scope| {
        let threads: Vec<_> = (1..RANKS)
            .map(|rank| {
                let (folder, options) = (&folder, &options);
                scope.spawn(move || {
                    let (io, state) = (io_of(rank), Own::of(step, rank));
                    let written = write_slices(&io, folder, Some(rank), &state.views(), options);
                    (written, io.reached())
                })
            })
            .collect();
        let state = Own::of(step, 0);
        let written = write_slices(&first, &folder, Some(0), &state.views(), &options);
        let others = threads.into_iter().map(|thread| thread.join().unwrap());
        std::iter::once((written, first.reached())).chain(others).collect()
    });
    *reached |= written.iter().any(|(_, reached)| *reached);
    let shards: Result<Vec<RankShards>, _> = written.into_iter().map(|(it, _)| it).collect();
    let shards = match shards {
        Ok(shards) => shards,
        Err(error) => {
            // What the first rank does when it hears of it; a dead one does nothing.
            temporary.discard(&first);
            return Err(error);
        }
    };
    let options = SaveOptions { keep_last: Some(2), ..options };
    let saved = temporary.publish(&first, &CheckpointContents::new(step), shards, &options);
    *reached |= first.reached();
    saved.map(drop)
}

/// Steps of all listed checkpoints, each of which must be whole.
fn listed(root: &std::path::Path) -> Vec<u64> {
    assert!(scan_is_undamaged(root));
    let entries = list(root).unwrap();
    for entry in &entries {
        let report = verify(&entry.path).unwrap();
        assert!(report.is_sound(), "{report}");
        let checkpoint = load(&entry.path).unwrap();
        assert_eq!(checkpoint.tensors().len(), 3);
        for section in [Section::Master, Section::MomentFirst, Section::MomentSecond] {
            let mut values = vec![0f32; SHAPE.iter().product()];
            checkpoint.read_f32_into(section, "w", &SHAPE, &mut values).unwrap();
            assert_eq!(values, whole(entry.step, section), "step {} {section}", entry.step);
        }
    }
    entries.into_iter().map(|entry| entry.step).collect()
}

#[test]
fn a_rank_killed_at_any_operation_leaves_whole_checkpoints_only() {
    let mut kills = 0;
    for rank in 0..RANKS {
        for at in 0.. {
            let root = tempfile::tempdir().unwrap();
            let root = root.path();
            let mut reached = false;
            for step in [10, 20] {
                save_by_all(root, step, None, &mut reached).unwrap();
            }
            let saved = save_by_all(root, 30, Some((rank, at)), &mut reached);
            let context = format!("rank {rank} at {at}: {saved:?}");
            let steps = listed(root);
            if !reached {
                assert!(saved.is_ok() && steps == [20, 30], "{context}");
                break;
            }
            kills += 1;
            assert!(steps.contains(&20), "{context}: {steps:?}");
            // Nobody but the first rank gives a checkpoint its name.
            assert!(rank == 0 || !steps.contains(&30), "{context}: {steps:?}");
            // The next save clears what was left.
            save_by_all(root, 40, None, &mut false).unwrap();
            assert_eq!(aside_folders(root), [""; 0], "{context}");
            assert_eq!(listed(root).last(), Some(&40), "{context}");
        }
    }
    assert!(kills >= 30, "{kills} kills");
}

#[test]
fn parts_that_are_missing_or_overlap_are_not_published() {
    let check = |change: &dyn Fn(&mut Vec<RankShards>), expected: &str| {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let options = SaveOptions::default();
        let writer = CheckpointWriter::begin(root, 1).unwrap();
        assert_eq!(CheckpointWriter::folder_of(root, 1, writer.id()), writer.folder());
        let mut shards: Vec<RankShards> = (0..RANKS)
            .map(|rank| {
                let own = Own::of(1, rank);
                write_shards(writer.folder(), Some(rank), &own.views(), &options).unwrap()
            })
            .collect();
        change(&mut shards);
        let error = writer.publish(&CheckpointContents::new(1), shards, &options).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!((listed(root), aside_folders(root)), (vec![], vec![]));
    };
    check(&|shards| drop(shards.pop()), "tensor `w` (master): parts have 23 of its 30 elements");
    check(
        &|shards| shards[0].tensors[1].global_offset = vec![1, 1],
        "tensor `w` (master): parts at [1, 1] and [1, 2] of [5, 6] overlap",
    );
    check(&|shards| shards[3].files[0].bytes -= 1, "bytes");
    check(
        &|shards| shards[1].tensors[0].global_shape = vec![5, 7],
        "tensor `w` (master): parts of",
    );
}

#[test]
fn a_dropped_writer_removes_its_folder() {
    let root = tempfile::tempdir().unwrap();
    let writer = CheckpointWriter::begin(root.path(), 1).unwrap();
    let own = Own::of(1, 2);
    write_shards(writer.folder(), Some(2), &own.views(), &SaveOptions::default()).unwrap();
    assert_eq!(aside_folders(root.path()).len(), 1);
    drop(writer);
    assert_eq!(aside_folders(root.path()), [""; 0]);
    // And the folder is free.
    drop(CheckpointWriter::begin(root.path(), 2).unwrap());
}

/// Any rectangle, of whatever parts it lies in.
#[test]
fn regions_are_read_from_all_parts_that_have_some() {
    let root = tempfile::tempdir().unwrap();
    save_by_all(root.path(), 1, None, &mut false).unwrap();
    let checkpoint = load(&list(root.path()).unwrap()[0].path).unwrap();
    let [rows, columns] = SHAPE;
    for section in [Section::Master, Section::MomentSecond] {
        let whole = whole(1, section);
        for (top, bottom, left, right) in [
            (0, rows, 0, columns),
            (1, 4, 2, 5),
            (2, 3, 0, 6),
            (4, 5, 5, 6),
            (0, 5, 3, 6),
            (2, 2, 0, 1),
        ] {
            let shape = vec![bottom - top, right - left];
            let region = Region { offset: vec![top, left], shape };
            let mut bytes = vec![0; region.elements() * 4];
            checkpoint.read_region(section, "w", &region, &mut bytes).unwrap();
            let got: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
            let rows = whole.chunks(columns).take(bottom).skip(top);
            let expected: Vec<f32> = rows.flat_map(|row| row[left..right].to_vec()).collect();
            assert_eq!(got, expected, "{section} {region:?}");
        }
        let outside = Region { offset: vec![3, 0], shape: vec![3, 6] };
        let error = checkpoint.read_region(section, "w", &outside, &mut [0; 72]).unwrap_err();
        assert!(matches!(error, CheckpointError::NoRegion { .. }), "{error}");
    }
}
