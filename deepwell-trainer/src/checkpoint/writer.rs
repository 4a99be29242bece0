//! Writes checkpoints, each rank its share.
//!
//! | who | what |
//! |---|---|
//! | all ranks | agree on the shares ([`shares`]) |
//! | rank 0 | begins a [`CheckpointWriter`], and sends its id to the other ranks |
//! | each rank | writes its share: directly from host-visible memory, else a copy in a thread |
//! | all ranks | once all have written: report their shards to rank 0 ([`Writer::complete`]) |
//! | rank 0 | publishes the checkpoint |
//!
//! The collective steps go through the ranks' communicator, in order: if a rank dies or fails in
//! between, the other ranks end too, and the checkpoint is never published.

use std::borrow::Cow;
use std::path::Path;
use std::thread::JoinHandle;

use bytemuck::{cast_slice, pod_collect_to_vec};
use deepwell_ckpt::{
    CheckpointWriter, RankShards, SaveOptions, SliceView, TensorView, write_shards,
};
use deepwell_ir::ByteRange;
use deepwell_kernels::HostBuffer;

use super::holdings::{Holding, holdings, shares};
use super::state::{Position, State};
use crate::run_folder::RunIdentity;
use crate::{Engine, Settings, TrainError};

/// Returns this rank's share of the checkpoint. A collective of all ranks.
fn own_share(engine: &mut Engine) -> Result<Vec<Holding>, TrainError> {
    let (parallel, rank) = (engine.plan().parallel, engine.rank());
    let all = holdings(engine.program(), parallel, rank);
    let share = shares(&mut engine.peers, parallel.pipeline_place(rank), &all)?;
    Ok(share.into_iter().map(|index| all[index].clone()).collect())
}

/// Returns the pinned or pageable host bytes that this rank's first save needs for its copy: its
/// share of master weights, moments and copies. A collective of all ranks.
///
/// # Errors
/// Another rank has failed.
pub fn host_bytes(engine: &mut Engine) -> Result<usize, TrainError> {
    Ok(own_share(engine)?.iter().map(|holding| holding.range.bytes).sum())
}

/// A checkpoint in progress.
#[derive(Debug)]
struct Pending {
    /// Writer and state; only on rank 0.
    first: Option<(CheckpointWriter, State)>,
    options: SaveOptions,
}

impl Pending {
    /// Makes the checkpoint appear, on rank 0.
    fn publish(self, shards: Vec<RankShards>) -> Result<(), TrainError> {
        let Some((writer, state)) = self.first else { return Ok(()) };
        let saved = writer.publish(&state.contents(), shards, &self.options)?;
        for warning in &saved.warnings {
            tracing::warn!("{warning}");
        }
        Ok(())
    }
}

/// Writes this rank's share of checkpoints: directly from memory that the host sees; otherwise from
/// a copy, which another thread writes while training continues.
#[derive(Debug, Default)]
pub struct Writer {
    /// The copy, when no thread writes it.
    buffer: Option<HostBuffer>,
    /// Writes the last checkpoint and returns the copy.
    thread: Option<JoinHandle<Written>>,
    /// The checkpoint that the thread writes, if other ranks write shares too.
    pending: Option<Pending>,
}

/// Result of a writer thread.
struct Written {
    buffer: HostBuffer,
    shards: Result<RankShards, TrainError>,
}

impl Writer {
    /// Allocates the host memory that [`Writer::save`] copies to, if it copies: pinning memory
    /// takes longer than a copy, so a run does it before its first step. A collective of all ranks.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn reserve(&mut self, engine: &mut Engine, settings: &Settings) -> Result<(), TrainError> {
        let share = own_share(engine)?;
        if !is_copied(engine, settings) {
            return Ok(());
        }
        self.take_buffer(engine, &share)
    }

    fn take_buffer(&mut self, engine: &mut Engine, share: &[Holding]) -> Result<(), TrainError> {
        // At least 64 bytes, also for a rank without a share: drivers reject empty allocations.
        let bytes = share.iter().map(|holding| holding.range.bytes).sum::<usize>().max(64);
        if self.buffer.as_ref().is_some_and(|buffer| buffer.as_slice().len() >= bytes) {
            return Ok(());
        }
        let backend = engine.executor.backend_mut();
        if let Some(small) = self.buffer.take() {
            backend.free_host_buffer(small)?;
        }
        self.buffer = Some(backend.host_buffer(bytes)?);
        Ok(())
    }

    /// Writes a checkpoint of the state after `position.step`, or starts to. A collective of all
    /// ranks; each rank writes its share.
    ///
    /// # Errors
    /// The state is not finite, or the disk fails; nothing is listed then. The next call returns an
    /// error of the thread.
    pub fn save(
        &mut self,
        root: &Path,
        engine: &mut Engine,
        position: &Position,
        settings: &Settings,
        identity: &RunIdentity,
    ) -> Result<(), TrainError> {
        self.complete(engine)?;
        let share = own_share(engine)?;
        let options = SaveOptions { keep_last: Some(settings.keep_last), ..SaveOptions::default() };
        let step = position.step;
        let first = match engine.peers.is_first() {
            true => {
                let state = State::of(engine, position, settings, identity)?;
                Some((CheckpointWriter::begin(root, step)?, state))
            }
            false => None,
        };
        let id = first.as_ref().map_or(0, |(writer, _)| u64::from(writer.id()));
        let id = engine.peers.gather(&[id])?[0][0] as u32;
        let folder = CheckpointWriter::folder_of(root, step, id);
        let pending = Pending { first, options: options.clone() };
        let rank = (engine.peers.world_size() > 1).then(|| engine.rank() as u32);
        if !is_copied(engine, settings) {
            let backend = engine.executor.backend();
            let views: Option<Vec<&[u8]>> =
                share.iter().map(|it| backend.host_view(it.range)).collect();
            let shards = write(&folder, rank, &share, &views.unwrap_or_default(), &options)?;
            return publish(engine, pending, shards);
        }
        self.take_buffer(engine, &share)?;
        let Some(mut buffer) = self.buffer.take() else { return Ok(()) };
        let ranges: Vec<ByteRange> = share.iter().map(|holding| holding.range).collect();
        engine.executor.backend_mut().read_all(&ranges, &mut buffer)?;
        // A single rank publishes in its thread.
        let (alone, pending) = match rank {
            None => (Some(pending), None),
            Some(_) => (None, Some(pending)),
        };
        self.pending = pending;
        let work = move || {
            let mut rest = buffer.as_slice();
            let data: Vec<&[u8]> = share
                .iter()
                .map(|holding| {
                    let (data, behind) = rest.split_at(holding.range.bytes);
                    rest = behind;
                    data
                })
                .collect();
            let shards = write(&folder, rank, &share, &data, &options).and_then(|shards| {
                alone.map_or(Ok(()), |alone| alone.publish(vec![shards.clone()]))?;
                Ok(shards)
            });
            Written { buffer, shards }
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_string()).spawn(work);
        self.thread = Some(thread.map_err(TrainError::io(Path::new("a thread")))?);
        Ok(())
    }

    /// Whether this rank has finished writing: when all ranks have, they
    /// [`complete`](Writer::complete) the checkpoint.
    pub fn is_written(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Whether a checkpoint is not yet complete on all ranks.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Waits until this rank has written its share of the last checkpoint, and reports it to rank
    /// 0, which publishes. A collective of all ranks.
    ///
    /// # Errors
    /// Writing failed on this rank or another.
    pub fn complete(&mut self, engine: &mut Engine) -> Result<(), TrainError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let Written { buffer, shards } = match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        self.buffer = Some(buffer);
        let shards = shards?;
        match self.pending.take() {
            Some(pending) => publish(engine, pending, shards),
            None => Ok(()),
        }
    }

    /// Completes the last checkpoint and frees the host memory.
    ///
    /// # Errors
    /// Writing failed.
    pub fn finish(&mut self, engine: &mut Engine) -> Result<(), TrainError> {
        self.complete(engine)?;
        let Some(buffer) = self.buffer.take() else { return Ok(()) };
        Ok(engine.executor.backend_mut().free_host_buffer(buffer)?)
    }
}

/// Whether shares are written from a copy. All ranks must agree, whatever their shares are, because
/// a copy changes the time at which they publish.
fn is_copied(engine: &Engine, settings: &Settings) -> bool {
    let first_byte = ByteRange { offset: 0, bytes: 1 };
    settings.async_checkpoints || engine.executor.backend().host_view(first_byte).is_none()
}

/// Writes the holdings of a rank into the folder of a checkpoint writer.
fn write(
    folder: &Path,
    rank: Option<u32>,
    share: &[Holding],
    data: &[&[u8]],
    options: &SaveOptions,
) -> Result<RankShards, TrainError> {
    let data = share.iter().zip(data).map(|(holding, data)| holding.to_file(data));
    let data: Vec<Cow<'_, [u8]>> = data.collect::<Result<_, _>>()?;
    let parts: Vec<SliceView<'_>> = share
        .iter()
        .zip(&data)
        .map(|(holding, data)| SliceView {
            view: TensorView {
                name: &holding.name,
                dtype: holding.dtype,
                shape: holding.region.shape.clone(),
                data,
                section: holding.section,
            },
            global_shape: holding.whole.clone(),
            global_offset: holding.region.offset.clone(),
        })
        .collect();
    Ok(write_shards(folder, rank, &parts, options)?)
}

/// Gathers the shards of all ranks on rank 0, which publishes the checkpoint.
fn publish(engine: &mut Engine, pending: Pending, own: RankShards) -> Result<(), TrainError> {
    if engine.peers.world_size() == 1 {
        return pending.publish(vec![own]);
    }
    let mut text = serde_json::to_vec(&own).expect("names and numbers");
    let bytes = text.len() as u64;
    text.resize(text.len().next_multiple_of(size_of::<u64>()), 0);
    let words: Vec<u64> = std::iter::once(bytes).chain(pod_collect_to_vec(&text)).collect();
    let all = engine.peers.gather_any(&words)?;
    if !engine.peers.is_first() {
        return Ok(());
    }
    let read = |words: &Vec<u64>| {
        let bytes: &[u8] = cast_slice(&words[1..]);
        serde_json::from_slice(&bytes[..words[0] as usize])
    };
    let shards: Result<Vec<RankShards>, _> = all.iter().map(read).collect();
    let shards = shards.map_err(|error| TrainError::Setting {
        setting: "checkpoint",
        expected: "what each rank has written".to_string(),
        got: error.to_string(),
        hint: Some("start every rank with the same version".to_string()),
    })?;
    pending.publish(shards)
}
