//! Claims to turns. Each process that waits, or is in its turn, has a file that it locks. So a claim ends with its process.
//!
//! The modification time of the file is the process's last sign of life, in the clock of turns. Claims are numbered in the order
//! in which they were made. The holder of the lock of turns creates and removes claims. The text of a claim is changed by its own
//! process.

use std::fs::{self, FileTimes, OpenOptions};
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::poll::{PollFd, PollFlags};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use serde::{Deserialize, Serialize};
use vmm_pool::{UninheritedFd, check_file_length};

use crate::clock::now_us;
use crate::decision::scene::Wish;
use crate::signals;
use crate::turn_files::{TurnDir, TurnLock};
use tenants::run_dir::files::{
    FileLock, entry_names, holders, io_error, is_no_file, is_still_named, open_regular,
    open_to_read, remove_file_if_there,
};
use tenants::run_dir::{RunDirError, pause_thread};

const CLAIM_EXTENSION: &str = ".claim";
/// The version of a claim's format. It changes with the format.
const CLAIM_VERSION: u32 = 2;
/// The largest file that is read as a claim. A claim is a few words, so a larger file is none of ours.
const CLAIM_BYTES_MAX: u64 = 4 << 10;
/// The time for which a watch waits after a change. Within it, related changes arrive, and the locks of a dead process end.
const SETTLES: Duration = Duration::from_millis(2);

/// The statement, for all other processes, of a process that waits or is in a turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    /// Its tenant.
    pub(crate) tenant: String,
    /// Its process, by the id that the process itself sees.
    pub(crate) pid: u32,
    /// The PID namespace of that id; 0 if it is not known.
    #[serde(default)]
    pub(crate) pid_namespace: u64,
    /// Does the process wait? If not, its tenant is in its turn.
    pub(crate) waits: bool,
    pub(crate) wish: Wish,
    /// The time at which the wait or the turn began, in microseconds of the clock.
    pub(crate) since_us: u64,
}

/// A claim in the format of its file. Earlier versions of Sublet wrote no version.
#[derive(Serialize)]
struct Written<'a> {
    version: u32,
    #[serde(flatten)]
    claim: &'a Claim,
}

/// The part of a claim that is read first.
#[derive(Deserialize)]
struct Versioned {
    #[serde(default)]
    version: u32,
}

/// A claim that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Its number. Claims with smaller numbers were made before.
    pub(crate) number: u64,
    /// The time for which its process has shown no sign of life.
    pub(crate) silent: Duration,
    /// The id of its process in this PID namespace; none if it has none here, or the kernel does not tell.
    pub(crate) pid: Option<u32>,
    pub(crate) claim: Claim,
}

/// A claim of this process. It ends when this value is dropped, except for a forked child's copy.
#[derive(Debug)]
pub(crate) struct OwnClaim {
    lock: FileLock,
    path: PathBuf,
    /// See [`Found::number`].
    pub(crate) number: u64,
}

/// Reports when a claim is made, ends or changes. If the system gives no watch, a wait ends only with its time.
#[derive(Debug)]
pub(crate) struct Watch(Option<UninheritedFd>);

impl TurnDir {
    /// Makes a claim after all others, or with `number` if that number is free.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn claim(
        &self,
        _lock: &TurnLock,
        claim: &Claim,
        number: Option<u64>,
    ) -> Result<OwnClaim, RunDirError> {
        let numbers = self.numbers()?;
        let after_all = numbers.last().copied().unwrap_or(0).saturating_add(1);
        let number = number.filter(|number| !numbers.contains(number)).unwrap_or(after_all);
        // No process looks for a claim under this name. The file is locked and written before it gets its own name.
        let next = self.path.join("claim.next");
        remove_file_if_there(&next)?;
        let mut options = OpenOptions::new();
        let made = open_regular(options.read(true).write(true).create_new(true).mode(0o600), &next);
        let file = made.map_err(io_error("creation", &next))?;
        file.lock().map_err(io_error("locking", &next))?;
        let mut own = OwnClaim { lock: FileLock::new(file), path: next, number };
        own.say(claim)?;
        let path = self.claim_path(number);
        fs::rename(&own.path, &path).map_err(io_error("renaming", &own.path))?;
        own.path = path;
        Ok(own)
    }

    /// Returns the claims of live processes, in order. With the lock, claims of dead processes are removed.
    ///
    /// # Errors
    /// [`RunDirError::OtherTurns`]; [`RunDirError::Io`].
    pub(crate) fn claims(&self, lock: Option<&TurnLock>) -> Result<Vec<Found>, RunDirError> {
        let mut claims = Vec::new();
        for number in self.numbers()? {
            let path = self.claim_path(number);
            let file = match open_to_read(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) if is_no_file(&error) || error.kind() == ErrorKind::PermissionDenied => {
                    tracing::warn!(%error, path = %path.display(), "it is no claim");
                    continue;
                }
                file => file.map_err(io_error("opening", &path))?,
            };
            if file.try_lock_shared().is_ok() {
                if lock.is_some() {
                    remove_file_if_there(&path)?;
                }
                continue;
            }
            let beaten = file.metadata().and_then(|metadata| metadata.modified()).ok();
            let since_start = beaten.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
            let silent =
                Duration::from_micros(now_us()).saturating_sub(since_start.unwrap_or_default());
            let mut text = Vec::new();
            let read = (&file).take(CLAIM_BYTES_MAX).read_to_end(&mut text);
            read.map_err(io_error("reading", &path))?;
            // A claim that is just being written does not count yet. It has no version to check either.
            let version = serde_json::from_slice(&text).map(|Versioned { version }| version);
            if let Ok(found) = version
                && found != CLAIM_VERSION
            {
                let holder_pids = holders(&file);
                return Err(RunDirError::OtherTurns { holder_pids, found, known: CLAIM_VERSION });
            }
            if let Ok(claim) = serde_json::from_slice::<Claim>(&text) {
                let is_known = claim.pid_namespace == pid_namespace();
                let pid = if is_known { Some(claim.pid) } else { holders(&file).pop() };
                claims.push(Found { number, silent, pid, claim });
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

    /// Watches all claims from now on.
    pub(crate) fn watch(&self) -> Watch {
        let events = WatchFlags::MOVED_TO
            | WatchFlags::DELETE
            | WatchFlags::MODIFY
            // A process that ends closes its claims.
            | WatchFlags::CLOSE_WRITE;
        let watch = || -> rustix::io::Result<UninheritedFd> {
            let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
            inotify::add_watch(&fd, &self.path, events | WatchFlags::ONLYDIR)?;
            Ok(fd.into())
        };
        Watch(watch().inspect_err(|error| tracing::debug!(%error, "turns are not watched")).ok())
    }
}

/// Returns the inode of this process's PID namespace.
pub(crate) fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

impl Watch {
    /// Waits, for `most` at most, until a claim has changed since the last call. Returns whether one has.
    pub(crate) fn wait(&self, most: Duration) -> bool {
        let Some(fd) = &self.0 else { return signals::wait(&mut [], most) };
        let deadline = Instant::now() + most;
        loop {
            let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
            if !signals::wait(&mut fds, deadline.saturating_duration_since(Instant::now())) {
                return false;
            }
            if Self::clear(fd) {
                pause_thread(SETTLES);
                Self::clear(fd);
                return true;
            }
        }
    }

    /// Reads the events. Returns whether one was about claims.
    fn clear(fd: &UninheritedFd) -> bool {
        let mut is_claim = false;
        let mut bytes = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(fd, &mut bytes);
        while let Ok(event) = events.next() {
            let name = event.file_name().map(|name| name.to_string_lossy());
            is_claim |= name.is_some_and(|name| name.ends_with(CLAIM_EXTENSION));
            // Events were lost, or the directory was removed.
            is_claim |= event.events().intersects(ReadFlags::QUEUE_OVERFLOW | ReadFlags::IGNORED);
        }
        is_claim
    }
}

impl Found {
    /// Has its process shown no sign of life for so long that others go before it?
    pub(crate) fn is_silent(&self) -> bool {
        const SILENCE_MAX: Duration = Duration::from_secs(10);
        self.silent > SILENCE_MAX
    }
}

impl OwnClaim {
    /// Replaces the text of the claim; its number stays.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn say(&self, claim: &Claim) -> Result<(), RunDirError> {
        let Some(mut file) = self.lock.file() else { return Ok(()) };
        let said = Written { version: CLAIM_VERSION, claim };
        let text = serde_json::to_string(&said).unwrap_or_default();
        let written = check_file_length(text.len() as u64)
            .and_then(|()| file.seek(SeekFrom::Start(0)))
            .and_then(|_| file.write_all(text.as_bytes()))
            .and_then(|()| file.set_len(text.len() as u64));
        self.beat();
        written.map_err(io_error("writing", &self.path))
    }

    /// Shows a sign of life.
    pub(crate) fn beat(&self) {
        let now = SystemTime::UNIX_EPOCH + Duration::from_micros(now_us());
        // Both times are set: the kernel reports a new modification time alone as a write. A recent access time keeps cleaners of
        // old files from removing it.
        let times = FileTimes::new().set_accessed(SystemTime::now()).set_modified(now);
        if let Some(Err(error)) = self.lock.file().map(|file| file.set_times(times)) {
            tracing::debug!(%error, "a claim to a turn could not be touched");
        }
    }

    /// Is the file still where others look for it?
    pub(crate) fn is_there(&self) -> bool {
        self.lock.file().is_some_and(|file| is_still_named(file, &self.path))
    }

    /// Its file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for OwnClaim {
    fn drop(&mut self) {
        // No other claim gets this number before the file is gone. If somebody has removed the file, another claim may have its
        // name.
        if self.is_there()
            && let Err(error) = remove_file_if_there(&self.path)
        {
            tracing::warn!(%error, "a claim to a turn was not given up");
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::turn_files::tests::{dir, soon};

    pub(crate) fn claim(tenant: &str) -> Claim {
        let tenant = tenant.to_owned();
        let (pid, pid_namespace) = (1, pid_namespace());
        Claim { tenant, pid, pid_namespace, waits: true, wish: Wish::Turn, since_us: 5 }
    }

    #[test]
    fn claims_stand_in_order_and_end_with_their_holder_and_dead_ones_are_removed() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let lock = dir.lock(soon()).unwrap();
        let first = dir.claim(&lock, &claim("a"), None).unwrap();
        let second = dir.claim(&lock, &claim("b"), None).unwrap();
        let names = |dir: &TurnDir| -> Vec<String> {
            let claims = dir.claims(None).unwrap();
            claims.into_iter().map(|found| found.claim.tenant).collect()
        };
        assert_eq!(names(&dir), ["a", "b"]);
        first.say(&Claim { waits: false, ..claim("a-longer-name") }).unwrap();
        assert_eq!(names(&dir), ["a-longer-name", "b"]);
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
    fn a_live_claim_of_another_version_is_refused_by_its_process_and_a_dead_one_goes() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let lock = dir.lock(soon()).unwrap();
        let own = dir.claim(&lock, &claim("a"), None).unwrap();
        let text = fs::read_to_string(own.path()).unwrap();
        assert!(text.contains("\"version\":2"), "{text}");
        let without = serde_json::to_string(&claim("a")).unwrap();
        for (other, version) in [(without, 0), (text.replace("\"version\":2", "\"version\":3"), 3)]
        {
            fs::write(own.path(), other).unwrap();
            let refused = dir.claims(Some(&lock)).unwrap_err();
            let words = format!("process {} takes turns by version {version}", std::process::id());
            assert!(refused.to_string().contains(&words), "{refused}");
        }
        // Half of what is being written says nothing.
        fs::write(own.path(), &text[..text.len() / 2]).unwrap();
        assert!(dir.claims(Some(&lock)).unwrap().is_empty());
        own.say(&claim("b")).unwrap();
        assert_eq!(dir.claims(None).unwrap()[0].claim, claim("b"));
        let dead = dir.claim_path(77);
        fs::write(&dead, "{\"version\":2}").unwrap();
        assert_eq!(dir.claims(Some(&lock)).unwrap().len(), 1);
        assert!(!dead.exists());
    }

    #[test]
    fn one_that_stands_still_is_silent_until_it_beats_whatever_the_wall_clock_says() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let own = dir.claim(&dir.lock(soon()).unwrap(), &claim("a"), None).unwrap();
        let is_silent = || dir.claims(None).unwrap()[0].is_silent();
        assert!(!is_silent());
        let long_ago = Duration::from_micros(now_us()).saturating_sub(Duration::from_mins(1));
        let file = own.lock.file().unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + long_ago).unwrap();
        assert!(is_silent());
        own.beat();
        assert!(!is_silent());
        // The wall clock has no part in it.
        let beaten = file.metadata().unwrap().modified().unwrap();
        let beaten = beaten.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert!(beaten <= Duration::from_micros(now_us()), "{beaten:?}");
    }

    #[test]
    fn a_claim_whose_file_has_gone_is_made_again_in_its_place_and_its_old_end_leaves_it() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let lock = dir.lock(soon()).unwrap();
        let first = dir.claim(&lock, &claim("a"), None).unwrap();
        let second = dir.claim(&lock, &claim("b"), None).unwrap();
        assert!(first.is_there());
        fs::remove_file(first.path()).unwrap();
        assert!(!first.is_there());
        let again = dir.claim(&lock, &claim("a"), Some(first.number)).unwrap();
        assert_eq!(again.number, first.number);
        drop(first);
        assert!(again.is_there());
        // One that has another in its place comes after all.
        let third = dir.claim(&lock, &claim("c"), Some(second.number)).unwrap();
        assert_eq!(third.number, second.number + 1);
    }

    #[test]
    fn a_claim_is_locked_and_says_what_it_is_before_others_can_find_it() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let lock = dir.lock(soon()).unwrap();
        fs::write(dir.path.join("claim.next"), "of one that died").unwrap();
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&fd, &dir.path, WatchFlags::CREATE | WatchFlags::MOVED_TO).unwrap();
        let _own = dir.claim(&lock, &claim("a"), None).unwrap();
        // One that looks locks what it finds unlocked for a moment, and may be stopped in it: nobody could lock it any more.
        let mut bytes = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&fd, &mut bytes);
        let mut came = Vec::new();
        while let Ok(event) = events.next() {
            let name = event.file_name().unwrap().to_str().unwrap().to_owned();
            came.push((event.events().contains(ReadFlags::CREATE), name));
        }
        let [(true, next), (false, own)] = &came[..] else { panic!("{came:?}") };
        assert!(next == "claim.next" && own.ends_with(CLAIM_EXTENSION), "{came:?}");
    }

    #[test]
    fn a_watch_wakes_when_a_claim_is_made_changed_or_ended_and_for_nothing_else() {
        const NOT: Duration = Duration::from_millis(50);
        let most = Duration::from_mins(1);
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let watch = dir.watch();
        let lock = dir.lock(soon()).unwrap();
        dir.keep_history(&lock, &vec![1]).unwrap();
        dir.log(None, &["a line".to_owned()]).unwrap();
        drop(lock);
        assert!(!watch.wait(NOT));
        let lock = dir.lock(soon()).unwrap();
        let own = dir.claim(&lock, &claim("a"), None).unwrap();
        assert!(watch.wait(most), "it was made");
        own.beat();
        assert_eq!(dir.claims(None).unwrap().len(), 1);
        assert!(!watch.wait(NOT), "a sign of life, and a look");
        own.say(&claim("b")).unwrap();
        assert!(watch.wait(most), "it says something else");
        drop(own);
        assert!(watch.wait(most), "it has ended");
        let _own = dir.claim(&lock, &claim("a"), None).unwrap();
        assert!(watch.wait(most));
        fs::remove_dir_all(&dir.path).unwrap();
        assert!(watch.wait(most), "its directory has gone");
    }
}
