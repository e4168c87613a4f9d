//! Disk space for saved contents: one file without a name, in a directory that the pool's user chooses.
//!
//! The file never has a name that outlives its making, so nothing is left behind however the process ends. It is
//! written and read past the page cache (`O_DIRECT`) where the filesystem takes that and a piece begins and ends at a
//! page. What is not goes through the cache, whose pages are sent to the disk and dropped behind the writer: no more than
//! two pieces a writer are in host memory together. Both may be in one file, for they share no page.
//!
//! Written contents have checksums ([`super::sums`]), in this process. Contents that differ when they are read are an
//! error.

#![expect(unsafe_code, reason = "calls sync_file_range")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::fstatvfs;

use super::sums::Sums;
use crate::error::{PoolError, PoolResult};

/// The directory of the file, unless the pool's user says otherwise.
const DEFAULT_DIR: &str = "/tmp";

/// The alignment, in bytes, of the start and the end of pieces that go past the page cache, in the file and in memory.
/// Every disk takes it.
pub(crate) const ALIGNMENT_BYTES: u64 = 4096;

/// The directory, and the file while it holds anything.
#[derive(Debug)]
pub(crate) struct Disk {
    dir: PathBuf,
    file: Option<Arc<ContentsFile>>,
}

/// The file. Disk space is held by its parts that have been reserved and not given back.
#[derive(Debug)]
pub(crate) struct ContentsFile {
    file: File,
    /// The same, past the page cache; none where the filesystem refuses that.
    direct: Option<File>,
    /// The filesystem has refused a piece that it should have taken.
    is_direct_refused: AtomicBool,
    sums: Sums,
    /// The directory in which it was made, for messages.
    dir: PathBuf,
    /// The offset of a piece that never gets to the disk.
    #[cfg(test)]
    broken_at: Option<u64>,
}

/// Can files for saved contents be made and written in `dir`? Nothing stays there.
///
/// # Errors
/// [`PoolError::FileRefused`].
pub fn check_file_dir(dir: &Path) -> PoolResult<()> {
    let file = ContentsFile::create(dir)?;
    file.check_limit(1)?;
    file.write(0, &[0])
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

impl Disk {
    pub(super) fn new() -> Self {
        Self { dir: PathBuf::from(DEFAULT_DIR), file: None }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// From the next file on.
    pub(crate) fn set_dir(&mut self, dir: PathBuf) {
        self.dir = dir;
    }

    /// The file; there is one while anything is saved in it.
    pub(crate) fn file(&self) -> Option<Arc<ContentsFile>> {
        self.file.clone()
    }

    /// That there is no file, or no ring before it, where one is needed.
    pub(crate) fn nothing_to_write_to(&self) -> PoolError {
        refused(&self.dir, "writing", &(0..0), io::ErrorKind::NotFound.into())
    }

    /// As [`Disk::nothing_to_write_to`], for `place`, which is to be read.
    pub(crate) fn nothing_to_read(&self, place: &Range<u64>) -> PoolError {
        unreadable(&self.dir, place, io::ErrorKind::NotFound.into())
    }

    /// Takes disk space for `places`, which hold nothing yet. What was taken by a reservation that failed half-way
    /// is given back by the next [`Disk::keep_only`].
    ///
    /// # Errors
    /// [`PoolError::OutOfDisk`], [`PoolError::FileRefused`].
    pub(crate) fn reserve(&mut self, places: &[Range<u64>]) -> PoolResult<()> {
        let Some(end_bytes) = places.iter().map(|place| place.end).max() else {
            return Ok(());
        };
        let file = match self.file.take() {
            Some(file) => file,
            None => Arc::new(ContentsFile::create(&self.dir)?.past_the_cache()),
        };
        let file = self.file.insert(file);
        file.check_limit(end_bytes)?;
        file.check_space(places.iter().map(|place| place.end - place.start).sum())?;
        places.iter().try_for_each(|place| file.take_space(place))
    }

    /// Gives back all disk space but that of `live`, which are in order and apart. When nothing is left this
    /// returns the file: closing it gives the space back, which takes a while. Who reads it now closes it.
    pub(crate) fn keep_only(&mut self, live: &[Range<u64>]) -> Option<OwnedFd> {
        let Some(last) = live.last() else {
            return self.file.take().and_then(Arc::into_inner).map(|file| file.file.into());
        };
        let file = self.file.as_ref()?;
        let mut begin = 0;
        for place in live {
            file.give_space_back(&(begin..place.start));
            begin = place.end;
        }
        file.sums.forget(&(last.end..u64::MAX));
        if let Err(error) = file.file.set_len(last.end) {
            tracing::debug!(%error, "disk space behind saved contents stays until the next resume");
        }
        None
    }

    /// For a forked child: closes its copy of the file, which would hold the disk space beyond the parent's end.
    pub(crate) fn close_in_child(&mut self) {
        self.file = None;
    }
}

impl ContentsFile {
    fn create(dir: &Path) -> PoolResult<Self> {
        let file = tempfile::tempfile_in(dir);
        let file = file.map_err(|source| refused(dir, "making", &(0..0), source))?;
        Ok(Self::over(file, dir.to_owned()))
    }

    /// As one of ours: a file that lies in `dir` and is the caller's.
    pub(crate) fn over(file: File, dir: PathBuf) -> Self {
        Self {
            file,
            direct: None,
            is_direct_refused: AtomicBool::new(false),
            sums: Sums::default(),
            dir,
            #[cfg(test)]
            broken_at: None,
        }
    }

    /// The same, with what can go past the page cache going there.
    fn past_the_cache(mut self) -> Self {
        // The file has no name but this.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let opened = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
        match opened {
            Ok(direct) => self.direct = Some(direct),
            Err(error) => self.say_cached(&error),
        }
        self
    }

    /// Once a file.
    fn say_cached(&self, error: &io::Error) {
        if !self.is_direct_refused.swap(true, Ordering::Relaxed) {
            tracing::info!(
                %error,
                dir = %self.dir.display(),
                "the filesystem takes no direct writes: saved contents go through the page cache"
            );
        }
    }

    /// The file past the page cache, where these bytes may go that way.
    fn direct(&self, offset_bytes: u64, bytes: &[u8]) -> Option<&File> {
        let is_aligned = |value: u64| value.is_multiple_of(ALIGNMENT_BYTES);
        let are_aligned = is_aligned(offset_bytes)
            && is_aligned(bytes.len() as u64)
            && is_aligned(bytes.as_ptr().addr() as u64);
        self.direct
            .as_ref()
            .filter(|_| are_aligned && !self.is_direct_refused.load(Ordering::Relaxed))
    }

    /// Gives the file this size; what is not written of it takes no space.
    pub(crate) fn extend_to(&self, end_bytes: u64) -> PoolResult<()> {
        self.check_limit(end_bytes)?;
        let extended = self.file.set_len(end_bytes);
        extended.map_err(|source| self.refused("making", &(0..end_bytes), source))
    }

    /// As [`check_file_length`].
    pub(crate) fn check_limit(&self, end_bytes: u64) -> PoolResult<()> {
        let checked = check_file_length(end_bytes);
        checked.map_err(|source| self.refused("reserving", &(0..end_bytes), source))
    }

    /// Checks the free space that the filesystem reports. Processes that pause at the same time see the same free
    /// space, and [`ContentsFile::take_space`] refuses the second one.
    fn check_space(&self, needed_bytes: u64) -> PoolResult<()> {
        let space = fstatvfs(&self.file)
            .map_err(|errno| self.refused("reserving", &(0..needed_bytes), errno.into()))?;
        let free_bytes = space.blocks_available().saturating_mul(space.fragment_size());
        if free_bytes < needed_bytes {
            return Err(PoolError::OutOfDisk { dir: self.dir.clone(), needed_bytes, free_bytes });
        }
        Ok(())
    }

    fn take_space(&self, place: &Range<u64>) -> PoolResult<()> {
        let (offset, length) = signed(place);
        loop {
            match fallocate(&self.file, FallocateFlags::empty(), offset, length) {
                Err(Errno::EINTR) => {}
                // Where nothing can be reserved, the write itself finds out.
                Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::ENODEV) => return Ok(()),
                Err(errno) => return Err(self.refused("reserving", place, errno.into())),
            }
        }
    }

    fn give_space_back(&self, place: &Range<u64>) {
        if place.start >= place.end {
            return;
        }
        self.sums.forget(place);
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let (offset, length) = signed(place);
        if let Err(error) = fallocate(&self.file, flags, offset, length) {
            tracing::debug!(%error, "disk space of contents that are back stays with the file");
        }
    }

    /// Writes at `offset_bytes`; [`ContentsFile::drop_cached`] sees it to the disk.
    fn write(&self, offset_bytes: u64, bytes: &[u8]) -> PoolResult<()> {
        let place = offset_bytes..offset_bytes + bytes.len() as u64;
        match self.direct(offset_bytes, bytes).map(|file| file.write_all_at(bytes, offset_bytes)) {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) if is_refusal_of_direct(&error) => self.say_cached(&error),
            Some(Err(error)) => return Err(self.refused("writing", &place, error)),
            None => {}
        }
        self.file
            .write_all_at(bytes, offset_bytes)
            .and_then(|()| self.sync_range(&place, libc::SYNC_FILE_RANGE_WRITE))
            .map_err(|source| self.refused("writing", &place, source))
    }

    /// Waits until `place` is on the disk, and takes it out of host memory.
    fn drop_cached(&self, place: &Range<u64>) -> PoolResult<()> {
        let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
            | libc::SYNC_FILE_RANGE_WRITE
            | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        #[cfg(test)]
        if self.broken_at == Some(place.start) {
            return Err(self.refused("writing", place, Errno::EIO.into()));
        }
        self.sync_range(place, all).map_err(|source| self.refused("writing", place, source))?;
        self.forget_cached(place);
        Ok(())
    }

    /// The filesystem says whether it took all that was written; some tell only now.
    pub(crate) fn finish(&self) -> PoolResult<()> {
        self.file.sync_data().map_err(|source| self.refused("writing", &(0..0), source))
    }

    /// Reads exactly what `bytes` holds, and takes it out of the page cache. What was not written is not checked, and refused if all
    /// `is_written`.
    ///
    /// # Errors
    /// [`PoolError::FileUnreadable`]; [`PoolError::FileCorrupted`] where it is not what was written.
    pub(super) fn read(
        &self,
        offset_bytes: u64,
        bytes: &mut [u8],
        is_written: bool,
    ) -> PoolResult<()> {
        let place = offset_bytes..offset_bytes + bytes.len() as u64;
        let read = self.read_any(offset_bytes, bytes);
        read.map_err(|source| self.unreadable(&place, source))?;
        let checked_bytes = self.check(offset_bytes, bytes)?;
        if is_written && checked_bytes < bytes.len() as u64 {
            return Err(self.corrupted(&place));
        }
        self.forget_cached(&place);
        Ok(())
    }

    fn read_any(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self.direct(offset_bytes, bytes).map(|file| file.read_exact_at(bytes, offset_bytes)) {
            Some(Ok(())) => return Ok(()),
            // The end of a file that was cut short is refused in the same way, and is no piece that it should take.
            Some(Err(error)) if is_refusal_of_direct(&error) => {}
            Some(Err(error)) => return Err(error),
            None => {}
        }
        self.file.read_exact_at(bytes, offset_bytes)
    }

    /// Are `bytes`, read at `offset_bytes`, those that were written? How many were. A block that is only partly among
    /// them is read whole.
    fn check(&self, offset_bytes: u64, bytes: &[u8]) -> PoolResult<u64> {
        let place = offset_bytes..offset_bytes + bytes.len() as u64;
        let mut checked_bytes = 0;
        for block in self.sums.over(&place) {
            let within = block.place.start.max(place.start)..block.place.end.min(place.end);
            checked_bytes += within.end - within.start;
            let is_right = if within == block.place {
                let at = |end: u64| usize::try_from(end - offset_bytes).unwrap_or(usize::MAX);
                bytes.get(at(within.start)..at(within.end)).is_some_and(|own| block.is_of(own))
            } else {
                let length = usize::try_from(block.place.end - block.place.start).unwrap_or(0);
                let mut whole = vec![0; length];
                let read = self.file.read_exact_at(&mut whole, block.place.start);
                read.map_err(|source| self.unreadable(&block.place, source))?;
                block.is_of(&whole)
            };
            if !is_right {
                return Err(self.corrupted(&block.place));
            }
        }
        Ok(checked_bytes)
    }

    fn corrupted(&self, place: &Range<u64>) -> PoolError {
        PoolError::FileCorrupted {
            dir: self.dir.clone(),
            offset_bytes: place.start,
            size_bytes: place.end - place.start,
        }
    }

    fn forget_cached(&self, place: &Range<u64>) {
        let (offset, length) = signed(place);
        let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        if let Err(error) = posix_fadvise(&self.file, offset, length, advice) {
            tracing::debug!(%error, "saved contents stay in the page cache");
        }
    }

    fn sync_range(&self, place: &Range<u64>, flags: libc::c_uint) -> io::Result<()> {
        let (offset, length) = signed(place);
        // SAFETY: the descriptor is open as long as `self.file`; the call has no pointer.
        let outcome =
            unsafe { libc::sync_file_range(self.file.as_raw_fd(), offset, length, flags) };
        match Errno::result(outcome) {
            // Nothing to wait for there: the last flush tells.
            Ok(_) | Err(Errno::ENOSYS | Errno::ESPIPE | Errno::EINVAL) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(crate) fn refused(
        &self,
        operation: &'static str,
        place: &Range<u64>,
        source: io::Error,
    ) -> PoolError {
        refused(&self.dir, operation, place, source)
    }

    pub(super) fn unreadable(&self, place: &Range<u64>, source: io::Error) -> PoolError {
        unreadable(&self.dir, place, source)
    }
}

/// Offset and length as the kernel wants them. No file is as long as it could not say.
fn signed(place: &Range<u64>) -> (i64, i64) {
    let [offset, length] = [place.start, place.end - place.start];
    (i64::try_from(offset).unwrap_or(i64::MAX), i64::try_from(length).unwrap_or(i64::MAX))
}

fn refused(
    dir: &Path,
    operation: &'static str,
    place: &Range<u64>,
    source: io::Error,
) -> PoolError {
    let (offset_bytes, size_bytes) = (place.start, place.end - place.start);
    PoolError::FileRefused { operation, dir: dir.to_owned(), offset_bytes, size_bytes, source }
}

fn unreadable(dir: &Path, place: &Range<u64>, source: io::Error) -> PoolError {
    let (offset_bytes, size_bytes) = (place.start, place.end - place.start);
    PoolError::FileUnreadable { dir: dir.to_owned(), offset_bytes, size_bytes, source }
}

/// Writes pieces of one file one behind the other: each is on its way to the disk while the next is written.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    /// Written last, and perhaps still on its way to the disk.
    unsettled: Option<Range<u64>>,
}

impl Writer {
    /// Writes `bytes` at `offset_bytes`, and sees the piece before to the disk and out of host memory. What is to be read back gets
    /// checksums: that is of allocations one behind the other, each as long as `lengths_bytes` say.
    ///
    /// # Errors
    /// [`PoolError::FileRefused`], also of the piece before.
    pub(crate) fn write(
        &mut self,
        file: &ContentsFile,
        offset_bytes: u64,
        bytes: &[u8],
        lengths_bytes: &[u64],
    ) -> PoolResult<()> {
        file.sums.note(offset_bytes, bytes, lengths_bytes);
        let written = file.write(offset_bytes, bytes);
        let settled = self.settle(file);
        self.unsettled = Some(offset_bytes..offset_bytes + bytes.len() as u64);
        written.and(settled)
    }

    /// Sees the last piece to the disk and out of host memory; [`ContentsFile::finish`] comes behind all writers.
    ///
    /// # Errors
    /// [`PoolError::FileRefused`].
    pub(crate) fn settle(&mut self, file: &ContentsFile) -> PoolResult<()> {
        self.unsettled.take().map_or(Ok(()), |place| file.drop_cached(&place))
    }
}

/// Does the filesystem, or the disk below it, not do this past the page cache?
fn is_refusal_of_direct(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EINVAL | Errno::EOPNOTSUPP))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: usize = 4096;

    impl Disk {
        pub(crate) fn use_without_flush(&mut self) {
            self.file = Some(Arc::new(ContentsFile::without_flush()));
        }

        pub(crate) fn use_full(&mut self) {
            let file = ContentsFile::full();
            // It reads as zeros without end.
            file.sums.note(0, &[0; 4096], &[4096]);
            self.file = Some(Arc::new(file));
        }
    }

    impl ContentsFile {
        /// One that behaves as on a disk without space.
        pub(crate) fn full() -> Self {
            Self::device("/dev/full")
        }

        /// One that takes whatever is written, and says only at the flush that it has not kept it.
        pub(crate) fn without_flush() -> Self {
            Self::device("/dev/null")
        }

        fn device(path: &str) -> Self {
            let file = File::options().read(true).write(true).open(path).unwrap();
            Self::over(file, PathBuf::from("/dev"))
        }

        /// One on a disk that loses what is written to `offset_bytes`, after it has taken it.
        pub(crate) fn broken_at(dir: &Path, offset_bytes: u64) -> Self {
            Self { broken_at: Some(offset_bytes), ..Self::create(dir).unwrap() }
        }
    }

    #[test]
    fn what_is_not_in_the_file_is_refused_only_if_it_is_said_to_be_written() {
        let mut disk = Disk::new();
        disk.set_dir("/dev/shm".into());
        let (half, all) = (HALF as u64, 0..2 * HALF as u64);
        let mut seen = [1; 2 * HALF];
        for _ in 0..2 {
            disk.reserve(std::slice::from_ref(&all)).unwrap();
            let file = disk.file().unwrap();
            let mut writer = Writer::default();
            writer.write(&file, 0, &[7; HALF], &[half]).unwrap();
            file.read(0, &mut seen, false).unwrap();
            assert_eq!(seen, [[7; HALF], [0; HALF]].concat()[..]);
            let refused = file.read(0, &mut seen, true).unwrap_err();
            assert!(matches!(refused, PoolError::FileCorrupted { .. }), "{refused}");
            writer.write(&file, half, &[8; HALF], &[half]).unwrap();
            file.read(0, &mut seen, true).unwrap();
            // The next round knows nothing of the second half.
            assert!(disk.keep_only(std::slice::from_ref(&(0..half))).is_none());
        }
    }
}
