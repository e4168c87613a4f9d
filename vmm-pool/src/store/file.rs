//! The interface to the file for saved contents, a linear space with places. The pool decides the place of all
//! contents. A crate above makes the file and keeps it on a disk. The file exists while anything is saved in it.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};

use super::{SavedPart, Slot};
use crate::error::{PoolError, PoolResult};
use crate::ids::AllocationId;

/// The alignment, in bytes, of the start of each part that [`ContentsFile::write_out`] is to write.
pub const FILE_ALIGNMENT_BYTES: u64 = 4096;

/// A shared reference to the file.
pub type HeldFile = Arc<dyn ContentsFile>;

/// Makes the file, in the given directory.
pub type MakeFile = fn(&Path) -> PoolResult<HeldFile>;

/// A place in the file, and the lengths in bytes of the contents there. Each length is that of one allocation's
/// contents, one behind the other.
pub type FilePlace = (Range<u64>, Vec<u64>);

/// Fills a slot, and returns the place of its contents in the file. None when there is no more.
pub type Fill<'a> = &'a mut dyn FnMut(&mut Slot) -> PoolResult<Option<FilePlace>>;

/// Gets contents that were read: the index of their place, and the slot that holds them.
pub type Each<'a> = &'a mut dyn FnMut(usize, &Slot) -> PoolResult<()>;

/// Looks up a part of an allocation. None when the allocation is gone.
pub type LookUp<'a> = &'a dyn Fn(AllocationId, Range<u64>) -> PoolResult<Option<SavedPart>>;

/// An allocation to write to the file: its parts, each with its offset in the file.
pub type ToFile = (AllocationId, Vec<(Range<u64>, u64)>);

/// The file. Parts that are reserved, and not given back, hold disk space. All methods block for the disk.
pub trait ContentsFile: Debug + Send + Sync {
    /// Reserves disk space for `places`, which hold nothing yet. If a reservation fails half-way, the next
    /// [`ContentsFile::keep_only`] gives its space back.
    ///
    /// # Errors
    /// [`PoolError::OutOfDisk`], [`PoolError::FileRefused`].
    fn reserve(&self, places: &[Range<u64>]) -> PoolResult<()>;

    /// Gives back all disk space but that of `live`, which has at least one place, in order and apart.
    fn keep_only(&self, live: &[Range<u64>]);

    /// Fills the slots of a `ring` with `fill`, one after the other, while filled slots are written to the file. When
    /// this returns without an error, all is on the disk. When it returns, no write is under way in any case.
    ///
    /// # Errors
    /// [`PoolError::FileRefused`], or that of `fill`.
    fn write_behind(&self, ring: Vec<Slot>, fill: Fill<'_>) -> PoolResult<()>;

    /// Reads `all` places. Calls `each` with the index of each place and the slot that holds it, in any order. When
    /// this returns, no read is under way.
    ///
    /// # Errors
    /// [`PoolError::FileUnreadable`], [`PoolError::FileCorrupted`], or that of `each`.
    fn read_ahead(&self, ring: Vec<Slot>, all: &[Range<u64>], each: Each<'_>) -> PoolResult<()>;

    /// Fills `bytes` from the file at `offset_bytes`. Places that were not written are not checked.
    ///
    /// # Errors
    /// [`PoolError::FileUnreadable`], [`PoolError::FileCorrupted`].
    fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> PoolResult<()>;

    /// Writes what `look_up` finds of `all`, a piece at a time, until `until` or until `is_called_off`, which is called
    /// before each piece. Returns the number of allocations that need no more writing: those are on the disk.
    ///
    /// # Errors
    /// [`PoolError::FileRefused`], also if the first allocation was not written in time.
    fn write_out(
        self: Arc<Self>,
        all: Vec<ToFile>,
        look_up: LookUp<'_>,
        until: Instant,
        is_called_off: &dyn Fn() -> bool,
    ) -> PoolResult<usize>;

    /// Drops the last reference, and returns the descriptor. Closing that takes a while. None if it is not the last
    /// reference.
    fn into_fd(self: Arc<Self>) -> Option<OwnedFd>;
}

/// Checks whether a file of this process may end at `end_bytes` (`ulimit -f`). A write beyond the limit raises a signal
/// that ends the process (`SIGXFSZ`), so threads of the application check before each write. Makes one system call.
///
/// # Errors
/// `EFBIG`, which the kernel returns if the signal is ignored.
pub fn check_file_length(end_bytes: u64) -> io::Result<()> {
    match getrlimit(Resource::RLIMIT_FSIZE) {
        Ok((limit, _)) if end_bytes > limit => Err(Errno::EFBIG.into()),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// The directory, and the file while it holds anything.
#[derive(Debug)]
pub(crate) struct Disk {
    /// The directory of the next file.
    pub(crate) dir: PathBuf,
    pub(crate) make: MakeFile,
    /// The file, while anything is saved in it. A forked child has none: its copy would hold the disk space after the
    /// parent has ended.
    pub(crate) file: Option<HeldFile>,
}

impl Default for Disk {
    /// Makes a value with the directory `/tmp` and without a way to make a file. The pool's user may set both.
    fn default() -> Self {
        Self { dir: "/tmp".into(), make: |dir| Err(nothing_to_write_to(dir)), file: None }
    }
}

/// Makes the error for a write without a file, or without a ring.
pub(crate) fn nothing_to_write_to(dir: &Path) -> PoolError {
    PoolError::file_refused(dir, "writing", &(0..0), io::ErrorKind::NotFound.into())
}

impl Disk {
    /// Makes the error for a read of `place` without a file, or without a ring.
    pub(crate) fn nothing_to_read(&self, place: &Range<u64>) -> PoolError {
        PoolError::file_unreadable(&self.dir, place, io::ErrorKind::NotFound.into())
    }

    /// As [`ContentsFile::reserve`]. Makes the file if there is none.
    pub(crate) fn reserve(&mut self, places: &[Range<u64>]) -> PoolResult<()> {
        if places.is_empty() {
            return Ok(());
        }
        let file = match self.file.take() {
            Some(file) => file,
            None => (self.make)(&self.dir)?,
        };
        self.file.insert(file).reserve(places)
    }

    /// As [`ContentsFile::keep_only`]. When nothing is left, this returns the file for the caller to close. Closing it
    /// gives the disk space back, which takes a while. If somebody still reads the file, the reader closes it.
    pub(crate) fn keep_only(&mut self, live: &[Range<u64>]) -> Option<OwnedFd> {
        if live.is_empty() {
            return self.file.take()?.into_fd();
        }
        self.file.iter().for_each(|file| file.keep_only(live));
        None
    }
}
