//! The file in which a tenant's processes count their memory together, against the tenant's budgets.
//!
//! All of them map `<tenant>/budget` ([`Shared`]). The file lives as long as one of them. Single bytes of it are locked,
//! separately for each opening of the file. The kernel releases these locks when a process ends in any way:
//!
//! | byte | who locks it |
//! | --- | --- |
//! | 0 ([`CHANGING`]) | a process that changes more in the file than figures; for moments |
//! | 1 | a command that changes budgets from outside, so that the file is not taken for left behind |
//! | 2 + n | the process that has slot n |

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use sublet_protocol::run_dir::files::{
    CHANGING, COUNTS_NAME, StretchLock, io_error, is_in_use, is_same, is_still_named, lock_stretch,
    open_if_there, open_lock_file,
};
use sublet_protocol::run_dir::{RunDirError, TenantDir};
use vmm_pool::{Uninherited, check_file_length};

use super::Budgets;
use super::shared::{Gpu, Shared};

const EDITOR: i64 = 1;
const FIRST_SLOT: i64 = 2;

/// The opened, mapped file. It keeps its slot, if it has one, until it is dropped or the process ends.
#[derive(Debug)]
pub(crate) struct BudgetFile {
    file: Uninherited<File>,
    path: PathBuf,
    shared: Shared,
}

/// Locks one byte, or unlocks it.
fn lock(file: &File, byte: i64, kind: i32) -> nix::Result<()> {
    lock_stretch(file, (byte, 1), kind)
}

fn byte_of(slot: usize) -> i64 {
    FIRST_SLOT + i64::try_from(slot).unwrap_or_default()
}

/// Fills the file with zeros, and allocates all its disk space, so that a write to the mapping cannot find the disk full. The
/// file is never shortened: another process may have it mapped.
fn wipe(file: &File) -> io::Result<()> {
    check_file_length(Shared::BYTES as u64)?;
    file.write_all_at(&vec![0; Shared::BYTES], 0)
}

fn read_budgets(file: &File) -> io::Result<Budgets> {
    let (at, size) = Shared::CALLERS;
    let mut text = vec![0; size];
    file.read_exact_at(&mut text, at)?;
    text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(size));
    if text.is_empty() {
        return Ok(Budgets::default());
    }
    let text = String::from_utf8(text).map_err(|_| io::Error::from(ErrorKind::InvalidData))?;
    text.parse().map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

fn write_budgets(file: &File, budgets: &Budgets) -> io::Result<()> {
    let (at, size) = Shared::CALLERS;
    let mut text = budgets.to_string().into_bytes();
    if text.len() >= size {
        return Err(ErrorKind::InvalidInput.into());
    }
    text.resize(size, 0);
    check_file_length(at + size as u64)?;
    file.write_all_at(&text, at)
}

impl BudgetFile {
    /// Opens the file of a tenant, if a process or a command that changes budgets has it open; else `None`.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn existing(dir: &TenantDir) -> Result<Option<Self>, RunDirError> {
        let path = dir.path().join(COUNTS_NAME);
        let Some(file) = open_if_there(&path)? else {
            return Ok(None);
        };
        let found = || -> io::Result<Option<Shared>> {
            let _table = StretchLock::take(&file, CHANGING)?;
            if file.metadata()?.len() < Shared::BYTES as u64 {
                return Ok(None);
            }
            let shared = Shared::map(&file)?;
            let lives = shared.is_begun() && is_in_use(&file)?;
            Ok(lives.then_some(shared))
        };
        let shared = found().map_err(io_error("reading", &path))?;
        Ok(shared.map(|shared| Self { file: file.into(), path, shared }))
    }

    /// Opens the tenant's file for a process, with a slot in it. A file that dead processes have left is begun again with
    /// `budgets`. `None` if no process counts and no budgets are given. Blocks for moments.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn join(
        dir: &TenantDir,
        budgets: Option<&Budgets>,
    ) -> Result<Option<(Self, usize)>, RunDirError> {
        Self::open_with(dir, budgets, |file, shared| {
            for slot in 0..Shared::SLOTS_MAX {
                // The slot stays locked for as long as the file is open.
                if lock(file, byte_of(slot), libc::F_WRLCK).is_ok() {
                    shared.open_slot(slot);
                    return Ok(slot);
                }
            }
            Err(ErrorKind::QuotaExceeded.into())
        })
    }

    /// Opens the file for a command that changes budgets of a running tenant. Until the result is dropped, the file does not
    /// count as left behind.
    ///
    /// # Errors
    /// [`RunDirError::Io`], with `WouldBlock` inside if another command does so.
    pub(crate) fn edit(dir: &TenantDir) -> Result<Self, RunDirError> {
        let none = Budgets::default();
        let opened = Self::open_with(dir, Some(&none), |file, _| {
            lock(file, EDITOR, libc::F_WRLCK).map_err(io::Error::from)
        })?;
        let gone =
            || io_error("opening", &dir.path().join(COUNTS_NAME))(ErrorKind::NotFound.into());
        opened.map(|(file, ())| file).ok_or_else(gone)
    }

    /// Opens the file, creates it if need be, and calls `take` with the table locked.
    fn open_with<T>(
        dir: &TenantDir,
        budgets: Option<&Budgets>,
        take: impl Fn(&File, &Shared) -> io::Result<T>,
    ) -> Result<Option<(Self, T)>, RunDirError> {
        let path = dir.path().join(COUNTS_NAME);
        loop {
            let file = match budgets {
                None => open_if_there(&path)?,
                Some(_) => Some(open_lock_file(&path).map_err(io_error("opening", &path))?),
            };
            let Some(file) = file else {
                return Ok(None);
            };
            let opened = || -> io::Result<Option<(Shared, T)>> {
                let _table = StretchLock::take(&file, CHANGING)?;
                // A forked child keeps the mapping, and so the opening that is mapped. The locks of slots belong to the other
                // opening.
                let mapped = open_if_there(&path).map_err(io::Error::other)?;
                let Some(mapped) = mapped.filter(|mapped| is_same(&file, mapped.metadata())) else {
                    return Ok(None);
                };
                if file.metadata()?.len() < Shared::BYTES as u64 {
                    wipe(&file)?;
                }
                let shared = Shared::map(&mapped)?;
                if !(shared.is_begun() && is_in_use(&file)?) {
                    let Some(budgets) = budgets else {
                        std::fs::remove_file(&path)?;
                        return Ok(None);
                    };
                    wipe(&file)?;
                    write_budgets(&file, budgets)?;
                    shared.begin();
                }
                let taken = take(&file, &shared)?;
                Ok(Some((shared, taken)))
            };
            if let Some((shared, taken)) = opened().map_err(io_error("use", &path))? {
                return Ok(Some((Self { file: file.into(), path, shared }, taken)));
            }
        }
    }

    /// Is it the file that processes find now? A shortened file is removed, so that all processes use another one.
    pub(crate) fn is_named(&self) -> bool {
        let is_named = is_still_named(&self.file, &self.path);
        is_named && (self.is_whole() || std::fs::remove_file(&self.path).is_err())
    }

    /// Does it have all its bytes? An access beyond its end would kill this process.
    pub(crate) fn is_whole(&self) -> bool {
        self.file.metadata().is_ok_and(|found| found.len() >= Shared::BYTES as u64)
    }

    /// Returns the count that all processes share.
    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Returns the places of `gpus`. New GPUs get the tenant's budgets. Blocks for moments.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn places(&self, gpus: &[Gpu]) -> Result<Vec<Option<usize>>, RunDirError> {
        let places = || -> io::Result<Vec<Option<usize>>> {
            let _table = StretchLock::take(&self.file, CHANGING)?;
            let budgets = read_budgets(&self.file)?;
            let place = |gpu: &Gpu| {
                self.shared.find(gpu.uuid).or_else(|| {
                    let mut gpu = *gpu;
                    gpu.figure.budget_bytes = budgets.of(gpu.uuid, gpu.index);
                    self.shared.add(&gpu)
                })
            };
            Ok(gpus.iter().map(place).collect())
        };
        places().map_err(io_error("use", &self.path))
    }

    /// Returns the tenant's budgets.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn budgets(&self) -> Result<Budgets, RunDirError> {
        read_budgets(&self.file).map_err(io_error("reading", &self.path))
    }

    /// Changes the tenant's budgets, for all its processes simultaneously.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub(crate) fn change(&self, changes: &Budgets) -> Result<(), RunDirError> {
        let change = || -> io::Result<()> {
            let _table = StretchLock::take(&self.file, CHANGING)?;
            let gpus = self.shared.gpus();
            let known: Vec<_> = gpus.iter().map(|gpu| (gpu.uuid, gpu.index)).collect();
            let budgets = read_budgets(&self.file)?.changed_by(changes, &known);
            write_budgets(&self.file, &budgets)?;
            for (place, gpu) in gpus.iter().enumerate() {
                self.shared.set_budget(place, budgets.of(gpu.uuid, gpu.index));
            }
            Ok(())
        };
        change().map_err(io_error("writing", &self.path))
    }

    /// Clears the slots of processes that have ended; `own` is the slot of this process. Does not block.
    pub(crate) fn forget_dead(&self, own: Option<usize>) {
        for slot in (0..self.shared.slots_used()).filter(|slot| Some(*slot) != own) {
            // While the byte is locked here, no process takes the slot.
            if self.shared.is_slot_used(slot)
                && lock(&self.file, byte_of(slot), libc::F_WRLCK).is_ok()
            {
                self.shared.clear_slot(slot);
                if let Err(errno) = lock(&self.file, byte_of(slot), libc::F_UNLCK) {
                    tracing::warn!(%errno, slot, "a dead process's slot stays locked");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::time::{Duration, Instant};

    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use sublet_protocol::identity::TenantName;
    use sublet_protocol::run_dir::{RunDir, pause_thread};
    use sublet_stage::apart::{in_own_process, make_fifo, without_waiting};
    use vmm_pool::budget::Figure;
    use vmm_pool::driver::DeviceUuid;

    use std::path::Path;

    use super::*;

    const GPU: Gpu = Gpu {
        uuid: DeviceUuid([7; 16]),
        index: Some(0),
        total_bytes: 100,
        figure: Figure { budget_bytes: None, held_bytes: 0 },
    };

    fn dir(base: &tempfile::TempDir) -> TenantDir {
        let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
        run_dir.tenant(&TenantName::new("train").unwrap()).unwrap()
    }

    fn budgets(text: &str) -> Budgets {
        text.parse().unwrap()
    }

    /// A process, until it is dropped: each opening of the file has locks of its own.
    fn process(dir: &TenantDir, budget: &str) -> (BudgetFile, usize) {
        let (file, slot) = BudgetFile::join(dir, Some(&budgets(budget))).unwrap().unwrap();
        assert_eq!(file.places(&[GPU]).unwrap(), [Some(0)]);
        (file, slot)
    }

    #[test]
    fn who_takes_the_slot_of_one_that_was_killed_has_all_of_the_budget() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let (lives, own) = process(&dir, "0=50");
        let (killed, slot) = process(&dir, "0=50");
        killed.shared().take(0, slot, 50).unwrap();
        drop(killed);
        // Nobody has looked since.
        let (next, taken) = process(&dir, "0=50");
        assert_eq!((own, taken), (0, slot));
        next.shared().take(0, taken, 50).unwrap();
        assert_eq!(lives.shared().figure(0).held_bytes, 50);
    }

    #[test]
    fn the_slot_of_a_dead_process_is_free_again_when_another_has_cleared_it() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let (lives, own) = process(&dir, "0=50");
        let (killed, slot) = process(&dir, "0=50");
        killed.shared().take(0, slot, 50).unwrap();
        lives.forget_dead(Some(own));
        assert_eq!(lives.shared().figure(0).held_bytes, 50, "it lives");
        drop(killed);
        lives.forget_dead(Some(own));
        assert_eq!(lives.shared().figure(0).held_bytes, 0);
        let (_next, taken) = process(&dir, "0=50");
        assert_eq!(taken, slot);
    }

    #[test]
    fn a_file_that_only_the_dead_have_used_is_begun_anew_though_somebody_has_looked_at_it() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let (killed, slot) = process(&dir, "0=50");
        killed.shared().take(0, slot, 50).unwrap();
        let looks = BudgetFile::existing(&dir).unwrap().unwrap();
        drop(killed);
        // It has cleared the slot, and has the file open still.
        looks.forget_dead(None);
        let (next, _) = process(&dir, "0=20");
        assert_eq!(next.budgets().unwrap(), budgets("0=20"));
        drop(next);
        assert!(BudgetFile::existing(&dir).unwrap().is_none());
        dir.remove_stale().map(drop).unwrap();
        assert!(!looks.is_named());
    }

    #[test]
    fn a_file_that_somebody_is_changing_is_not_taken_for_left_behind() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let editor = BudgetFile::edit(&dir).unwrap();
        editor.change(&budgets("0=30")).unwrap();
        dir.remove_stale().map(drop).unwrap();
        assert!(editor.is_named());
        let (joins, _) = process(&dir, "0=50");
        assert_eq!(joins.budgets().unwrap(), budgets("0=30"));
        assert_eq!(joins.shared().figure(0).budget_bytes, Some(30));
        drop(joins);
        assert!(BudgetFile::existing(&dir).unwrap().is_some());
        drop(editor);
        let (again, _) = process(&dir, "0=50");
        assert_eq!(again.budgets().unwrap(), budgets("0=50"));
    }

    #[test]
    fn a_file_that_was_made_shorter_is_not_touched_and_all_take_another() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let ((one, _), (other, _)) = (process(&dir, "0=100"), process(&dir, "0=100"));
        assert!(one.is_named() && one.is_whole());
        File::options().write(true).open(dir.path().join(COUNTS_NAME)).unwrap().set_len(0).unwrap();
        assert!(!one.is_whole() && !one.is_named());
        let (next, _) = process(&dir, "0=100");
        assert!(!other.is_named(), "it moves to the new one");
        assert!(next.is_named() && next.is_whole());
    }

    /// One that joins waits for the lock of a file that is removed meanwhile.
    #[test]
    fn a_file_that_was_removed_while_its_lock_was_waited_for_is_joined_by_nobody() {
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let (first, _) = process(&dir, "0=50");
        let path = dir.path().join(COUNTS_NAME);
        let opened = open_if_there(&path).unwrap().unwrap();
        let held = StretchLock::take(&opened, CHANGING).unwrap();
        let waiting = std::thread::scope(|threads| {
            let joining = threads.spawn(|| process(&dir, "0=50"));
            let is_waiting = || {
                let found = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
                let links = found.filter_map(|entry| std::fs::read_link(entry.path()).ok());
                links.filter(|link| *link == path).count() == 3
            };
            let deadline = Instant::now() + Duration::from_millis(2500);
            while !is_waiting() && Instant::now() < deadline {
                pause_thread(Duration::from_millis(1));
            }
            std::fs::remove_file(&path).unwrap();
            drop(held);
            joining.join().unwrap()
        });
        assert!(waiting.0.is_named() && !first.is_named());
    }

    #[test]
    fn a_file_beyond_the_limit_of_its_process_is_an_error_and_no_signal() {
        const TEST: &str =
            "file::tests::a_file_beyond_the_limit_of_its_process_is_an_error_and_no_signal";
        if !in_own_process(TEST) {
            return;
        }
        let base = tempfile::tempdir().unwrap();
        let dir = dir(&base);
        let hard = getrlimit(Resource::RLIMIT_FSIZE).unwrap().1;
        setrlimit(Resource::RLIMIT_FSIZE, 1500, hard).unwrap();
        let error = BudgetFile::join(&dir, Some(&budgets("0=50"))).unwrap_err();
        let RunDirError::Io { source, .. } = error else { panic!("{error}") };
        assert_eq!(source.raw_os_error(), Some(libc::EFBIG), "{source}");
        setrlimit(Resource::RLIMIT_FSIZE, hard, hard).unwrap();
    }

    #[test]
    fn a_pipe_or_a_link_in_the_place_of_the_file_makes_nobody_wait_and_leads_nowhere() {
        without_waiting(|| {
            let base = tempfile::tempdir().unwrap();
            let link = |path: &Path| symlink(base.path().join("made"), path).unwrap();
            for make in [&make_fifo as &dyn Fn(&Path), &link] {
                let dir = dir(&base);
                make(&dir.path().join(COUNTS_NAME));
                let error = BudgetFile::join(&dir, None).unwrap_err();
                assert!(error.to_string().contains("no regular file"), "{error}");
                std::fs::remove_dir_all(dir.path()).unwrap();
            }
            assert!(!base.path().join("made").exists());
        });
    }
}
