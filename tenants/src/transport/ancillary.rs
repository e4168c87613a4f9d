//! Receiving bytes with descriptors beside them.
//!
//! The safe wrapper that we use elsewhere drops descriptors on the floor when the kernel reports that
//! not all of them fitted; here each one is owned from the moment it exists.

#![expect(unsafe_code, reason = "recvmsg, and ownership of the descriptors it installs")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

/// Room for the 253 descriptors that one message can carry (`SCM_MAX_FD`), its header, and another
/// small control message.
const CONTROL_BYTES: usize = 1280;
/// Size of `cmsghdr`: a length of the machine's word, a level and a type.
const HEADER_BYTES: usize = size_of::<libc::cmsghdr>();
const FD_BYTES: usize = size_of::<RawFd>();
const WORD_BYTES: usize = size_of::<usize>();

const _: () = assert!(HEADER_BYTES == WORD_BYTES + 8 && FD_BYTES == 4);

#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

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

/// Receives at most `into.len()` bytes without blocking; descriptors beside them join `fds`,
/// close-on-exec.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    room: Room,
) -> io::Result<Received> {
    let mut control = Control([0; CONTROL_BYTES]);
    let mut data = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: `msghdr` is a C structure of integers and pointers, for which zero bytes are a value.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut data;
    message.msg_iovlen = 1;
    if room == Room::Full {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES;
    }
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` names one buffer of data (`into`, borrowed mutably for this call) and at most one
    // for control (`control`, a local), each with its own length; the kernel writes within these.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let bytes = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
    let used = message.msg_controllen.min(CONTROL_BYTES);
    adopt(&control.0[..used], fds);
    Ok(Received { bytes, fds_truncated: message.msg_flags & libc::MSG_CTRUNC != 0 })
}

/// Takes ownership of every descriptor in `control`, which the kernel has just filled.
fn adopt(control: &[u8], fds: &mut Vec<OwnedFd>) {
    for raw_fd in descriptors(control) {
        // SAFETY: the kernel has just installed `raw_fd` in this process for the receiver of this
        // message, which is us: it is open, and nobody else knows it.
        fds.push(unsafe { OwnedFd::from_raw_fd(raw_fd) });
    }
}

/// The descriptors in a control buffer; stops at the first entry that does not fit.
fn descriptors(mut control: &[u8]) -> Vec<RawFd> {
    let mut found = Vec::new();
    while let Some((length, level, kind)) = entry_header(control) {
        let Some(data) = control.get(HEADER_BYTES..length) else {
            break;
        };
        if level == libc::SOL_SOCKET && kind == libc::SCM_RIGHTS {
            let (whole, _rest) = data.as_chunks::<FD_BYTES>();
            found.extend(whole.iter().map(|bytes| RawFd::from_ne_bytes(*bytes)));
        }
        let next = length.next_multiple_of(WORD_BYTES).min(control.len());
        control = &control[next..];
    }
    found
}

/// Length (its own header included), level and type of the first entry.
fn entry_header(control: &[u8]) -> Option<(usize, i32, i32)> {
    let (length, rest) = control.split_first_chunk::<WORD_BYTES>()?;
    let (level, rest) = rest.split_first_chunk::<4>()?;
    let (kind, _data) = rest.split_first_chunk::<4>()?;
    Some((usize::from_ne_bytes(*length), i32::from_ne_bytes(*level), i32::from_ne_bytes(*kind)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(length: usize, kind: i32, fds: &[RawFd]) -> Vec<u8> {
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(libc::SOL_SOCKET.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(fds.iter().flat_map(|fd| fd.to_ne_bytes()));
        bytes.resize(bytes.len().next_multiple_of(WORD_BYTES), 0);
        bytes
    }

    #[test]
    fn descriptors_of_several_entries_are_all_found() {
        let mut control = entry(HEADER_BYTES + 12, libc::SCM_RIGHTS, &[3, 4, 5]);
        control.extend(entry(HEADER_BYTES + 4, libc::SCM_CREDENTIALS, &[99]));
        control.extend(entry(HEADER_BYTES + 4, libc::SCM_RIGHTS, &[6]));
        assert_eq!(descriptors(&control), [3, 4, 5, 6]);
    }

    #[test]
    fn an_entry_longer_than_the_buffer_or_shorter_than_its_header_ends_the_list() {
        assert!(descriptors(&entry(4000, libc::SCM_RIGHTS, &[3])).is_empty());
        assert!(descriptors(&entry(3, libc::SCM_RIGHTS, &[3])).is_empty());
        assert!(descriptors(&entry(usize::MAX, libc::SCM_RIGHTS, &[3])).is_empty());
    }

    proptest! {
        #[test]
        fn any_bytes_end(control in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(descriptors(&control).len() <= control.len());
        }
    }
}
