//! The calls by which one process of a node handles another by its id: `cuCheckpointProcess*`. They take a process's memory off
//! the devices, with that of its contexts, and restore it.
//!
//! Each process has a page that all processes of the node share. The page has the state of the process, and the number of its
//! threads inside a call. The caller that checkpoints a process finds the process's device memory by its descriptors. So the
//! process itself takes no part, and may be killed at any moment.
//!
//! As seen on driver 580 (H100, H200): a checkpoint succeeds, and the restore fails with `NOT_SUPPORTED` while the process
//! holds imports or memory of a host node. It fails with `INVALID_VALUE` while the process has memory open by a `cudaIpc`
//! handle. The states, and what each call needs, are from the header (CUDA 12.8). Not seen, and the harsher guess: after such a
//! restore the process is `FAILED`. A restore without room leaves the process as it was.

#![expect(unsafe_code, reason = "maps pages that processes share")]

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};

use super::blocks::HeldBlock;
use super::memory::{Coded, io_code};
use super::node::SimNode;
use sublet_driver::{DriverCode, LocationKind, ProcessState};

/// The interval of checks during a wait: pages give no event.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// The longest time that a step waits for the lock, whose holder may be stopped.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

const PROCESSES: &str = "processes";
/// The file that is locked while one process changes another.
const LOCK: &str = "lock";
/// The indexes of the words of a page.
const STATE: usize = 0;
const INSIDE: usize = 1;
const IMPORTS: usize = 2;
const OPENED: usize = 3;
const WORDS: usize = 4;

/// # Invariants
/// 1. `map` has room for [`WORDS`] words, which every process that maps it treats as atomics.
#[derive(Debug)]
struct Page {
    map: MmapRaw,
    file: File,
}

impl Page {
    fn open(options: &OpenOptions, path: &PathBuf) -> io::Result<Self> {
        let file = options.open(path)?;
        let length = WORDS * size_of::<AtomicU32>();
        if file.metadata()?.len() < length as u64 {
            file.set_len(length as u64)?;
        }
        // SAFETY: others change it only as atomics, and nobody takes a slice of it.
        let map = unsafe { MmapOptions::new().len(length).map_mut(&file) }?;
        // INVARIANT: the map has that length, and every user is this type.
        let map = MmapRaw::from(map);
        Ok(Self { map, file })
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        debug_assert!(index < WORDS, "a page has so many words");
        #[expect(clippy::cast_ptr_alignment, reason = "a map begins at a page")]
        let first = self.map.as_mut_ptr().cast::<AtomicU32>();
        // SAFETY: within the map, which is aligned to a page (invariant 1).
        let word = unsafe { first.add(index) };
        // SAFETY: mapped as long as this lives, and only ever touched as an atomic (invariant 1).
        unsafe { &*word }
    }

    fn state(&self) -> ProcessState {
        ProcessState::of(self.word(STATE).load(Ordering::SeqCst))
    }

    fn set_state(&self, state: ProcessState) {
        self.word(STATE).store(state.number(), Ordering::SeqCst);
    }
}

/// The page of this process. While it lives, others find this process by its id.
#[derive(Debug)]
pub struct ProcessPage(Page);

/// A call of this process. While it lives, no lock of the process completes.
#[derive(Debug)]
pub struct InCall<'a>(&'a Page);

impl Drop for InCall<'_> {
    fn drop(&mut self) {
        self.0.word(INSIDE).fetch_sub(1, Ordering::SeqCst);
    }
}

impl ProcessPage {
    /// Begins a call. Waits while another process has locked this one.
    pub fn enter(&self) -> InCall<'_> {
        loop {
            self.0.word(INSIDE).fetch_add(1, Ordering::SeqCst);
            let call = InCall(&self.0);
            if self.0.state() == ProcessState::Running {
                return call;
            }
            drop(call);
            while self.0.state() != ProcessState::Running {
                look_again_later();
            }
        }
    }

    /// Ends the process if its contexts are off the device. For calls that the lock does not hold back, such as queries about
    /// work. Driver 580.159 ends such a process by SIGSEGV. It answers in a process that is only locked (seen on an H100).
    pub fn end_if_off_device(&self, symbol: &str) {
        if self.0.state() == ProcessState::Checkpointed {
            let said = format!(
                "the simulated driver: {symbol} in a process whose contexts are off the device\n"
            );
            let _written = io::stderr().write_all(said.as_bytes());
            // A panic would be caught, and answered as an error.
            let _sent = nix::sys::signal::raise(nix::sys::signal::Signal::SIGSEGV);
        }
    }

    /// Records the obstacles to a restore: the numbers of imported allocations, and of those that are open by a `cudaIpc`
    /// handle.
    pub fn note_foreign(&self, imports: u32, opened: u32) {
        self.0.word(IMPORTS).store(imports, Ordering::SeqCst);
        self.0.word(OPENED).store(opened, Ordering::SeqCst);
    }
}

/// Makes the directory by which processes of the node at `dir` find each other.
pub(super) fn make_place(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir.join(PROCESSES))?;
    let mut lock = OpenOptions::new();
    lock.append(true).create(true).open(dir.join(PROCESSES).join(LOCK)).map(drop)
}

impl SimNode {
    fn page_path(&self, pid: u32) -> PathBuf {
        self.dir().join(PROCESSES).join(pid.to_string())
    }

    /// Makes the page of this process, which has called `cuInit`.
    ///
    /// # Errors
    /// The error that the file system returned.
    pub fn stand(&self) -> io::Result<ProcessPage> {
        // A node that a script has made may lack it.
        make_place(self.dir())?;
        self.sweep_processes();
        let path = self.page_path(std::process::id());
        // It is locked before it has its name: a page without a lock belongs to a process that has ended.
        let draft = path.with_extension("new");
        let page = Page::open(OpenOptions::new().read(true).write(true).create(true), &draft)?;
        page.file.lock_shared()?;
        fs::rename(draft, path)?;
        Ok(ProcessPage(page))
    }

    /// Removes the pages of processes that have ended.
    pub fn sweep_processes(&self) {
        for entry in fs::read_dir(self.dir().join(PROCESSES)).into_iter().flatten().flatten() {
            let is_page =
                entry.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok());
            let is_dead = || File::open(entry.path()).is_ok_and(|page| page.try_lock().is_ok());
            if is_page && is_dead() {
                // Another process may be sweeping too.
                fs::remove_file(entry.path()).ok();
            }
        }
    }

    /// Opens the page of a process that lives.
    fn page_of(&self, pid: u32) -> Coded<Page> {
        let opened = Page::open(OpenOptions::new().read(true).write(true), &self.page_path(pid));
        let page = opened.map_err(|_| DriverCode::INVALID_VALUE)?;
        match page.file.try_lock() {
            Err(TryLockError::WouldBlock) if PathBuf::from(format!("/proc/{pid}")).exists() => {
                Ok(page)
            }
            Ok(()) | Err(_) => Err(DriverCode::INVALID_VALUE),
        }
    }

    /// `cuCheckpointProcessGetState`.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a process that does not use this node.
    pub fn process_state(&self, pid: u32) -> Coded<ProcessState> {
        Ok(self.page_of(pid)?.state())
    }

    /// `cuCheckpointProcessLock`: makes the process's calls wait from now on. Waits until the calls under way are out, for at
    /// most `timeout` if there is one. After a timeout the process runs as before.
    ///
    /// # Errors
    /// `INVALID_VALUE`; `ILLEGAL_STATE` unless the process runs; `NOT_READY` after the timeout.
    pub fn lock_process(&self, pid: u32, timeout: Option<Duration>) -> Coded<()> {
        let page = self.page_of(pid)?;
        let (running, locked) = (ProcessState::Running.number(), ProcessState::Locked.number());
        let change =
            page.word(STATE).compare_exchange(running, locked, Ordering::SeqCst, Ordering::SeqCst);
        change.map_err(|_| DriverCode::ILLEGAL_STATE)?;
        let began = Instant::now();
        while page.word(INSIDE).load(Ordering::SeqCst) > 0 {
            if timeout.is_some_and(|timeout| began.elapsed() >= timeout) {
                page.set_state(ProcessState::Running);
                return Err(DriverCode::NOT_READY);
            }
            self.page_of(pid)?;
            look_again_later();
        }
        Ok(())
    }

    /// `cuCheckpointProcessUnlock`.
    ///
    /// # Errors
    /// `INVALID_VALUE`; `ILLEGAL_STATE` unless the process is locked.
    pub fn unlock_process(&self, pid: u32) -> Coded<()> {
        self.step(pid, ProcessState::Locked, || Ok(ProcessState::Running))
    }

    /// `cuCheckpointProcessCheckpoint`: frees the process's memory on devices for others.
    ///
    /// # Errors
    /// `INVALID_VALUE`; `ILLEGAL_STATE` unless the process is locked; `UNKNOWN` when the node's files cannot be changed.
    pub fn checkpoint_process(&self, pid: u32) -> Coded<()> {
        self.step(pid, ProcessState::Locked, || {
            for block in self.blocks_held_by(pid).map_err(|error| io_code(&error))? {
                block.set_aside().map_err(|error| io_code(&error))?;
            }
            Ok(ProcessState::Checkpointed)
        })
    }

    /// `cuCheckpointProcessRestore`: takes that memory again, all or nothing, and leaves the process locked.
    ///
    /// # Errors
    /// `INVALID_VALUE`, `NOT_SUPPORTED`: see the head of this module; `ILLEGAL_STATE` unless the process is checkpointed;
    /// `OUT_OF_MEMORY`, which leaves the process as before.
    pub fn restore_process(&self, pid: u32) -> Coded<()> {
        let page = self.page_of(pid)?;
        let blocks = self.blocks_held_by(pid).map_err(|error| io_code(&error))?;
        self.step(pid, ProcessState::Checkpointed, || {
            let of_host = |block: &HeldBlock| block.place() != LocationKind::DEVICE;
            let failed =
                if page.word(IMPORTS).load(Ordering::SeqCst) > 0 || blocks.iter().any(of_host) {
                    Some(DriverCode::NOT_SUPPORTED)
                } else if page.word(OPENED).load(Ordering::SeqCst) > 0 {
                    Some(DriverCode::INVALID_VALUE)
                } else {
                    None
                };
            if let Some(code) = failed {
                page.set_state(ProcessState::Failed);
                return Err(code);
            }
            for (count, block) in blocks.iter().enumerate() {
                let taken = block.take_back().map_err(|error| io_code(&error));
                if taken == Ok(true) {
                    continue;
                }
                for block in &blocks[..count] {
                    block.set_aside().map_err(|error| io_code(&error))?;
                }
                taken?;
                return Err(DriverCode::OUT_OF_MEMORY);
            }
            Ok(ProcessState::Locked)
        })
    }

    /// Runs `work` on a process that is in state `from`, with all other steps shut out.
    fn step(
        &self,
        pid: u32,
        from: ProcessState,
        work: impl FnOnce() -> Coded<ProcessState>,
    ) -> Coded<()> {
        let page = self.page_of(pid)?;
        // The lock is a file next to the page: the page's own lock says that its process lives.
        let gate = File::open(self.dir().join(PROCESSES).join(LOCK));
        let gate = gate.map_err(|error| io_code(&error))?;
        let until = Instant::now() + STEP_TIMEOUT;
        while gate.try_lock().is_err() {
            if Instant::now() >= until {
                return Err(DriverCode::NOT_READY);
            }
            look_again_later();
        }
        if page.state() != from {
            return Err(DriverCode::ILLEGAL_STATE);
        }
        page.set_state(work()?);
        Ok(())
    }
}

#[expect(clippy::disallowed_methods, reason = "a page that processes share gives no event")]
fn look_again_later() {
    std::thread::sleep(LOOK_EVERY);
}
