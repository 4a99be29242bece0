//! Reads a checkpoint: the manifest when opened, tensors on request.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::CheckpointError;
use crate::io::PIECE_BYTES;
use crate::manifest::{FileEntry, Manifest, TensorEntry};
use crate::region::Region;
use crate::tensor::{CkptDtype, Section};

/// An opened checkpoint. Holds the manifest only; tensors stay on disk until they are read.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    tensors: Vec<StoredTensor>,
    index: HashMap<(Section, String), usize>,
}

/// A tensor of a checkpoint, written whole by one rank or in parts by several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name, unique within `section`.
    pub name: String,
    /// Role of the tensor.
    pub section: Section,
    /// Element type.
    pub dtype: CkptDtype,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Bytes of all parts together.
    pub bytes: u64,
    /// Indices of the parts in [`Checkpoint::entries`].
    pub entries: Vec<usize>,
}

/// Opens the checkpoint in folder `path`, such as `runs/a/step-00000120`.
///
/// Checks the manifest's checksum, its consistency, and the presence and length of every shard. The
/// shards' bytes are checked as tensors are read, or all at once by [`verify`](crate::verify).
///
/// # Errors
///
/// [`NotACheckpoint`](CheckpointError::NotACheckpoint),
/// [`ManifestChecksum`](CheckpointError::ManifestChecksum),
/// [`ManifestInvalid`](CheckpointError::ManifestInvalid),
/// [`FormatVersion`](CheckpointError::FormatVersion),
/// [`FileLength`](CheckpointError::FileLength) and [`Io`](CheckpointError::Io).
pub fn load(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let manifest = Manifest::read(path)?;
    let mut tensors: Vec<StoredTensor> = Vec::new();
    let mut index = HashMap::new();
    for (position, entry) in manifest.tensors.iter().enumerate() {
        let key = (entry.section, entry.name.clone());
        let at = *index.entry(key).or_insert_with(|| {
            tensors.push(StoredTensor {
                name: entry.name.clone(),
                section: entry.section,
                dtype: entry.dtype,
                shape: entry.global_shape.clone(),
                bytes: 0,
                entries: Vec::new(),
            });
            tensors.len() - 1
        });
        tensors[at].bytes += entry.bytes;
        tensors[at].entries.push(position);
    }
    Ok(Checkpoint { path: path.to_path_buf(), manifest, tensors, index })
}

impl Checkpoint {
    /// Folder of the checkpoint.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Completed training steps.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Layout of the model on the hardware.
    #[must_use]
    pub fn plan(&self) -> &Value {
        &self.manifest.plan
    }

    /// Precision per tensor.
    #[must_use]
    pub fn policy(&self) -> &Value {
        &self.manifest.policy
    }

    /// State of the numeric guards.
    #[must_use]
    pub fn guards(&self) -> &Value {
        &self.manifest.guards
    }

    /// State of the random-number generators.
    #[must_use]
    pub fn rng(&self) -> &Value {
        &self.manifest.rng
    }

    /// Position of the next batch in the data.
    #[must_use]
    pub fn data_position(&self) -> &Value {
        &self.manifest.data_position
    }

    /// Options, model configuration, seeds, versions.
    #[must_use]
    pub fn run(&self) -> &Value {
        &self.manifest.run
    }

    /// All tensors, ordered by their first stored part.
    #[must_use]
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// All stored parts of tensors.
    #[must_use]
    pub fn entries(&self) -> &[TensorEntry] {
        &self.manifest.tensors
    }

    /// All shards.
    #[must_use]
    pub fn files(&self) -> &[FileEntry] {
        &self.manifest.files
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns one tensor.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MissingTensor`].
    pub fn tensor(&self, section: Section, name: &str) -> Result<&StoredTensor, CheckpointError> {
        match self.index.get(&(section, name.to_string())) {
            Some(&position) => Ok(&self.tensors[position]),
            None => Err(CheckpointError::MissingTensor {
                path: self.path.clone(),
                section,
                name: name.to_string(),
                hint: self.missing_hint(section, name),
            }),
        }
    }

    fn missing_hint(&self, section: Section, name: &str) -> String {
        let elsewhere: Vec<_> = self
            .tensors
            .iter()
            .filter(|tensor| tensor.name == name)
            .map(|tensor| tensor.section.name())
            .collect();
        if !elsewhere.is_empty() {
            return format!("the name is in {}", elsewhere.join(", "));
        }
        let mut members = self.tensors.iter().filter(|tensor| tensor.section == section);
        match (members.next(), members.count()) {
            (None, _) => "the section is empty".to_string(),
            (Some(first), others) => {
                format!("the section has {} tensors, such as `{}`", others + 1, first.name)
            }
        }
    }

    /// Returns one tensor, which must have this type and shape.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MissingTensor`] and [`CheckpointError::TensorMismatch`].
    pub fn expect(
        &self,
        section: Section,
        name: &str,
        dtype: CkptDtype,
        shape: &[usize],
    ) -> Result<&StoredTensor, CheckpointError> {
        let entry = self.tensor(section, name)?;
        if entry.dtype != dtype || entry.shape != shape {
            return Err(CheckpointError::TensorMismatch {
                path: self.path.clone(),
                section,
                name: name.to_string(),
                expected_dtype: dtype,
                expected_shape: shape.to_vec(),
                got_dtype: entry.dtype,
                got_shape: entry.shape.clone(),
            });
        }
        Ok(entry)
    }

    /// Reads one tensor into `buffer`, whose length must equal the tensor's bytes, and verifies its
    /// checksum. After an error the buffer's contents are unspecified.
    ///
    /// # Errors
    ///
    /// [`MissingTensor`](CheckpointError::MissingTensor),
    /// [`BufferLength`](CheckpointError::BufferLength),
    /// [`TensorChecksum`](CheckpointError::TensorChecksum) and [`Io`](CheckpointError::Io).
    pub fn read_into(
        &self,
        section: Section,
        name: &str,
        buffer: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let shape = &self.tensor(section, name)?.shape;
        self.read_region(section, name, &Region::whole(shape), buffer)
    }

    /// Reads a region of a tensor into `buffer`, row-major, from the parts that overlap the region.
    /// Each of these parts is read whole, in pieces of 1 MiB, and its checksum is verified. After
    /// an error the buffer's contents are unspecified.
    ///
    /// ```
    /// # use deepwell_ckpt::{CheckpointContents, Region, SaveOptions, Section, TensorView};
    /// # let root = tempfile::tempdir()?;
    /// let mut contents = CheckpointContents::new(1);
    /// let values = [0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0];
    /// contents.tensors = vec![TensorView::from_f32(Section::Master, "w", &[2, 3], &values)];
    /// let saved = deepwell_ckpt::save(root.path(), &contents, &SaveOptions::default())?;
    /// let mut columns = [0; 16];
    /// let region = Region { offset: vec![0, 1], shape: vec![2, 2] };
    /// deepwell_ckpt::load(&saved.path)?.read_region(Section::Master, "w", &region, &mut columns)?;
    /// let columns: Vec<f32> = columns.chunks(4).map(|it|
    /// f32::from_le_bytes(it.try_into().unwrap())).collect(); assert_eq!(columns, [1.0, 2.0, 4.0,
    /// 5.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`read_into`](Checkpoint::read_into); [`CheckpointError::NoRegion`].
    pub fn read_region(
        &self,
        section: Section,
        name: &str,
        region: &Region,
        buffer: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let tensor = self.tensor(section, name)?;
        if !region.is_within(&tensor.shape) {
            return Err(CheckpointError::NoRegion {
                section,
                name: name.to_string(),
                shape: tensor.shape.clone(),
                region: region.clone(),
            });
        }
        let element_bytes = tensor.dtype.element_bytes();
        let expected_bytes = (region.elements() * element_bytes) as u64;
        if buffer.len() as u64 != expected_bytes {
            return Err(CheckpointError::BufferLength {
                section,
                name: name.to_string(),
                expected_bytes,
                got_bytes: buffer.len(),
            });
        }
        for &index in &tensor.entries {
            let entry = &self.manifest.tensors[index];
            let has = entry.region();
            if has == *region {
                return self.read_part(entry, buffer);
            } else if has.overlaps(region) {
                self.read_overlap(entry, &has, region, buffer)?;
            }
        }
        Ok(())
    }

    /// Copies the overlap of a part and a region into the region's buffer.
    fn read_overlap(
        &self,
        entry: &TensorEntry,
        has: &Region,
        region: &Region,
        buffer: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let element_bytes = entry.dtype.element_bytes();
        let columns_of = |region: &Region| {
            let begin = region.offset.last().copied().unwrap_or(0);
            begin..begin + region.row_elements()
        };
        let stored_range = columns_of(has);
        let wanted_range = columns_of(region);
        let common =
            stored_range.start.max(wanted_range.start)..stored_range.end.min(wanted_range.end);
        let mut rows = has.rows();
        let row_bytes = stored_range.len() * element_bytes;
        // Pieces have a fixed size, so a row may span two pieces.
        let mut row = Vec::with_capacity(row_bytes);
        let mut piece_buffer = vec![0; PIECE_BYTES];
        let mut copy_row = |row: &[u8]| {
            let Some(at) = rows.next() else { return };
            let Some(begin) = region.row_begin(&at) else { return };
            let to = (begin + common.start - wanted_range.start) * element_bytes;
            let from = (common.start - stored_range.start) * element_bytes;
            let bytes = common.len() * element_bytes;
            buffer[to..to + bytes].copy_from_slice(&row[from..from + bytes]);
        };
        let mut take = |mut bytes_left: &[u8]| {
            while !bytes_left.is_empty() {
                if row.is_empty() && bytes_left.len() >= row_bytes {
                    copy_row(&bytes_left[..row_bytes]);
                    bytes_left = &bytes_left[row_bytes..];
                    continue;
                }
                let more = (row_bytes - row.len()).min(bytes_left.len());
                row.extend_from_slice(&bytes_left[..more]);
                bytes_left = &bytes_left[more..];
                if row.len() == row_bytes {
                    copy_row(&row);
                    row.clear();
                }
            }
        };
        let path = self.path.join(&entry.file);
        let mut hasher = blake3::Hasher::new();
        let mut file = self.open_at(entry)?;
        let mut rest = entry.bytes;
        while rest > 0 {
            let bytes_left = &mut piece_buffer[..rest.min(PIECE_BYTES as u64) as usize];
            file.read_exact(bytes_left).map_err(CheckpointError::io("read", &path))?;
            hasher.update(bytes_left);
            take(bytes_left);
            rest -= bytes_left.len() as u64;
        }
        self.check(entry, &hasher)
    }

    /// Reads a whole part.
    fn read_part(&self, entry: &TensorEntry, buffer: &mut [u8]) -> Result<(), CheckpointError> {
        let path = self.path.join(&entry.file);
        let mut file = self.open_at(entry)?;
        let mut hasher = blake3::Hasher::new();
        for piece in buffer.chunks_mut(PIECE_BYTES) {
            file.read_exact(piece).map_err(CheckpointError::io("read", &path))?;
            hasher.update(piece);
        }
        self.check(entry, &hasher)
    }

    /// Opens the shard of a part, at the part's first byte.
    fn open_at(&self, entry: &TensorEntry) -> Result<File, CheckpointError> {
        let path = self.path.join(&entry.file);
        let mut file = File::open(&path).map_err(CheckpointError::io("open", &path))?;
        file.seek(SeekFrom::Start(entry.begin)).map_err(CheckpointError::io("read", &path))?;
        Ok(file)
    }

    fn check(&self, entry: &TensorEntry, hasher: &blake3::Hasher) -> Result<(), CheckpointError> {
        let got = hasher.finalize().to_hex().to_string();
        if got == entry.blake3 {
            return Ok(());
        }
        Err(CheckpointError::TensorChecksum {
            path: self.path.join(&entry.file),
            section: entry.section,
            name: entry.name.clone(),
            offset: entry.begin,
            bytes: entry.bytes,
            expected: entry.blake3.clone(),
            got,
        })
    }

    /// Reads one tensor's bytes.
    ///
    /// # Errors
    ///
    /// As [`read_into`](Checkpoint::read_into).
    pub fn read(&self, section: Section, name: &str) -> Result<Vec<u8>, CheckpointError> {
        // The length was checked against the file's when opening, so the allocation is reasonable.
        let mut buffer = vec![0; self.tensor(section, name)?.bytes as usize];
        self.read_into(section, name, &mut buffer)?;
        Ok(buffer)
    }

    /// Reads an `F32` tensor of this shape into `buffer`, one element per value.
    ///
    /// # Errors
    ///
    /// As [`expect`](Checkpoint::expect) and [`read_into`](Checkpoint::read_into).
    pub fn read_f32_into(
        &self,
        section: Section,
        name: &str,
        shape: &[usize],
        buffer: &mut [f32],
    ) -> Result<(), CheckpointError> {
        self.expect(section, name, CkptDtype::F32, shape)?;
        self.read_into(section, name, bytemuck::cast_slice_mut(buffer))
    }

    /// Reads a `BF16` tensor of this shape into `buffer`, as bit patterns.
    ///
    /// # Errors
    ///
    /// As [`expect`](Checkpoint::expect) and [`read_into`](Checkpoint::read_into).
    pub fn read_bf16_bits_into(
        &self,
        section: Section,
        name: &str,
        shape: &[usize],
        buffer: &mut [u16],
    ) -> Result<(), CheckpointError> {
        self.expect(section, name, CkptDtype::Bf16, shape)?;
        self.read_into(section, name, bytemuck::cast_slice_mut(buffer))
    }
}
