//! The pool's file for saved contents. It has no name, and is in a directory that the pool's user chooses.
//!
//! The file keeps no name after it is made, so nothing stays on the disk however the process ends. Pieces are written
//! and read past the page cache (`O_DIRECT`), if the filesystem supports that. Such a piece must begin and end at a
//! page. Other pieces go through the cache. The writer then sends those cached pages to the disk and drops them: each
//! writer has at most two pieces in host memory. One file may have both kinds of pieces, for they share no page.
//!
//! This process keeps checksums of what it writes ([`super::sums`]). If contents differ when they are read, the read
//! fails.

#![expect(unsafe_code, reason = "calls sync_file_range")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};
use nix::sys::statvfs::fstatvfs;

use vmm_pool::{
    ContentsFile, Each, FILE_ALIGNMENT_BYTES, Fill, HeldFile, LookUp, PoolError, PoolResult, Slot,
    ToFile, check_file_length,
};

use crate::ring::{read_ahead, write_behind};
use crate::sums::Sums;
use crate::writeout::WriteOut;

/// A file for saved contents. Parts that are reserved, and not given back, hold disk space.
#[derive(Debug)]
pub(crate) struct DiskFile {
    pub(crate) file: File,
    /// The same file, opened past the page cache. None where the filesystem refuses that.
    direct: Option<File>,
    /// True once the filesystem has refused a direct write that it should have done.
    is_direct_refused: AtomicBool,
    sums: Sums,
    /// The directory of the file, for messages.
    pub(crate) dir: PathBuf,
    /// The offset of a piece that never reaches the disk.
    #[cfg(test)]
    broken_at: Option<u64>,
}

/// Makes a file in `dir`, for [`vmm_pool::HostMemory::make_files_by`].
///
/// # Errors
/// [`PoolError::FileRefused`].
pub fn file(dir: &Path) -> PoolResult<HeldFile> {
    Ok(Arc::new(DiskFile::create(dir)?.past_the_cache()))
}

/// Checks that files for saved contents can be made and written in `dir`. No file stays there.
///
/// # Errors
/// [`PoolError::FileRefused`].
pub fn check_file_dir(dir: &Path) -> PoolResult<()> {
    let file = DiskFile::create(dir)?;
    file.check_limit(1)?;
    file.write(0, &[0])
}

impl ContentsFile for DiskFile {
    fn reserve(&self, places: &[Range<u64>]) -> PoolResult<()> {
        self.check_limit(places.iter().map(|place| place.end).max().unwrap_or(0))?;
        let needed_bytes = places.iter().map(|place| place.end - place.start).sum();
        let space = fstatvfs(&self.file)
            .map_err(|errno| self.refused("reserving", &(0..needed_bytes), errno.into()))?;
        let free_bytes = space.blocks_available().saturating_mul(space.fragment_size());
        if free_bytes < needed_bytes {
            return Err(PoolError::OutOfDisk { dir: self.dir.clone(), needed_bytes, free_bytes });
        }
        // Processes that pause simultaneously see the same free space. This call refuses the second of them.
        places.iter().try_for_each(|place| self.take_space(place))
    }

    fn keep_only(&self, live: &[Range<u64>]) {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let mut end = 0;
        for place in live {
            let gap = end..place.start;
            end = place.end;
            if gap.is_empty() {
                continue;
            }
            self.sums.forget(&gap);
            let (offset, length) = signed(&gap);
            if let Err(error) = fallocate(&self.file, flags, offset, length) {
                tracing::debug!(%error, "disk space of contents that are back stays with the file");
            }
        }
        self.sums.forget(&(end..u64::MAX));
        if let Err(error) = self.file.set_len(end) {
            tracing::debug!(%error, "disk space behind saved contents stays until the next resume");
        }
    }

    fn write_behind(&self, ring: Vec<Slot>, fill: Fill<'_>) -> PoolResult<()> {
        write_behind(self, ring, fill)
    }

    fn read_ahead(&self, ring: Vec<Slot>, all: &[Range<u64>], each: Each<'_>) -> PoolResult<()> {
        read_ahead(self, ring, all, each)
    }

    fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> PoolResult<()> {
        self.read_written(offset_bytes, bytes, false)
    }

    fn write_out(
        self: Arc<Self>,
        all: Vec<ToFile>,
        look_up: LookUp<'_>,
        until: Instant,
        is_called_off: &dyn Fn() -> bool,
    ) -> PoolResult<usize> {
        WriteOut::move_in_time(self, all, look_up, until, is_called_off)
    }

    fn into_fd(self: Arc<Self>) -> Option<OwnedFd> {
        Arc::into_inner(self).map(|own| own.file.into())
    }
}

impl DiskFile {
    pub(crate) fn create(dir: &Path) -> PoolResult<Self> {
        let refused = |source| PoolError::file_refused(dir, "making", &(0..0), source);
        Ok(Self::over(tempfile::tempfile_in(dir).map_err(refused)?, dir.to_owned()))
    }

    /// Wraps `file`, which is in `dir` and belongs to the caller.
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

    /// Opens the file past the page cache too, where the filesystem supports that.
    pub(crate) fn past_the_cache(mut self) -> Self {
        // This is the file's only name.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let opened = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
        match opened {
            Ok(direct) => self.direct = Some(direct),
            Err(error) => self.say_cached(&error),
        }
        self
    }

    /// Logs that pieces go through the page cache, once for each file.
    fn say_cached(&self, error: &io::Error) {
        if !self.is_direct_refused.swap(true, Ordering::Relaxed) {
            tracing::info!(
                %error,
                dir = %self.dir.display(),
                "the filesystem takes no direct writes: saved contents go through the page cache"
            );
        }
    }

    /// Returns the file past the page cache, if these bytes can be written or read directly.
    fn direct(&self, offset_bytes: u64, bytes: &[u8]) -> Option<&File> {
        let ends = [offset_bytes, bytes.len() as u64, bytes.as_ptr().addr() as u64];
        let are_aligned = ends.iter().all(|end| end.is_multiple_of(FILE_ALIGNMENT_BYTES));
        self.direct
            .as_ref()
            .filter(|_| are_aligned && !self.is_direct_refused.load(Ordering::Relaxed))
    }

    /// Checks with [`check_file_length`] whether the file may end at `end_bytes`.
    pub(crate) fn check_limit(&self, end_bytes: u64) -> PoolResult<()> {
        let checked = check_file_length(end_bytes);
        checked.map_err(|source| self.refused("reserving", &(0..end_bytes), source))
    }

    /// Writes `bytes` at `offset_bytes`. [`DiskFile::drop_cached`] then waits until the disk has them.
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

    /// Waits until `place` is on the disk, and drops it from the page cache.
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

    /// Waits until all written data is on the disk. Some filesystems report failed writes only now.
    pub(crate) fn finish(&self) -> PoolResult<()> {
        self.file.sync_data().map_err(|source| self.refused("writing", &(0..0), source))
    }

    /// Fills `bytes` from the file at `offset_bytes`, and drops the place from the page cache. Bytes without a checksum
    /// are not checked. If `is_written`, they are an error.
    ///
    /// # Errors
    /// [`PoolError::FileUnreadable`]; [`PoolError::FileCorrupted`] where the bytes differ from what was written.
    pub(crate) fn read_written(
        &self,
        offset_bytes: u64,
        bytes: &mut [u8],
        is_written: bool,
    ) -> PoolResult<()> {
        let place = offset_bytes..offset_bytes + bytes.len() as u64;
        let read = self.read_any(offset_bytes, bytes);
        read.map_err(|source| PoolError::file_unreadable(&self.dir, &place, source))?;
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
            // Reading past the end of a shortened file is refused in the same way, and is no failure of direct reads.
            Some(Err(error)) if is_refusal_of_direct(&error) => {}
            Some(Err(error)) => return Err(error),
            None => {}
        }
        self.file.read_exact_at(bytes, offset_bytes)
    }

    /// Checks `bytes`, read at `offset_bytes`, against their checksums. Returns how many bytes have a checksum. A block
    /// that is only partly among them is read whole.
    fn check(&self, offset_bytes: u64, bytes: &[u8]) -> PoolResult<u64> {
        let place = offset_bytes..offset_bytes + bytes.len() as u64;
        let mut checked_bytes = 0;
        for (block, crc32) in self.sums.over(&place) {
            let within = block.start.max(place.start)..block.end.min(place.end);
            checked_bytes += within.end - within.start;
            let is_of = |bytes: &[u8]| crc32fast::hash(bytes) == crc32;
            let is_right = if within == block {
                let at = |end: u64| usize::try_from(end - offset_bytes).unwrap_or(usize::MAX);
                bytes.get(at(within.start)..at(within.end)).is_some_and(is_of)
            } else {
                let length = usize::try_from(block.end - block.start).unwrap_or(0);
                let mut whole = vec![0; length];
                let read = self.file.read_exact_at(&mut whole, block.start);
                read.map_err(|source| PoolError::file_unreadable(&self.dir, &block, source))?;
                is_of(&whole)
            };
            if !is_right {
                return Err(self.corrupted(&block));
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

    fn take_space(&self, place: &Range<u64>) -> PoolResult<()> {
        let (offset, length) = signed(place);
        loop {
            match fallocate(&self.file, FallocateFlags::empty(), offset, length) {
                Err(Errno::EINTR) => {}
                // Where the filesystem cannot reserve, the write itself finds out.
                Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::ENODEV) => return Ok(()),
                Err(errno) => return Err(self.refused("reserving", place, errno.into())),
            }
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
            // There is nothing to wait for: the last flush reports errors.
            Ok(_) | Err(Errno::ENOSYS | Errno::ESPIPE | Errno::EINVAL) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(crate) fn refused(&self, op: &'static str, at: &Range<u64>, why: io::Error) -> PoolError {
        PoolError::file_refused(&self.dir, op, at, why)
    }
}

/// Returns offset and length as the kernel expects them. No file is too long for these types.
fn signed(place: &Range<u64>) -> (i64, i64) {
    let [offset, length] = [place.start, place.end - place.start];
    (i64::try_from(offset).unwrap_or(i64::MAX), i64::try_from(length).unwrap_or(i64::MAX))
}

/// Writes pieces of one file one after the other: the disk writes one piece while the next is copied to the kernel.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    /// The piece that was written last, and may not be on the disk yet.
    unsettled: Option<Range<u64>>,
}

impl Writer {
    /// Writes `bytes` at `offset_bytes`. Then waits until the piece before is on the disk, and drops that from the page
    /// cache. Records checksums of the contents of allocations, one behind the other, with the lengths `lengths_bytes`.
    ///
    /// # Errors
    /// [`PoolError::FileRefused`], also for the piece before.
    pub(crate) fn write(
        &mut self,
        file: &DiskFile,
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

    /// Waits until the last piece is on the disk, and drops it from the page cache. Call [`DiskFile::finish`] after all
    /// writers.
    ///
    /// # Errors
    /// [`PoolError::FileRefused`].
    pub(crate) fn settle(&mut self, file: &DiskFile) -> PoolResult<()> {
        self.unsettled.take().map_or(Ok(()), |place| file.drop_cached(&place))
    }
}

/// Does `error` say that the filesystem, or the disk below it, cannot bypass the page cache?
fn is_refusal_of_direct(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EINVAL | Errno::EOPNOTSUPP))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: usize = 4096;

    impl DiskFile {
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
        let made = DiskFile::create(Path::new("/dev/shm")).unwrap().past_the_cache();
        let (half, all) = (HALF as u64, 0..2 * HALF as u64);
        let mut seen = [1; 2 * HALF];
        for _ in 0..2 {
            made.reserve(std::slice::from_ref(&all)).unwrap();
            let mut writer = Writer::default();
            writer.write(&made, 0, &[7; HALF], &[half]).unwrap();
            made.read(0, &mut seen).unwrap();
            assert_eq!(seen, [[7; HALF], [0; HALF]].concat()[..]);
            let refused = made.read_written(0, &mut seen, true).unwrap_err();
            assert!(matches!(refused, PoolError::FileCorrupted { .. }), "{refused}");
            writer.write(&made, half, &[8; HALF], &[half]).unwrap();
            made.read_written(0, &mut seen, true).unwrap();
            // The next round knows nothing of the second half.
            made.keep_only(std::slice::from_ref(&(0..half)));
        }
    }
}
