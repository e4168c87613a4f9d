//! The directory for saved contents. It is private to the user, and the same for all writing processes.
//!
//! Files are named relative to the open directory; its path is not used again. A file has a name that ends in `.part` until it is
//! complete.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::sys::statvfs::fstatvfs;
use nix::unistd::geteuid;
use vmm_pool::check_file_length;

use crate::map::TENANT_MAP;
use sublet_protocol::saving::{DirName, SaveDirError};

/// The beginning of the names of a process's files.
pub(super) const FILE_PREFIX: &str = "process-";

/// The end of the name of an incomplete file.
pub const PART_SUFFIX: &str = ".part";

/// The open directory.
#[derive(Debug)]
pub(super) struct SaveDir {
    dir: File,
    path: PathBuf,
    /// Was the directory created for this save?
    is_new: bool,
}

impl SaveDir {
    /// Opens the directory at `path`, and creates it if need be. It must be empty.
    pub(super) fn prepare(path: &Path) -> Result<Self, SaveDirError> {
        let failed =
            |operation, source| SaveDirError::Io { operation, path: path.to_owned(), source };
        let path = std::path::absolute(path).map_err(|source| failed("using", source))?;
        let is_new = match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            Err(error) => return Err(failed("making", error)),
        };
        let dir = Self { is_new, ..Self::open_path(path)? };
        if !dir.names()?.is_empty() {
            return Err(SaveDirError::NotEmpty { path: dir.path });
        }
        dir.check_private()?;
        Ok(dir)
    }

    /// Opens the directory that another process has named.
    pub(super) fn open(name: &DirName) -> Result<Self, SaveDirError> {
        let path = PathBuf::from(OsStr::from_bytes(&name.path));
        if !path.is_absolute() {
            let source = ErrorKind::InvalidInput.into();
            return Err(SaveDirError::Io { operation: "opening", path, source });
        }
        let dir = Self::open_path(path)?;
        dir.check_private()?;
        if dir.name()? == *name { Ok(dir) } else { Err(SaveDirError::Elsewhere { path: dir.path }) }
    }

    fn open_path(path: PathBuf) -> Result<Self, SaveDirError> {
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
        match OpenOptions::new().read(true).custom_flags(flags).open(&path) {
            Ok(dir) => Ok(Self { dir, path, is_new: false }),
            Err(source) => Err(SaveDirError::Io { operation: "opening", path, source }),
        }
    }

    fn check_private(&self) -> Result<(), SaveDirError> {
        let status = self.status()?;
        let (own_uid, mode) = (geteuid().as_raw(), status.mode() & 0o777);
        let problem = if status.uid() != own_uid {
            format!("belongs to user {}, not {own_uid}: name another", status.uid())
        } else if mode & 0o077 != 0 {
            format!("is open to others (mode {mode:03o}): chmod 700 {}", self.path.display())
        } else {
            return Ok(());
        };
        Err(SaveDirError::NotPrivate { path: self.path.clone(), problem })
    }

    /// The path of the directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name for [`SaveDir::open`] in another process.
    pub(super) fn name(&self) -> Result<DirName, SaveDirError> {
        let status = self.status()?;
        let path = self.path.clone().into_os_string().into_vec();
        Ok(DirName { path, device: status.dev(), inode: status.ino() })
    }

    fn status(&self) -> Result<Metadata, SaveDirError> {
        self.dir.metadata().map_err(|error| self.failed("looking at", "", error))
    }

    /// Returns the free bytes of its filesystem.
    pub(super) fn free_bytes(&self) -> Result<u64, SaveDirError> {
        let space = fstatvfs(&self.dir);
        let space = space.map_err(|errno| self.failed("looking at", "", errno.into()))?;
        Ok(space.blocks_available().saturating_mul(space.fragment_size()))
    }

    /// Returns a path of the entry `name`, valid in this process.
    fn inside(&self, name: impl AsRef<Path>) -> PathBuf {
        Path::new("/proc/self/fd").join(self.dir.as_raw_fd().to_string()).join(name)
    }

    /// Returns the names of all entries.
    pub(super) fn names(&self) -> Result<Vec<OsString>, SaveDirError> {
        let entries = fs::read_dir(self.inside("")).and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.file_name())).collect()
        });
        entries.map_err(|error| self.failed("reading", "", error))
    }

    /// Creates a file that will be called `name` once it is complete.
    pub(super) fn create_part(&self, name: &str) -> Result<File, SaveDirError> {
        let mut new = OpenOptions::new();
        let made = new.read(true).write(true).create_new(true).mode(0o600);
        let made = made.open(self.inside(part_of(name)));
        made.map_err(|error| self.failed("making", name, error))
    }

    /// Gives the complete file its name `name`.
    pub(super) fn finish_part(&self, name: &str) -> Result<(), SaveDirError> {
        let named = fs::rename(self.inside(part_of(name)), self.inside(name));
        let named = named.and_then(|()| match self.dir.sync_all() {
            // Some filesystems have nothing to do for a directory.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTSUP)) => {
                Ok(())
            }
            synced => synced,
        });
        named.map_err(|error| self.failed("naming", name, error))
    }

    /// Writes a small, complete file.
    pub(super) fn write_whole(&self, name: &str, bytes: &[u8]) -> Result<(), SaveDirError> {
        let failed = |source| self.failed("writing", name, source);
        check_file_length(bytes.len() as u64).map_err(failed)?;
        let mut file = self.create_part(name)?;
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)?;
        self.finish_part(name)
    }

    /// Removes our files whose names `choose` picks.
    pub(super) fn remove_all(&self, choose: impl Fn(&str) -> bool) {
        let names = self.names().unwrap_or_default();
        let ours = |name: &&str| name.starts_with(FILE_PREFIX) || name.starts_with(TENANT_MAP);
        let names = names.iter().filter_map(|name| name.to_str()).filter(ours);
        for name in names.filter(|name| choose(name)) {
            if let Err(error) = fs::remove_file(self.inside(name)) {
                tracing::warn!(%error, name, "a file stays");
            }
        }
    }

    /// Removes all our files, and the directory itself if it was created for this save.
    pub(super) fn undo(&self) {
        self.remove_all(|_| true);
        if self.is_new
            && let Err(error) = fs::remove_dir(&self.path)
        {
            tracing::warn!(%error, "a directory stays");
        }
    }

    fn failed(&self, operation: &'static str, name: &str, source: io::Error) -> SaveDirError {
        let path = if name.is_empty() { self.path.clone() } else { self.path.join(name) };
        SaveDirError::Io { operation, path, source }
    }
}

fn part_of(name: &str) -> String {
    format!("{name}{PART_SUFFIX}")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    /// It was private when it was prepared.
    #[test]
    fn a_directory_that_was_opened_to_others_meanwhile_is_written_to_by_nobody() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("saved");
        let name = SaveDir::prepare(&path).unwrap().name().unwrap();
        SaveDir::open(&name).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        let error = SaveDir::open(&name).unwrap_err();
        assert!(matches!(error, SaveDirError::NotPrivate { .. }), "{error}");
    }

    #[test]
    fn a_directory_is_made_for_us_alone_and_goes_with_what_is_in_it() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("saved");
        let dir = SaveDir::prepare(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        dir.write_whole("tenant.json", b"{}").unwrap();
        assert_eq!(fs::read(path.join("tenant.json")).unwrap(), b"{}");
        assert_eq!(
            fs::metadata(path.join("tenant.json")).unwrap().permissions().mode() & 0o777,
            0o600
        );
        drop(dir.create_part("process-1.bin").unwrap());
        assert!(path.join("process-1.bin.part").exists());
        assert!(dir.create_part("process-1.bin").is_err(), "never over another's file");
        dir.undo();
        assert!(!path.exists());
        let dir = SaveDir::prepare(&path).unwrap();
        fs::write(path.join("notes"), "").unwrap();
        dir.undo();
        assert!(path.join("notes").exists(), "it is not ours");
    }

    #[test]
    fn what_is_not_empty_not_private_or_no_directory_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let chmod = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        let path = base.path().join("saved");
        fs::create_dir(&path).unwrap();
        chmod(&path, 0o755);
        let error = SaveDir::prepare(&path).unwrap_err().to_string();
        assert!(error.contains("open to others (mode 755): chmod 700"), "{error}");
        chmod(&path, 0o700);
        let dir = SaveDir::prepare(&path).unwrap();
        dir.undo();
        assert!(path.exists(), "it was there before");
        fs::write(path.join("old"), "").unwrap();
        let error = SaveDir::prepare(&path).unwrap_err().to_string();
        assert!(error.contains("is not empty"), "{error}");
        assert!(SaveDir::prepare(&path.join("old")).is_err());
        assert!(SaveDir::prepare(&base.path().join("not/there")).is_err());
        let link = base.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(SaveDir::prepare(&link).is_err());
    }

    #[test]
    fn a_path_that_leads_elsewhere_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("saved");
        let name = SaveDir::prepare(&path).unwrap().name().unwrap();
        SaveDir::open(&name).unwrap();
        // Two that exist simultaneously have different numbers.
        fs::rename(&path, base.path().join("moved")).unwrap();
        SaveDir::prepare(&path).unwrap();
        assert!(matches!(SaveDir::open(&name), Err(SaveDirError::Elsewhere { .. })));
        let relative = DirName { path: b"saved".to_vec(), ..name };
        assert!(SaveDir::open(&relative).is_err());
    }

    #[test]
    fn a_file_has_its_name_only_when_it_is_whole() {
        let base = tempfile::tempdir().unwrap();
        let dir = SaveDir::prepare(&base.path().join("saved")).unwrap();
        drop(dir.create_part("process-1.bin").unwrap());
        dir.finish_part("process-1.bin").unwrap();
        assert_eq!(dir.names().unwrap(), ["process-1.bin"]);
        dir.remove_all(|name| name.starts_with("process-1."));
        assert!(dir.names().unwrap().is_empty());
        assert!(dir.free_bytes().unwrap() > 0);
    }
}
