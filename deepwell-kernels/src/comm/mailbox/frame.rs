//! Format of a frame: a header, the words (a text for error messages), and data.
//!
//! ```text
//! 0   bytes of the frame                  u64
//! 8   digest of the exchange              u64
//! 16  digest of the group and the class   u64
//! 24  bytes of the words                  u32
//! 28  kind                                u8, and three zeros
//! 32  the words, then the bytes of the exchange
//! ```

use std::sync::Arc;

use deepwell_ir::ops::CollectiveKind;

use crate::comm::want::Want;

/// Bytes before the words.
const HEADER: usize = 32;

/// An outgoing frame, kept alive until it has been sent.
pub(crate) type Outgoing = Arc<Vec<u8>>;

/// Purpose of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A part of a collective, or a message from rank to rank.
    Part,
    /// No frames follow from this sender.
    Goodbye,
    /// The sender has failed; the words give the reason.
    Failure,
}

/// Digests that are equal in frames of the same collective or message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Digests {
    /// Digest of the whole request: equal if both ends agree.
    pub(super) exchange: u64,
    /// Digest of the group, distinct for collectives and messages: each class has its own order.
    pub(super) channel: u64,
}

impl Digests {
    pub(super) fn of(want: &Want) -> Digests {
        let Want { kind, group, dtype, bytes } = want;
        let is_message = matches!(kind, CollectiveKind::Send { .. } | CollectiveKind::Recv { .. });
        let kind = if is_message { "message".to_string() } else { format!("{kind:?}") };
        let channel = format!("{is_message} {:?} {}", group.ranks, group.name);
        let exchange = format!("{kind} {dtype} {bytes} {channel}");
        Digests { exchange: digest(&exchange), channel: digest(&channel) }
    }
}

/// FNV-1a of 64 bits: equal on every machine.
fn digest(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

/// A part of a collective, or a message, for one or several ranks.
pub(super) fn part(want: &Want, digests: Digests, bytes: &[u8]) -> Outgoing {
    frame(Kind::Part, digests, &want.to_string(), bytes)
}

/// A frame outside of any collective.
pub(super) fn notice(kind: Kind, words: &str) -> Outgoing {
    frame(kind, Digests { exchange: 0, channel: 0 }, words, &[])
}

fn frame(kind: Kind, digests: Digests, words: &str, bytes: &[u8]) -> Outgoing {
    let whole = HEADER + words.len() + bytes.len();
    let mut frame = Vec::with_capacity(whole);
    frame.extend((whole as u64).to_le_bytes());
    frame.extend(digests.exchange.to_le_bytes());
    frame.extend(digests.channel.to_le_bytes());
    frame.extend((words.len() as u32).to_le_bytes());
    frame.extend([kind as u8, 0, 0, 0]);
    frame.extend(words.as_bytes());
    frame.extend(bytes);
    Arc::new(frame)
}

/// Returns the length of a frame, from its first bytes.
///
/// # Errors
/// Bytes that cannot begin a frame.
pub(crate) fn frame_bytes(begin: &[u8]) -> Result<usize, String> {
    let bytes = begin.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    bytes
        .filter(|bytes| *bytes >= HEADER && *bytes >= begin.len())
        .ok_or_else(|| format!("{} bytes that begin no frame of this version", begin.len()))
}

/// A received frame.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) digests: Digests,
    frame: Vec<u8>,
    words: usize,
}

impl Frame {
    /// # Errors
    /// Bytes that are not a frame.
    pub(super) fn of(frame: Vec<u8>) -> Result<Frame, String> {
        let unknown = || format!("{} bytes that are no frame of this version", frame.len());
        if frame_bytes(&frame)? != frame.len() {
            return Err(unknown());
        }
        let number = |at: usize| u64::from_le_bytes(*frame[at..].first_chunk().unwrap_or(&[0; 8]));
        let digests = Digests { exchange: number(8), channel: number(16) };
        let words = number(24) as u32 as usize;
        let kinds = [Kind::Part, Kind::Goodbye, Kind::Failure];
        let kind = kinds.into_iter().find(|kind| *kind as u8 == frame[28]).ok_or_else(unknown)?;
        if words > frame.len() - HEADER {
            return Err(unknown());
        }
        Ok(Frame { kind, digests, frame, words })
    }

    /// The text for error messages.
    pub(super) fn words(&self) -> String {
        String::from_utf8_lossy(&self.frame[HEADER..HEADER + self.words]).into_owned()
    }

    /// The data.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.frame[HEADER + self.words..]
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::Reduction;
    use deepwell_ir::{DType, ProcessGroup, Shape};

    use super::*;

    fn want(kind: CollectiveKind, name: &str, ranks: &[u32], dtype: DType, bytes: usize) -> Want {
        let group = ProcessGroup { name: name.to_string(), ranks: ranks.to_vec() };
        Want { kind, group, dtype, bytes }
    }

    /// Digests differ wherever two requests can disagree, and agree where a difference is legal.
    #[test]
    fn digests_differ_where_wants_do() {
        let sum = CollectiveKind::AllReduce { reduction: Reduction::Sum };
        let most = CollectiveKind::AllReduce { reduction: Reduction::Max };
        let root = |root| CollectiveKind::Broadcast { root };
        let recv = CollectiveKind::Recv { from: 0, shape: Shape::new([2usize]), dtype: DType::F32 };
        let wants = [
            want(sum.clone(), "data", &[0, 1], DType::F32, 8),
            want(most, "data", &[0, 1], DType::F32, 8),
            want(CollectiveKind::AllGather, "data", &[0, 1], DType::F32, 8),
            want(root(0), "data", &[0, 1], DType::F32, 8),
            want(root(1), "data", &[0, 1], DType::F32, 8),
            want(sum.clone(), "data", &[0, 1], DType::I32, 8),
            want(sum.clone(), "data", &[0, 1], DType::F32, 4),
            want(sum.clone(), "data", &[1, 0], DType::F32, 8),
            want(sum.clone(), "model", &[0, 1], DType::F32, 8),
            want(recv.clone(), "data", &[0, 1], DType::F32, 8),
        ];
        for (index, a) in wants.iter().enumerate() {
            for b in &wants[..index] {
                assert_ne!(Digests::of(a).exchange, Digests::of(b).exchange, "{a} and {b}");
            }
        }
        let channel = |want: &Want| Digests::of(want).channel;
        assert!(wants[..7].iter().all(|want| channel(want) == channel(&wants[0])));
        assert!(wants[7..].iter().all(|want| channel(want) != channel(&wants[0])));
        let send = want(CollectiveKind::Send { to: 1 }, "data", &[0, 1], DType::F32, 8);
        assert_eq!(Digests::of(&send), Digests::of(&wants[9]));
        // The digest is the same on every machine.
        assert_eq!(digest("a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn frames_come_as_they_went() {
        let all = want(CollectiveKind::AllGather, "daten-ä", &[0, 1], DType::E4m3, 3);
        for bytes in [&[][..], &[1, 2, 3]] {
            let frame = part(&all, Digests::of(&all), bytes);
            assert_eq!(frame_bytes(&frame[..8]), Ok(frame.len()));
            let got = Frame::of(frame.to_vec()).unwrap();
            assert_eq!((got.kind, got.digests), (Kind::Part, Digests::of(&all)));
            assert_eq!((got.words(), got.bytes()), (all.to_string(), bytes));
        }
        for kind in [Kind::Goodbye, Kind::Failure] {
            let got = Frame::of(notice(kind, "why").to_vec()).unwrap();
            assert_eq!((got.kind, got.words().as_str(), got.bytes()), (kind, "why", &[][..]));
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let good = notice(Kind::Failure, "why").to_vec();
        let check = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bad = good.clone();
            change(&mut bad);
            assert!(Frame::of(bad).unwrap_err().contains("frame of this version"));
        };
        check(&|bad| bad.clear());
        check(&|bad| bad.truncate(7));
        check(&|bad| bad.truncate(HEADER + 2));
        check(&|bad| bad.push(0));
        check(&|bad| bad[0] = 8);
        check(&|bad| bad[7] = 1);
        check(&|bad| bad[24] = 4);
        check(&|bad| bad[28] = 9);
    }
}
