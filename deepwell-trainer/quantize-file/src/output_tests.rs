//! Publishing a model, broken at each of its operations.

use std::cell::{Cell, RefCell};

use super::*;

/// The disk, of which the operation `fault` and all behind it fail, as after a kill. Syncing is
/// only recorded.
struct FaultyDisk {
    fault: usize,
    count: Cell<usize>,
    log: RefCell<Vec<String>>,
}

impl FaultyDisk {
    fn step(&self, action: &str, path: &Path) -> io::Result<()> {
        let index = self.count.replace(self.count.get() + 1);
        let name = path.file_name().map_or("?".into(), |name| name.to_string_lossy());
        self.log.borrow_mut().push(format!("{action} {name}"));
        if index < self.fault { Ok(()) } else { Err(io::Error::other("killed")) }
    }
}

impl Disk for FaultyDisk {
    fn sync(&self, path: &Path) -> io::Result<()> {
        self.step("sync", path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step("rename", from)?;
        RealDisk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step("remove", path)?;
        RealDisk.remove(path)
    }
}

/// Writes the files of a model, each with `version` in it.
fn write(folder: &Path, names: &[&str], version: &str) {
    fs::create_dir_all(folder).unwrap();
    for &name in names {
        let shards: Vec<_> = names.iter().filter(|name| !name.ends_with(".json")).collect();
        let entries = shards.iter().map(|shard| format!("\"{shard}\": \"{shard}\""));
        let text = match name == INDEX_FILE {
            true => format!("{{\"weight_map\": {{{}}}}}", entries.collect::<Vec<_>>().join(", ")),
            false => version.to_string(),
        };
        fs::write(folder.join(name), text).unwrap();
    }
}

/// The versions of the files of the model that a reader finds, `None` if it finds none.
fn found(path: &Path) -> Option<Vec<String>> {
    if !path.exists() {
        return None;
    }
    let model = safetensors::find(path).ok()?;
    Some(model.files.iter().map(|(file, _)| fs::read_to_string(file).unwrap()).collect())
}

/// Publishes a model of the files `new` over one of the files `old`, broken at each operation, and
/// gives the operations of the unbroken run.
#[track_caller]
fn check(old: &[&str], new: &[&str], is_folder: bool) -> Vec<String> {
    for fault in 0.. {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join(if is_folder { "out" } else { "a.safetensors" });
        let folder = if is_folder { path.clone() } else { root.path().to_path_buf() };
        if !old.is_empty() {
            write(&folder, old, "old");
        }
        let partial = tempfile::tempdir_in(root.path()).unwrap();
        let output = Output { path: &path, folder, partial, is_folder };
        write(&output.files(), new, "new");
        let disk = FaultyDisk { fault, count: Cell::new(0), log: RefCell::default() };
        let published = output.publish(&disk);
        drop(output);
        let found = found(&path);
        let case = format!("{old:?} to {new:?}, broken at {fault}: {:?}", disk.log.borrow());
        if let Some(versions) = &found {
            let is = |version: &str| versions.iter().all(|found| found == version);
            assert!(!versions.is_empty() && (is("old") || is("new")), "{versions:?}: {case}");
        }
        if published.is_ok() {
            let shards = new.iter().filter(|name| !name.ends_with(".json")).count();
            assert_eq!(found, Some(vec!["new".to_string(); shards]), "{case}");
            let left = |name: &str| root.path().join("out").join(name).exists();
            assert_eq!(left(SINGLE_FILE), is_folder && new.contains(&SINGLE_FILE), "{case}");
            return disk.log.take();
        }
    }
    unreachable!("some number of operations is enough")
}

#[test]
fn a_model_is_complete_or_absent() {
    let (a, b, c) = ("a.safetensors", "b.safetensors", "c.safetensors");
    let log = check(&[], &[a, b, INDEX_FILE], true);
    let renames: Vec<&String> = log.iter().filter(|step| !step.starts_with("sync")).collect();
    assert_eq!(renames, ["rename model"]);
    assert_eq!(log.len(), 6, "three files, their folder, the rename, the folder around it");

    check(&[a, b, INDEX_FILE], &[a, b, INDEX_FILE], true);
    check(&[a, b, INDEX_FILE], &[a, c, INDEX_FILE], true);
    check(&[SINGLE_FILE], &[a, b, INDEX_FILE], true);
    check(&[a, b, INDEX_FILE], &[SINGLE_FILE], true);
    check(&[SINGLE_FILE], &[SINGLE_FILE], true);
    check(&["config.json"], &[a, INDEX_FILE], true);
    // A model of one shard may call it as a model without an index would.
    check(&[a, INDEX_FILE], &[SINGLE_FILE, INDEX_FILE], true);
    let log = check(&[a], &[a], false);
    assert_eq!(log[..3], ["sync a.safetensors", "sync model", "rename a.safetensors"]);
    assert_eq!(log.len(), 4, "and its folder");
}
