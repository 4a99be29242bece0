//! Tables of measured times for kernel selection, and versions of the installed kernels.
//!
//! [`use_found`] reads the user's tables; otherwise only the crate's own tables are used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once, OnceLock};

use deepwell_kernels::cuda::KernelImages;
use deepwell_kernels::cuda::tuned::{
    COMMITTED, KernelVersions, LoadedTable, TunedCatalog, TunedTable,
};
use serde_json::Value;

use crate::TrainError;

/// Environment variable with the path of a table from `deepwell tune`, or `off`: then all kernels
/// are selected by predicted time.
pub const TUNED_VARIABLE: &str = "DEEPWELL_TUNED";
/// Output folder of `deepwell tune`; tables are searched in this folder of the working directory
/// and its parents.
pub const TUNED_FOLDER: &str = "target/tuned";
/// Number of digits kept of a hash.
const DIGITS: usize = 12;

static TABLES: OnceLock<Arc<[LoadedTable]>> = OnceLock::new();
static SAID: Once = Once::new();

/// The CUDA kernels, selected by the tables of this process. Unused parts of the tables are logged
/// once.
pub fn tuned_catalog() -> TunedCatalog {
    let tables = TABLES.get_or_init(|| committed(&kernel_versions()).into());
    SAID.call_once(|| {
        for warning in tables.iter().filter_map(LoadedTable::warning) {
            tracing::warn!("{warning}");
        }
    });
    TunedCatalog::new(Arc::clone(tables))
}

/// Reads the user's tables: the table of [`TUNED_VARIABLE`], or the tables of the nearest
/// [`TUNED_FOLDER`]. The crate's own tables come after them. No effect once a catalog was
/// requested.
///
/// # Errors
/// A file cannot be read, or is no table.
pub fn use_found() -> Result<(), TrainError> {
    let here = std::env::current_dir().unwrap_or_default();
    let named = std::env::var_os(TUNED_VARIABLE).map(PathBuf::from);
    let tables = found(named.as_deref(), &here, &kernel_versions())?;
    let _ = TABLES.set(tables.into());
    Ok(())
}

/// Versions of the compiled kernels here, by the manifest of the compiler's run.
pub fn kernel_versions() -> KernelVersions {
    KernelVersions::new(KernelImages::discover().manifest().and_then(|text| sources(&text)))
}

/// Hashes of the sources of each file; none if the manifest has no hashes.
fn sources(manifest: &str) -> Option<BTreeMap<String, String>> {
    let manifest: Value = serde_json::from_str(manifest).ok()?;
    let source = |compiled: &Value| {
        let hash = compiled["source_hash"].as_str()?;
        Some((compiled["file"].as_str()?.to_string(), hash.get(..DIGITS)?.to_string()))
    };
    manifest["compiled"].as_array()?.iter().map(source).collect()
}

fn found(
    named: Option<&Path>,
    here: &Path,
    versions: &KernelVersions,
) -> Result<Vec<LoadedTable>, TrainError> {
    let of_user = match named {
        Some(off) if off.as_os_str() == "off" => return Ok(Vec::new()),
        Some(path) => vec![path.to_path_buf()],
        None => in_folders(here)?,
    };
    let mut tables = Vec::new();
    for path in of_user {
        tables.push(load(&path, versions)?);
    }
    tables.extend(committed(versions));
    Ok(tables)
}

/// The tables of the nearest folder with tables.
fn in_folders(here: &Path) -> Result<Vec<PathBuf>, TrainError> {
    for folder in here.ancestors().map(|folder| folder.join(TUNED_FOLDER)) {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        let paths = entries.map(|entry| entry.map(|entry| entry.path()));
        let mut paths =
            paths.collect::<std::io::Result<Vec<_>>>().map_err(TrainError::io(&folder))?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
        paths.sort();
        if !paths.is_empty() {
            return Ok(paths);
        }
    }
    Ok(Vec::new())
}

/// Reads the table of a file, for any versions of kernels.
///
/// # Errors
/// The file cannot be read, or is no table.
pub fn read_table(path: &Path) -> Result<TunedTable, TrainError> {
    Ok(load(path, &KernelVersions::default())?.table().clone())
}

/// Text of a table in a file: a line for each row, so that diffs are readable.
pub fn table_text(table: &TunedTable) -> String {
    let head = TunedTable { rows: Vec::new(), ..table.clone() };
    let data = "a table is plain data";
    let head = serde_json::to_string_pretty(&head).expect(data);
    let row = |row| format!("    {}", serde_json::to_string(row).expect(data));
    let rows: Vec<String> = table.rows.iter().map(row).collect();
    match head.strip_suffix("[]\n}") {
        Some(head) if !rows.is_empty() => format!("{head}[\n{}\n  ]\n}}\n", rows.join(",\n")),
        _ => head + "\n",
    }
}

fn load(path: &Path, versions: &KernelVersions) -> Result<LoadedTable, TrainError> {
    let text = std::fs::read_to_string(path).map_err(TrainError::io(path))?;
    let table = serde_json::from_str(&text).map_err(|error| refused(path, &error.to_string()))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    loaded(&name, table, versions).map_err(|error| refused(path, &error))
}

fn loaded(name: &str, table: TunedTable, versions: &KernelVersions) -> Result<LoadedTable, String> {
    let text = serde_json::to_vec(&table).expect("a table is plain data");
    let hash = blake3::hash(&text).to_hex();
    let loaded = LoadedTable::new(name, &hash[..DIGITS], table, versions);
    loaded.map_err(|error| format!("expected {}, got {}", error.expected, error.got))
}

fn refused(path: &Path, got: &str) -> TrainError {
    TrainError::Setting {
        setting: "tuned kernels",
        expected: "a table that `deepwell tune` has written".to_string(),
        got: format!("{}: {got}", path.display()),
        hint: Some(format!(
            "delete the file or tune again; `{TUNED_VARIABLE}=off` selects by predicted time"
        )),
    }
}

fn committed(versions: &KernelVersions) -> Vec<LoadedTable> {
    let table = |(name, text): &(&str, &str)| {
        let table = serde_json::from_str(text).expect("a test reads each of them");
        loaded(name, table, versions).expect("a test reads each of them")
    };
    COMMITTED.iter().map(table).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn committed_tables_can_be_read() {
        assert_eq!(committed(&KernelVersions::default()).len(), COMMITTED.len());
    }

    #[test]
    fn manifests_say_which_versions_are_here() {
        let manifest = r#"{"compiled": [
            {"file": "bf16_gemm", "architecture": "sm_90a", "source_hash": "0123456789abcdef"},
            {"file": "bf16_gemm", "architecture": "sm_100a", "source_hash": "0123456789abcdef"}]}"#;
        let versions = KernelVersions::new(sources(manifest));
        assert_eq!(versions.of("cuda_bf16_gemm").as_deref(), Some("0123456789ab"));
        assert_eq!(versions.of("cuda_mxfp8_gemm"), None);
        for unknown in ["", "{}", r#"{"compiled": [{"file": "a"}]}"#] {
            assert_eq!(sources(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn where_tables_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        let tuned = folder.path().join("a").join(TUNED_FOLDER);
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::create_dir_all(&tuned).unwrap();
        let versions = KernelVersions::default();
        let names = |named: Option<&Path>| -> Result<Vec<String>, String> {
            let tables = found(named, &inner, &versions).map_err(|error| error.to_string())?;
            let of_user = tables.len() - COMMITTED.len().min(tables.len());
            Ok(tables[..of_user].iter().map(|table| table.table().gpu.clone()).collect())
        };
        assert_eq!(names(None), Ok(Vec::new()));
        let write = |path: &Path, gpu: &str| {
            let table = TunedTable::new("hopper-sm90", gpu, 132);
            std::fs::write(path, serde_json::to_string(&table).unwrap()).unwrap();
        };
        write(&tuned.join("b.json"), "B");
        write(&tuned.join("a.json"), "A");
        std::fs::write(tuned.join("a.txt"), "no table").unwrap();
        assert_eq!(names(None), Ok(vec!["A".to_string(), "B".to_string()]));
        let other = folder.path().join("other");
        write(&other, "C");
        assert_eq!(names(Some(&other)), Ok(vec!["C".to_string()]));
        assert!(found(Some(Path::new("off")), &inner, &versions).unwrap().is_empty());
        for (text, expected) in [
            ("{}", "missing field"),
            (
                r#"{"format":"x","version":9,"architecture":"","gpu":"","sm_count":0,"clocks":[],
                "heuristics_behind":null,"rows":[]}"#,
                "got `x` of version 9",
            ),
        ] {
            std::fs::write(&other, text).unwrap();
            let error = names(Some(&other)).unwrap_err();
            assert!(error.contains(expected) && error.contains("tune again"), "{error}");
        }
        let error = names(Some(&folder.path().join("absent"))).unwrap_err();
        assert!(error.contains("absent"), "{error}");
    }
}
