//! Bytes with descriptors, sent and received without blocking.
//!
//! Each descriptor is owned from the moment it exists, also where the kernel reports that not all of them fitted.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Descriptors that one message can carry (`SCM_MAX_FD`).
const FDS_MAX: usize = 253;
/// Room for them, and for another small control message.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(FDS_MAX), ScmCredentials(1));

/// What one receive call brought; the descriptors go to the caller's list.
pub(super) struct Received {
    /// Bytes of data; zero when the peer has closed.
    pub(super) bytes: usize,
    /// Were there descriptors that this process could not take?
    pub(super) fds_truncated: bool,
}

/// How many descriptors the kernel may install.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// None: what comes is closed by the kernel, and reported as truncated.
    None,
    /// As many as a message can carry.
    Full,
}

/// Receives at most `into.len()` bytes; descriptors with them join `fds`, close-on-exec.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    room: Room,
) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = match room {
        Room::None => RecvAncillaryBuffer::default(),
        Room::Full => RecvAncillaryBuffer::new(&mut space),
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

/// Sends some of `bytes`, with `fds` at the first; says how many.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        // As the kernel says of more than a message can carry.
        return Err(Errno::INVAL);
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}
