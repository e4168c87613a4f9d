//! Tickets: what an application holds in place of the driver's descriptor of an exported allocation.
//!
//! A ticket is a sealed memfd that says which allocation is meant and where its owner is reached. It may
//! be passed on, duplicated and kept for as long as the application likes: unlike the driver's
//! descriptor it holds no device memory.
//!
//! ```text
//!  0  magic "SUBLETTK"        8  version u16      10  tenant length u16   12  path length u16   14  zero u16
//! 16  allocation id, 16 bytes                     32  serial u64          40  size in bytes u64
//! 48  owner's member id u64                       56  tenant              ..  owner's socket path
//! ```
//! Integers are little-endian; the file ends with the path. The seals keep anybody from changing it, so
//! there is no checksum. Identity is the random allocation id: process ids are not unique.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;
use nix::sys::uio::pread;
use vmm_pool::AllocationId;

use crate::identity::{MemberId, TENANT_NAME_BYTES_MAX, TenantName};
use crate::run_dir::SOCKET_PATH_BYTES_MAX;

/// Changes whenever the layout does.
pub const TICKET_VERSION: u16 = 1;

/// How every ticket of this version begins: magic and version.
pub const HEAD: [u8; 10] = {
    let [m0, m1, m2, m3, m4, m5, m6, m7] = MAGIC;
    let [v0, v1] = TICKET_VERSION.to_le_bytes();
    [m0, m1, m2, m3, m4, m5, m6, m7, v0, v1]
};

const MAGIC: [u8; 8] = *b"SUBLETTK";
const FIXED_BYTES: usize = 56;
const TICKET_BYTES_MAX: usize = FIXED_BYTES + TENANT_NAME_BYTES_MAX + SOCKET_PATH_BYTES_MAX;

/// What a ticket says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The allocation that it stands for.
    pub allocation: AllocationId,
    /// Which of the owner's tickets it is.
    pub serial: u64,
    /// Size of the allocation, in bytes.
    pub size_bytes: u64,
    /// The process that owns the allocation.
    pub owner: MemberId,
    /// Where the owner's agent listens.
    pub owner_socket: PathBuf,
    /// The owner's tenant.
    pub tenant: TenantName,
}

/// Why a ticket cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// It was written by a newer Sublet.
    #[error(
        "this descriptor is a Sublet ticket of version {found}, and this process knows up to \
         {TICKET_VERSION}: run all processes of a tenant with one Sublet version"
    )]
    NewerVersion {
        /// Its version.
        found: u16,
    },
    /// It ends too early.
    #[error("this descriptor is a Sublet ticket of {length} bytes that should have {expected}")]
    Truncated {
        /// Its length in bytes.
        length: usize,
        /// What it should be.
        expected: usize,
    },
    /// A part of it makes no sense.
    #[error("this descriptor is a Sublet ticket with a bad {field}")]
    Malformed {
        /// Which part.
        field: &'static str,
    },
    /// The system refused to read it.
    #[error("a Sublet ticket could not be read")]
    Io(#[from] io::Error),
}

impl Ticket {
    /// Writes the ticket into a new descriptor, sealed and close-on-exec.
    ///
    /// # Errors
    /// `InvalidInput` for an owner's socket path that is empty or longer than
    /// [`SOCKET_PATH_BYTES_MAX`]; what the system returned, such as too many open files.
    pub fn issue(&self) -> io::Result<OwnedFd> {
        let bytes = self.encode().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("socket path {} does not fit a ticket", self.owner_socket.display()),
            )
        })?;
        let fd =
            memfd_create("sublet-ticket", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        let mut file = File::from(fd);
        file.write_all(&bytes)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(all_seals()))?;
        Ok(file.into())
    }

    /// Reads the ticket behind `fd`; `None` when it is something else.
    ///
    /// Something else is left as it was: nothing is read from it unless it is a sealed memfd, and then
    /// at a given offset only.
    ///
    /// # Errors
    /// [`TicketError`] when it is a ticket, but not one that we can use.
    pub fn read(fd: BorrowedFd<'_>) -> Result<Option<Self>, TicketError> {
        // Anything but a memfd answers EINVAL; a number that is no descriptor is for the driver to judge.
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
        // One more than fits, so that a longer file is seen to be longer.
        let mut bytes = [0; TICKET_BYTES_MAX + 1];
        let want = length.min(bytes.len());
        let got = read_at_start(fd, &mut bytes[..want])?;
        Self::decode(&bytes[..got]).map(Some)
    }

    /// The ticket as bytes; `None` when the socket path does not fit.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let tenant = self.tenant.as_str().as_bytes();
        let path = self.owner_socket.as_os_str().as_bytes();
        if path.is_empty() || path.len() > SOCKET_PATH_BYTES_MAX {
            return None;
        }
        let mut bytes = Vec::with_capacity(TICKET_BYTES_MAX);
        bytes.extend(HEAD);
        bytes.extend(u16::try_from(tenant.len()).ok()?.to_le_bytes());
        bytes.extend(u16::try_from(path.len()).ok()?.to_le_bytes());
        bytes.extend(0_u16.to_le_bytes());
        bytes.extend(self.allocation.0);
        bytes.extend(self.serial.to_le_bytes());
        bytes.extend(self.size_bytes.to_le_bytes());
        bytes.extend(self.owner.0.to_le_bytes());
        bytes.extend(tenant);
        bytes.extend(path);
        Some(bytes)
    }

    /// The ticket in `bytes`, which are all of it. Any bytes give a ticket or an error.
    ///
    /// # Errors
    /// [`TicketError`]; never [`TicketError::Io`].
    pub fn decode(bytes: &[u8]) -> Result<Self, TicketError> {
        let mut parts = Parts { rest: bytes, length: bytes.len(), expected: FIXED_BYTES };
        if parts.array::<8>()? != MAGIC {
            return Err(TicketError::Malformed { field: "magic" });
        }
        match parts.u16()? {
            TICKET_VERSION => {}
            0 => return Err(TicketError::Malformed { field: "version" }),
            found => return Err(TicketError::NewerVersion { found }),
        }
        let tenant_length = usize::from(parts.u16()?);
        let path_length = usize::from(parts.u16()?);
        let zero = parts.u16()?;
        parts.expected += tenant_length + path_length;
        let allocation = AllocationId(parts.array()?);
        let serial = u64::from_le_bytes(parts.array()?);
        let size_bytes = u64::from_le_bytes(parts.array()?);
        let owner = MemberId(u64::from_le_bytes(parts.array()?));
        let tenant = parse_tenant(parts.bytes(tenant_length)?)?;
        let owner_socket = parse_path(parts.bytes(path_length)?)?;
        if zero != 0 || !parts.rest.is_empty() {
            return Err(TicketError::Malformed { field: "length" });
        }
        Ok(Self { allocation, serial, size_bytes, owner, owner_socket, tenant })
    }
}

/// A reader that knows how long the whole should be.
struct Parts<'a> {
    rest: &'a [u8],
    length: usize,
    expected: usize,
}

impl<'a> Parts<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], TicketError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(count)
            .ok_or(TicketError::Truncated { length: self.length, expected: self.expected })?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], TicketError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    fn u16(&mut self) -> Result<u16, TicketError> {
        Ok(u16::from_le_bytes(self.array()?))
    }
}

fn parse_tenant(bytes: &[u8]) -> Result<TenantName, TicketError> {
    std::str::from_utf8(bytes)
        .ok()
        .and_then(|name| TenantName::new(name).ok())
        .ok_or(TicketError::Malformed { field: "tenant" })
}

fn parse_path(bytes: &[u8]) -> Result<PathBuf, TicketError> {
    let fits = (1..=SOCKET_PATH_BYTES_MAX).contains(&bytes.len()) && !bytes.contains(&0);
    if !fits {
        return Err(TicketError::Malformed { field: "socket path" });
    }
    Ok(PathBuf::from(OsString::from_vec(bytes.to_vec())))
}

fn all_seals() -> SealFlag {
    SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

/// Fills `buffer` from offset 0 without moving the file's own offset; says how much there was.
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
            owner_socket: PathBuf::from("/tmp/sublet-0/train/0123456789abcdef.sock"),
            tenant: TenantName::new("train").unwrap(),
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
    fn an_issued_ticket_cannot_be_changed() {
        let mut file = File::from(ticket().issue().unwrap());
        file.rewind().unwrap();
        file.write_all(b"x").unwrap_err();
        file.set_len(0).unwrap_err();
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::empty())).unwrap_err();
    }

    #[test]
    fn the_longest_path_fits_and_one_byte_more_does_not() {
        let mut ticket = ticket();
        ticket.tenant = TenantName::new(&"t".repeat(TENANT_NAME_BYTES_MAX)).unwrap();
        ticket.owner_socket = PathBuf::from("p".repeat(SOCKET_PATH_BYTES_MAX));
        let fd = ticket.issue().unwrap();
        assert_eq!(Ticket::read(fd.as_fd()).unwrap(), Some(ticket.clone()));
        ticket.owner_socket = PathBuf::from("p".repeat(SOCKET_PATH_BYTES_MAX + 1));
        assert_eq!(ticket.issue().unwrap_err().kind(), io::ErrorKind::InvalidInput);
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

        let bytes = ticket().encode().unwrap();
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
        let bytes = ticket().encode().unwrap();
        for length in MAGIC.len()..bytes.len() {
            let error = read_sealed(&bytes[..length]).unwrap_err();
            assert!(matches!(error, TicketError::Truncated { .. }), "{error}");
        }
    }

    #[test]
    fn a_longer_a_newer_and_a_bad_ticket_are_errors() {
        let good = ticket().encode().unwrap();
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            read_sealed(&bytes).unwrap_err()
        };
        let mut longer = good.clone();
        longer.push(b'x');
        let error = read_sealed(&longer).unwrap_err();
        assert!(matches!(error, TicketError::Malformed { field: "length" }));
        longer.resize(TICKET_BYTES_MAX * 2, b'x');
        read_sealed(&longer).unwrap_err();
        assert!(matches!(with(8, 9), TicketError::NewerVersion { found: 9 }));
        assert!(matches!(with(8, 0), TicketError::Malformed { field: "version" }));
        assert!(matches!(with(FIXED_BYTES, b'/'), TicketError::Malformed { field: "tenant" }));
        assert!(matches!(
            with(FIXED_BYTES + 6, 0),
            TicketError::Malformed { field: "socket path" }
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_ticket_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _either = Ticket::decode(&bytes);
        }

        #[test]
        fn a_ticket_with_any_byte_changed_gives_a_ticket_or_an_error(
            at in 0_usize..100,
            byte in any::<u8>(),
        ) {
            let mut bytes = ticket().encode().unwrap();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(read) = Ticket::decode(&bytes) {
                prop_assert_eq!(read.encode().unwrap(), bytes);
            }
        }
    }
}
