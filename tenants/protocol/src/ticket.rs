//! Tickets: an application holds a ticket instead of the driver's descriptor of an exported allocation.
//!
//! A ticket is a sealed memfd that names an allocation and its owner. It may be passed on, duplicated and kept for as
//! long as the application likes. It names no path: the importer looks for the owner in the directory of its own tenant.
//!
//! Like a descriptor of the driver, a ticket keeps its memory while it is open anywhere, under any duplicate. The file is
//! opened once, and this open file description has a shared lock (`flock`). The kernel keeps the lock until the last descriptor
//! is closed, in any process. The owner has opened the file a second time, and tries to take the exclusive lock.
//!
//! ```text
//!  0  magic "SUBLETTK"         8  version u16      10  zero, 6 bytes
//! 16  allocation id, 16 bytes                      32  serial u64       40  size in bytes u64
//! 48  owner's member id u64                        56  tenant, 40 bytes, zero behind its name
//! 96  offset in bytes u64                         104  length in bytes u64: the part that it stands for; 0 for all
//! ```
//! Integers are little-endian. The seals prevent changes, so there is no checksum. Identity is the random allocation id:
//! process ids are not unique.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;
use nix::sys::uio::pread;
use rustix::fs::{FlockOperation, flock};
use vmm_pool::{AllocationId, Part, TicketWatch, check_file_length};

use crate::identity::{MemberId, TENANT_NAME_BYTES_MAX, TenantName};

/// The version changes whenever the layout does.
pub const TICKET_VERSION: u16 = 3;

/// The first bytes of every ticket of this version: magic and version.
pub const HEAD: [u8; 10] = {
    let [m0, m1, m2, m3, m4, m5, m6, m7] = MAGIC;
    let [v0, v1] = TICKET_VERSION.to_le_bytes();
    [m0, m1, m2, m3, m4, m5, m6, m7, v0, v1]
};

/// Length of a ticket.
pub const TICKET_BYTES: usize = TENANT_AT + TENANT_NAME_BYTES_MAX + 2 * size_of::<u64>();

const MAGIC: [u8; 8] = *b"SUBLETTK";
const ZEROES: [u8; 6] = [0; 6];
const TENANT_AT: usize = 56;

/// The contents of a ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The allocation that the ticket stands for.
    pub allocation: AllocationId,
    /// The number of the ticket among the owner's; 0 if the owner keeps no memory for it.
    pub serial: u64,
    /// Size of the allocation, in bytes.
    pub size_bytes: u64,
    /// The process that owns the allocation.
    pub owner: MemberId,
    /// The owner's tenant.
    pub tenant: TenantName,
    /// The part of the allocation that the ticket stands for; none for all of it.
    pub part: Option<Part>,
}

/// The reason why a ticket cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// The process that sent the memory has another version of Sublet. The memory was not opened. Run all processes
    /// of the job with one version.
    #[error(
        "this descriptor is a Sublet ticket of version {found}, and this process knows version {TICKET_VERSION}: run \
         all processes of a tenant with one Sublet version"
    )]
    OtherVersion {
        /// Its version.
        found: u16,
    },
    /// The description of the shared memory was cut short between the two processes. The memory was not opened. Let
    /// the owner send it again. If that fails too, this is a fault of Sublet.
    #[error("this descriptor is a Sublet ticket of {length} bytes that should have {TICKET_BYTES}")]
    Truncated {
        /// Its length in bytes.
        length: usize,
    },
    /// A field in the description of the shared memory is invalid. The memory was not opened. The processes have
    /// different versions, or this is a fault of Sublet.
    #[error("this descriptor is a Sublet ticket with a bad {field}")]
    Malformed {
        /// The name of the bad part.
        field: &'static str,
    },
    /// The system refused to read the description of the shared memory. Its answer follows. The memory was not
    /// opened; the owner may send it again.
    #[error("a Sublet ticket could not be read")]
    Io(#[from] io::Error),
}

impl Ticket {
    /// A ticket for which the owner keeps no memory, and which may be redeemed any number of times.
    pub fn uncounted(
        allocation: AllocationId,
        size_bytes: u64,
        owner: MemberId,
        tenant: TenantName,
    ) -> Self {
        Self { allocation, serial: 0, size_bytes, owner, tenant, part: None }
    }

    /// Writes the ticket into a new descriptor, sealed and close-on-exec.
    ///
    /// # Errors
    /// The system's error, such as too many open files.
    pub fn issue(&self) -> io::Result<OwnedFd> {
        sealed_and_locked("sublet-ticket", &self.encode())
    }

    /// Reads the ticket behind `fd`; `None` if `fd` is not a ticket.
    ///
    /// A descriptor of another kind stays as it was. Only a sealed memfd is read, at a given offset.
    ///
    /// # Errors
    /// [`TicketError`] if it is a ticket that this process cannot use.
    pub fn read(fd: BorrowedFd<'_>) -> Result<Option<Self>, TicketError> {
        // Any descriptor other than a memfd answers EINVAL. The driver judges a number that is no descriptor.
        let Ok(seals) = fcntl(fd, FcntlArg::F_GET_SEALS) else {
            return Ok(None);
        };
        if !SealFlag::from_bits_truncate(seals).contains(all_seals()) {
            return Ok(None);
        }
        let mut magic = [0; MAGIC.len()];
        if read_at_start(fd, &mut magic)? < magic.len() || magic != MAGIC {
            return Ok(None);
        }
        let length = fstat(fd).map_err(io::Error::from)?.st_size;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        // One byte more than a ticket, so that a longer file is recognized.
        let mut bytes = [0; TICKET_BYTES + 1];
        let want = length.min(bytes.len());
        let got = read_at_start(fd, &mut bytes[..want])?;
        Self::decode(&bytes[..got]).map(Some)
    }

    /// The ticket as bytes.
    pub fn encode(&self) -> [u8; TICKET_BYTES] {
        let mut bytes = [0; TICKET_BYTES];
        let name = self.tenant.as_str().as_bytes();
        let mut tenant = [0; TENANT_NAME_BYTES_MAX];
        // A tenant's name has 40 bytes at most.
        tenant.iter_mut().zip(name).for_each(|(byte, value)| *byte = *value);
        let [offset, length] =
            self.part.map_or([0; 2], |part| [part.offset_bytes, part.size_bytes]);
        let parts = [
            HEAD.as_slice(),
            &ZEROES,
            &self.allocation.0,
            &self.serial.to_le_bytes(),
            &self.size_bytes.to_le_bytes(),
            &self.owner.0.to_le_bytes(),
            &tenant,
            &offset.to_le_bytes(),
            &length.to_le_bytes(),
        ];
        for (byte, value) in bytes.iter_mut().zip(parts.into_iter().flatten()) {
            *byte = *value;
        }
        bytes
    }

    /// Reads the ticket in `bytes`, with no bytes left over. Any bytes give a ticket or an error.
    ///
    /// # Errors
    /// [`TicketError`]; never [`TicketError::Io`].
    pub fn decode(bytes: &[u8]) -> Result<Self, TicketError> {
        let mut parts = Parts { rest: bytes, length: bytes.len() };
        if parts.array()? != MAGIC {
            return Err(TicketError::Malformed { field: "magic" });
        }
        match u16::from_le_bytes(parts.array()?) {
            TICKET_VERSION => {}
            0 => return Err(TicketError::Malformed { field: "version" }),
            found => return Err(TicketError::OtherVersion { found }),
        }
        if parts.array()? != ZEROES {
            return Err(TicketError::Malformed { field: "head" });
        }
        let allocation = AllocationId(parts.array()?);
        let serial = u64::from_le_bytes(parts.array()?);
        let size_bytes = u64::from_le_bytes(parts.array()?);
        let owner = MemberId(u64::from_le_bytes(parts.array()?));
        let tenant = parse_tenant(&parts.array::<TENANT_NAME_BYTES_MAX>()?)?;
        let offset_bytes = u64::from_le_bytes(parts.array()?);
        let part_bytes = u64::from_le_bytes(parts.array()?);
        if !parts.rest.is_empty() {
            return Err(TicketError::Malformed { field: "length" });
        }
        let part = parse_part(Part { offset_bytes, size_bytes: part_bytes }, size_bytes)?;
        Ok(Self { allocation, serial, size_bytes, owner, tenant, part })
    }
}

/// Makes a lease, and the watch that tells whether it is open anywhere. A lease is a file without a name. A borrower keeps it
/// open as long as it holds the borrowed memory. Uses two descriptors.
///
/// # Errors
/// The system's error, such as too many open files, or no `/proc`.
pub fn lease() -> io::Result<(OwnedFd, TicketWatch)> {
    let fd = sealed_and_locked("sublet-lease", &[])?;
    let watch = watch(fd.as_fd())?;
    Ok((fd, watch))
}

/// Makes a file without a name that holds `bytes` for good, close-on-exec, with the lock that [`watch`] tests.
fn sealed_and_locked(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    check_file_length(bytes.len() as u64)?;
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    let mut file = File::from(fd);
    file.write_all(bytes)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(all_seals()))?;
    flock(file.as_fd(), FlockOperation::NonBlockingLockShared)?;
    Ok(file.into())
}

/// Returns the watch that tells whether the ticket or lease behind `fd`, which must be new, is still open anywhere. Uses a
/// descriptor.
///
/// # Errors
/// The system's error, such as too many open files, or no `/proc`.
pub fn watch(fd: BorrowedFd<'_>) -> io::Result<TicketWatch> {
    // The file is opened again: a duplicate descriptor would share the lock.
    let fd = OwnedFd::from(File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()))?).into();
    Ok(TicketWatch { fd, is_closed })
}

fn is_closed(watch: BorrowedFd<'_>) -> bool {
    flock(watch, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// A reader that knows the total length.
struct Parts<'a> {
    rest: &'a [u8],
    length: usize,
}

impl Parts<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], TicketError> {
        let taken = self.rest.split_first_chunk();
        let (array, rest) = taken.ok_or(TicketError::Truncated { length: self.length })?;
        self.rest = rest;
        Ok(*array)
    }
}

/// Reads the tenant from its field. A zero inside a name is refused like other characters that no name may have.
fn parse_tenant(field: &[u8]) -> Result<TenantName, TicketError> {
    let behind = field.iter().rev().take_while(|byte| **byte == 0).count();
    std::str::from_utf8(&field[..field.len() - behind])
        .ok()
        .and_then(|name| TenantName::new(name).ok())
        .ok_or(TicketError::Malformed { field: "tenant" })
}

/// A part that lies inside an allocation of `whole_bytes`; none for all of it.
fn parse_part(part: Part, whole_bytes: u64) -> Result<Option<Part>, TicketError> {
    match part {
        Part { offset_bytes: 0, size_bytes: 0 } => Ok(None),
        Part { offset_bytes, size_bytes } => {
            let end = offset_bytes.checked_add(size_bytes);
            let is_inside = size_bytes > 0 && end.is_some_and(|end| end <= whole_bytes);
            is_inside.then_some(Some(part)).ok_or(TicketError::Malformed { field: "part" })
        }
    }
}

fn all_seals() -> SealFlag {
    SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

/// Fills `buffer` from offset 0 without moving the file's own offset; returns how many bytes there were.
fn read_at_start(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        // CAST: the buffer is far smaller than `i64::MAX`.
        let offset = i64::try_from(filled).unwrap_or(i64::MAX);
        match pread(fd, &mut buffer[filled..], offset) {
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};
    use std::os::fd::AsFd as _;

    use proptest::prelude::*;

    use super::*;

    fn ticket() -> Ticket {
        Ticket {
            allocation: AllocationId(*b"0123456789abcdef"),
            serial: 7,
            size_bytes: 2 << 20,
            owner: MemberId(0x0123_4567_89ab_cdef),
            tenant: TenantName::new("train").unwrap(),
            part: None,
        }
    }

    fn memfd(bytes: &[u8], seals: SealFlag) -> File {
        let fd = memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        let mut file = File::from(fd);
        file.write_all(bytes).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        file
    }

    fn read_sealed(bytes: &[u8]) -> Result<Option<Ticket>, TicketError> {
        Ticket::read(memfd(bytes, all_seals()).as_fd())
    }

    #[test]
    fn an_issued_ticket_reads_back_any_number_of_times() {
        let fd = ticket().issue().unwrap();
        for _ in 0..2 {
            assert_eq!(Ticket::read(fd.as_fd()).unwrap(), Some(ticket()));
        }
        let flags = fcntl(&fd, FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    }

    #[test]
    fn a_ticket_is_open_until_its_last_duplicate_is_closed() {
        let fd = ticket().issue().unwrap();
        let watch = watch(fd.as_fd()).unwrap();
        let is_closed = || (watch.is_closed)(watch.fd.as_fd());
        let duplicate = fd.try_clone().unwrap();
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        let sent = [std::os::fd::AsRawFd::as_raw_fd(&duplicate)];
        let rights = [nix::sys::socket::ControlMessage::ScmRights(&sent)];
        let bytes = [io::IoSlice::new(b"x")];
        let flags = nix::sys::socket::MsgFlags::empty();
        nix::sys::socket::sendmsg::<()>(here.as_raw_fd(), &bytes, &rights, flags, None).unwrap();
        assert!(!is_closed());
        drop(fd);
        assert!(!is_closed(), "a duplicate is open");
        drop(duplicate);
        assert!(!is_closed(), "one is on its way");
        drop(there);
        assert!(is_closed());
        assert!(is_closed(), "for good");
    }

    #[test]
    fn an_issued_ticket_cannot_be_changed() {
        let mut file = File::from(ticket().issue().unwrap());
        file.rewind().unwrap();
        file.write_all(b"x").unwrap_err();
        file.set_len(0).unwrap_err();
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::empty())).unwrap_err();
    }

    #[test]
    fn the_longest_and_the_shortest_name_of_a_tenant_fit() {
        for length in [1, TENANT_NAME_BYTES_MAX] {
            let tenant = TenantName::new(&"t".repeat(length)).unwrap();
            let ticket = Ticket { tenant, ..ticket() };
            let fd = ticket.issue().unwrap();
            assert_eq!(Ticket::read(fd.as_fd()).unwrap(), Some(ticket));
        }
    }

    #[test]
    fn a_ticket_of_a_part_reads_back() {
        let part = Some(Part { offset_bytes: 1 << 20, size_bytes: 1 << 20 });
        let ticket = Ticket { part, ..ticket() };
        assert_eq!(Ticket::read(ticket.issue().unwrap().as_fd()).unwrap(), Some(ticket));
    }

    #[test]
    fn what_is_no_ticket_is_left_alone() {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        let mut writer = File::from(writer);
        writer.write_all(&MAGIC).unwrap();
        assert_eq!(Ticket::read(reader.as_fd()).unwrap(), None);
        drop(writer);
        let mut rest = Vec::new();
        File::from(reader).read_to_end(&mut rest).unwrap();
        assert_eq!(rest, MAGIC);

        let bytes = ticket().encode();
        let mut unsealed = memfd(&bytes, SealFlag::F_SEAL_GROW);
        unsealed.rewind().unwrap();
        assert_eq!(Ticket::read(unsealed.as_fd()).unwrap(), None);
        assert_eq!(unsealed.stream_position().unwrap(), 0);

        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        assert_eq!(Ticket::read(file.as_fd()).unwrap(), None);
        assert_eq!(read_sealed(b"something else").unwrap(), None);
        assert_eq!(read_sealed(b"").unwrap(), None);
    }

    #[test]
    fn every_shorter_ticket_is_truncated() {
        let bytes = ticket().encode();
        for length in MAGIC.len()..bytes.len() {
            let error = read_sealed(&bytes[..length]).unwrap_err();
            assert!(matches!(error, TicketError::Truncated { .. }), "{error}");
        }
    }

    #[test]
    fn a_longer_a_ticket_of_another_version_and_a_bad_one_are_errors() {
        let good = ticket().encode();
        let with = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            read_sealed(&bytes).unwrap_err()
        };
        let mut longer = good.to_vec();
        longer.push(b'x');
        let error = read_sealed(&longer).unwrap_err();
        assert!(matches!(error, TicketError::Malformed { field: "length" }));
        longer.resize(TICKET_BYTES * 2, b'x');
        read_sealed(&longer).unwrap_err();
        assert!(matches!(with(8, 9), TicketError::OtherVersion { found: 9 }));
        assert!(matches!(with(8, 1), TicketError::OtherVersion { found: 1 }));
        assert!(matches!(with(8, 0), TicketError::Malformed { field: "version" }));
        assert!(matches!(with(15, 1), TicketError::Malformed { field: "head" }));
        assert!(matches!(with(TENANT_AT, b'/'), TicketError::Malformed { field: "tenant" }));
        assert!(matches!(with(TENANT_AT + 1, 0), TicketError::Malformed { field: "tenant" }));
        let behind_name = TENANT_AT + TENANT_NAME_BYTES_MAX - 1;
        assert!(matches!(with(behind_name, b't'), TicketError::Malformed { field: "tenant" }));
        // A part that begins somewhere and has no length, and one that is longer than the whole.
        for at in [behind_name + 1, TICKET_BYTES - 1] {
            assert!(matches!(with(at, 1), TicketError::Malformed { field: "part" }));
        }
        let mut nobody = good;
        nobody[TENANT_AT..=behind_name].fill(0);
        let error = read_sealed(&nobody).unwrap_err();
        assert!(matches!(error, TicketError::Malformed { field: "tenant" }));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_ticket_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _either = Ticket::decode(&bytes);
        }

        #[test]
        fn a_ticket_with_any_byte_changed_gives_a_ticket_or_an_error(
            at in 0_usize..TICKET_BYTES,
            byte in any::<u8>(),
        ) {
            let mut bytes = ticket().encode();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(read) = Ticket::decode(&bytes) {
                prop_assert_eq!(read.encode(), bytes);
            }
        }
    }
}
