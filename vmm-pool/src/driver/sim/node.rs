//! A simulated node: a directory that several processes share, with one ledger per device.
//!
//! A physical allocation is a file whose name says everything the driver was told about it. Its holders
//! are open file descriptions with a shared `flock`; a mapping, a duplicate and a descriptor in flight all
//! keep their description, and so the lock, alive. A process that gets an exclusive lock on a fresh description
//! has therefore proved that nobody in any process holds the memory, even after a `SIGKILL`.
//!
//! ```text
//! <node>/node.conf            capacity, version, identity
//! <node>/dev0/ledger          8 bytes: bytes in use; its flock serialises creation and removal
//! <node>/dev0/h-<id>-<size>-..  one allocation
//! <node>/host/...             the same for host memory, without a limit
//! <node>/processes/<pid>      where a process stands that `cuCheckpointProcess*` may be about
//! ```
//!
//! The ledger never says too little. It may say too much after a process was killed half-way, or while a
//! descriptor outlives the handle that it came from; [`Account::reconcile`] makes it exact by looking at
//! every file, and runs only when memory would run out or somebody asks how much is free.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::processes;
use crate::driver::{
    AllocationFlags, AllocationProp, DeviceUuid, DriverVersion, Location, LocationKind,
};

const CONFIG: &str = "node.conf";
const LEDGER: &str = "ledger";
const OWNER: &str = "owner";
/// Of the file of an allocation that a checkpoint has taken off its device.
const ASIDE_PREFIX: &str = "aside-";
const PRIVATE_PREFIX: &str = "sublet-sim-private-";
const VERSION_DEFAULT: DriverVersion = DriverVersion(13000);
/// What others left in new memory.
pub const SOIL: &[u8; 32] = b"what others had in here before..";
/// It is there once in so many bytes,
const SOILED_EVERY_BYTES: u64 = 64 << 10;
/// and so often at most in one allocation.
const SOILED_MAX: u64 = 4096;

/// A simulated node, open in this process.
#[derive(Clone, Debug)]
pub struct SimNode {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    id: [u8; 16],
    version: DriverVersion,
    devices: Vec<Arc<Account>>,
    host: Arc<Account>,
    /// Held locked while a private node is in use; the directory goes with the last user.
    private: Option<File>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.private.is_some() {
            // A leftover is swept by the next private node, so a failure here has no reader.
            fs::remove_dir_all(&self.dir).ok();
        }
    }
}

impl SimNode {
    /// Makes a node at `dir`, which must not hold one yet, with one device per capacity in bytes.
    ///
    /// # Errors
    /// What the file system said.
    pub fn create(dir: impl AsRef<Path>, capacities_bytes: &[u64]) -> io::Result<Self> {
        let dir = dir.as_ref();
        fs::create_dir_all(dir)?;
        let mut config = String::new();
        let id = hex(&random_id()?);
        let capacities = capacities_bytes.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        let version = VERSION_DEFAULT.0;
        writeln!(config, "id = {id}\nversion = {version}\ncapacities_bytes = {capacities}")
            .map_err(io::Error::other)?;
        for name in place_names(capacities_bytes.len()) {
            let place = dir.join(name);
            fs::create_dir(&place)?;
            fs::write(place.join(LEDGER), 0_u64.to_le_bytes())?;
        }
        processes::make_place(dir)?;
        // Last, and in one step: a node that can be opened is complete.
        let draft = dir.join("node.conf.new");
        fs::write(&draft, config)?;
        fs::rename(draft, dir.join(CONFIG))?;
        Self::open(dir)
    }

    /// Opens the node at `dir`.
    ///
    /// # Errors
    /// `NotFound` when there is none, `InvalidData` when its configuration makes no sense.
    pub fn open(dir: impl AsRef<Path>) -> io::Result<Self> {
        let dir = fs::canonicalize(dir)?;
        Self::open_at(dir, None)
    }

    /// Makes a node under `/dev/shm` that goes away with its last user in this process.
    ///
    /// # Errors
    /// What the file system said.
    pub fn private(capacities_bytes: &[u64]) -> io::Result<Self> {
        let base = Path::new("/dev/shm");
        sweep_private(base);
        let name = hex(&random_id()?);
        let draft = base.join(format!("sublet-sim-new-{name}"));
        drop(Self::create(&draft, capacities_bytes)?);
        let owner = File::create(draft.join(OWNER))?;
        owner.lock()?;
        let dir = base.join(format!("{PRIVATE_PREFIX}{name}"));
        fs::rename(&draft, &dir)?;
        Self::open_at(dir, Some(owner))
    }

    fn open_at(dir: PathBuf, private: Option<File>) -> io::Result<Self> {
        let config = Config::parse(&fs::read_to_string(dir.join(CONFIG))?)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "node.conf is malformed"))?;
        let mut accounts = place_names(config.capacities_bytes.len())
            .zip(config.capacities_bytes.iter().copied().chain([u64::MAX]))
            .map(|(name, capacity)| Account::open(dir.join(name), capacity).map(Arc::new))
            .collect::<io::Result<Vec<_>>>()?;
        let host = accounts.pop().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        let shared = Shared {
            dir,
            id: config.id,
            version: config.version,
            devices: accounts,
            host,
            private,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The directory of the node.
    pub fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// How many devices the node has.
    pub fn device_count(&self) -> usize {
        self.shared.devices.len()
    }

    /// The driver version that the node was made with.
    pub fn version(&self) -> DriverVersion {
        self.shared.version
    }

    /// A name for device `index` of this node that no other device shares.
    pub fn device_uuid(&self, index: usize) -> DeviceUuid {
        let mut uuid = self.shared.id;
        // Devices past the 256th would share a name; a node has far fewer. The first digits differ, as those of real
        // devices do.
        uuid[3] = uuid[3].wrapping_add(u8::try_from(index).unwrap_or(u8::MAX));
        DeviceUuid(uuid)
    }

    pub(super) fn device(&self, index: usize) -> Option<&Arc<Account>> {
        self.shared.devices.get(index)
    }

    /// The ledger for memory at `place`, whose device id counts the node's devices.
    fn account(&self, place: Location) -> Option<&Arc<Account>> {
        if place.kind == LocationKind::DEVICE {
            self.device(usize::try_from(place.id).ok()?)
        } else {
            Some(&self.shared.host)
        }
    }

    /// Makes a block and charges it. `Ok(None)` when the device has no room.
    pub(super) fn create_block(
        &self,
        size_bytes: u64,
        prop: AllocationProp,
    ) -> io::Result<Option<Block>> {
        let account = self
            .account(prop.location)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let name = BlockName { id: random_id()?, size_bytes, prop };
        let path = account.dir.join(name.to_string());
        let Some(file) = account.create(&path, size_bytes)? else {
            return Ok(None);
        };
        Ok(Some(Block { file: Some(file), name, account: account.clone() }))
    }

    /// The block that `fd` was exported from, held through a duplicate of `fd`. `Ok(None)` when `fd` is
    /// something else.
    pub(super) fn import_block(&self, fd: BorrowedFd<'_>) -> io::Result<Option<Block>> {
        use std::os::fd::AsRawFd;
        let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        let Some((account, name)) = self.recognise(&link) else {
            return Ok(None);
        };
        let bits = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_GETFL)?;
        if bits & libc::O_ACCMODE != libc::O_RDWR {
            return Ok(None);
        }
        Ok(Some(Block { file: Some(File::from(fd.try_clone_to_owned()?)), name, account }))
    }

    /// The block with `name`, if anybody still holds it.
    pub(super) fn open_block(&self, name: &BlockName) -> io::Result<Option<Block>> {
        let Some(account) = self.account(name.prop.location) else {
            return Ok(None);
        };
        let path = account.dir.join(name.to_string());
        Ok(account.join(&path)?.map(|file| Block {
            file: Some(file),
            name: *name,
            account: account.clone(),
        }))
    }

    /// The allocations of this node that the process `pid` holds, each once, as its descriptors say.
    pub(super) fn blocks_held_by(&self, pid: u32) -> io::Result<Vec<HeldBlock>> {
        let mut held = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
            // It may have been closed since.
            let Ok(link) = fs::read_link(entry?.path()) else { continue };
            let name = link.file_name().and_then(|name| name.to_str());
            let Some(name) = name else { continue };
            let plain = link.with_file_name(name.strip_prefix(ASIDE_PREFIX).unwrap_or(name));
            if let Some((account, name)) = self.recognise(&plain) {
                held.entry(plain).or_insert(HeldBlock { account, name });
            }
        }
        Ok(held.into_values().collect())
    }

    fn recognise(&self, path: &Path) -> Option<(Arc<Account>, BlockName)> {
        let parent = path.parent()?;
        let name = BlockName::parse(path.file_name()?.to_str()?)?;
        let account = self.account(name.prop.location)?;
        (account.dir == parent).then(|| (account.clone(), name))
    }
}

struct Config {
    id: [u8; 16],
    version: DriverVersion,
    capacities_bytes: Vec<u64>,
}

impl Config {
    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.lines().find_map(|line| {
                let (key, value) = line.split_once('=')?;
                (key.trim() == name).then(|| value.trim())
            })
        };
        Some(Self {
            id: unhex(field("id")?)?,
            version: DriverVersion(field("version")?.parse().ok()?),
            capacities_bytes: field("capacities_bytes")?
                .split_whitespace()
                .map(|word| word.parse().ok())
                .collect::<Option<_>>()?,
        })
    }
}

fn place_names(devices: usize) -> impl Iterator<Item = String> {
    (0..devices).map(|index| format!("dev{index}")).chain(["host".to_owned()])
}

/// Removes private nodes whose owner is gone.
fn sweep_private(base: &Path) {
    let Ok(entries) = fs::read_dir(base) else {
        return;
    };
    for entry in entries.flatten() {
        let is_private =
            entry.file_name().to_str().is_some_and(|name| name.starts_with(PRIVATE_PREFIX));
        if !is_private {
            continue;
        }
        let orphaned =
            File::open(entry.path().join(OWNER)).is_ok_and(|owner| owner.try_lock().is_ok());
        if orphaned {
            // Somebody else may be sweeping too; the second finds nothing.
            fs::remove_dir_all(entry.path()).ok();
        }
    }
}

/// The memory of one place and how much of it is in use.
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
        // An unlock of a lock that we hold cannot fail; if it did, closing the file would undo it.
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

impl Account {
    fn open(dir: PathBuf, capacity_bytes: u64) -> io::Result<Self> {
        let ledger = OpenOptions::new().read(true).write(true).open(dir.join(LEDGER))?;
        Ok(Self { dir, capacity_bytes, ledger: Mutex::new(ledger) })
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn lock(&self) -> io::Result<Locked<'_>> {
        let file = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        file.lock()?;
        Ok(Locked(file))
    }

    /// Charges `size_bytes` and makes the file at `path`, held. `Ok(None)` when there is no room.
    fn create(&self, path: &Path, size_bytes: u64) -> io::Result<Option<File>> {
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
        let made = make_held(path, size_bytes);
        if made.is_err() {
            fs::remove_file(path).ok();
            ledger.set_used_bytes(used)?;
        }
        made.map(Some)
    }

    /// Opens the file at `path`, held, unless nobody holds it any more.
    fn join(&self, path: &Path) -> io::Result<Option<File>> {
        let _ledger = self.lock()?;
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        if file.try_lock().is_ok() {
            return Ok(None);
        }
        file.lock_shared()?;
        Ok(Some(file))
    }

    /// Removes the file at `path` and its charge, unless somebody still holds it.
    fn settle(&self, path: &Path, size_bytes: u64) -> io::Result<()> {
        let ledger = self.lock()?;
        if remove_if_unheld(path)? {
            let used = ledger.used_bytes()?;
            ledger.set_used_bytes(used.saturating_sub(size_bytes))?;
        }
        Ok(())
    }

    /// Makes the ledger exact and returns what it says.
    fn reconcile(&self, ledger: &Locked<'_>) -> io::Result<u64> {
        let mut used: u64 = 0;
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().and_then(BlockName::parse) else {
                // Of a process that ended while its memory was set aside.
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

    /// Bytes held by anybody, exactly.
    pub(super) fn used_bytes(&self) -> io::Result<u64> {
        let ledger = self.lock()?;
        self.reconcile(&ledger)
    }
}

/// An allocation that some process holds, by its name.
#[derive(Debug)]
pub(super) struct HeldBlock {
    account: Arc<Account>,
    name: BlockName,
}

impl HeldBlock {
    pub(super) fn place(&self) -> LocationKind {
        self.name.prop.location.kind
    }

    fn paths(&self) -> (PathBuf, PathBuf) {
        let name = self.name.to_string();
        let aside = self.account.dir.join(format!("{ASIDE_PREFIX}{name}"));
        (self.account.dir.join(name), aside)
    }

    /// Takes what is on a device off it; its holders keep it. Nothing to do where that is done.
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

    /// Undoes [`Self::set_aside`]; false where the device has no room.
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

fn make_held(path: &Path, size_bytes: u64) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    file.lock_shared()?;
    file.set_len(size_bytes)?;
    for offset in soiled_places(size_bytes) {
        file.write_all_at(SOIL, offset)?;
    }
    Ok(file)
}

/// The beginning of new memory, which comes again and again in allocations of up to 256 MiB.
pub(super) fn new_memory() -> Vec<u8> {
    let mut bytes = SOIL.to_vec();
    bytes.resize(64 << 10, 0);
    bytes
}

/// Where new memory has [`SOIL`] in it. All of it would be written page by page, and fill the machine.
fn soiled_places(size_bytes: u64) -> impl Iterator<Item = u64> {
    let apart = size_bytes.div_ceil(SOILED_MAX).next_multiple_of(SOILED_EVERY_BYTES);
    (0..size_bytes.div_ceil(apart)).map(move |index| index * apart)
}

/// Only with the ledger locked: otherwise two callers could both find the same file unheld.
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

/// What the name of an allocation's file says; device ids count the node's devices.
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
    /// `None` only inside `drop`, where the description must go before the account looks.
    file: Option<File>,
    name: BlockName,
    account: Arc<Account>,
}

impl Block {
    pub(super) fn name(&self) -> &BlockName {
        &self.name
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match &self.file {
            Some(file) => file.as_fd(),
            None => unreachable!("the file is taken only in drop"),
        }
    }

    /// A duplicate, which holds the memory as this block does.
    pub(super) fn export(&self) -> io::Result<OwnedFd> {
        self.fd().try_clone_to_owned()
    }

    /// A descriptor that holds the memory but cannot be imported, as a DMA-BUF is.
    pub(super) fn export_read_only(&self) -> io::Result<OwnedFd> {
        let file = File::open(self.account.dir.join(self.name.to_string()))?;
        file.lock_shared()?;
        Ok(file.into())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        drop(self.file.take());
        let path = self.account.dir.join(self.name.to_string());
        if let Err(error) = self.account.settle(&path, self.name.size_bytes) {
            // The next reconciliation finds the file unheld and does it then.
            tracing::trace!(%error, path = %path.display(), "block not settled");
        }
    }
}

pub(super) fn random_id() -> io::Result<[u8; 16]> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(io::Error::other)?;
    Ok(id)
}

fn hex(bytes: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*bytes))
}

fn unhex(text: &str) -> Option<[u8; 16]> {
    u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes)
}
