//! The places where the processes of a user meet: the run directory, tenants' directories and the coordinator's lock.
//!
//! ```text
//! <run>/                        0700, ours alone
//!   <tenant>/                   0700, ours alone
//!     <member id, 16 hex>.sock  one listening socket for each process
//!     coordinator.lock          held while a process pauses or resumes the tenant
//!     budget                    the memory that its processes hold together, if they have budgets
//!   .turns/                     0700, ours alone; no tenant has such a name
//! ```
//!
//! A socket gets its final name only once it listens (see [`crate::transport::Listener::bind`]). So a socket that refuses a
//! connection belongs to a dead process and may be removed. No other user can replace these directories
//! (`run_dir/trusted_path.rs` says how that is checked). Nothing here reads the environment: the caller does, once.

mod error;
pub mod files;
mod locks;
mod sockets;
pub mod trusted_path;

pub use sockets::{NAME_LOOK_EVERY, NAMES_AGAIN_WITHIN};

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::unistd::geteuid;

pub use error::RunDirError;
use files::{
    entry_names, io_error, is_still_named, open_lock_file, open_to_read, remove_file_if_there,
    wait_for_lock,
};

use crate::identity::{MemberId, TenantName};
use crate::transport::{BINDING_EXTENSION, Connection, Listener, TransportError, has_ended};

/// Longest path of a Unix socket, in bytes (`sun_path` less its closing zero).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The most processes of one tenant, each with a socket in the directory.
pub const MEMBERS_MAX: usize = 1024;

/// Name of the environment variable that names the run directory.
pub const RUN_DIR_VARIABLE: &str = "SUBLET_RUN_DIR";

const LOCK_NAME: &str = "coordinator.lock";
/// The extension of the sockets of processes.
pub const SOCKET_EXTENSION: &str = "sock";
/// A half-bound name older than this was left behind by a process that died between bind and rename.
const BINDING_AGE_MAX: Duration = Duration::from_mins(1);
const LISTEN_ATTEMPTS_MAX: u32 = 8;
/// The time limit for connecting to all processes of a tenant without a request.
const PIDS_TIMEOUT: Duration = Duration::from_millis(500);

/// The directory that holds one directory for each tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
}

/// The directory of one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantDir {
    path: PathBuf,
    tenant: TenantName,
}

/// The socket of one process of a tenant; the process may be dead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSocket {
    /// The member that it belongs to.
    pub id: MemberId,
    /// Its path.
    pub path: PathBuf,
}

/// The right to pause or resume a tenant, held until dropped. A process that dies gives it up.
#[derive(Debug)]
pub struct CoordinatorLock {
    lock: locks::FileLock,
    path: PathBuf,
}

impl CoordinatorLock {
    /// Does the lock's file still have the name that others look for? Cleaners of old files remove it, and then the next
    /// process makes another file.
    pub fn is_named(&self) -> bool {
        self.lock.file().is_some_and(|file| is_still_named(file, &self.path))
    }
}

impl RunDir {
    /// Opens, and creates if necessary, the run directory: `explicit` (the value of [`RUN_DIR_VARIABLE`]), else `sublet` in
    /// `xdg_runtime_dir` where that exists, else `/tmp/sublet-<uid>`. Empty values count as absent.
    ///
    /// # Errors
    /// [`RunDirError::NotOurs`] when it is a link, another user's, or open to others, or in a place where others could replace
    /// it; [`RunDirError::Io`] when it cannot be created.
    pub fn open(
        explicit: Option<PathBuf>,
        xdg_runtime_dir: Option<PathBuf>,
    ) -> Result<Self, RunDirError> {
        let path = Self::choose(explicit, xdg_runtime_dir);
        // Processes of one tenant may have different working directories.
        let path = std::path::absolute(&path).map_err(io_error("use", &path))?;
        trusted_path::ensure(&path)?;
        Ok(Self { path })
    }

    /// The path that [`RunDir::open`] would use; touches no directory.
    pub fn choose(explicit: Option<PathBuf>, xdg_runtime_dir: Option<PathBuf>) -> PathBuf {
        let given = |path: &PathBuf| !path.as_os_str().is_empty();
        if let Some(path) = explicit.filter(given) {
            return path;
        }
        match xdg_runtime_dir.filter(given) {
            Some(base) if base.is_dir() => base.join("sublet"),
            Some(_) | None => PathBuf::from(format!("/tmp/sublet-{}", geteuid())),
        }
    }

    /// Returns the path of the run directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of `tenant`, created if need be.
    ///
    /// # Errors
    /// As [`RunDir::open`].
    pub fn tenant(&self, tenant: &TenantName) -> Result<TenantDir, RunDirError> {
        let path = self.path.join(tenant.as_str());
        trusted_path::ensure(&path)?;
        Ok(TenantDir { path, tenant: tenant.clone() })
    }

    /// The directory of `tenant`, when there is one.
    ///
    /// # Errors
    /// As [`RunDir::open`].
    pub fn existing_tenant(&self, tenant: &TenantName) -> Result<Option<TenantDir>, RunDirError> {
        let path = self.path.join(tenant.as_str());
        match trusted_path::check(&path) {
            Ok(()) => Ok(Some(TenantDir { path, tenant: tenant.clone() })),
            Err(RunDirError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All tenants that have a directory, by name; all their processes may be dead.
    ///
    /// # Errors
    /// [`RunDirError::Io`] when the directory cannot be read.
    pub fn tenants(&self) -> Result<Vec<TenantName>, RunDirError> {
        let mut tenants: Vec<_> = entry_names(&self.path)?
            .iter()
            .filter(|name| self.path.join(name).is_dir())
            .filter_map(|name| TenantName::new(name).ok())
            .collect();
        tenants.sort();
        Ok(tenants)
    }

    /// The tenants that have a process, in order of their names.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub fn live_tenants(&self) -> Result<Vec<TenantName>, RunDirError> {
        let mut tenants = self.tenants()?;
        tenants.retain(|name| {
            let dir = self.existing_tenant(name).ok().flatten();
            let members = dir.and_then(|dir| dir.sockets().ok()).unwrap_or_default();
            members.iter().any(|member| !has_ended(&member.path))
        });
        Ok(tenants)
    }

    /// Opens the socket of member `id` in the directory of `tenant`, created if need be.
    ///
    /// Tries again if another process removes the empty directory just before the socket is in it.
    ///
    /// # Errors
    /// As [`RunDir::tenant`] and [`TenantDir::socket_path`]; [`RunDirError::Listen`] otherwise.
    pub fn listen(
        &self,
        tenant: &TenantName,
        id: MemberId,
    ) -> Result<(TenantDir, Listener), RunDirError> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let dir = self.tenant(tenant)?;
            match Listener::bind(&dir.socket_path(id)?) {
                Ok(listener) => {
                    dir.sweep_behind(id);
                    return Ok((dir, listener));
                }
                Err(TransportError::Bind { source, .. })
                    if source.kind() == ErrorKind::NotFound && attempt < LISTEN_ATTEMPTS_MAX => {}
                Err(error) => return Err(RunDirError::Listen(error)),
            }
        }
    }

    /// As [`RunDir::listen`], after the name of an existing socket, and perhaps this directory, was removed. logind removes a
    /// user's directory at the last logout, and cleaners of `/tmp` remove old files.
    ///
    /// # Errors
    /// As [`RunDir::open`] and [`RunDir::listen`].
    pub fn listen_again(&self, tenant: &TenantName, id: MemberId) -> Result<Listener, RunDirError> {
        trusted_path::ensure(&self.path)?;
        // Whatever has the name now is in a directory that is ours alone, and is not our socket.
        remove_file_if_there(&self.tenant(tenant)?.socket_path(id)?)?;
        let (dir, listener) = self.listen(tenant, id)?;
        dir.note_names_again()?;
        Ok(listener)
    }
}

impl TenantDir {
    /// Returns the path of the tenant's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tenant that it belongs to.
    pub fn tenant(&self) -> &TenantName {
        &self.tenant
    }

    /// Returns the path that the socket of member `id` belongs at.
    ///
    /// # Errors
    /// [`RunDirError::PathTooLong`].
    pub fn socket_path(&self, id: MemberId) -> Result<PathBuf, RunDirError> {
        let path = self.path.join(format!("{id}.{SOCKET_EXTENSION}"));
        let length = path.as_os_str().as_bytes().len();
        if length > SOCKET_PATH_BYTES_MAX {
            return Err(RunDirError::PathTooLong { path, length });
        }
        Ok(path)
    }

    /// Does member `id` have a socket here? Its process may be dead.
    pub fn has_member(&self, id: MemberId) -> bool {
        let path = self.socket_path(id);
        path.is_ok_and(|path| {
            fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
        })
    }

    /// The processes that have a socket here, by their ids in our pid namespace. Left out are processes without an id there,
    /// and those that have ended or accept no connection for a moment.
    pub fn pids(&self) -> BTreeSet<u32> {
        let deadline = Instant::now() + PIDS_TIMEOUT;
        let pid = |member: &MemberSocket| {
            Connection::connect(&member.path, deadline).ok().and_then(|found| found.peer().pid())
        };
        self.members().unwrap_or_default().iter().filter_map(pid).collect()
    }

    /// Removes sockets whose process is dead, then the directory if no socket is left in it and nobody coordinates in it.
    /// Returns how many sockets were removed. Does not block: the kernel accepts or refuses a local connection immediately.
    ///
    /// # Errors
    /// [`RunDirError::Io`] when something cannot be removed.
    pub fn remove_stale(&self) -> Result<usize, RunDirError> {
        let removed = self.remove_dead_sockets()?;
        let path = self.path.join(LOCK_NAME);
        // The file is made if it does not exist: a file that another process makes and locks meanwhile must not be removed.
        let file = match open_lock_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(removed),
            file => file.map_err(io_error("opening", &path))?,
        };
        if file.try_lock().is_ok() && is_still_named(&file, &path) {
            self.remove_if_empty()?;
        }
        Ok(removed)
    }

    /// As [`TenantDir::remove_stale`], for the process that holds the tenant's lock.
    ///
    /// # Errors
    /// [`RunDirError::Io`] when something cannot be removed.
    pub fn remove_stale_holding(&self, _lock: &CoordinatorLock) -> Result<usize, RunDirError> {
        let removed = self.remove_dead_sockets()?;
        self.remove_if_empty()?;
        Ok(removed)
    }

    /// Takes the coordinator's lock, waiting for its holder until `deadline`. Processes that would share the lock wait
    /// meanwhile.
    ///
    /// # Errors
    /// [`RunDirError::Locked`] with the holder's process id; [`RunDirError::Io`].
    pub fn lock(&self, deadline: Instant) -> Result<CoordinatorLock, RunDirError> {
        let _wish = self.want_alone();
        self.lock_with(deadline, fs::File::try_lock)
    }

    /// Announces that this process wants the coordinator's lock alone. Until the result is dropped, no further process shares
    /// the lock.
    pub fn want_alone(&self) -> Option<locks::Wish> {
        open_lock_file(&self.path.join(LOCK_NAME)).ok().and_then(locks::Wish::new)
    }

    /// Takes the coordinator's lock together with other callers of this function, each for one process alone. Until
    /// `let_pass_until`, processes that want the lock alone go first: otherwise they would wait as long as others come and go.
    /// After that they do not, since one of them may be stopped.
    ///
    /// # Errors
    /// As [`TenantDir::lock`].
    pub fn lock_shared(
        &self,
        let_pass_until: Instant,
        deadline: Instant,
    ) -> Result<CoordinatorLock, RunDirError> {
        let share = |file: &File| {
            if Instant::now() < let_pass_until && locks::Wish::is_on(file) {
                return Err(fs::TryLockError::WouldBlock);
            }
            file.try_lock_shared()
        };
        self.lock_with(deadline, share)
    }

    /// Returns the processes that hold the coordinator's lock now, as [`RunDirError::Locked`] would name them. Takes no
    /// lock, and does not block.
    pub fn lock_holders(&self) -> Vec<u32> {
        // No process holds a lock on a missing file, and an unreadable file names no process.
        open_to_read(&self.path.join(LOCK_NAME))
            .map_or_else(|_| Vec::new(), |file| locks::holders(&file))
    }

    fn lock_with(
        &self,
        deadline: Instant,
        try_lock: impl Fn(&File) -> Result<(), fs::TryLockError>,
    ) -> Result<CoordinatorLock, RunDirError> {
        let path = self.path.join(LOCK_NAME);
        let open = || loop {
            match open_lock_file(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    trusted_path::ensure(&self.path)?;
                }
                file => return file.map_err(io_error("opening", &path)),
            }
        };
        let locked = |holder_pids, waited_ms| RunDirError::Locked {
            tenant: self.tenant.clone(),
            holder_pids,
            waited_ms,
        };
        let lock = wait_for_lock(&path, deadline, open, try_lock, locked)?;
        // Cleaners decide by the age of the file.
        if let Some(Err(error)) = lock.file().map(|file| file.set_modified(SystemTime::now())) {
            tracing::debug!(%error, "the lock's file keeps its age");
        }
        Ok(CoordinatorLock { lock, path })
    }

    fn remove_abandoned_bindings(&self) -> Result<(), RunDirError> {
        let suffix = format!(".{BINDING_EXTENSION}");
        let names = match entry_names(&self.path) {
            Err(RunDirError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                return Ok(());
            }
            names => names?,
        };
        for name in names.iter().filter(|name| name.ends_with(&suffix)) {
            let path = self.path.join(name);
            let age = fs::symlink_metadata(&path)
                .and_then(|metadata| metadata.modified())
                .ok()
                .and_then(|modified| SystemTime::now().duration_since(modified).ok());
            if age.is_some_and(|age| age > BINDING_AGE_MAX) {
                remove_file_if_there(&path)?;
            }
        }
        Ok(())
    }

    /// Removes the directory unless it contains a socket. The caller excludes coordinators.
    fn remove_if_empty(&self) -> Result<(), RunDirError> {
        if !self.members()?.is_empty() || !self.path.is_dir() {
            return Ok(());
        }
        files::remove_counts(&self.path)?;
        remove_file_if_there(&self.path.join(LOCK_NAME))?;
        self.remove_names_note()?;
        match fs::remove_dir(&self.path) {
            Err(error)
                if !matches!(
                    error.kind(),
                    ErrorKind::NotFound
                        | ErrorKind::DirectoryNotEmpty
                        | ErrorKind::ReadOnlyFilesystem
                ) =>
            {
                Err(io_error("removal", &self.path)(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

/// Makes the calling thread sleep for `duration`.
#[expect(
    clippy::disallowed_methods,
    reason = "the kernel offers no file lock with a deadline, and no event for its release"
)]
pub fn pause_thread(duration: Duration) {
    std::thread::sleep(duration);
}

#[cfg(test)]
mod tests;
