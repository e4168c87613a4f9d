//! Members of one tenant in this process, memory that they share, and what they read there.

#![expect(unsafe_code, reason = "reads and writes simulated device memory through the driver")]

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tenants::coordinator::{Coordinator, CoordinatorError, Event, LostImports, Options, Outcome};
use tenants::identity::TenantName;
use tenants::member::{ImportError, Member, MemberConfig};
use tenants::run_dir::RunDir;
use tenants::scope::{Scope, TagNames};
use tenants::ticket::Ticket;
use tenants::wire::Action;
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, VaRange};
use vmm_pool::{Class, Contents, VirtualHandle};

pub(crate) type Process = Arc<Member<SimDriver>>;
pub(crate) type Acted = Result<Outcome, CoordinatorError>;

pub(crate) const UNIT: u64 = GRANULARITY_BYTES;
pub(crate) const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
const TIMEOUT: Duration = Duration::from_mins(1);

/// A node, and the directory that its tenants meet in.
pub(crate) struct Stage {
    pub(crate) run_dir: RunDir,
    pub(crate) node: SimNode,
    pub(crate) base: TempDir,
}

pub(crate) fn tenant() -> TenantName {
    TenantName::new("train").expect("a good name")
}

/// Memory of `tag` ("" for none), contents kept.
pub(crate) fn kept(tag: &str) -> Class {
    Class { library: "test", tag: tag.to_owned(), contents: Contents::Keep }
}

pub(crate) fn tags(tag: &str) -> Scope {
    Scope::Tags { tags: TagNames::Named([tag.to_owned()].into()), owner: None }
}

impl Stage {
    pub(crate) fn new() -> Self {
        let base = tempfile::Builder::new().tempdir_in("/dev/shm").expect("a directory");
        let run_dir = RunDir::open(Some(base.path().join("run")), None).expect("a run directory");
        let capacity = [1024 * UNIT; 2];
        let node = SimNode::create(base.path().join("node"), &capacity).expect("a node");
        Self { run_dir, node, base }
    }

    /// A process that joins.
    pub(crate) fn join(&self) -> Process {
        self.join_with(SimOptions::default())
    }

    pub(crate) fn join_with(&self, options: SimOptions) -> Process {
        let driver = SimDriver::new(self.node.clone(), options);
        let config = MemberConfig::new(self.run_dir.clone(), tenant(), "python", "0.1.0");
        let member = Member::join(config, Arc::new(driver)).expect("joined");
        member.pool().set_file_dir("/dev/shm".into());
        member
    }

    pub(crate) fn act_with(
        &self,
        action: Action,
        options: Options,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Acted {
        let mut coordinator = Coordinator::new(self.run_dir.clone(), tenant(), options);
        match action {
            Action::Pause => coordinator.pause(progress),
            Action::Resume => coordinator.resume(progress),
        }
    }

    pub(crate) fn act(&self, action: Action, scope: Scope) -> Acted {
        self.act_with(action, options(scope), &mut |_| {})
    }

    /// As [`Stage::act`], and must succeed.
    pub(crate) fn must(&self, action: Action, scope: Scope) {
        let outcome = self.act(action, scope);
        assert!(outcome.is_ok(), "{outcome:?}");
    }

    /// Pauses all, which must succeed; returns what it notes.
    pub(crate) fn pause(&self) -> Vec<String> {
        notes(self.act(Action::Pause, Scope::Whole).expect("paused"))
    }

    /// Resumes all, which must succeed.
    pub(crate) fn resume(&self) -> Vec<String> {
        notes(self.act(Action::Resume, Scope::Whole).expect("resumed"))
    }

    pub(crate) fn resume_without_lost(&self) -> Acted {
        let lost_imports = LostImports::LeaveOut;
        let options = Options { lost_imports, ..options(Scope::Whole) };
        self.act_with(Action::Resume, options, &mut |_| {})
    }
}

/// Bytes of the device in use, as any process sees them.
fn used_bytes(process: &Process) -> u64 {
    let info = process.pool().driver().memory_of(DEVICE).expect("memory");
    info.total_bytes - info.free_bytes
}

pub(crate) fn options(scope: Scope) -> Options {
    Options { timeout: Some(TIMEOUT), scope, ..Options::default() }
}

fn notes(outcome: Outcome) -> Vec<String> {
    match outcome {
        Outcome::Completed(report) => {
            assert!(report.losses.is_empty(), "{:?}", report.losses);
            report.notes
        }
        Outcome::AlreadyPaused | Outcome::AlreadyActive => panic!("{outcome:?}"),
    }
}

/// This much of the device is in use, as soon as descriptors that a resume has left are closed.
pub(crate) fn assert_used(process: &Process, bytes: u64, why: &str) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while used_bytes(process) != bytes && Instant::now() < deadline {
        std::thread::park_timeout(Duration::from_millis(2));
    }
    assert_eq!(used_bytes(process), bytes, "{why}");
}

/// A handle of new memory.
pub(crate) fn create(process: &Process, units: u64, class: Class) -> VirtualHandle {
    let prop = AllocationProp::pinned_on(DEVICE);
    process.pool().enter().create(units * UNIT, &prop, class).expect("memory")
}

/// Maps `handle` somewhere, readable and writable.
pub(crate) fn map(process: &Process, handle: VirtualHandle, units: u64) -> VaRange {
    let size_bytes = units * UNIT;
    let start = process.pool().driver().reserve(size_bytes, 0, DeviceAddress(0)).expect("place");
    let range = VaRange::new(start, size_bytes);
    process.pool().enter().map(range, 0, handle).expect("mapped");
    process.pool().enter().set_access(range, &[AccessDesc::read_write(DEVICE)]).expect("access");
    range
}

/// Memory of `tag` with the contents `seed`: its handle and its place.
pub(crate) fn written(
    process: &Process,
    units: u64,
    tag: &str,
    seed: u64,
) -> (VirtualHandle, VaRange) {
    let handle = create(process, units, kept(tag));
    let range = map(process, handle, units);
    write(process, range, seed);
    (handle, range)
}

/// Frees what [`written`] made.
pub(crate) fn free(process: &Process, handle: VirtualHandle, range: VaRange) {
    process.pool().enter_giving_up().unmap(range).expect("unmapped");
    process.pool().enter_giving_up().release(handle).expect("released");
    process.pool().driver().free_addresses(range).expect("addresses");
}

pub(crate) fn redeem(importer: &Process, ticket: &OwnedFd) -> Result<VirtualHandle, ImportError> {
    let ticket = Ticket::read(ticket.as_fd()).expect("readable").expect("a ticket");
    importer.redeem_ticket(&importer.pool().enter(), &ticket, "test")
}

/// Gives `handle` of `owner` to `importer`: its handle and its place there.
pub(crate) fn share(
    owner: &Process,
    handle: VirtualHandle,
    importer: &Process,
    units: u64,
) -> (VirtualHandle, VaRange) {
    let ticket = owner.issue_ticket(&owner.pool().enter(), handle).expect("a ticket");
    let imported = redeem(importer, &ticket).expect("imported");
    (imported, map(importer, imported, units))
}

fn page_of(seed: u64) -> Vec<u8> {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes().repeat(512)
}

pub(crate) fn write(process: &Process, range: VaRange, seed: u64) {
    // SAFETY: the driver checks the range before it touches a byte.
    unsafe { process.pool().driver().core().fill(DEVICE, range, &page_of(seed)) }.expect("written");
}

/// Does `range` hold what `seed` says? An error where it is not readable.
pub(crate) fn holds(process: &Process, range: VaRange, seed: u64) -> Result<bool, String> {
    let mut seen = vec![0_u8; usize::try_from(range.size_bytes).expect("small")];
    let target = seen.as_mut_ptr().expose_provenance() as u64;
    let core = process.pool().driver().core();
    // SAFETY: `seen` is host memory of this length; the source is checked by the driver.
    unsafe { core.copy((DEVICE, target), (DEVICE, range.start.0), range.size_bytes) }
        .map_err(|code| format!("{code:?}"))?;
    let page = page_of(seed);
    Ok(seen.chunks(page.len()).all(|chunk| *chunk == page[..chunk.len()]))
}

/// `reader` sees what `writer` writes: their places are one memory.
pub(crate) fn assert_one_memory(
    writer: (&Process, VaRange),
    reader: (&Process, VaRange),
    seed: u64,
) {
    write(writer.0, writer.1, seed);
    assert_eq!(holds(reader.0, reader.1, seed), Ok(true), "two memories where one should be");
}
