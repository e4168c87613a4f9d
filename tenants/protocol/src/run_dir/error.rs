//! The errors of a run directory.

use std::io;
use std::path::PathBuf;

use super::{MEMBERS_MAX, RUN_DIR_VARIABLE, SOCKET_PATH_BYTES_MAX, locks};
use crate::code::Code;
use crate::identity::TenantName;
use crate::transport::TransportError;

/// The operation of looking at a directory on the way to the run directory.
pub(super) const INSPECTION: &str = "inspection";

/// An error of a run directory.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunDirError {
    /// Another user could enter or replace the run directory. Nothing was changed. The message has the command that
    /// repairs it. Or set `SUBLET_RUN_DIR` to a directory that is yours alone.
    #[error(
        "{} {problem}; Sublet meets its processes only in a directory that is theirs alone: {next_step}, \
         or set {RUN_DIR_VARIABLE} to another",
        path.display()
    )]
    NotOurs { path: PathBuf, problem: String, next_step: String },
    /// The name of the run directory is too long for the sockets in it. Nothing was changed. Set a shorter
    /// `SUBLET_RUN_DIR`.
    #[error(
        "the socket path {} has {length} bytes, and Unix sockets take {SOCKET_PATH_BYTES_MAX}: \
         set {RUN_DIR_VARIABLE} to a shorter directory, such as /tmp/sublet",
        path.display()
    )]
    PathTooLong { path: PathBuf, length: usize },
    /// A tenant has at most 1,024 live processes. Nothing was changed. Run the job as several tenants.
    #[error(
        "{} holds sockets of more than {MEMBERS_MAX} live processes: run fewer processes in one tenant",
        path.display()
    )]
    TooManyMembers { path: PathBuf },
    /// Another command, or a rank in `ncclPause`, works on the tenant. The message has the process ids. Nothing was
    /// changed. Wait for that command, or end it; then try again.
    #[error(
        "tenant '{tenant}' is being paused or resumed by {}, and that did not end in {waited_ms} ms; wait for it, or \
         end it",
        locks::in_words(holder_pids)
    )]
    Locked {
        tenant: TenantName,
        /// The processes that hold the lock, as far as the kernel tells; several, if each acts for itself alone.
        holder_pids: Vec<u32>,
        waited_ms: u64,
    },
    /// A cleaner of old files removed the lock that this command held, so another command may have begun. Nothing was
    /// changed. Try again, and exclude the run directory from the cleaner.
    #[error(
        "the file of the lock on tenant '{tenant}' was removed, as cleaners of old files do; nothing was changed: try again"
    )]
    LockGone { tenant: TenantName },
    /// A cleaner of old files removed the lock on turns, so another process may decide about turns meanwhile. Sublet
    /// tries a switch again if it had not begun. Exclude the run directory from the cleaner.
    #[error(
        "the file of the lock on turns was removed, as cleaners of old files do; earlier decisions are not recorded"
    )]
    TurnsLockGone,
    /// One process switches tenants at a time, and another one does. The message has its process id. Nothing was
    /// changed. Wait for it, or end it.
    #[error(
        "tenants are being switched by {}, and that did not end in {waited_ms} ms; wait for it, or end it",
        locks::in_words(holder_pids)
    )]
    Switching {
        /// The processes that hold the lock, as far as the kernel tells.
        holder_pids: Vec<u32>,
        waited_ms: u64,
    },
    /// Two jobs on this machine have different versions of Sublet, and the files about turns differ. Nothing was
    /// changed. Run all jobs with one version, or end the process that the message names.
    #[error(
        "{} takes turns by version {found} of their files, and this process knows version {known}: run all tenants of a run \
         directory with one Sublet version, or end that process",
        locks::in_words(holder_pids)
    )]
    OtherTurns {
        /// The processes of the other version, as far as the kernel tells.
        holder_pids: Vec<u32>,
        /// Its version; 0 for Sublets that wrote none.
        found: u32,
        known: u32,
    },
    /// The process could not make its socket in the run directory. The reason follows. The job runs without Sublet,
    /// so it cannot be paused. Mend the reason, then start the job again.
    #[error("no socket for this process in the run directory")]
    Listen(#[source] TransportError),
    /// The file system refused a call. Its answer follows. Check that the directory above exists and is yours.
    #[error("{operation} of {} failed{}", path.display(), next_step(operation, source))]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The error for a file of Sublet's that is not a regular file.
pub(super) fn no_file() -> io::Error {
    io::Error::from_raw_os_error(libc::ENODEV)
}

/// Does the error say that the path names something other than a regular file?
pub fn is_no_file(error: &io::Error) -> bool {
    let codes = [libc::ENODEV, libc::ENXIO, libc::EISDIR, libc::ELOOP];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// Returns the remedy for a full file system or a missing directory.
fn next_step(operation: &str, error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOENT) if operation == INSPECTION => {
            " (create it, or set SUBLET_RUN_DIR to a directory that is there)"
        }
        Some(libc::ENOSPC | libc::EDQUOT) => {
            " (free space there, or set SUBLET_RUN_DIR to a directory on another file system)"
        }
        Some(libc::EROFS) => {
            " (make its file system writable again; `sublet resume` and `sublet ps` work without)"
        }
        _ if is_no_file(error) => " (it is no regular file, and none of Sublet's: remove it)",
        _ => "",
    }
}

impl From<&RunDirError> for Code {
    fn from(error: &RunDirError) -> Self {
        match error {
            RunDirError::Locked { .. }
            | RunDirError::LockGone { .. }
            | RunDirError::TurnsLockGone
            | RunDirError::Switching { .. } => Self::Busy,
            RunDirError::OtherTurns { .. } => Self::VersionsDiffer,
            RunDirError::NotOurs { .. }
            | RunDirError::PathTooLong { .. }
            | RunDirError::TooManyMembers { .. }
            | RunDirError::Listen(_)
            | RunDirError::Io { .. } => Self::RunDir,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_file_system_has_a_next_step_and_other_answers_stand_alone() {
        let of = |code: i32| {
            let source = io::Error::from_raw_os_error(code);
            RunDirError::Io { operation: "writing", path: "/run/x".into(), source }.to_string()
        };
        assert!(of(libc::ENOSPC).contains("free space there, or set SUBLET_RUN_DIR"));
        assert!(of(libc::EROFS).contains("writable again"));
        assert!(
            of(libc::EISDIR).contains("no regular file") && of(libc::ENXIO).contains("remove it")
        );
        assert_eq!(of(libc::EACCES), "writing of /run/x failed");
    }
}
