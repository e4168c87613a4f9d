//! The files by which processes agree on turns.
//!
//! ```text
//! <run>/.turns/
//!   lock                held while somebody decides, and while tenants are switched
//!   <number>.claim      one for each that waits or is in its turn: locked by its process, so that it ends with it
//!   history             what has been, for the next decision
//!   log                 decisions, one a line; of bounded length
//! ```
//!
//! Whoever holds the lock changes all of them. Claims are numbered in the order in which they were made.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{
    RunDir, RunDirError, entry_names, io_error, locks, open_lock_file, remove_file_if_there,
    trusted_path, wait_for_lock,
};
use crate::descriptors::Noted;
use crate::turns::scene::Wish;

const NAME: &str = ".turns";
const CLAIM_EXTENSION: &str = ".claim";
const LOG_BYTES_MAX: u64 = 256 << 10;
/// A claim is a few words; one that says more is none of ours.
const CLAIM_BYTES_MAX: u64 = 4 << 10;

/// The directory of the files.
#[derive(Clone, Debug)]
pub(crate) struct TurnDir {
    path: PathBuf,
}

/// The right to decide and to switch tenants, held until dropped. A process that dies gives it up.
#[derive(Debug)]
pub(crate) struct TurnLock(
    #[expect(dead_code, reason = "its end gives the lock up")] locks::FileLock,
);

/// What somebody who waits, or is in a turn, says of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    /// Its tenant.
    pub(crate) tenant: String,
    /// Its process.
    pub(crate) pid: u32,
    /// Does it wait? Else its tenant is in its turn.
    pub(crate) waits: bool,
    /// What it is for.
    pub(crate) wish: Wish,
    /// When it began to wait, or its turn, in microseconds of the clock.
    pub(crate) since_us: u64,
}

/// One of the claims that there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Its number: those with smaller ones came before.
    pub(crate) number: u64,
    /// How long its process has shown no sign of life, as far as the file system's clock tells.
    pub(crate) silent: Duration,
    /// What it says.
    pub(crate) claim: Claim,
}

/// A claim of this process. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct OwnClaim {
    _noted: Noted,
    file: File,
    path: PathBuf,
    /// See [`Found::number`].
    pub(crate) number: u64,
}

impl RunDir {
    /// The directory of the files, created if need be.
    ///
    /// # Errors
    /// As [`RunDir::open`].
    pub(crate) fn turns(&self) -> Result<TurnDir, RunDirError> {
        let path = self.path.join(NAME);
        trusted_path::ensure(&path)?;
        Ok(TurnDir { path })
    }

    /// The directory of the files, where somebody has taken turns.
    ///
    /// # Errors
    /// As [`RunDir::open`].
    pub(crate) fn existing_turns(&self) -> Result<Option<TurnDir>, RunDirError> {
        let path = self.path.join(NAME);
        match trusted_path::check(&path) {
            Ok(()) => Ok(Some(TurnDir { path })),
            Err(RunDirError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl TurnDir {
    /// Takes the lock, waiting for its holder until `deadline`.
    ///
    /// # Errors
    /// [`RunDirError::Switching`]; [`RunDirError::Io`].
    pub(crate) fn lock(&self, deadline: Instant) -> Result<TurnLock, RunDirError> {
        let path = self.path.join("lock");
        let open = || open_lock_file(&path).map_err(io_error("opening", &path));
        let locked = |holder_pids, waited_ms| RunDirError::Switching { holder_pids, waited_ms };
        wait_for_lock(&path, deadline, open, File::try_lock, locked).map(TurnLock)
    }

    /// Makes a claim that comes after all others.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn claim(&self, _lock: &TurnLock, claim: &Claim) -> Result<OwnClaim, RunDirError> {
        let most = self.numbers()?.last().copied().unwrap_or(0);
        let number = most.saturating_add(1);
        let path = self.claim_path(number);
        let made = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path);
        let file = made.map_err(io_error("creation", &path))?;
        file.lock().map_err(io_error("locking", &path))?;
        let own = OwnClaim { _noted: locks::HELD.note(&file), file, path, number };
        own.say(claim)?;
        Ok(own)
    }

    /// The claims of live processes, in order. With the lock, those of dead ones are removed.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn claims(&self, lock: Option<&TurnLock>) -> Result<Vec<Found>, RunDirError> {
        let mut claims = Vec::new();
        for number in self.numbers()? {
            let path = self.claim_path(number);
            let file = match File::open(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                file => file.map_err(io_error("opening", &path))?,
            };
            if file.try_lock_shared().is_ok() {
                if lock.is_some() {
                    remove_file_if_there(&path)?;
                }
                continue;
            }
            let modified = file.metadata().and_then(|metadata| metadata.modified()).ok();
            let silent = modified.and_then(|at| SystemTime::now().duration_since(at).ok());
            let mut text = String::new();
            let read = file.take(CLAIM_BYTES_MAX).read_to_string(&mut text);
            read.map_err(io_error("reading", &path))?;
            // One that is just being written has no place yet.
            if let Ok(claim) = serde_json::from_str(&text) {
                claims.push(Found { number, silent: silent.unwrap_or_default(), claim });
            }
        }
        Ok(claims)
    }

    fn claim_path(&self, number: u64) -> PathBuf {
        self.path.join(format!("{number:016x}{CLAIM_EXTENSION}"))
    }

    fn numbers(&self) -> Result<Vec<u64>, RunDirError> {
        let names = entry_names(&self.path)?;
        let hex = names.iter().filter_map(|name| name.strip_suffix(CLAIM_EXTENSION));
        let mut numbers: Vec<u64> =
            hex.filter_map(|hex| u64::from_str_radix(hex, 16).ok()).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// What was kept last; the default where there is nothing, or nothing that can be read.
    pub(crate) fn history<T: DeserializeOwned + Default>(&self) -> T {
        let text = fs::read_to_string(self.path.join("history")).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// Keeps `history` in place of what was kept before, at once.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn keep_history<T: Serialize>(
        &self,
        _lock: &TurnLock,
        history: &T,
    ) -> Result<(), RunDirError> {
        let text = serde_json::to_string(history).map_err(|error| {
            io_error("writing", &self.path)(io::Error::new(ErrorKind::InvalidData, error))
        })?;
        self.replace("history", text.as_bytes())
    }

    /// Adds lines to the log, which keeps the later half of them when it has become long.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn log(&self, _lock: &TurnLock, lines: &[String]) -> Result<(), RunDirError> {
        let path = self.path.join("log");
        let at_ms = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (at_ms, pid) = (at_ms.as_millis(), std::process::id());
        let line = |text: &String| format!("{at_ms} {pid} {}\n", text.replace('\n', " "));
        let added: String = lines.iter().map(line).collect();
        let length = fs::metadata(&path).map_or(0, |metadata| metadata.len());
        if length + added.len() as u64 > LOG_BYTES_MAX {
            let all = self.log_lines();
            let later = all.iter().skip(all.len() / 2).map(|line| format!("{line}\n"));
            return self.replace("log", (later.collect::<String>() + &added).as_bytes());
        }
        let opened = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path);
        let mut file = opened.map_err(io_error("opening", &path))?;
        file.write_all(added.as_bytes()).map_err(io_error("writing", &path))
    }

    /// The lines of the log, oldest first: milliseconds since 1970, the process that decided, and the decision.
    pub(crate) fn log_lines(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path.join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), RunDirError> {
        let path = self.path.join(name);
        let next = self.path.join(format!("{name}.next"));
        fs::write(&next, bytes).map_err(io_error("writing", &next))?;
        fs::rename(&next, &path).map_err(io_error("renaming", &path))
    }

    /// Changes when a claim is made, ends, or says something else. Takes no lock.
    pub(crate) fn glance(&self) -> Vec<(u64, bool, bool)> {
        let claims = self.claims(None).unwrap_or_default();
        claims.iter().map(|found| (found.number, found.claim.waits, found.is_silent())).collect()
    }
}

impl Found {
    /// Has its process stood still for so long that others pass it by?
    pub(crate) fn is_silent(&self) -> bool {
        const SILENCE_MAX: Duration = Duration::from_secs(10);
        self.silent > SILENCE_MAX
    }
}

impl OwnClaim {
    /// Says something else in the same place of the order.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn say(&self, claim: &Claim) -> Result<(), RunDirError> {
        let text = serde_json::to_string(claim).unwrap_or_default();
        let mut file = &self.file;
        let written = file
            .seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(text.as_bytes()))
            .and_then(|()| file.set_len(text.len() as u64));
        written.map_err(io_error("writing", &self.path))
    }

    /// A sign of life.
    pub(crate) fn beat(&self) {
        if let Err(error) = self.file.set_modified(SystemTime::now()) {
            tracing::debug!(%error, "a claim to a turn could not be touched");
        }
    }

    /// Its file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for OwnClaim {
    fn drop(&mut self) {
        // Its number is not given again before the file is gone.
        let removed = remove_file_if_there(&self.path);
        let unlocked = self.file.unlock();
        if removed.is_err() || unlocked.is_err() {
            tracing::warn!(?removed, ?unlocked, "a claim to a turn was not given up");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(tenant: &str) -> Claim {
        let tenant = tenant.to_owned();
        Claim { tenant, pid: 1, waits: true, wish: Wish::Turn, since_us: 5 }
    }

    fn dir(base: &tempfile::TempDir) -> TurnDir {
        let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
        assert!(run_dir.existing_turns().unwrap().is_none());
        let turns = run_dir.turns().unwrap();
        assert!(run_dir.tenants().unwrap().is_empty(), "it is no tenant's directory");
        turns
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[test]
    fn claims_stand_in_order_and_end_with_their_holder_and_dead_ones_are_removed() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let lock = dir.lock(soon()).unwrap();
        let first = dir.claim(&lock, &claim("a")).unwrap();
        let second = dir.claim(&lock, &claim("b")).unwrap();
        let names = |dir: &TurnDir| -> Vec<String> {
            let claims = dir.claims(None).unwrap();
            claims.into_iter().map(|found| found.claim.tenant).collect()
        };
        assert_eq!(names(&dir), ["a", "b"]);
        first.say(&Claim { waits: false, ..claim("a-longer-name") }).unwrap();
        assert_eq!(names(&dir), ["a-longer-name", "b"]);
        let before = dir.glance();
        first.say(&claim("c")).unwrap();
        assert_ne!(dir.glance(), before);
        drop(first);
        assert_eq!(names(&dir), ["b"]);
        // As one that was killed leaves it: there, and not locked.
        let dead = dir.claim_path(77);
        fs::write(&dead, serde_json::to_string(&claim("dead")).unwrap()).unwrap();
        assert_eq!(names(&dir), ["b"]);
        assert!(dead.exists());
        assert_eq!(dir.claims(Some(&lock)).unwrap()[0].number, second.number);
        assert!(!dead.exists());
        assert!(second.path().exists());
    }

    #[test]
    fn one_that_stands_still_is_silent_until_it_beats() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let own = dir.claim(&dir.lock(soon()).unwrap(), &claim("a")).unwrap();
        let long_ago = SystemTime::now() - Duration::from_mins(1);
        own.file.set_modified(long_ago).unwrap();
        assert!(dir.claims(None).unwrap()[0].is_silent());
        own.beat();
        assert!(!dir.claims(None).unwrap()[0].is_silent());
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
            dir.log(&lock, &[format!("{number}\n{long}")]).unwrap();
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
