//! Search for compiled kernels.
//!
//! Search order: the folder in `DEEPWELL_KERNELS_DIR`, then `target/kernels` under the working
//! directory and its parents, then the kernels embedded in the library, which a published archive
//! has.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::architecture::Architecture;
use crate::KernelError;

/// Environment variable with a folder of `<architecture>/<file>.cubin` and `.ptx`.
pub const KERNELS_DIR_VARIABLE: &str = "DEEPWELL_KERNELS_DIR";

/// Finds compiled kernels.
#[derive(Clone, Debug)]
pub struct KernelImages {
    folders: Vec<PathBuf>,
    /// Whether a missing kernel gets an empty image.
    may_be_empty: bool,
    /// Whether to search for PTX instead of cubins.
    is_ptx: bool,
}

impl KernelImages {
    /// Searches the default folders of this process.
    pub fn discover() -> KernelImages {
        let mut folders: Vec<PathBuf> =
            std::env::var_os(KERNELS_DIR_VARIABLE).map(PathBuf::from).into_iter().collect();
        if let Ok(here) = std::env::current_dir() {
            folders.extend(here.ancestors().map(|folder| folder.join("target/kernels")));
        }
        KernelImages { folders, may_be_empty: false, is_ptx: false }
    }

    /// Searches only `folder`.
    pub fn in_folder(folder: &Path) -> KernelImages {
        KernelImages { folders: vec![folder.to_path_buf()], may_be_empty: false, is_ptx: false }
    }

    /// Returns an empty image for every kernel: for a driver that runs no kernels, such as
    /// [`FakeDriver`](crate::cuda::FakeDriver).
    pub fn empty() -> KernelImages {
        KernelImages { folders: Vec::new(), may_be_empty: true, is_ptx: false }
    }

    /// Searches the same folders for `<file>.ptx`: for a driver that runs PTX, such as the emulated
    /// driver.
    pub fn into_ptx(self) -> KernelImages {
        KernelImages { is_ptx: true, ..self }
    }

    /// The compiler's report about the kernels, `manifest.json`, from the first folder with such a
    /// file; `None` if nothing is compiled.
    pub fn manifest(&self) -> Option<String> {
        let mut folders = self.folders.iter();
        folders.find_map(|folder| std::fs::read_to_string(folder.join("manifest.json")).ok())
    }

    /// Returns the cubin of `<file>.cu`, or the PTX with a final zero byte, for a compute
    /// capability.
    ///
    /// # Errors
    /// [`KernelError::NoImage`] with every searched folder.
    pub fn image(
        &self,
        file: &str,
        capability: (u32, u32),
    ) -> Result<Cow<'static, [u8]>, KernelError> {
        if self.may_be_empty {
            return Ok(Cow::Borrowed(&[]));
        }
        let architecture = Architecture::of_capability(capability);
        let name = architecture.map_or("this GPU", Architecture::name);
        let extension = if self.is_ptx { "ptx" } else { "cubin" };
        if architecture.is_some() {
            for folder in &self.folders {
                let path = folder.join(name).join(file).with_extension(extension);
                if let Ok(mut bytes) = std::fs::read(&path) {
                    if self.is_ptx {
                        bytes.push(0);
                    }
                    return Ok(Cow::Owned(bytes));
                }
            }
            #[cfg(feature = "cuda")]
            if !self.is_ptx
                && let Some(cubin) = super::packs::cubin(name, file)
            {
                return Ok(Cow::Owned(cubin));
            }
        }
        Err(KernelError::NoImage {
            file: file.to_string(),
            architecture: format!("{name} (compute capability {}.{})", capability.0, capability.1),
            looked_in: self.folders.clone(),
        })
    }
}
