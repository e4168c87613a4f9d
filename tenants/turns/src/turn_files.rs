//! The files by which processes agree on turns.
//!
//! ```text
//! <run>/.turns.lock     held while somebody decides, and while tenants are switched. It is not among the others, which a
//!                       cleaner may remove meanwhile
//! <run>/.turns/
//!   <number>.claim      one for each that waits or is in its turn (`claims.rs`)
//!   claim.next          one that is just being made
//!   history             what has been, for the next decision
//!   silent              who did not answer, and is not asked again for a while
//!   log                 decisions, one a line; of bounded length
//! ```
//!
//! The holder of the lock changes all other files, with two exceptions: any process adds lines to the log, and a process changes
//! its own claim.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{Instant, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;
use vmm_pool::check_file_length;

use tenants::run_dir::files::{
    self, FileLock, io_error, is_still_named, open_lock_file, open_regular, open_to_read,
    remove_file_if_there, wait_for_lock,
};
use tenants::run_dir::{RunDir, RunDirError};

const NAME: &str = ".turns";
const LOCK_NAME: &str = ".turns.lock";
const LOG_BYTES_MAX: u64 = 256 << 10;
/// The largest file that is read. A larger one is none of ours.
const READ_BYTES_MAX: u64 = 16 << 20;

/// The directory of the files.
#[derive(Clone, Debug)]
pub(crate) struct TurnDir {
    pub(super) path: PathBuf,
}

/// The right to decide and to switch tenants, held until dropped. A process that dies gives it up.
#[derive(Debug)]
pub(crate) struct TurnLock(FileLock);

impl TurnDir {
    /// Returns the directory of the files. Creates it if need be, in a run directory that may have been removed.
    ///
    /// # Errors
    /// As [`RunDir::open`].
    pub(crate) fn make(run_dir: &RunDir) -> Result<Self, RunDirError> {
        files::ensure(run_dir.path())?;
        let path = run_dir.path().join(NAME);
        files::ensure(&path)?;
        Ok(Self { path })
    }

    /// Returns the directory of the files, if a process has taken turns.
    ///
    /// # Errors
    /// As [`RunDir::open`].
    pub(crate) fn existing(run_dir: &RunDir) -> Result<Option<Self>, RunDirError> {
        let path = run_dir.path().join(NAME);
        match files::check(&path) {
            Ok(()) => Ok(Some(Self { path })),
            Err(RunDirError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes the lock. Waits for its holder until `deadline`.
    ///
    /// # Errors
    /// [`RunDirError::Switching`]; [`RunDirError::Io`].
    pub(crate) fn lock(&self, deadline: Instant) -> Result<TurnLock, RunDirError> {
        let path = self.path.with_file_name(LOCK_NAME);
        let open = || open_lock_file(&path).map_err(io_error("opening", &path));
        let locked = |holder_pids, waited_ms| RunDirError::Switching { holder_pids, waited_ms };
        wait_for_lock(&path, deadline, open, File::try_lock, locked).map(TurnLock)
    }

    /// Returns the history that was kept last, or the default if there is none that can be read.
    pub(crate) fn history<T: DeserializeOwned + Default>(&self) -> T {
        self.read("history")
    }

    /// Keeps `history` instead of what was kept before, atomically.
    ///
    /// # Errors
    /// [`RunDirError::Io`]; [`RunDirError::TurnsLockGone`]: another process may hold a newer lock, and know more.
    pub(crate) fn keep_history<T: Serialize>(
        &self,
        lock: &TurnLock,
        history: &T,
    ) -> Result<(), RunDirError> {
        let path = self.path.with_file_name(LOCK_NAME);
        if !lock.0.file().is_some_and(|file| is_still_named(file, &path)) {
            return Err(RunDirError::TurnsLockGone);
        }
        let text = serde_json::to_string(history).map_err(|error| {
            io_error("writing", &self.path)(io::Error::new(ErrorKind::InvalidData, error))
        })?;
        self.replace("history", text.as_bytes())
    }

    /// Returns the last record of the tenants that did not answer, or the default, as [`TurnDir::history`] does.
    pub(crate) fn silent<T: DeserializeOwned + Default>(&self) -> T {
        self.read("silent")
    }

    /// Keeps `silent` instead of the record before, immediately. Takes no lock. Of two simultaneous calls one record is kept, or
    /// none that can be read. Then the next decision contacts those tenants again.
    pub(crate) fn keep_silent<T: Serialize>(&self, silent: &T) {
        let text = serde_json::to_string(silent).unwrap_or_default();
        if let Err(error) = self.replace("silent", text.as_bytes()) {
            tracing::debug!(%error, "who did not answer was not written down");
        }
    }

    /// Adds lines to the log. A long log is cut to its later half, only with the lock: then no other process adds to the part
    /// that is removed.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn log(&self, lock: Option<&TurnLock>, lines: &[String]) -> Result<(), RunDirError> {
        let path = self.path.join("log");
        let at_ms = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (at_ms, pid) = (at_ms.as_millis(), std::process::id());
        let line = |text: &String| format!("{at_ms} {pid} {}\n", text.replace('\n', " "));
        let added: String = lines.iter().map(line).collect();
        let length = fs::symlink_metadata(&path).map_or(0, |metadata| metadata.len());
        if lock.is_some() && length + added.len() as u64 > LOG_BYTES_MAX {
            let all = self.log_lines();
            let later = all.iter().skip(all.len() / 2).map(|line| format!("{line}\n"));
            return self.replace("log", (later.collect::<String>() + &added).as_bytes());
        }
        let mut options = OpenOptions::new();
        let opened = open_regular(options.append(true).create(true).mode(0o600), &path);
        let mut file = opened.map_err(io_error("opening", &path))?;
        check_file_length(length + added.len() as u64)
            .and_then(|()| file.write_all(added.as_bytes()))
            .map_err(io_error("writing", &path))
    }

    /// Returns the lines of the log, oldest first: milliseconds since 1970, the process that decided, and the decision.
    pub(crate) fn log_lines(&self) -> Vec<String> {
        self.text("log").lines().map(str::to_owned).collect()
    }

    fn read<T: DeserializeOwned + Default>(&self, name: &str) -> T {
        serde_json::from_str(&self.text(name)).unwrap_or_default()
    }

    fn text(&self, name: &str) -> String {
        let file = open_to_read(&self.path.join(name));
        let read = file.and_then(|file| io::read_to_string(file.take(READ_BYTES_MAX)));
        read.unwrap_or_default()
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), RunDirError> {
        let path = self.path.join(name);
        let next = self.path.join(format!("{name}.next"));
        remove_file_if_there(&next)?;
        let mut options = OpenOptions::new();
        check_file_length(bytes.len() as u64)
            .and_then(|()| open_regular(options.write(true).create_new(true).mode(0o600), &next))
            .and_then(|mut file| file.write_all(bytes))
            .map_err(io_error("writing", &next))?;
        fs::rename(&next, &path).map_err(io_error("renaming", &path))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use super::*;

    pub(crate) fn dir(base: &tempfile::TempDir) -> TurnDir {
        let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
        assert!(TurnDir::existing(&run_dir).unwrap().is_none());
        let turns = TurnDir::make(&run_dir).unwrap();
        assert!(run_dir.tenants().unwrap().is_empty(), "it is no tenant's directory");
        turns
    }

    pub(crate) fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[test]
    fn whoever_switches_does_so_alone_also_when_the_files_are_removed_meanwhile() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let held = dir.lock(soon()).unwrap();
        fs::remove_dir_all(&dir.path).unwrap();
        let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
        let again = TurnDir::make(&run_dir).unwrap();
        let refused = again.lock(Instant::now()).unwrap_err();
        assert!(matches!(refused, RunDirError::Switching { .. }), "{refused}");
        again.keep_history(&held, &7_u32).unwrap();
        // With the lock's own file another process has one too.
        fs::remove_file(dir.path.with_file_name(LOCK_NAME)).unwrap();
        let newer = again.lock(Instant::now()).unwrap();
        again.keep_history(&newer, &8_u32).unwrap();
        let error = again.keep_history(&held, &9_u32).unwrap_err();
        assert!(matches!(error, RunDirError::TurnsLockGone), "{error}");
        assert_eq!(again.history::<u32>(), 8);
        drop((held, newer));
        again.lock(Instant::now()).unwrap();
    }

    #[test]
    fn the_lock_is_one_holders_and_names_it() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let lock = dir.lock(soon()).unwrap();
        let error = dir.lock(Instant::now()).unwrap_err();
        assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
        drop(lock);
        drop(dir.lock(Instant::now()).unwrap());
    }

    #[test]
    fn the_log_keeps_what_came_last_and_a_broken_history_is_none() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let lock = dir.lock(soon()).unwrap();
        let long = "x".repeat(1000);
        for number in 0..600 {
            dir.log(Some(&lock), &[format!("{number}\n{long}")]).unwrap();
        }
        let lines = dir.log_lines();
        assert!(lines.iter().map(|line| line.len() as u64 + 1).sum::<u64>() <= LOG_BYTES_MAX);
        assert!(lines.last().unwrap().contains(" 599 x"));
        assert!(lines.len() > 100);
        dir.keep_history(&lock, &vec![1, 2]).unwrap();
        assert_eq!(dir.history::<Vec<u32>>(), [1, 2]);
        fs::write(dir.path.join("history"), "nonsense").unwrap();
        assert!(dir.history::<Vec<u32>>().is_empty());
    }
}
