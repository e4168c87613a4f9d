//! The door for contents that go to a file, a linear space with places: the pool says what lies where, and a crate above makes the
//! file and keeps it on a disk. There is one while anything is saved in it.

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

/// The pool's hand on it.
pub type HeldFile = Arc<dyn ContentsFile>;

/// Makes the file, in a directory.
pub type MakeFile = fn(&Path) -> PoolResult<HeldFile>;

/// A place in the file, and the lengths of the contents that lie there, one allocation's behind the other's, in bytes.
pub type FilePlace = (Range<u64>, Vec<u64>);

/// Fills a slot, and says where its first bytes go. None when there is no more.
pub type Fill<'a> = &'a mut dyn FnMut(&mut Slot) -> PoolResult<Option<FilePlace>>;

/// Takes what was read: the index of its place, and the slot.
pub type Each<'a> = &'a mut dyn FnMut(usize, &Slot) -> PoolResult<()>;

/// Has the part of an allocation looked up. None when it is gone.
pub type LookUp<'a> = &'a dyn Fn(AllocationId, Range<u64>) -> PoolResult<Option<SavedPart>>;

/// An allocation that is to move to the file: its parts, each with the offset in the file where it goes.
pub type ToFile = (AllocationId, Vec<(Range<u64>, u64)>);

/// The file. Disk space is held by its parts that have been reserved and not given back. All of it waits for the disk.
pub trait ContentsFile: Debug + Send + Sync {
    /// Takes disk space for `places`, which hold nothing yet. What was taken by a reservation that failed half-way
    /// is given back by the next [`ContentsFile::keep_only`].
    ///
    /// # Errors
    /// [`PoolError::OutOfDisk`], [`PoolError::FileRefused`].
    fn reserve(&self, places: &[Range<u64>]) -> PoolResult<()>;

    /// Gives back all disk space but that of `live`, which are some, in order and apart.
    fn keep_only(&self, live: &[Range<u64>]);

    /// Has `fill` fill the slots of a `ring` one after the other, and writes them behind it. All is on the disk when this returns
    /// without an error, and nothing is written any more in any case.
    ///
    /// # Errors
    /// [`PoolError::FileRefused`], or that of `fill`.
    fn write_behind(&self, ring: Vec<Slot>, fill: Fill<'_>) -> PoolResult<()>;

    /// Reads `all` places and calls `each` with the index of every one and the slot that holds it, in any order. Nothing
    /// is read any more when this returns.
    ///
    /// # Errors
    /// [`PoolError::FileUnreadable`], [`PoolError::FileCorrupted`], or that of `each`.
    fn read_ahead(&self, ring: Vec<Slot>, all: &[Range<u64>], each: Each<'_>) -> PoolResult<()>;

    /// Reads exactly what `bytes` holds. What was not written is not checked.
    ///
    /// # Errors
    /// [`PoolError::FileUnreadable`], [`PoolError::FileCorrupted`].
    fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> PoolResult<()>;

    /// Writes what `look_up` finds of `all`, a piece at a time, until the time is over or it `is_called_off`, which is asked before each piece.
    /// Returns for how many of them nothing is left to be written: those are on the disk.
    ///
    /// # Errors
    /// [`PoolError::FileRefused`], also for a first one that was not written in time.
    fn write_out(
        self: Arc<Self>,
        all: Vec<ToFile>,
        look_up: LookUp<'_>,
        until: Instant,
        is_called_off: &dyn Fn() -> bool,
    ) -> PoolResult<usize>;

    /// The last hand on it lets go, and gets its descriptor to close, which takes a while.
    fn into_fd(self: Arc<Self>) -> Option<OwnedFd>;
}

/// May a file of this process end at this byte (`ulimit -f`)? A write beyond its limit brings a signal that ends the process (`SIGXFSZ`), so it is
/// asked before each write by a thread of the application's. Makes one system call.
///
/// # Errors
/// `EFBIG`, as the kernel has it if the signal is ignored.
pub fn check_file_length(end_bytes: u64) -> io::Result<()> {
    match getrlimit(Resource::RLIMIT_FSIZE) {
        Ok((limit, _)) if end_bytes > limit => Err(Errno::EFBIG.into()),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// The directory, and the file while it holds anything.
#[derive(Debug)]
pub(crate) struct Disk {
    /// From the next file on.
    pub(crate) dir: PathBuf,
    pub(crate) make: MakeFile,
    /// There is one while anything is saved in it. A forked child has none: its copy would hold the disk space beyond the parent's end.
    pub(crate) file: Option<HeldFile>,
}

impl Default for Disk {
    /// In `/tmp`, unless the pool's user says otherwise, and made by nobody.
    fn default() -> Self {
        Self { dir: "/tmp".into(), make: |dir| Err(nothing_to_write_to(dir)), file: None }
    }
}

/// There is no file, or no ring before it, where one is needed.
pub(crate) fn nothing_to_write_to(dir: &Path) -> PoolError {
    PoolError::file_refused(dir, "writing", &(0..0), io::ErrorKind::NotFound.into())
}

impl Disk {
    /// There is none, or no ring before it, where `place` is to be read.
    pub(crate) fn nothing_to_read(&self, place: &Range<u64>) -> PoolError {
        PoolError::file_unreadable(&self.dir, place, io::ErrorKind::NotFound.into())
    }

    /// As [`ContentsFile::reserve`], of a file that is made if there is none.
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

    /// As [`ContentsFile::keep_only`]. When nothing is left this returns the file: closing it gives the space back, which takes a
    /// while. Who reads it now closes it.
    pub(crate) fn keep_only(&mut self, live: &[Range<u64>]) -> Option<OwnedFd> {
        if live.is_empty() {
            return self.file.take()?.into_fd();
        }
        self.file.iter().for_each(|file| file.keep_only(live));
        None
    }
}
