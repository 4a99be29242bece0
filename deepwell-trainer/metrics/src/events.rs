//! TensorBoard event files.
//!
//! A file is a sequence of records:
//!
//! ```text
//! u64  length of the payload
//! u32  masked CRC-32C of the 8 bytes before
//!      payload
//! u32  masked CRC-32C of the payload
//! ```
//!
//! all little endian, with `mask(crc) = (crc rotated right by 15) + 0xa282ead8`. A payload is an
//! `Event` message: 1 = wall time in seconds (double), 2 = step, and one of 3 = version, 5 =
//! `Summary` { 1 = `Value` { 1 = tag, 2 = number (float) }, repeated }, 7 = `SessionLog` { 1 =
//! status }. The first record of a file contains the version `brain.Event:2`.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::MetricsError;
use super::proto::{self, Value, take_field};

const VERSION: &[u8] = b"brain.Event:2";

/// `SessionLog.START`: TensorBoard then discards all earlier data at and after this step.
const SESSION_START: u64 = 1;

/// Writes scalars into a new event file.
///
/// ```
/// use deepwell_metrics::{EventWriter, read_events};
/// # fn main() -> Result<(), deepwell_metrics::MetricsError> {
/// # let folder = tempfile::tempdir().unwrap();
/// let mut events = EventWriter::create(folder.path())?;
/// events.scalars(120, &[("loss/train", 2.31), ("tokens_per_s", 10_400.0)])?;
/// events.flush()?;
/// let scalars = read_events(events.path())?;
/// assert_eq!((scalars[0].tag.as_str(), scalars[0].step), ("loss/train", 120));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventWriter {
    /// Creates an event file in `folder`, which is created if needed.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Write`].
    pub fn create(folder: &Path) -> Result<Self, MetricsError> {
        let fail = |source| MetricsError::Write { path: folder.to_owned(), source };
        std::fs::create_dir_all(folder).map_err(fail)?;
        let seconds = wall_time_s() as u64;
        let process = std::process::id();
        // TensorBoard reads the files of a folder in the order of their names.
        for number in 0..u32::MAX {
            let path = folder.join(format!("events.out.tfevents.{seconds}.{number}.{process}"));
            match File::create_new(&path) {
                Ok(file) => {
                    let mut writer = Self { path, file: BufWriter::new(file) };
                    writer.event(0, |event| proto::put_bytes(event, 3, VERSION))?;
                    writer.flush()?;
                    return Ok(writer);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(fail(error)),
            }
        }
        Err(fail(io::Error::other("too many event files of one second")))
    }

    /// Creates an event file for a resumed run: data in older files of the folder at and after
    /// `next_step` become void, because they will be written again.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Write`].
    pub fn resume(folder: &Path, next_step: u64) -> Result<Self, MetricsError> {
        let mut writer = Self::create(folder)?;
        let mut session = Vec::new();
        proto::put_u64(&mut session, 1, SESSION_START);
        writer.event(next_step, |event| proto::put_bytes(event, 7, &session))?;
        writer.flush()?;
        Ok(writer)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the numbers of one step. Tags with the same prefix before `/` share a section.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Write`].
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f32)]) -> Result<(), MetricsError> {
        let mut summary = Vec::new();
        for &(tag, value) in scalars {
            let mut message = Vec::new();
            proto::put_bytes(&mut message, 1, tag.as_bytes());
            proto::put_f32(&mut message, 2, value);
            proto::put_bytes(&mut summary, 1, &message);
        }
        self.event(step, |event| proto::put_bytes(event, 5, &summary))
    }

    /// Hands everything to the operating system.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Write`].
    pub fn flush(&mut self) -> Result<(), MetricsError> {
        self.file.flush().map_err(|source| self.fail(source))
    }

    fn event(
        &mut self,
        step: u64,
        put_what: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), MetricsError> {
        let mut event = Vec::new();
        proto::put_f64(&mut event, 1, wall_time_s());
        proto::put_u64(&mut event, 2, step);
        put_what(&mut event);
        let length = (event.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(event.len() + 16);
        record.extend_from_slice(&length);
        record.extend_from_slice(&masked_crc(&length).to_le_bytes());
        record.extend_from_slice(&event);
        record.extend_from_slice(&masked_crc(&event).to_le_bytes());
        self.file.write_all(&record).map_err(|source| self.fail(source))
    }

    fn fail(&self, source: io::Error) -> MetricsError {
        MetricsError::Write { path: self.path.clone(), source }
    }
}

/// Seconds since 1970.
fn wall_time_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A number in an event file.
#[derive(Clone, Debug, PartialEq)]
pub struct Scalar {
    /// Time of writing: seconds since 1970.
    pub wall_time_s: f64,
    /// The step.
    pub step: u64,
    /// Name of the scalar.
    pub tag: String,
    /// Value of the scalar.
    pub value: f32,
}

/// Reads every scalar of an event file. An incomplete last record, as left by a kill, ends the
/// file.
///
/// # Errors
///
/// [`MetricsError::Read`]; [`MetricsError::BadEvent`] for a wrong checksum, a damaged message, or a
/// file that does not begin with the version.
pub fn read_events(path: &Path) -> Result<Vec<Scalar>, MetricsError> {
    let bytes = std::fs::read(path)
        .map_err(|source| MetricsError::Read { path: path.to_owned(), source })?;
    let mut scalars = Vec::new();
    let mut rest = &bytes[..];
    let mut is_first = true;
    while !rest.is_empty() {
        let offset = (bytes.len() - rest.len()) as u64;
        let bad = |what| MetricsError::BadEvent { path: path.to_owned(), offset, what };
        let Some(event) = take_record(&mut rest).map_err(bad)? else { break };
        let version = read_event(event, &mut scalars).ok_or_else(|| bad("damaged message"))?;
        if is_first && version != Some(VERSION) {
            return Err(bad("expected the version `brain.Event:2`"));
        }
        is_first = false;
    }
    Ok(scalars)
}

/// Returns the payload of the next record, or `None` if the record is incomplete.
fn take_record<'a>(rest: &mut &'a [u8]) -> Result<Option<&'a [u8]>, &'static str> {
    let Some((length, after)) = rest.split_first_chunk::<8>() else { return Ok(None) };
    let Some((crc, after)) = after.split_first_chunk::<4>() else { return Ok(None) };
    if u32::from_le_bytes(*crc) != masked_crc(length) {
        return Err("wrong checksum of the length");
    }
    let length = u64::from_le_bytes(*length);
    let Some((payload, after)) =
        usize::try_from(length).ok().and_then(|length| after.split_at_checked(length))
    else {
        return Ok(None);
    };
    let Some((crc, after)) = after.split_first_chunk::<4>() else { return Ok(None) };
    if u32::from_le_bytes(*crc) != masked_crc(payload) {
        return Err("wrong checksum of the payload");
    }
    *rest = after;
    Ok(Some(payload))
}

/// Appends the scalars of an event and returns its version, if any; `None` if the message is
/// damaged.
fn read_event<'a>(mut event: &'a [u8], scalars: &mut Vec<Scalar>) -> Option<Option<&'a [u8]>> {
    let (mut wall_time_s, mut step, mut version) = (0.0, 0, None);
    let first = scalars.len();
    while !event.is_empty() {
        match take_field(&mut event)? {
            (1, Value::F64(value)) => wall_time_s = value,
            (2, Value::Varint(value)) => step = value,
            (3, Value::Bytes(value)) => version = Some(value),
            (5, Value::Bytes(mut summary)) => {
                while !summary.is_empty() {
                    let (field, value) = take_field(&mut summary)?;
                    if let (1, Value::Bytes(value)) = (field, value) {
                        scalars.extend(read_value(value)?);
                    }
                }
            }
            _ => {}
        }
    }
    for scalar in &mut scalars[first..] {
        (scalar.wall_time_s, scalar.step) = (wall_time_s, step);
    }
    Some(version)
}

/// Reads a `Summary.Value`, if it is a scalar; the outer `None` if the message is damaged.
fn read_value(mut message: &[u8]) -> Option<Option<Scalar>> {
    let (mut tag, mut number) = (String::new(), None);
    while !message.is_empty() {
        match take_field(&mut message)? {
            (1, Value::Bytes(value)) => tag = String::from_utf8_lossy(value).into_owned(),
            (2, Value::F32(value)) => number = Some(value),
            _ => {}
        }
    }
    Some(number.map(|value| Scalar { wall_time_s: 0.0, step: 0, tag, value }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_one_of_the_standard() {
        // CRC-32C of "123456789" is 0xe3069283 (RFC 3720, and every catalogue of CRCs).
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(masked_crc(b"123456789"), 0xc78a_b0e5);
        // A record of 24 bytes, computed from the definition by a separate bitwise program.
        assert_eq!(masked_crc(&24u64.to_le_bytes()).to_le_bytes(), [0xa3, 0x7f, 0x4b, 0x22],);
    }

    #[test]
    fn scalars_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(&folder.path().join("run/events")).unwrap();
        let name = writer.path().file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.starts_with("events.out.tfevents."), "{name}");
        let before = wall_time_s();
        writer.scalars(1, &[("loss/train", 5.5), ("grad norm", f32::INFINITY)]).unwrap();
        writer.scalars(u64::from(u32::MAX) + 1, &[("loss/val \u{e9}", -0.0)]).unwrap();
        writer.flush().unwrap();
        let scalars = read_events(writer.path()).unwrap();
        let rows: Vec<_> = scalars
            .iter()
            .map(|scalar| (scalar.step, scalar.tag.as_str(), scalar.value.to_bits()))
            .collect();
        assert_eq!(
            rows,
            [
                (1, "loss/train", 5.5f32.to_bits()),
                (1, "grad norm", f32::INFINITY.to_bits()),
                (u64::from(u32::MAX) + 1, "loss/val \u{e9}", (-0.0f32).to_bits()),
            ]
        );
        assert!(scalars.iter().all(|scalar| (0.0..60.0).contains(&(scalar.wall_time_s - before))));
    }

    #[test]
    fn two_files_of_one_second_have_two_names() {
        let folder = tempfile::tempdir().unwrap();
        let writers: Vec<_> = (0..3).map(|_| EventWriter::create(folder.path()).unwrap()).collect();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), writers.len());
    }

    #[test]
    fn a_resumed_file_says_from_which_step_on() {
        let folder = tempfile::tempdir().unwrap();
        let writer = EventWriter::resume(folder.path(), 41).unwrap();
        let bytes = std::fs::read(writer.path()).unwrap();
        let mut rest = &bytes[..];
        take_record(&mut rest).unwrap().unwrap();
        let mut event = take_record(&mut rest).unwrap().unwrap();
        let mut fields = Vec::new();
        while !event.is_empty() {
            fields.push(take_field(&mut event).unwrap());
        }
        assert_eq!(fields[1..], [(2, Value::Varint(41)), (7, Value::Bytes(&[8, 1]))]);
        assert_eq!(read_events(writer.path()).unwrap(), []);
    }

    #[test]
    fn damage_is_noticed_and_a_torn_end_is_not_damage() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(folder.path()).unwrap();
        writer.scalars(1, &[("a", 1.0)]).unwrap();
        writer.flush().unwrap();
        let first = std::fs::read(writer.path()).unwrap().len();
        writer.scalars(2, &[("a", 2.0)]).unwrap();
        writer.flush().unwrap();
        let good = std::fs::read(writer.path()).unwrap();
        let path = folder.path().join("copy");
        for length in first..good.len() {
            std::fs::write(&path, &good[..length]).unwrap();
            assert_eq!(read_events(&path).unwrap().len(), 1, "{length} bytes");
        }
        for bit in 0..8 * good.len() {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, bad).unwrap();
            assert!(read_events(&path).is_err(), "bit {bit}");
        }
        std::fs::write(&path, &good[..first]).unwrap();
        assert_eq!(read_events(&path).unwrap().len(), 1);
        let version_bytes = good.len() - 2 * (good.len() - first);
        std::fs::write(&path, &good[version_bytes..]).unwrap();
        assert_eq!(
            read_events(&path).unwrap_err().to_string(),
            format!(
                "event file `{}`, byte 0: expected the version `brain.Event:2`",
                path.display()
            )
        );
    }
}
