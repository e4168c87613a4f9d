//! Sockets of a tenant's processes. Sockets of killed processes stay until another process removes them.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use super::files::{LOCK_BACK_OFF_MAX, io_error, open_regular, remove_file_if_there};
use super::{MEMBERS_MAX, MemberSocket, RunDirError, SOCKET_EXTENSION, TenantDir, pause_thread};
use crate::identity::MemberId;
use crate::transport::{BINDING_EXTENSION, has_ended};

/// The number of other processes' sockets that a joining process looks at. It removes the sockets of dead ones.
const SWEPT_AT_JOIN: usize = 16;

/// The interval at which a process looks whether its socket still has its name.
pub const NAME_LOOK_EVERY: Duration = Duration::from_secs(3);

/// The file whose time says when a process last made its socket again after the directory was removed.
const NAMES_AGAIN_NAME: &str = "names-again";
/// The time after which all live processes have made their sockets again.
pub const NAMES_AGAIN_WITHIN: Duration = NAME_LOOK_EVERY.saturating_add(Duration::from_secs(1));

impl TenantDir {
    /// The sockets of all processes, live or dead, by member id. An empty list when the directory is gone. Does not block.
    ///
    /// Killed processes leave their sockets. If there are more than [`MEMBERS_MAX`] sockets, those of dead processes are
    /// removed first.
    ///
    /// # Errors
    /// [`RunDirError::Io`] when the directory cannot be read or changed; [`RunDirError::TooManyMembers`], if more processes
    /// live.
    pub fn members(&self) -> Result<Vec<MemberSocket>, RunDirError> {
        let mut members = self.sockets()?;
        if members.len() > MEMBERS_MAX {
            let mut live = Vec::new();
            for member in members {
                if !self.remove_if_dead(&member)? {
                    live.push(member);
                }
            }
            members = live;
        }
        if members.len() > MEMBERS_MAX {
            return Err(RunDirError::TooManyMembers { path: self.path.clone() });
        }
        Ok(members)
    }

    /// Removes sockets of dead processes among the few ids that follow `id`. If many processes die one after the other and no
    /// command looks, joining processes keep the number of sockets small. Does not block.
    pub(super) fn sweep_behind(&self, id: MemberId) {
        let Ok(mut sockets) = self.sockets() else { return };
        sockets.retain(|socket| socket.id != id);
        // Identities are random, so each joining process looks at other sockets.
        let next = sockets.partition_point(|socket| socket.id < id);
        sockets.rotate_left(next);
        for socket in sockets.iter().take(SWEPT_AT_JOIN) {
            if let Err(error) = self.remove_if_dead(socket) {
                tracing::debug!(%error, "a dead process's socket stays");
            }
        }
    }

    /// Tells commands that the directory was removed, and that other processes may have no socket in it yet.
    ///
    /// # Errors
    /// [`RunDirError`].
    pub fn note_names_again(&self) -> Result<(), RunDirError> {
        let path = self.path.join(NAMES_AGAIN_NAME);
        let mut options = fs::OpenOptions::new();
        let file = open_regular(options.write(true).create(true).truncate(true).mode(0o600), &path);
        file.and_then(|file| file.set_modified(SystemTime::now()))
            .map_err(io_error("making", &path))
    }

    pub(super) fn remove_names_note(&self) -> Result<(), RunDirError> {
        remove_file_if_there(&self.path.join(NAMES_AGAIN_NAME))
    }

    /// Waits until all processes have sockets again, if the directory or some sockets were removed a moment ago. A command that
    /// acts on some processes alone would leave a tenant in two states. Blocks for eight seconds at most, or until it
    /// `is_called_off`.
    pub fn until_names_are_back(&self, is_called_off: impl Fn() -> bool) {
        let deadline = Instant::now() + 2 * NAMES_AGAIN_WITHIN;
        let path = self.path.join(NAMES_AGAIN_NAME);
        let is_early = || {
            let modified = fs::symlink_metadata(&path).and_then(|found| found.modified()).ok();
            let since = modified.and_then(|modified| modified.elapsed().ok());
            since.is_some_and(|since| since < NAMES_AGAIN_WITHIN)
        };
        while (is_early() || self.somebody_lost_its_name())
            && !is_called_off()
            && Instant::now() < deadline
        {
            pause_thread(LOCK_BACK_OFF_MAX);
        }
    }

    /// Does a process listen whose socket was removed from here a moment ago? The kernel lists all listening sockets in this
    /// network namespace, by the path of their bind. This reads the list only if the directory has just changed.
    fn somebody_lost_its_name(&self) -> bool {
        let Ok(changed) = fs::metadata(&self.path).and_then(|found| found.modified()) else {
            return false;
        };
        // A clock that was set back gives no answer.
        if changed.elapsed().is_ok_and(|since| since > NAMES_AGAIN_WITHIN) {
            return false;
        }
        let list = fs::read("/proc/net/unix").unwrap_or_default();
        let listening = list.split(|byte| *byte == b'\n').filter_map(listens_at);
        let bound = listening.filter(|path| path.parent() == Some(&self.path));
        let binding = |path: &Path| path.extension() == Some(OsStr::new(BINDING_EXTENSION));
        bound
            .filter(|path| binding(path))
            .any(|path| path.with_extension(SOCKET_EXTENSION).symlink_metadata().is_err())
    }

    /// As [`TenantDir::members`], for any number of sockets.
    pub(super) fn sockets(&self) -> Result<Vec<MemberSocket>, RunDirError> {
        let entries = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(io_error("reading", &self.path))?,
        };
        let mut members = Vec::new();
        for entry in entries {
            let entry = entry.map_err(io_error("reading", &self.path))?;
            let name = entry.file_name();
            let Some(id) = name.to_str().and_then(parse_member_name) else {
                continue;
            };
            // A link of that name is not ours, and could lead to another tenant.
            if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
                members.push(MemberSocket { id, path: self.path.join(name) });
            }
        }
        members.sort_by_key(|member| member.id);
        Ok(members)
    }

    pub(super) fn remove_dead_sockets(&self) -> Result<usize, RunDirError> {
        let mut removed = 0;
        for member in self.sockets()? {
            removed += usize::from(self.remove_if_dead(&member)?);
        }
        self.remove_abandoned_bindings()?;
        Ok(removed)
    }

    /// Removes `member`'s socket when its process has ended. Returns whether it did.
    ///
    /// # Errors
    /// [`RunDirError::Io`] when it cannot be removed.
    pub fn remove_if_dead(&self, member: &MemberSocket) -> Result<bool, RunDirError> {
        let dead = has_ended(&member.path);
        if dead {
            self.remove_socket(member)?;
        }
        Ok(dead)
    }

    /// Removes `member`'s socket; the caller knows that its process is dead. A missing socket is no error.
    ///
    /// # Errors
    /// [`RunDirError::Io`] when it cannot be removed.
    pub fn remove_socket(&self, member: &MemberSocket) -> Result<(), RunDirError> {
        tracing::debug!(tenant = %self.tenant, member = %member.id, "removing a dead process's socket");
        remove_file_if_there(&member.path)
    }
}

/// The path that a listening socket was bound to, from a line of `/proc/net/unix`. The line's fields: number, references,
/// protocol, flags, type, state, inode, path.
fn listens_at(line: &[u8]) -> Option<&Path> {
    const ACCEPTS: &[u8] = b"00010000";
    let mut fields = line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    let flags = fields.nth(3)?;
    let path = line.iter().position(|byte| *byte == b'/')?;
    (flags == ACCEPTS).then(|| Path::new(OsStr::from_bytes(&line[path..])))
}

fn parse_member_name(name: &str) -> Option<MemberId> {
    let hex = name.strip_suffix(".sock")?;
    let plain =
        hex.len() == 16 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if !plain {
        return None;
    }
    u64::from_str_radix(hex, 16).ok().map(MemberId)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::run_dir::tests::{leave_dead_socket, name, run_dir};
    use crate::transport::Listener;

    #[test]
    fn a_command_waits_for_a_process_whose_socket_was_removed_until_it_has_it_again_or_ends() {
        let base = tempfile::tempdir().unwrap();
        let dir = run_dir(&base).tenant(&name("train")).unwrap();
        let path = dir.socket_path(MemberId(7)).unwrap();
        assert!(!dir.somebody_lost_its_name());
        let listener = Listener::bind(&path).unwrap();
        let connection = std::os::unix::net::UnixStream::connect(&path).unwrap();
        assert!(!dir.somebody_lost_its_name());
        fs::remove_file(&path).unwrap();
        assert!(dir.somebody_lost_its_name());
        let again = Listener::bind(&path).unwrap();
        assert!(!dir.somebody_lost_its_name());
        fs::remove_file(&path).unwrap();
        drop((listener, again));
        assert!(!dir.somebody_lost_its_name(), "a connection is nobody's name");
        drop(connection);
    }

    #[test]
    fn only_sockets_with_a_members_name_are_listed() {
        let base = tempfile::tempdir().unwrap();
        let run = run_dir(&base);
        let (dir, listener) = run.listen(&name("train"), MemberId(0xab)).unwrap();
        for stray in ["x.sock", "00000000000000AB.sock", "00000000000000ac.bind"] {
            fs::write(dir.path().join(stray), "").unwrap();
        }
        let members = dir.members().unwrap();
        assert_eq!(members.len(), 1);
        assert_eq!(members[0].id, MemberId(0xab));
        assert_eq!(members[0].path, listener.path());
    }

    #[test]
    fn dead_sockets_go_and_live_ones_stay() {
        let base = tempfile::tempdir().unwrap();
        let run = run_dir(&base);
        let (dir, listener) = run.listen(&name("train"), MemberId(1)).unwrap();
        let dead = leave_dead_socket(&dir, MemberId(2));
        assert_eq!(dir.remove_stale().unwrap(), 1);
        assert!(!dead.exists());
        assert!(listener.path().exists());
        drop(listener);
        assert_eq!(dir.remove_stale().unwrap(), 1);
        assert!(!dir.path().exists());
        assert_eq!(dir.remove_stale().unwrap(), 0);
        assert!(dir.members().unwrap().is_empty());
    }

    #[test]
    fn more_dead_sockets_than_a_tenant_may_have_processes_keep_nobody_from_the_living() {
        let base = tempfile::tempdir().unwrap();
        let run = run_dir(&base);
        let (dir, listener) = run.listen(&name("train"), MemberId(0)).unwrap();
        for number in 1..=MEMBERS_MAX as u64 + 1 {
            leave_dead_socket(&dir, MemberId(number));
        }
        assert_eq!(run.live_tenants().unwrap(), [name("train")]);
        let members = dir.members().unwrap();
        assert_eq!(members.len(), 1);
        assert_eq!(members[0].path, listener.path());
        for number in 1..=MEMBERS_MAX as u64 + 1 {
            leave_dead_socket(&dir, MemberId(number));
        }
        assert_eq!(dir.remove_stale().unwrap(), MEMBERS_MAX + 1);
        assert_eq!(dir.members().unwrap().len(), 1);
    }

    #[test]
    fn a_process_that_joins_removes_sockets_of_some_dead_ones_behind_its_own() {
        let base = tempfile::tempdir().unwrap();
        let run = run_dir(&base);
        let (dir, _listener) = run.listen(&name("train"), MemberId(7)).unwrap();
        let dead: Vec<PathBuf> =
            (0..40).filter(|id| *id != 7).map(|id| leave_dead_socket(&dir, MemberId(id))).collect();
        let (_dir, _second) = run.listen(&name("train"), MemberId(0x100)).unwrap();
        // The first behind the largest identity, of which one lives.
        let gone: Vec<bool> = dead.iter().map(|path| !path.exists()).collect();
        assert_eq!(gone.iter().filter(|gone| **gone).count(), SWEPT_AT_JOIN - 1);
        assert!(gone.iter().take(SWEPT_AT_JOIN - 1).all(|gone| *gone), "{gone:?}");
        let ids: Vec<MemberId> = dir.members().unwrap().iter().map(|member| member.id).collect();
        assert!(ids.contains(&MemberId(7)) && ids.contains(&MemberId(0x100)));
    }
}
