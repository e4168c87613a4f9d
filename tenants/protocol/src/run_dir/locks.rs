//! Locks that this process holds. A forked child closes their files. Otherwise the child would keep them locked after this
//! process was killed.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::process;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::stat::{major, minor};
use vmm_pool::Uninherited;

use super::pause_thread;

/// The time limit for a lock that is held for moments.
const STRETCH_TIMEOUT: Duration = Duration::from_secs(5);
const STRETCH_BACK_OFF: Duration = Duration::from_millis(1);

/// A lock on a file, held until dropped. A process that dies gives it up. In a forked child it holds nothing, and dropping it
/// does nothing.
#[derive(Debug)]
pub struct FileLock {
    /// None after the drop.
    held: Option<Uninherited<File>>,
    /// The process that took it.
    pid: u32,
}

impl FileLock {
    /// Wraps the lock that this process has just taken on `file`.
    pub fn new(file: File) -> Self {
        Self { held: Some(file.into()), pid: process::id() }
    }

    /// The lock's file; none in a forked child.
    pub fn file(&self) -> Option<&File> {
        self.held.as_deref().filter(|_| self.is_own())
    }

    /// Did this process take the lock, rather than a parent of it?
    pub fn is_own(&self) -> bool {
        self.pid == process::id()
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        let is_own = self.is_own();
        let Some(file) = self.held.take() else { return };
        if !is_own {
            // The child's copy was closed at the fork. By now its number may belong to another of these files.
            let _closed = std::mem::ManuallyDrop::new(file);
            return;
        }
        // A child forked meanwhile shares the lock until it closes or unlocks; unlocking ends the lock for both.
        if let Err(error) = file.unlock() {
            tracing::warn!(%error, "a lock of the run directory was not given up");
        }
    }
}

/// The wish to have the lock on a file alone. Processes that would share the lock see the wish until it is dropped. It is a
/// lock of another kind on the same file. A process that dies gives it up.
#[derive(Debug)]
pub struct Wish {
    file: Uninherited<File>,
}

impl Wish {
    /// Makes a wish on `file`, whose open file description no other process has. None if the file system does not support such
    /// locks. Then a process that wants the lock alone may wait for long.
    pub(super) fn new(file: File) -> Option<Self> {
        set(&file, ALL, libc::F_RDLCK).ok()?;
        Some(Self { file: file.into() })
    }

    /// Has any process this wish? Takes no lock.
    pub(super) fn is_on(file: &File) -> bool {
        is_set(file, ALL).unwrap_or(false)
    }
}

impl Drop for Wish {
    fn drop(&mut self) {
        // As for the lock: a child forked meanwhile shares the open file description.
        if let Err(error) = set(&self.file, ALL, libc::F_UNLCK) {
            tracing::warn!(%error, "the wish for a lock of the run directory was not given up");
        }
    }
}

/// A stretch of a file: its begin and its length; length 0 means to the end.
type Stretch = (i64, i64);
const ALL: Stretch = (0, 0);

fn flock((l_start, l_len): Stretch, kind: i32) -> libc::flock {
    let l_type = i16::try_from(kind).unwrap_or_default();
    let l_whence = i16::try_from(libc::SEEK_SET).unwrap_or_default();
    libc::flock { l_type, l_whence, l_start, l_len, l_pid: 0 }
}

/// A range of a file that is locked for a short time. Dropping it unlocks it.
#[derive(Debug)]
pub struct StretchLock<'a>(&'a File, Stretch);

impl<'a> StretchLock<'a> {
    /// Waits for the lock, for five seconds at most.
    ///
    /// # Errors
    /// The system's error; `TimedOut`.
    pub fn take(file: &'a File, stretch: Stretch) -> io::Result<Self> {
        let deadline = Instant::now() + STRETCH_TIMEOUT;
        loop {
            match set(file, stretch, libc::F_WRLCK) {
                Ok(()) => return Ok(Self(file, stretch)),
                Err(Errno::EAGAIN | Errno::EACCES) if Instant::now() < deadline => {
                    pause_thread(STRETCH_BACK_OFF);
                }
                Err(Errno::EAGAIN | Errno::EACCES) => return Err(ErrorKind::TimedOut.into()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl Drop for StretchLock<'_> {
    fn drop(&mut self) {
        if let Err(errno) = set(self.0, self.1, libc::F_UNLCK) {
            tracing::warn!(%errno, "the lock of the tenant's budgets was not given up");
        }
    }
}

/// Locks a stretch of `file`, or unlocks it. The lock belongs to this open file description, not to this process.
///
/// # Errors
/// The system's error.
pub fn set(file: &File, stretch: Stretch, kind: i32) -> nix::Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&flock(stretch, kind))).map(drop)
}

/// Has another opening of the file locked some of this stretch?
pub(super) fn is_set(file: &File, stretch: Stretch) -> nix::Result<bool> {
    let mut asked = flock(stretch, libc::F_WRLCK);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut asked))?;
    Ok(i32::from(asked.l_type) != libc::F_UNLCK)
}

/// Ids of the processes that hold a lock on `file`, in our pid namespace. The list is empty if the kernel lists none. Then the
/// kernel may not say, or the holders live in another namespace, or they have ended and left the lock to a child.
pub fn holders(file: &File) -> Vec<u32> {
    let Ok(found) = file.metadata() else {
        return Vec::new();
    };
    let (device, inode) = (found.dev(), found.ino());
    let name = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    let list = fs::read_to_string("/proc/locks").unwrap_or_default();
    let mut pids: Vec<u32> = list.lines().filter_map(|line| holder_in(line, &name)).collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// Returns the process that holds a whole-file lock on the file `name`, from a line of `/proc/locks`. Lines of waiting
/// processes have an arrow in the second place.
fn holder_in(line: &str, name: &str) -> Option<u32> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        [_, "FLOCK", _, _, pid, file, ..] if file == name => {
            pid.parse().ok().filter(|pid| *pid > 0)
        }
        _ => None,
    }
}

/// The holders, as text for people.
pub(super) fn in_words(pids: &[u32]) -> String {
    let numbers: Vec<String> = pids.iter().map(ToString::to_string).collect();
    match numbers.as_slice() {
        [] => "a process of unknown id".to_owned(),
        [one] => format!("process {one}"),
        more => format!("processes {}", more.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_lock_in_a_forked_child_closes_and_unlocks_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let file = File::create(&path).unwrap();
        file.try_lock().unwrap();
        let mut lock = FileLock::new(file);
        // As its copy in a child, whose process has another number.
        lock.pid = 0;
        assert!(lock.file().is_none());
        drop(lock);
        File::open(&path).unwrap().try_lock().unwrap_err();
    }

    /// A child that is forked during the end of a lock has the same opening of the file, as a copy of the descriptor has.
    #[test]
    fn what_is_given_up_is_free_though_a_child_has_the_opening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.try_lock().unwrap();
        let childs = file.try_clone().unwrap();
        let other = File::open(&path).unwrap();
        let lock = FileLock::new(file);
        other.try_lock().unwrap_err();
        drop(lock);
        other.try_lock().unwrap();
        let wish = Wish::new(childs.try_clone().unwrap()).unwrap();
        assert!(Wish::is_on(&other));
        drop(wish);
        assert!(!Wish::is_on(&other));
        drop(childs);
    }

    #[test]
    fn only_holders_of_the_file_are_read_from_the_list() {
        let name = "00:1a:77";
        assert_eq!(holder_in("3: FLOCK  ADVISORY  WRITE 41 00:1a:77 0 EOF", name), Some(41));
        assert_eq!(holder_in("3: FLOCK  ADVISORY  READ  42 00:1a:77 0 EOF", name), Some(42));
        for other in [
            "3: -> FLOCK  ADVISORY  WRITE 43 00:1a:77 0 EOF",
            "4: POSIX  ADVISORY  WRITE 44 00:1a:77 0 EOF",
            "5: FLOCK  ADVISORY  WRITE 45 00:1a:78 0 EOF",
            "6: FLOCK  ADVISORY  WRITE 0 00:1a:77 0 EOF",
            "7: FLOCK",
            "",
        ] {
            assert_eq!(holder_in(other, name), None, "{other}");
        }
    }

    #[test]
    fn one_several_and_unknown_holders_have_words() {
        assert_eq!(in_words(&[]), "a process of unknown id");
        assert_eq!(in_words(&[7]), "process 7");
        assert_eq!(in_words(&[7, 9]), "processes 7, 9");
    }
}
