//! A simulated node: a directory that several processes share, with one ledger per device (`blocks.rs`).
//!
//! ```text
//! <node>/node.conf            capacity, version, identity
//! <node>/dev0/ledger          8 bytes: bytes in use; its flock serialises creation and removal
//! <node>/dev0/h-<id>-<size>-..  one allocation
//! <node>/host/...             the same for host memory, without a limit
//! <node>/processes/<pid>      the state of a process that `cuCheckpointProcess*` may name
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::blocks::{ASIDE_PREFIX, Account, Block, BlockName, HeldBlock};
use super::processes;
use sublet_driver::{AllocationProp, DeviceUuid, DriverVersion, Location, LocationKind};

const CONFIG: &str = "node.conf";
const OWNER: &str = "owner";
const PRIVATE_PREFIX: &str = "sublet-sim-private-";
const VERSION_DEFAULT: DriverVersion = DriverVersion(13000);

/// A simulated node, open in this process.
#[derive(Clone, Debug)]
pub struct SimNode {
    shared: Arc<OpenNode>,
}

#[derive(Debug)]
struct OpenNode {
    dir: PathBuf,
    id: [u8; 16],
    version: DriverVersion,
    devices: Vec<Arc<Account>>,
    host: Arc<Account>,
    /// Held locked while a private node is in use. The last user removes the directory.
    private: Option<File>,
}

impl Drop for OpenNode {
    fn drop(&mut self) {
        if self.private.is_some() {
            // The next private node sweeps a leftover, so nobody needs to hear of a failure here.
            fs::remove_dir_all(&self.dir).ok();
        }
    }
}

impl SimNode {
    /// Makes a node at `dir`, which must not hold one yet, with one device per capacity in bytes.
    ///
    /// # Errors
    /// The error that the file system returned.
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
            Account::make(&dir.join(name))?;
        }
        processes::make_place(dir)?;
        // The configuration comes last, and in one step: a node that can be opened is complete.
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

    /// Makes a node under `/dev/shm`, which its last user in this process removes.
    ///
    /// # Errors
    /// The error that the file system returned.
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
        let shared = OpenNode {
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

    /// Counts the devices of the node.
    pub fn device_count(&self) -> usize {
        self.shared.devices.len()
    }

    /// The driver version that the node was made with.
    pub fn version(&self) -> DriverVersion {
        self.shared.version
    }

    /// Returns a name for device `index` of this node that no other device shares.
    pub fn device_uuid(&self, index: usize) -> DeviceUuid {
        let mut uuid = self.shared.id;
        // Devices past the 256th would share a name; a node has far fewer. The first digits differ, as in the names of real
        // devices.
        uuid[3] = uuid[3].wrapping_add(u8::try_from(index).unwrap_or(u8::MAX));
        DeviceUuid(uuid)
    }

    pub(super) fn device(&self, index: usize) -> Option<&Arc<Account>> {
        self.shared.devices.get(index)
    }

    /// Returns the ledger for memory at `place`, whose device id is the node's number.
    fn account(&self, place: Location) -> Option<&Arc<Account>> {
        if place.kind == LocationKind::DEVICE {
            self.device(usize::try_from(place.id).ok()?)
        } else {
            Some(&self.shared.host)
        }
    }

    /// Makes a block, and charges it. `Ok(None)` when the device has no room.
    pub(super) fn create_block(
        &self,
        size_bytes: u64,
        prop: AllocationProp,
    ) -> io::Result<Option<Block>> {
        let account = self.account(prop.location);
        let account = account.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        account.create(BlockName { id: random_id()?, size_bytes, prop })
    }

    /// Returns the block that `fd` was exported from, held through a duplicate of `fd`. `Ok(None)` when `fd` is something else.
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
        Ok(Some(Block::of(fd.try_clone_to_owned()?.into(), name, account)))
    }

    /// Opens the block with `name`, if anybody still holds it.
    pub(super) fn open_block(&self, name: &BlockName) -> io::Result<Option<Block>> {
        let Some(account) = self.account(name.prop.location) else {
            return Ok(None);
        };
        account.join(*name)
    }

    /// Lists the allocations of this node that the process `pid` holds, each once, by its descriptors.
    pub(super) fn blocks_held_by(&self, pid: u32) -> io::Result<Vec<HeldBlock>> {
        let mut held = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
            // The descriptor may have been closed since.
            let Ok(link) = fs::read_link(entry?.path()) else { continue };
            let name = link.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let plain = link.with_file_name(name.strip_prefix(ASIDE_PREFIX).unwrap_or(name));
            if let Some((account, name)) = self.recognise(&plain) {
                held.entry(plain).or_insert(HeldBlock { account, name });
            }
        }
        Ok(held.into_values().collect())
    }

    fn recognise(&self, path: &Path) -> Option<(Arc<Account>, BlockName)> {
        let name = BlockName::parse(path.file_name()?.to_str()?)?;
        let account = self.account(name.prop.location)?;
        (account.dir() == path.parent()?).then(|| (account.clone(), name))
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
            // Another process may be sweeping too. The second one finds nothing.
            fs::remove_dir_all(entry.path()).ok();
        }
    }
}

pub(super) fn random_id() -> io::Result<[u8; 16]> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(io::Error::other)?;
    Ok(id)
}

pub(super) fn hex(bytes: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*bytes))
}

pub(super) fn unhex(text: &str) -> Option<[u8; 16]> {
    u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes)
}
