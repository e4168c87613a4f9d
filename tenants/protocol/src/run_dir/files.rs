//! Files that the processes of a user share, in directories that nobody else can change.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

pub use super::error::is_no_file;
pub use super::locks::{FileLock, StretchLock, holders, set as lock_stretch};
pub use super::trusted_path::{check, ensure};

use super::error::no_file;
use super::locks::is_set;
use super::{RunDirError, pause_thread};
use crate::time::millis;

/// The name of the file in which the processes of a tenant count the memory that they hold together.
pub const COUNTS_NAME: &str = "budget";
/// The byte of that file that a process locks for moments while it changes more than figures.
pub const CHANGING: (i64, i64) = (0, 1);
/// The bytes of that file of which each participant has one locked.
const PARTS: (i64, i64) = (1, 0);

const LOCK_BACK_OFF_MIN: Duration = Duration::from_millis(1);
pub(super) const LOCK_BACK_OFF_MAX: Duration = Duration::from_millis(50);

/// Opens the file at `path` and locks it by `try_lock`, again and again until `deadline`. After the deadline, `locked` makes
/// the error from the holder and the milliseconds of waiting.
///
/// # Errors
/// The error that `locked` makes; [`RunDirError::Io`].
pub fn wait_for_lock(
    path: &Path,
    deadline: Instant,
    open: impl Fn() -> Result<File, RunDirError>,
    try_lock: impl Fn(&File) -> Result<(), fs::TryLockError>,
    locked: impl FnOnce(Vec<u32>, u64) -> RunDirError,
) -> Result<FileLock, RunDirError> {
    let started = Instant::now();
    let mut back_off = LOCK_BACK_OFF_MIN;
    loop {
        let file = open()?;
        match try_lock(&file) {
            Ok(()) if is_still_named(&file, path) => return Ok(FileLock::new(file)),
            // Another process holds the lock. Or we hold it on a file that the last holder removed with the directory, where no
            // process would see the lock.
            Ok(()) | Err(fs::TryLockError::WouldBlock) => {}
            Err(fs::TryLockError::Error(error)) => return Err(io_error("locking", path)(error)),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let waited_ms = millis(started.elapsed());
            return Err(locked(holders(&file), waited_ms));
        }
        pause_thread(back_off.min(left));
        back_off = (back_off * 2).min(LOCK_BACK_OFF_MAX);
    }
}

/// Makes an error of the run directory out of the system's: `operation` on `path` failed.
pub fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RunDirError {
    let path = path.to_owned();
    move |source| RunDirError::Io { operation, path, source }
}

/// The names in the directory `path` that are valid text. Sublet makes no other names.
///
/// # Errors
/// [`RunDirError::Io`].
pub fn entry_names(path: &Path) -> Result<Vec<String>, RunDirError> {
    let entries = fs::read_dir(path).map_err(io_error("reading", path))?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io_error("reading", path))?;
        names.extend(entry.file_name().into_string().ok());
    }
    Ok(names)
}

/// Removes the file at `path`. A missing file is no error.
///
/// # Errors
/// [`RunDirError::Io`].
pub fn remove_file_if_there(path: &Path) -> Result<(), RunDirError> {
    match fs::remove_file(path) {
        // A file that cannot be removed because the file system is read-only does no harm to live processes.
        Err(error)
            if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ReadOnlyFilesystem) =>
        {
            Err(io_error("removal", path)(error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Opens a regular file of a directory that others write to. Anything else is refused: no link is followed, and the call does
/// not wait for the other end of a pipe.
///
/// # Errors
/// The system's error; or an error that says that the path names no regular file.
pub fn open_regular(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(no_file()) }
}

/// Opens a regular file to read it, as [`open_regular`].
///
/// # Errors
/// The system's error.
pub fn open_to_read(path: &Path) -> io::Result<File> {
    open_regular(OpenOptions::new().read(true), path)
}

/// Opens a file for locks, and makes it if it is missing. On a read-only file system the file is opened to read, which is
/// enough for locks.
///
/// # Errors
/// The system's error.
pub fn open_lock_file(path: &Path) -> io::Result<File> {
    let open = |writes: bool| {
        let mut options = OpenOptions::new();
        options.read(true).write(writes).create(writes).truncate(false).mode(0o600);
        open_regular(&mut options, path)
    };
    match open(true) {
        Err(error) if error.kind() == ErrorKind::ReadOnlyFilesystem => open(false),
        file => file,
    }
}

/// Does `file` still have the name `path`? Cleaners of old files remove the name, and the next process makes another file.
pub fn is_still_named(file: &File, path: &Path) -> bool {
    is_same(file, fs::symlink_metadata(path))
}

/// Is `file` the same file as `found`?
pub fn is_same(file: &File, found: io::Result<fs::Metadata>) -> bool {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let found = found.map(identity).ok();
    found.is_some() && file.metadata().map(identity).ok() == found
}

/// Opens a regular file to read and write it, as [`open_regular`]. None if the file is missing.
///
/// # Errors
/// [`RunDirError::Io`].
pub fn open_if_there(path: &Path) -> Result<Option<File>, RunDirError> {
    match open_regular(OpenOptions::new().read(true).write(true), path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(io_error("opening", path)),
    }
}

/// Does any process participate in `file`, a file of counts?
///
/// # Errors
/// The system's error.
pub fn is_in_use(file: &File) -> nix::Result<bool> {
    is_set(file, PARTS)
}

/// Removes the file of counts in `dir`, unless a process participates in it.
pub(super) fn remove_counts(dir: &Path) -> Result<(), RunDirError> {
    let path = dir.join(COUNTS_NAME);
    let Some(file) = open_if_there(&path)? else { return Ok(()) };
    let remove = || -> io::Result<()> {
        let _changing = StretchLock::take(&file, CHANGING)?;
        if !is_in_use(&file)? && is_still_named(&file, &path) {
            fs::remove_file(&path)?;
        }
        Ok(())
    };
    remove().map_err(io_error("removal", &path))
}
