//! The form of a frame (header, then payload), and its way through a socket, with descriptors. Pure functions of bytes make and
//! read frames. Nothing here waits.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use vmm_pool::UninheritedFd;

use crate::wire::{FDS_PER_MESSAGE_MAX, PROTOCOL_VERSION};

/// Longest payload of any message, in bytes: enough for a process's report on some 900,000 shared allocations.
pub const PAYLOAD_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Longest payload of a request, in bytes: 250 identities, the limits of thousands of lanes, or 14,000 allocations that stay.
pub const REQUEST_BYTES_MAX: usize = 256 * 1024;
/// Length of a header, in bytes.
pub const HEADER_BYTES: usize = 12;
/// Length in bytes of the header's first part, which has the mark of Sublet and the version.
pub const HEAD_BYTES: usize = 6;

pub(super) const MAGIC: [u8; 4] = *b"SBLT";

/// The most that one side accepts from the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a payload.
    pub payload_bytes_max: usize,
    /// Descriptors with a frame. More are never installed in this process.
    pub fds_max: usize,
}

impl Limits {
    /// The limits of the side that is asked: requests are short and bring no descriptors.
    pub const REQUESTS: Self = Self { payload_bytes_max: REQUEST_BYTES_MAX, fds_max: 0 };
    /// The limits of the side that asks; a caller that expects descriptors raises `fds_max`.
    pub const REPLIES: Self = Self { payload_bytes_max: PAYLOAD_BYTES_MAX, fds_max: 0 };
    /// The limits of any message.
    pub const ALL: Self =
        Self { payload_bytes_max: PAYLOAD_BYTES_MAX, fds_max: FDS_PER_MESSAGE_MAX };
}

/// The header of a frame, which announces the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Descriptors with the frame.
    pub fds: usize,
    /// Bytes of the payload.
    pub payload_bytes: usize,
}

/// The reason why bytes are no acceptable frame.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The first bytes are not those of a message of Sublet. Another program is connected.
    #[error("no Sublet message")]
    NotSublet,
    /// The message is of another version of Sublet. Run all processes of a tenant with one version.
    #[error("protocol version {found}, and {PROTOCOL_VERSION} is ours")]
    Version { found: u16 },
    /// The message is longer than the limit of the receiver. The tenant has more processes, streams or allocations
    /// than one message can name.
    #[error("a payload of {length} bytes, and {limit} are the limit")]
    TooLong { length: usize, limit: usize },
    /// The message announces more file descriptors than the limit. This is a fault of Sublet.
    #[error("{count} descriptors, and {limit} are the limit")]
    TooManyFds { count: usize, limit: usize },
    /// The message is shorter or longer than it says. The other process ended while it sent, or this is a fault of
    /// Sublet.
    #[error("{length} bytes for a frame of {expected}")]
    Length { length: usize, expected: usize },
    /// The contents of the message are invalid. The processes have different versions, or this is a fault of Sublet.
    #[error("a payload that could not be decoded")]
    Malformed(#[source] postcard::Error),
}

impl Header {
    /// Reads a header. Any bytes give a header within `limits`, or an error.
    ///
    /// # Errors
    /// [`FrameError::NotSublet`], [`FrameError::Version`], [`FrameError::TooManyFds`], [`FrameError::TooLong`], checked in this
    /// order.
    pub fn decode(bytes: [u8; HEADER_BYTES], limits: Limits) -> Result<Self, FrameError> {
        let [m0, m1, m2, m3, v0, v1, f0, f1, l0, l1, l2, l3] = bytes;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(FrameError::NotSublet);
        }
        let found = u16::from_le_bytes([v0, v1]);
        if found != PROTOCOL_VERSION {
            return Err(FrameError::Version { found });
        }
        let fds = usize::from(u16::from_le_bytes([f0, f1]));
        if fds > limits.fds_max {
            return Err(FrameError::TooManyFds { count: fds, limit: limits.fds_max });
        }
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let limit = limits.payload_bytes_max;
        if length > limit {
            return Err(FrameError::TooLong { length, limit });
        }
        Ok(Self { fds, payload_bytes: length })
    }

    /// The header as bytes. Both numbers have been checked against [`Limits::ALL`] before a frame is made.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let fds = u16::try_from(self.fds).unwrap_or(u16::MAX).to_le_bytes();
        let length = u32::try_from(self.payload_bytes).unwrap_or(u32::MAX).to_le_bytes();
        let [m0, m1, m2, m3] = MAGIC;
        let [v0, v1] = PROTOCOL_VERSION.to_le_bytes();
        let [l0, l1, l2, l3] = length;
        [m0, m1, m2, m3, v0, v1, fds[0], fds[1], l0, l1, l2, l3]
    }
}

/// Decodes the message in `payload`, with no bytes left over. Any bytes give a message or an error.
///
/// # Errors
/// The error of the decoder; [`postcard::Error::DeserializeBadEncoding`] for bytes that are left over.
pub fn decode_payload<T: DeserializeOwned>(payload: &[u8]) -> Result<T, postcard::Error> {
    let (message, rest) = postcard::take_from_bytes(payload)?;
    if rest.is_empty() { Ok(message) } else { Err(postcard::Error::DeserializeBadEncoding) }
}

/// Decodes the message in `frame`, which is a header and a payload. Any bytes give a message or an error.
///
/// # Errors
/// [`FrameError`].
pub fn decode<T: DeserializeOwned>(frame: &[u8], limits: Limits) -> Result<T, FrameError> {
    let short = FrameError::Length { length: frame.len(), expected: HEADER_BYTES };
    let (header, payload) = frame.split_first_chunk::<HEADER_BYTES>().ok_or(short)?;
    let header = Header::decode(*header, limits)?;
    if payload.len() != header.payload_bytes {
        let expected = HEADER_BYTES + header.payload_bytes;
        return Err(FrameError::Length { length: frame.len(), expected });
    }
    decode_payload(payload).map_err(FrameError::Malformed)
}

/// Encodes `message` as a frame that announces `fds` descriptors. Checks no limits.
///
/// # Errors
/// The error of the encoder.
pub fn encode<T: Serialize + ?Sized>(message: &T, fds: usize) -> Result<Vec<u8>, postcard::Error> {
    let payload = postcard::to_stdvec(message)?;
    let header = Header { fds, payload_bytes: payload.len() };
    Ok([header.encode().as_slice(), &payload].concat())
}

/// One frame that is not sent completely. Its descriptors travel with its first byte.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) bytes: Vec<u8>,
    pub(super) sent: usize,
    pub(super) fds: Vec<UninheritedFd>,
}

/// A queue of frames to send, in order. Dropping it closes their descriptors.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    frames: VecDeque<Queued>,
}

impl Outgoing {
    pub(super) fn push(&mut self, bytes: Vec<u8>, fds: Vec<UninheritedFd>) {
        self.frames.push_back(Queued { bytes, sent: 0, fds });
    }

    pub(super) fn first(&self) -> Option<&Queued> {
        self.frames.front()
    }

    /// Records that the peer has received so many more bytes of the first frame.
    pub(super) fn advance(&mut self, bytes: usize) {
        let Some(frame) = self.frames.front_mut() else {
            return;
        };
        frame.sent += bytes;
        // The kernel holds its own references from here on.
        frame.fds.clear();
        if frame.sent >= frame.bytes.len() {
            self.frames.pop_front();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}

// Sending and receiving bytes with descriptors, without blocking. Each descriptor is owned from the moment it exists, also if
// the kernel reports that some did not fit.

/// Descriptors that one message can carry (`SCM_MAX_FD`).
const FDS_MAX: usize = 253;
/// Room for the descriptors, and for another small control message.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(FDS_MAX), ScmCredentials(1));

/// The result of one receive call; the descriptors are added to the caller's list.
pub(super) struct Received {
    /// Bytes of data; zero if the peer has closed the connection.
    pub(super) bytes: usize,
    /// Did the kernel drop descriptors that this process had no room for?
    pub(super) fds_truncated: bool,
}

/// The number of descriptors that the kernel may install.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FdRoom {
    /// None: the kernel closes descriptors that arrive, and reports them as truncated.
    None,
    /// As many as a message can carry.
    Full,
}

/// Receives at most `into.len()` bytes. Descriptors that come with them are added to `fds`, close-on-exec.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    room: FdRoom,
) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = match room {
        FdRoom::None => RecvAncillaryBuffer::default(),
        FdRoom::Full => RecvAncillaryBuffer::new(&mut space),
    };
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(taken) = message {
            fds.extend(taken);
        }
    }
    let fds_truncated = received.flags.contains(ReturnFlags::CTRUNC);
    Ok(Received { bytes: received.bytes, fds_truncated })
}

/// Sends some of `bytes`, with `fds` at the first; returns how many.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        // The kernel's answer to more descriptors than a message can carry.
        return Err(Errno::INVAL);
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Request;

    fn header(fds: usize, payload_bytes: usize) -> [u8; HEADER_BYTES] {
        Header { fds, payload_bytes }.encode()
    }

    #[test]
    fn each_limit_is_taken_and_one_more_is_not() {
        for limits in [Limits::REQUESTS, Limits::REPLIES, Limits::ALL] {
            let Limits { payload_bytes_max, fds_max } = limits;
            let most = Header { fds: fds_max, payload_bytes: payload_bytes_max };
            assert_eq!(Header::decode(most.encode(), limits), Ok(most));
            let long = header(0, payload_bytes_max + 1);
            assert!(matches!(Header::decode(long, limits), Err(FrameError::TooLong { .. })));
            let many = header(fds_max + 1, 0);
            assert!(matches!(Header::decode(many, limits), Err(FrameError::TooManyFds { .. })));
        }
    }

    #[test]
    fn a_frame_decodes_at_its_own_length_only() {
        let frame = encode(&Request::Stats, 0).unwrap();
        assert_eq!(decode(&frame, Limits::REQUESTS), Ok(Request::Stats));
        for length in 0..frame.len() {
            let error = decode::<Request>(&frame[..length], Limits::REQUESTS).unwrap_err();
            assert!(matches!(error, FrameError::Length { .. }), "{error}");
        }
        let longer = [frame.as_slice(), &[0]].concat();
        let error = decode::<Request>(&longer, Limits::REQUESTS).unwrap_err();
        assert!(matches!(error, FrameError::Length { .. }), "{error}");
    }
}
