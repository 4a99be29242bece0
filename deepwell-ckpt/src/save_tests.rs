//! Saving, with a fault or a kill at every single operation on the disk.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use std::fs::{self, File};
use std::time::Duration;

use super::*;
use crate::checkpoint_writer::lock_folder;
use crate::folder::{FolderName, entry_names, latest, list, step_folder_name};
use crate::load::load;
use crate::tensor::Section;
use crate::verify::verify;

#[path = "checkpoint_writer_tests.rs"]
mod checkpoint_writer;

/// What happens at the chosen operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It fails with a full disk; everything after it works.
    DiskFull,
    /// It fails with a permission error; everything after it works.
    Denied,
    /// The process dies in the middle of it: a write or a removal is done by half, and nothing
    /// after it happens.
    Kill,
}

/// The disk, with one operation that goes wrong. Syncing is only recorded: the tests ask which
/// operations happened in which order, not whether the kernel keeps its promise.
struct FaultyIo {
    fault: Option<(usize, Fault)>,
    count: Cell<usize>,
    log: RefCell<Vec<String>>,
}

impl FaultyIo {
    fn new(fault: Option<(usize, Fault)>) -> Self {
        FaultyIo { fault, count: Cell::new(0), log: RefCell::new(Vec::new()) }
    }

    fn step(&self, action: &str, path: &Path, half: impl FnOnce()) -> io::Result<()> {
        let index = self.count.get();
        self.count.set(index + 1);
        let name = path.file_name().map_or("?".into(), |name| name.to_string_lossy());
        let name = name.replace(&std::process::id().to_string(), "PID");
        self.log.borrow_mut().push(format!("{action} {name}"));
        match self.fault {
            Some((at, Fault::DiskFull)) if at == index => {
                half();
                Err(io::ErrorKind::StorageFull.into())
            }
            Some((at, Fault::Denied)) if at == index => Err(io::ErrorKind::PermissionDenied.into()),
            Some((at, Fault::Kill)) if at == index => {
                half();
                Err(io::Error::other("killed"))
            }
            Some((at, Fault::Kill)) if at < index => Err(io::Error::other("killed")),
            _ => Ok(()),
        }
    }

    fn reached(&self) -> bool {
        self.fault.is_some_and(|(at, _)| at < self.count.get())
    }
}

impl Io for FaultyIo {
    type File = (File, PathBuf);

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.step("create_dir", path, || {})?;
        DiskIo.create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Self::File> {
        self.step("create", path, || {})?;
        Ok((DiskIo.create_file(path)?, path.to_path_buf()))
    }

    fn write(&self, (file, path): &mut Self::File, bytes: &[u8]) -> io::Result<()> {
        let half = &bytes[..bytes.len() / 2];
        self.step("write", path, || DiskIo.write(file, half).unwrap())?;
        DiskIo.write(file, bytes)
    }

    fn sync_file(&self, (_, path): &Self::File) -> io::Result<()> {
        self.step("sync", path, || {})
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.step("sync_dir", path, || {})
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step("rename", from, || {})?;
        DiskIo.rename(from, to)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        self.step("remove", path, || {
            // Half of the files, the manifest among those that stay or among those that go,
            // depending on the folder: both happen with a real kill.
            let mut files: Vec<_> =
                fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
            files.sort();
            if path.as_os_str().len().is_multiple_of(2) {
                files.reverse();
            }
            for file in &files[..files.len() / 2] {
                fs::remove_file(file).unwrap();
            }
        })?;
        DiskIo.remove_dir_all(path)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.step("remove_file", path, || {})?;
        DiskIo.remove_file(path)
    }
}

/// Contents whose every byte tells the `step` and the `version`.
struct Sample {
    weights: Vec<f32>,
    moments: Vec<f32>,
}

impl Sample {
    fn new(step: u64, version: u64) -> Self {
        let tag = (step * 1000 + version) as f32;
        Sample { weights: vec![tag; 64], moments: vec![tag + 0.5; 32] }
    }

    fn contents(&self, step: u64) -> CheckpointContents<'_> {
        let mut contents = CheckpointContents::new(step);
        contents.tensors = vec![
            TensorView::from_f32(Section::Weights, "a", &[32], &self.weights[..32]),
            TensorView::from_f32(Section::Weights, "b", &[32], &self.weights[32..]),
            TensorView::from_f32(Section::MomentFirst, "a", &[32], &self.moments),
        ];
        contents
    }
}

fn options(keep_last: Option<usize>) -> SaveOptions {
    // One weight a shard, so that there are several files.
    SaveOptions { keep_last, shard_bytes_max: 128 }
}

fn save_sample<I: Io>(
    io: &I,
    root: &Path,
    (step, version): (u64, u64),
    keep_last: Option<usize>,
) -> Result<SavedCheckpoint, CheckpointError> {
    save_with(io, root, &Sample::new(step, version).contents(step), &options(keep_last))
}

/// Step and version of every listed checkpoint, each of which must be whole.
fn listed(root: &Path) -> BTreeMap<u64, u64> {
    let mut versions = BTreeMap::new();
    for entry in list(root).unwrap() {
        let report = verify(&entry.path).unwrap();
        assert!(report.is_sound(), "{report}");
        let checkpoint = load(&entry.path).unwrap();
        let mut first = [0.0f32; 32];
        checkpoint.read_f32_into(Section::Weights, "a", &[32], &mut first).unwrap();
        let version = first[0] as u64 - entry.step * 1000;
        let sample = Sample::new(entry.step, version);
        for tensor in &sample.contents(entry.step).tensors {
            let bytes = checkpoint.read(tensor.section, tensor.name).unwrap();
            assert_eq!(bytes, tensor.data, "step {} tensor {}", entry.step, tensor.name);
        }
        assert!(versions.insert(entry.step, version).is_none(), "step {} twice", entry.step);
    }
    versions
}

fn aside_folders(root: &Path) -> Vec<String> {
    let mut names = entry_names(root).unwrap();
    names.retain(|name| matches!(FolderName::parse(name), Some(FolderName::Hidden { .. })));
    names
}

/// Saves `new` over the checkpoints `before`, with `fault` at every operation in turn, and checks
/// after each: what is listed is whole, is at least what was there, less what may be pruned, and
/// a later save puts everything right.
fn check_every_operation(
    fault: Fault,
    before: &[(u64, u64)],
    new: (u64, u64),
    keep_last: Option<usize>,
) {
    let mut at = 0;
    loop {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        for &sample in before {
            save_sample(&FaultyIo::new(None), root, sample, None).unwrap();
        }
        let faulty = FaultyIo::new(Some((at, fault)));
        let result = save_sample(&faulty, root, new, keep_last);
        if !faulty.reached() {
            assert!(result.is_ok());
            assert!(at > 20, "expected many operations, got {at}");
            break;
        }
        let context = format!("{fault:?} at {at}: {:?}", faulty.log.borrow().last());

        let after = listed(root);
        assert!(scan_is_undamaged(root), "{context}");
        match (after.get(&new.0), before.iter().find(|sample| sample.0 == new.0)) {
            (Some(&version), Some(former)) => {
                assert!(version == new.1 || version == former.1, "{context}");
            }
            (Some(&version), None) => assert_eq!(version, new.1, "{context}"),
            (None, former) => assert_eq!(former, None, "{context}: step {} is gone", new.0),
        }
        let is_in_place = after.get(&new.0) == Some(&new.1);
        if result.is_ok() {
            assert!(is_in_place, "{context}: success without a checkpoint");
        }
        for sample in before.iter().filter(|sample| sample.0 != new.0) {
            let may_be_pruned = is_in_place && keep_last.is_some();
            assert!(
                may_be_pruned || after.get(&sample.0) == Some(&sample.1),
                "{context}: step {} is gone",
                sample.0
            );
        }
        let newest = latest(root).unwrap().map(|entry| entry.step);
        assert_eq!(newest, after.keys().last().copied(), "{context}");
        if let (Fault::DiskFull, Err(error)) = (fault, &result) {
            let message = error.to_string();
            assert!(message.contains("no space left"), "{context}: {message}");
            // The space is free again. A replaced checkpoint may stay until the next save, since
            // it must not go before its successor's name is on the disk.
            let written = aside_folders(root).iter().any(|name| name.starts_with(".tmp"));
            assert!(!written, "{context}");
        }

        // The next save clears what was left, and keeps everything that was listed.
        let later = (new.0 + 1000, 1);
        save_sample(&FaultyIo::new(None), root, later, None).unwrap();
        assert_eq!(aside_folders(root), [""; 0], "{context}");
        let mut expected = after;
        expected.insert(later.0, later.1);
        assert_eq!(listed(root), expected, "{context}");
        for step in expected.keys() {
            assert!(root.join(step_folder_name(*step)).is_dir(), "{context}");
        }
        at += 1;
    }
}

fn scan_is_undamaged(root: &Path) -> bool {
    crate::folder::scan(root).unwrap().damaged.is_empty()
}

#[test]
fn a_fault_at_any_operation_leaves_whole_checkpoints_only() {
    for fault in [Fault::DiskFull, Fault::Denied, Fault::Kill] {
        // The first one, a further one, one that prunes, one that replaces, and both.
        check_every_operation(fault, &[], (10, 1), None);
        check_every_operation(fault, &[(10, 1)], (20, 1), None);
        check_every_operation(fault, &[(10, 1), (20, 1), (30, 1)], (40, 1), Some(2));
        check_every_operation(fault, &[(10, 1), (20, 1)], (20, 2), None);
        check_every_operation(fault, &[(10, 1), (20, 1), (30, 1)], (20, 2), Some(1));
    }
}

#[test]
fn everything_is_synced_before_it_gets_its_name() {
    let root = tempfile::tempdir().unwrap();
    save_sample(&DiskIo, root.path(), (1, 1), None).unwrap();
    let io = FaultyIo::new(None);
    save_sample(&io, root.path(), (2, 1), Some(1)).unwrap();
    let root_name = root.path().file_name().unwrap().to_str().unwrap().to_string();
    let mut expected = vec!["create_dir .tmp-step-00000002-PID".to_string()];
    for shard in ["weights-00001", "weights-00002", "moment_first-00001"] {
        let tensors = 1;
        expected.push(format!("create {shard}.safetensors"));
        for _header_or_tensor in 0..=tensors {
            expected.push(format!("write {shard}.safetensors"));
        }
        expected.push(format!("sync {shard}.safetensors"));
    }
    for file in ["manifest.json", "manifest.blake3"] {
        expected.extend(["create", "write", "sync"].map(|action| format!("{action} {file}")));
    }
    expected.extend([
        "sync_dir .tmp-step-00000002-PID".to_string(),
        "rename .tmp-step-00000002-PID".to_string(),
        format!("sync_dir {root_name}"),
        "rename step-00000001".to_string(),
        "remove .pruned-step-00000001-PID".to_string(),
    ]);
    assert_eq!(*io.log.borrow(), expected);
}

#[test]
fn no_write_is_larger_than_a_piece() {
    /// Records the longest write.
    struct Longest(Cell<usize>);
    impl Io for Longest {
        type File = File;
        fn create_dir(&self, path: &Path) -> io::Result<()> {
            DiskIo.create_dir(path)
        }
        fn create_file(&self, path: &Path) -> io::Result<File> {
            DiskIo.create_file(path)
        }
        fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
            self.0.set(self.0.get().max(bytes.len()));
            DiskIo.write(file, bytes)
        }
        fn sync_file(&self, _file: &File) -> io::Result<()> {
            Ok(())
        }
        fn sync_dir(&self, _path: &Path) -> io::Result<()> {
            Ok(())
        }
        fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
            DiskIo.rename(from, to)
        }
        fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
            DiskIo.remove_dir_all(path)
        }
        fn remove_file(&self, path: &Path) -> io::Result<()> {
            DiskIo.remove_file(path)
        }
    }
    let root = tempfile::tempdir().unwrap();
    let values = vec![1.0f32; 700_001];
    let mut contents = CheckpointContents::new(1);
    contents.tensors = vec![TensorView::from_f32(Section::Weights, "a", &[values.len()], &values)];
    let io = Longest(Cell::new(0));
    let saved = save_with(&io, root.path(), &contents, &SaveOptions::default()).unwrap();
    assert_eq!(io.0.get(), 1 << 20);
    assert!(verify(&saved.path).unwrap().is_sound());
}

#[test]
fn keep_last_removes_the_oldest_and_never_the_new_one() {
    let check = |before: &[u64], new: u64, keep_last: usize, expected: &[u64]| {
        let root = tempfile::tempdir().unwrap();
        for &step in before {
            save_sample(&FaultyIo::new(None), root.path(), (step, 1), None).unwrap();
        }
        let saved =
            save_sample(&FaultyIo::new(None), root.path(), (new, 1), Some(keep_last)).unwrap();
        let after: Vec<u64> = listed(root.path()).into_keys().collect();
        assert_eq!(after, expected, "{before:?} + {new}, keep {keep_last}");
        let mut all: Vec<u64> = after.iter().chain(&saved.pruned_steps).copied().collect();
        all.sort_unstable();
        let mut were: Vec<u64> = before.iter().copied().chain([new]).collect();
        were.sort_unstable();
        assert_eq!(all, were);
        assert_eq!(saved.warnings, [""; 0]);
    };
    check(&[1, 2, 3], 4, 2, &[3, 4]);
    check(&[1, 2, 3], 4, 1, &[4]);
    check(&[1, 2, 3], 4, 9, &[1, 2, 3, 4]);
    // Later steps are of another past: one of them in place of step 2 would be another run's.
    check(&[1, 200, 300], 2, 1, &[2, 200, 300]);
    check(&[1, 200, 300], 2, 2, &[1, 2, 200, 300]);
    check(&[1, 2, 200], 3, 2, &[2, 3, 200]);
}

#[test]
fn a_second_writer_waits_and_then_gives_up() {
    let root = tempfile::tempdir().unwrap();
    let held = lock_folder(root.path(), Duration::ZERO).unwrap();
    assert!(held.held);
    let error = lock_folder(root.path(), Duration::ZERO).err().unwrap();
    assert!(matches!(error, CheckpointError::WriterBusy { .. }), "{error}");
    drop(held);
    assert!(lock_folder(root.path(), Duration::ZERO).is_ok());
}
