//! The directory that saved contents are written to: ours alone, and the same one for all who write.
//!
//! Names are used only inside the open directory, never the path again. A file is written under a name that ends in
//! `.part` and gets its own when it is whole.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat, renameat};
use nix::sys::stat::{FileStat, Mode, fstat};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{UnlinkatFlags, fsync, geteuid, mkdir, unlinkat};
use serde::{Deserialize, Serialize};
use vmm_pool::check_file_length;

use super::map::TENANT_MAP;

/// The beginning of the names of a process's files.
pub(crate) const FILE_PREFIX: &str = "process-";

/// The end of the name of a file that is not whole yet.
pub const PART_SUFFIX: &str = ".part";

/// A directory, as one process names it to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirName {
    /// Its path, absolute, in bytes.
    pub path: Vec<u8>,
    /// The filesystem that it is on, as the namer sees it.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
}

/// Why a directory cannot be used.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveDirError {
    /// The system refused.
    #[error("{operation} {} failed", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Something is in it.
    #[error("{} is not empty: give an empty or a new directory", path.display())]
    NotEmpty { path: PathBuf },
    /// Others could read or replace what is written there.
    #[error("{} {problem}", path.display())]
    NotPrivate {
        path: PathBuf,
        /// The problem, and what to do.
        problem: String,
    },
    /// The path leads elsewhere here.
    #[error(
        "{} is another directory for this process than for the one that asks: they see different filesystems, as \
         in containers; name one that both see",
        path.display()
    )]
    Elsewhere { path: PathBuf },
}

/// The open directory.
#[derive(Debug)]
pub(crate) struct SaveDir {
    fd: OwnedFd,
    path: PathBuf,
    /// Was it made for this?
    is_new: bool,
}

impl SaveDir {
    /// The directory at `path`, which is made when it is not there. It must be empty.
    pub(crate) fn prepare(path: &Path) -> Result<Self, SaveDirError> {
        let failed =
            |operation, source| SaveDirError::Io { operation, path: path.to_owned(), source };
        let path = std::path::absolute(path).map_err(|source| failed("using", source))?;
        let is_new = match mkdir(&path, Mode::S_IRWXU) {
            Ok(()) => true,
            Err(Errno::EEXIST) => false,
            Err(errno) => return Err(failed("making", errno.into())),
        };
        let dir = Self { is_new, ..Self::open_path(&path)? };
        if !dir.names()?.is_empty() {
            return Err(SaveDirError::NotEmpty { path });
        }
        dir.check_private()?;
        Ok(dir)
    }

    /// The directory that another process has named.
    pub(crate) fn open(name: &DirName) -> Result<Self, SaveDirError> {
        let path = PathBuf::from(OsStr::from_bytes(&name.path));
        if !path.is_absolute() {
            let source = Errno::EINVAL.into();
            return Err(SaveDirError::Io { operation: "opening", path, source });
        }
        let dir = Self::open_path(&path)?;
        dir.check_private()?;
        let status = dir.status()?;
        if (status.st_dev, status.st_ino) == (name.device, name.inode) {
            Ok(dir)
        } else {
            Err(SaveDirError::Elsewhere { path })
        }
    }

    fn open_path(path: &Path) -> Result<Self, SaveDirError> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let fd = open(path, flags, Mode::empty()).map_err(|errno| SaveDirError::Io {
            operation: "opening",
            path: path.to_owned(),
            source: errno.into(),
        })?;
        Ok(Self { fd, path: path.to_owned(), is_new: false })
    }

    fn check_private(&self) -> Result<(), SaveDirError> {
        let status = self.status()?;
        let own_uid = geteuid().as_raw();
        let mode = status.st_mode & 0o777;
        let problem = if status.st_uid != own_uid {
            format!("belongs to user {}, not {own_uid}: name another", status.st_uid)
        } else if mode & 0o077 != 0 {
            format!("is open to others (mode {mode:03o}): chmod 700 {}", self.path.display())
        } else {
            return Ok(());
        };
        Err(SaveDirError::NotPrivate { path: self.path.clone(), problem })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// For [`SaveDir::open`].
    pub(crate) fn name(&self) -> Result<DirName, SaveDirError> {
        let status = self.status()?;
        let path = self.path.clone().into_os_string().into_vec();
        Ok(DirName { path, device: status.st_dev, inode: status.st_ino })
    }

    fn status(&self) -> Result<FileStat, SaveDirError> {
        fstat(&self.fd).map_err(|errno| self.failed("looking at", "", errno.into()))
    }

    /// Bytes that its filesystem has free.
    pub(crate) fn free_bytes(&self) -> Result<u64, SaveDirError> {
        let space =
            fstatvfs(&self.fd).map_err(|errno| self.failed("looking at", "", errno.into()))?;
        Ok(space.blocks_available().saturating_mul(space.fragment_size()))
    }

    /// The names of all that is in it.
    pub(crate) fn names(&self) -> Result<Vec<Vec<u8>>, SaveDirError> {
        let failed = |errno: Errno| self.failed("reading", "", errno.into());
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        // A descriptor of its own: reading moves its place.
        let fd = openat(&self.fd, ".", flags, Mode::empty()).map_err(failed)?;
        let mut names = Vec::new();
        for entry in Dir::from_fd(fd).map_err(failed)?.iter() {
            let name = entry.map_err(failed)?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// A new file that will be called `name` once it is whole.
    pub(crate) fn create_part(&self, name: &str) -> Result<File, SaveDirError> {
        let flags =
            OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let made = openat(&self.fd, part_of(name).as_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR);
        made.map(File::from).map_err(|errno| self.failed("making", name, errno.into()))
    }

    /// The file that was made for `name` is whole.
    pub(crate) fn finish_part(&self, name: &str) -> Result<(), SaveDirError> {
        let failed = |errno: Errno| self.failed("naming", name, errno.into());
        renameat(&self.fd, part_of(name).as_str(), &self.fd, name).map_err(failed)?;
        match fsync(&self.fd) {
            // Some filesystems have nothing to do for a directory.
            Ok(()) | Err(Errno::EINVAL | Errno::ENOTSUP) => Ok(()),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Writes a small file as a whole.
    pub(crate) fn write_whole(&self, name: &str, bytes: &[u8]) -> Result<(), SaveDirError> {
        let failed = |source| self.failed("writing", name, source);
        check_file_length(bytes.len() as u64).map_err(failed)?;
        let mut file = self.create_part(name)?;
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)?;
        self.finish_part(name)
    }

    /// Removes what `name` has become so far: the whole file, or the part of it.
    pub(crate) fn remove(&self, name: &str) {
        for name in [part_of(name).as_str(), name] {
            match unlinkat(&self.fd, name, UnlinkatFlags::NoRemoveDir) {
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(error) => tracing::warn!(%error, name, "a file that is not whole stays"),
            }
        }
    }

    /// Removes those of our files in it whose names `choose` picks.
    pub(crate) fn remove_all(&self, choose: impl Fn(&[u8]) -> bool) {
        let ours = |name: &&Vec<u8>| is_ours(name) && choose(name);
        for name in self.names().unwrap_or_default().iter().filter(ours) {
            let removed = unlinkat(&self.fd, name.as_slice(), UnlinkatFlags::NoRemoveDir);
            if let Err(error) = removed {
                tracing::warn!(%error, "a file stays");
            }
        }
    }

    /// Nothing is to be kept: removes all that we have put into it, and itself when it was made for this.
    pub(crate) fn undo(&self) {
        self.remove_all(|_| true);
        if self.is_new
            && let Err(error) = std::fs::remove_dir(&self.path)
        {
            tracing::warn!(%error, "a directory stays");
        }
    }

    fn failed(&self, operation: &'static str, name: &str, source: io::Error) -> SaveDirError {
        let path = if name.is_empty() { self.path.clone() } else { self.path.join(name) };
        SaveDirError::Io { operation, path, source }
    }
}

fn is_ours(name: &[u8]) -> bool {
    name.starts_with(FILE_PREFIX.as_bytes()) || name.starts_with(TENANT_MAP.as_bytes())
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
        assert_eq!(dir.names().unwrap(), [b"process-1.bin".to_vec()]);
        dir.remove("process-1.bin");
        assert!(dir.names().unwrap().is_empty());
        assert!(dir.free_bytes().unwrap() > 0);
    }
}
