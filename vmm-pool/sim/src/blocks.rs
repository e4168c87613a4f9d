//! Physical memory of a simulated node: files whose holders are locks, and a ledger for each device and for the host.
//!
//! A physical allocation is a file whose name says everything that the driver was told about it. Its holders are open file
//! descriptions with a shared `flock`. A mapping, a duplicate and a descriptor in flight all keep their description, and so the
//! lock, alive. An exclusive lock on a fresh description therefore proves that nobody in any process holds the memory, even
//! after a `SIGKILL`.
//!
//! The ledger never counts too little. It may count too much after a process was killed half-way. It may also do so while a
//! descriptor outlives the handle that it came from. [`Account::reconcile`] makes the ledger exact by looking at every file. It
//! runs only when memory would run out, or when somebody asks how much is free.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::node::{hex, unhex};
use super::vm;
use sublet_driver::{AllocationFlags, AllocationProp, Location, LocationKind};

const LEDGER: &str = "ledger";
/// The prefix of the file name of an allocation that a checkpoint has taken off its device.
pub(super) const ASIDE_PREFIX: &str = "aside-";
/// The bytes in new memory that a former owner could have left.
pub const SOIL: &[u8; 32] = b"what others had in here before..";
/// The distance between places with [`SOIL`], in bytes, unless [`SOILED_MAX`] makes it larger.
const SOILED_EVERY_BYTES: u64 = 64 << 10;
/// The most places with [`SOIL`] in one allocation.
const SOILED_MAX: u64 = 4096;
/// Up to this many bytes of a place's memory are in large pages, which the machine allocates whole. Memory beyond that gets a
/// page of the machine only where something is written. So a simulated device may be larger than the machine.
const LARGE_PAGES_MAX_BYTES: u64 = 1 << 30;
/// The limit for one allocation. A larger one is a context, or memory with which a test fills a device without touching it.
const LARGE_PAGES_MAX_EACH_BYTES: u64 = 128 << 20;

/// The memory of one place, and the bytes of it that are in use.
#[derive(Debug)]
pub(super) struct Account {
    dir: PathBuf,
    capacity_bytes: u64,
    ledger: Mutex<File>,
}

/// Exclusive use of a ledger, over all threads and processes; unlocked on drop.
struct Locked<'a>(std::sync::MutexGuard<'a, File>);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // To unlock a lock that we hold cannot fail. If it did, closing the file would unlock it.
        self.0.unlock().ok();
    }
}

impl Locked<'_> {
    fn used_bytes(&self) -> io::Result<u64> {
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, 0)?;
        Ok(u64::from_le_bytes(word))
    }

    fn set_used_bytes(&self, bytes: u64) -> io::Result<()> {
        self.0.write_all_at(&bytes.to_le_bytes(), 0)
    }
}

/// Repeats a call that a handled signal has interrupted. No function of the driver fails because of a signal.
fn through_signals(mut wait: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match wait() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            ended => return ended,
        }
    }
}

impl Account {
    /// Makes an empty account at `dir`.
    pub(super) fn make(dir: &Path) -> io::Result<()> {
        fs::create_dir(dir)?;
        fs::write(dir.join(LEDGER), 0_u64.to_le_bytes())
    }

    pub(super) fn open(dir: PathBuf, capacity_bytes: u64) -> io::Result<Self> {
        let ledger = OpenOptions::new().read(true).write(true).open(dir.join(LEDGER))?;
        Ok(Self { dir, capacity_bytes, ledger: Mutex::new(ledger) })
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    fn path_of(&self, name: &BlockName) -> PathBuf {
        self.dir.join(name.to_string())
    }

    fn lock(&self) -> io::Result<Locked<'_>> {
        let file = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        through_signals(|| file.lock())?;
        Ok(Locked(file))
    }

    /// Makes the block `name`, and charges it. `Ok(None)` when there is no room.
    pub(super) fn create(self: &Arc<Self>, name: BlockName) -> io::Result<Option<Block>> {
        let (path, size_bytes) = (self.path_of(&name), name.size_bytes);
        let ledger = self.lock()?;
        let mut used = ledger.used_bytes()?;
        if size_bytes > self.capacity_bytes.saturating_sub(used) {
            used = self.reconcile(&ledger)?;
        }
        if size_bytes > self.capacity_bytes.saturating_sub(used) {
            return Ok(None);
        }
        // OVERFLOW: the sum is at most the capacity, or the host's, which no machine reaches.
        ledger.set_used_bytes(used + size_bytes)?;
        let in_large_pages =
            size_bytes <= LARGE_PAGES_MAX_EACH_BYTES && used + size_bytes <= LARGE_PAGES_MAX_BYTES;
        let made = make_held(&path, size_bytes, in_large_pages);
        if made.is_err() {
            fs::remove_file(path).ok();
            ledger.set_used_bytes(used)?;
        }
        made.map(|file| Some(Block::of(file, name, Arc::clone(self))))
    }

    /// Opens and holds the block `name`, unless nobody holds it any more.
    pub(super) fn join(self: &Arc<Self>, name: BlockName) -> io::Result<Option<Block>> {
        let _ledger = self.lock()?;
        let file = match OpenOptions::new().read(true).write(true).open(self.path_of(&name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        if file.try_lock().is_ok() {
            return Ok(None);
        }
        through_signals(|| file.lock_shared())?;
        Ok(Some(Block::of(file, name, Arc::clone(self))))
    }

    /// Removes the file of `name` and its charge, unless somebody still holds it.
    fn settle(&self, name: &BlockName) -> io::Result<()> {
        let ledger = self.lock()?;
        if remove_if_unheld(&self.path_of(name))? {
            let used = ledger.used_bytes()?;
            ledger.set_used_bytes(used.saturating_sub(name.size_bytes))?;
        }
        Ok(())
    }

    /// Makes the ledger exact, and returns the bytes in use.
    fn reconcile(&self, ledger: &Locked<'_>) -> io::Result<u64> {
        let mut used: u64 = 0;
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().and_then(BlockName::parse) else {
                // The file belongs to a process that ended while its memory was set aside.
                if entry.file_name().to_str().is_some_and(|name| name.starts_with(ASIDE_PREFIX)) {
                    remove_if_unheld(&entry.path())?;
                }
                continue;
            };
            if !remove_if_unheld(&entry.path())? {
                used = used.saturating_add(name.size_bytes);
            }
        }
        ledger.set_used_bytes(used)?;
        Ok(used)
    }

    /// Counts the bytes that anybody holds, exactly.
    pub(super) fn used_bytes(&self) -> io::Result<u64> {
        let ledger = self.lock()?;
        self.reconcile(&ledger)
    }
}

/// An allocation that some process holds, by its name.
#[derive(Debug)]
pub(super) struct HeldBlock {
    pub(super) account: Arc<Account>,
    pub(super) name: BlockName,
}

impl HeldBlock {
    pub(super) fn place(&self) -> LocationKind {
        self.name.prop.location.kind
    }

    fn paths(&self) -> (PathBuf, PathBuf) {
        let aside = self.account.dir.join(format!("{ASIDE_PREFIX}{}", self.name));
        (self.account.path_of(&self.name), aside)
    }

    /// Takes the memory off its device; its holders keep it. Does nothing if that is done already.
    pub(super) fn set_aside(&self) -> io::Result<()> {
        if self.place() != LocationKind::DEVICE {
            return Ok(());
        }
        let (here, aside) = self.paths();
        let ledger = self.account.lock()?;
        if here.exists() {
            fs::rename(here, aside)?;
            let used = ledger.used_bytes()?;
            ledger.set_used_bytes(used.saturating_sub(self.name.size_bytes))?;
        }
        Ok(())
    }

    /// Undoes [`Self::set_aside`]. False if the device has no room.
    pub(super) fn take_back(&self) -> io::Result<bool> {
        let (here, aside) = self.paths();
        let ledger = self.account.lock()?;
        if !aside.exists() {
            return Ok(true);
        }
        let used = self.account.reconcile(&ledger)?;
        let size_bytes = self.name.size_bytes;
        if size_bytes > self.account.capacity_bytes.saturating_sub(used) {
            return Ok(false);
        }
        fs::rename(aside, here)?;
        // OVERFLOW: the sum is at most the capacity.
        ledger.set_used_bytes(used + size_bytes)?;
        Ok(true)
    }
}

fn make_held(path: &Path, size_bytes: u64, in_large_pages: bool) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    through_signals(|| file.lock_shared())?;
    file.set_len(size_bytes)?;
    // A page becomes a large one only where it has contents.
    let (first, rest): (Vec<u64>, Vec<u64>) =
        soiled_places(size_bytes).partition(|offset| offset.is_multiple_of(vm::LARGE_PAGE_BYTES));
    for offset in first {
        file.write_all_at(SOIL, offset)?;
    }
    if in_large_pages {
        vm::enlarge_pages(size_bytes, file.as_fd());
    }
    for offset in rest {
        file.write_all_at(SOIL, offset)?;
    }
    Ok(file)
}

/// The beginning of new memory, which repeats in allocations of up to 256 MiB.
pub(super) fn new_memory() -> Vec<u8> {
    let mut bytes = SOIL.to_vec();
    bytes.resize(64 << 10, 0);
    bytes
}

/// Returns the offsets in new memory that have [`SOIL`]. Soil everywhere would be written page by page, and would fill the
/// machine.
fn soiled_places(size_bytes: u64) -> impl Iterator<Item = u64> {
    let apart = size_bytes.div_ceil(SOILED_MAX).next_multiple_of(SOILED_EVERY_BYTES);
    (0..size_bytes.div_ceil(apart)).map(move |index| index * apart)
}

/// Removes the file at `path` if nobody holds it. The ledger must be locked: otherwise two callers could both find the same
/// file unheld.
fn remove_if_unheld(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    match file.try_lock() {
        Ok(()) => {
            fs::remove_file(path)?;
            Ok(true)
        }
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The contents of the name of an allocation's file. Device ids are numbers among the node's devices.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockName {
    pub(super) id: [u8; 16],
    pub(super) size_bytes: u64,
    pub(super) prop: AllocationProp,
}

impl std::fmt::Display for BlockName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let AllocationProp { kind, requested_handle_types: types, location, flags, .. } = self.prop;
        write!(
            f,
            "h-{}-{}-{kind}-{types}-{}-{}-{}-{}-{}",
            hex(&self.id),
            self.size_bytes,
            location.kind.0,
            location.id,
            flags.compression,
            flags.gpu_direct_rdma_capable,
            flags.usage,
        )
    }
}

impl BlockName {
    pub(super) fn parse(name: &str) -> Option<Self> {
        let mut words = name.strip_prefix("h-")?.split('-');
        let id = unhex(words.next()?)?;
        let size_bytes = words.next()?.parse().ok()?;
        let kind = words.next()?.parse().ok()?;
        let requested_handle_types = words.next()?.parse().ok()?;
        let location = Location {
            kind: LocationKind(words.next()?.parse().ok()?),
            id: words.next()?.parse().ok()?,
        };
        let flags = AllocationFlags {
            compression: words.next()?.parse().ok()?,
            gpu_direct_rdma_capable: words.next()?.parse().ok()?,
            usage: words.next()?.parse().ok()?,
            reserved: [0; 4],
        };
        words.next().is_none().then_some(Self {
            id,
            size_bytes,
            prop: AllocationProp {
                kind,
                requested_handle_types,
                location,
                win32_handle_metadata: 0,
                flags,
            },
        })
    }
}

/// Physical memory, held by this process through one open file description.
#[derive(Debug)]
pub(super) struct Block {
    /// `None` only inside `drop`, where the description must be closed before the account looks.
    file: Option<File>,
    name: BlockName,
    account: Arc<Account>,
}

impl Block {
    /// Makes the block that `file` holds.
    pub(super) fn of(file: File, name: BlockName, account: Arc<Account>) -> Self {
        Self { file: Some(file), name, account }
    }

    pub(super) fn name(&self) -> &BlockName {
        &self.name
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match &self.file {
            Some(file) => file.as_fd(),
            None => unreachable!("the file is taken only in drop"),
        }
    }

    /// Returns a duplicate descriptor, which holds the memory as this block does.
    pub(super) fn export(&self) -> io::Result<OwnedFd> {
        self.fd().try_clone_to_owned()
    }

    /// Returns a descriptor that holds the memory but cannot be imported, like a DMA-BUF.
    pub(super) fn export_read_only(&self) -> io::Result<OwnedFd> {
        let file = File::open(self.account.path_of(&self.name))?;
        through_signals(|| file.lock_shared())?;
        Ok(file.into())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        drop(self.file.take());
        if let Err(error) = self.account.settle(&self.name) {
            // The next reconciliation finds the file unheld, and removes it then.
            tracing::trace!(%error, name = %self.name, "block not settled");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;
    use std::thread;

    use nix::sys::pthread::{pthread_kill, pthread_self};
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

    use super::Account;

    static HANDLED: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_signal: i32) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }

    #[expect(unsafe_code, reason = "a handler of the test's own")]
    #[test]
    fn a_wait_for_the_ledger_goes_on_whatever_signals_come() {
        // Without SA_RESTART a signal ends the wait of the system.
        let action = SigAction::new(SigHandler::Handler(count), SaFlags::empty(), SigSet::empty());
        // SAFETY: it adds to an atomic alone.
        unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("dev0");
        Account::make(&place).unwrap();
        let [one, other] = [(); 2].map(|()| Account::open(place.clone(), 1).unwrap());
        let held = one.lock().unwrap();
        thread::scope(|scope| {
            let (tell, told) = channel();
            let waits = scope.spawn(move || {
                tell.send(pthread_self()).unwrap();
                other.lock().map(drop)
            });
            let thread = told.recv().unwrap();
            while HANDLED.load(Ordering::Relaxed) < 100 && !waits.is_finished() {
                pthread_kill(thread, Signal::SIGUSR1).unwrap();
                thread::yield_now();
            }
            drop(held);
            waits.join().unwrap().unwrap();
        });
    }
}
