//! Finds NVIDIA's collective library and binds the functions in use.
//!
//! The functions are bound here instead of by cudarc, for two reasons. First, cudarc does not look
//! for `libnccl.so.2`, the only file name in distributions and in PyTorch's wheels, and panics if
//! no library is found. Second, cudarc returns results as a Rust enumeration, for which the codes
//! of a newer library are invalid values: here a code is an integer.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;

use crate::runtime::cuda::driver::{DriverError, DriverResult};

/// Environment variable with the path of NCCL's file, or of its folder.
pub const NCCL_VARIABLE: &str = "DEEPWELL_NCCL";

/// Oldest supported version, as `ncclGetVersion` writes it; the probe requires the same.
const VERSION_MIN: c_int = 22_200;

/// The installed name of the library, and the name of its development link.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclComm_t`.
pub(super) type Communicator = *mut c_void;

/// `ncclUniqueId`, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` of 2.18, accepted by every later library, which checks size and version.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// All defaults, except for the number of CTAs if given.
    pub(super) fn with_ctas(ctas: Option<c_int>) -> Config {
        /// `NCCL_CONFIG_UNDEF_INT`.
        const DEFAULT: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 1,
            cga_cluster_size: DEFAULT,
            min_ctas: ctas.unwrap_or(DEFAULT),
            max_ctas: ctas.unwrap_or(DEFAULT),
            net_name: ptr::null(),
            split_share: DEFAULT,
        }
    }
}

/// `ncclDataType_t`; these numbers have been stable since 2.10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum DataType {
    Uint8 = 1,
    Int32 = 2,
    Uint64 = 5,
    Float32 = 7,
    Bfloat16 = 9,
}

/// `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum ReduceOp {
    Sum = 0,
    Max = 2,
}

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($kind:ty),*);)*) => {
        /// The library's functions, with the library's names.
        pub(super) struct Library {
            version: c_int,
            $(pub(super) $name: unsafe extern "C" fn($($kind),*) -> c_int,)*
            get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
            get_last_error: unsafe extern "C" fn(Communicator) -> *const c_char,
        }

        impl Library {
            fn bind(library: &libloading::Library, place: &str) -> DriverResult<Library> {
                Ok(Library {
                    version: 0,
                    $($name: symbol(library, $symbol, place)?,)*
                    get_error_string: symbol(library, "ncclGetErrorString", place)?,
                    get_last_error: symbol(library, "ncclGetLastError", place)?,
                })
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion" (*mut c_int);
    get_unique_id = "ncclGetUniqueId" (*mut UniqueId);
    init_all = "ncclCommInitAll" (*mut Communicator, c_int, *const c_int);
    init_rank = "ncclCommInitRankConfig" (*mut Communicator, c_int, UniqueId, c_int, *mut Config);
    get_async_error = "ncclCommGetAsyncError" (Communicator, *mut c_int);
    destroy = "ncclCommDestroy" (Communicator);
    abort = "ncclCommAbort" (Communicator);
    group_start = "ncclGroupStart" ();
    group_end = "ncclGroupEnd" ();
    all_reduce = "ncclAllReduce"
        (*const c_void, *mut c_void, usize, DataType, ReduceOp, Communicator, CUstream);
    reduce_scatter = "ncclReduceScatter"
        (*const c_void, *mut c_void, usize, DataType, ReduceOp, Communicator, CUstream);
    all_gather = "ncclAllGather"
        (*const c_void, *mut c_void, usize, DataType, Communicator, CUstream);
    broadcast = "ncclBroadcast"
        (*const c_void, *mut c_void, usize, DataType, c_int, Communicator, CUstream);
    send = "ncclSend" (*const c_void, usize, DataType, c_int, Communicator, CUstream);
    recv = "ncclRecv" (*mut c_void, usize, DataType, c_int, Communicator, CUstream);
}

impl Library {
    /// The library, searched once per process.
    ///
    /// # Errors
    /// No library, a version that is too old, or a library that lacks a function.
    pub(super) fn get() -> DriverResult<&'static Library> {
        static FOUND: OnceLock<DriverResult<Library>> = OnceLock::new();
        let found = FOUND.get_or_init(|| find(&candidates_here()));
        found.as_ref().map_err(Clone::clone)
    }

    /// `2.27.3`, of the library's own 22703.
    pub(super) fn version(&self) -> String {
        dotted(self.version)
    }

    /// Returns `Ok` for success, otherwise an error with the code's meaning and the library's last
    /// message.
    pub(super) fn check(&self, call: &str, code: c_int) -> DriverResult<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: takes any code.
        let meaning = text(unsafe { (self.get_error_string)(code) });
        // SAFETY: null stands for all communicators.
        let said = text(unsafe { (self.get_last_error)(ptr::null_mut()) }).unwrap_or_default();
        let meaning = meaning.unwrap_or_else(|| format!("code {code}"));
        Err(DriverError::new(call, explained(&meaning, &said)))
    }
}

fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: the library returns a text with a final zero byte, or null.
    let text = (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })?;
    // Ranks of a process share the last error: another rank may overwrite the text during the read.
    let text = text.to_string_lossy().replace(char::is_control, " ");
    Some(text.trim().to_string())
}

/// An error message: the code's meaning, the library's last message, and a hint.
fn explained(meaning: &str, said: &str) -> String {
    let hint = if said.contains("uplicate GPU detected") {
        "each rank needs a GPU of its own: start as many ranks as there are GPUs, and let \
         `CUDA_VISIBLE_DEVICES` show a rank its own or all of them"
    } else {
        "`NCCL_DEBUG=INFO` tells more"
    };
    let said = if said.is_empty() { String::new() } else { format!(": {said}") };
    format!("{meaning}{said}\nhint: {hint}")
}

fn symbol<F: Copy>(library: &libloading::Library, name: &str, place: &str) -> DriverResult<F> {
    // SAFETY: the type is the function's type in the library's header.
    match unsafe { library.get::<F>(name.as_bytes()) } {
        Ok(symbol) => Ok(*symbol),
        Err(_) => Err(DriverError::new(
            "NCCL",
            format!(
                "expected the function `{name}` in `{place}`, and it is not there\n\
                 hint: install NCCL {} or newer",
                dotted(VERSION_MIN)
            ),
        )),
    }
}

fn find(candidates: &[PathBuf]) -> DriverResult<Library> {
    for place in candidates {
        // SAFETY: loading the library runs its initializers, which take no action on their own. The
        // library stays loaded: its threads may run until the process ends.
        let Ok(library) = (unsafe { libloading::Library::new(place) }) else { continue };
        let library = std::mem::ManuallyDrop::new(library);
        let place = place.display().to_string();
        let mut bound = Library::bind(&library, &place)?;
        // SAFETY: writes one integer.
        let code = unsafe { (bound.get_version)(&mut bound.version) };
        bound.check("ncclGetVersion", code)?;
        if bound.version < VERSION_MIN {
            return Err(DriverError::new(
                "NCCL",
                format!(
                    "expected version {} or newer, `{place}` is {}\n\
                     hint: install a newer one (`libnccl2`, or `pip install nvidia-nccl-cu13`), \
                     and name it in `{NCCL_VARIABLE}`",
                    dotted(VERSION_MIN),
                    bound.version()
                ),
            ));
        }
        return Ok(bound);
    }
    let looked_for: Vec<String> =
        candidates.iter().map(|place| format!("`{}`", place.display())).collect();
    Err(DriverError::new(
        "NCCL",
        format!(
            "looked for {}, and could load none\n\
             hint: install NCCL (`libnccl2`, or `pip install nvidia-nccl-cu13`), or name its file \
             in `{NCCL_VARIABLE}`",
            looked_for.join(", ")
        ),
    ))
}

fn candidates_here() -> Vec<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let prefix = |name: &str| set(name).map(PathBuf::from);
    let local = prefix("HOME").map(|home| home.join(".local"));
    let prefixes = [prefix("VIRTUAL_ENV"), prefix("CONDA_PREFIX"), local];
    let system = ["/usr/local", "/usr"].map(PathBuf::from);
    let prefixes: Vec<PathBuf> = prefixes.into_iter().flatten().chain(system).collect();
    candidates(set(NCCL_VARIABLE), &prefixes)
}

/// Candidate paths of the library, in search order: only the path in the variable, if set;
/// otherwise the loader's path, then the folders of Python packages under `prefixes`, where
/// PyTorch's wheels install it.
fn candidates(named: Option<OsString>, prefixes: &[PathBuf]) -> Vec<PathBuf> {
    if let Some(named) = named.map(PathBuf::from) {
        return if named.is_dir() {
            NAMES.map(|name| named.join(name)).into()
        } else {
            vec![named]
        };
    }
    let mut paths: Vec<PathBuf> = NAMES.map(PathBuf::from).into();
    for prefix in prefixes {
        let mut pythons: Vec<PathBuf> = entries(&prefix.join("lib"))
            .filter(|path| path.file_name().is_some_and(|name| is_python(&name.to_string_lossy())))
            .collect();
        pythons.sort();
        for python in pythons {
            for packages in ["site-packages", "dist-packages"] {
                let file = python.join(packages).join("nvidia/nccl/lib").join(NAMES[0]);
                paths.extend(file.is_file().then_some(file));
            }
        }
    }
    paths
}

fn is_python(folder: &str) -> bool {
    folder.starts_with("python3")
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Formats a version code of NCCL 2.9 or later: `10000 · major + 100 · minor + patch`.
fn dotted(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(dotted(22_703), "2.27.3");
        assert_eq!(dotted(21_004), "2.10.4");
    }

    #[test]
    fn where_it_is_looked_for() {
        let folder = std::env::temp_dir().join(format!("deepwell-nccl-{}", std::process::id()));
        let wheel = folder.join("lib/python3.12/site-packages/nvidia/nccl/lib");
        std::fs::create_dir_all(&wheel).unwrap();
        let file = wheel.join("libnccl.so.2");
        std::fs::write(&file, b"no library").unwrap();
        let names = NAMES.map(PathBuf::from);
        let check = |named: Option<&Path>, prefixes: &[PathBuf], expected: &[PathBuf]| {
            assert_eq!(candidates(named.map(|path| path.as_os_str().into()), prefixes), expected);
        };
        check(None, &[], &names);
        check(None, &[folder.join("absent")], &names);
        let (folders, files) = ([folder.clone()], [file.clone()]);
        check(None, &folders, &[&names[..], &files].concat());
        check(Some(&file), &folders, &files);
        check(Some(&wheel), &[], &[file.clone(), wheel.join("libnccl.so")]);

        // A library that cannot be loaded is named, with a hint.
        let error = find(&candidates(Some(file.clone().into()), &[])).err().unwrap().to_string();
        assert!(error.contains(&format!("looked for `{}`, and", file.display())), "{error}");
        assert!(error.contains("hint: install NCCL") && error.contains(NCCL_VARIABLE), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn it_is_bound_or_missed_with_a_hint_on_any_machine() {
        match Library::get() {
            Ok(library) => assert!(library.version >= VERSION_MIN, "{}", library.version()),
            Err(error) => assert!(error.to_string().contains("\nhint: install "), "{error}"),
        }
    }

    #[test]
    fn two_ranks_on_one_gpu_are_explained() {
        // The second text is from a run on an H200, where the other rank wrote its error meanwhile.
        let devices = "GPU detected : rank 1 and rank 0 both on CUDA device 1b000";
        for said in [format!("Duplicate {devices}"), format!("uplicate {devices}")] {
            let text = explained("invalid usage", &said);
            assert!(text.starts_with(&format!("invalid usage: {said}\nhint: each rank")), "{text}");
        }
        assert_eq!(explained("x", ""), "x\nhint: `NCCL_DEBUG=INFO` tells more");
    }
}
