//! Members of one tenant in this process, memory that they share, and what they read there.

use std::time::{Duration, Instant};

pub(crate) use sublet_stage::memory::UNIT;
use sublet_stage::{Place, memory};
pub(crate) use sublet_stage::{Process, redeem};
use tenants::coordinator::{Coordinator, Event, LostImports, Options, Outcome, Trouble};
use tenants::identity::TenantName;
use tenants::scope::{Scope, TagNames};
use tenants::wire::Action;
use vmm_pool::driver::sim::SimOptions;
use vmm_pool::driver::{DeviceOrdinal, DriverCode, VaRange};
use vmm_pool::{Class, Contents, VirtualHandle};

pub(crate) type Acted = Result<Outcome, Trouble>;

pub(crate) const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
const TENANT: &str = "train";
pub(crate) const TIMEOUT: Duration = Duration::from_mins(1);

/// A node, and the directory that its tenants meet in.
pub(crate) struct Stage {
    pub(crate) place: Place,
}

pub(crate) fn tenant() -> TenantName {
    TenantName::new(TENANT).expect("a good name")
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
        Self { place: Place::new(&[1024 * UNIT; 2]).expect("a place") }
    }

    /// A process that joins.
    pub(crate) fn join(&self) -> Process {
        self.join_with(SimOptions::default())
    }

    pub(crate) fn join_with(&self, options: SimOptions) -> Process {
        self.place.join(TENANT, options).expect("joined")
    }

    pub(crate) fn act_with(
        &self,
        action: Action,
        options: Options,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Acted {
        let mut coordinator = Coordinator::new(self.place.run_dir().clone(), tenant(), options);
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
            report.remarks()
        }
        Outcome::AlreadyPaused { .. } | Outcome::AlreadyActive => panic!("{outcome:?}"),
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
    memory::create(process.pool(), DEVICE, units, class)
}

/// Maps `handle` somewhere, readable and writable.
pub(crate) fn map(process: &Process, handle: VirtualHandle, units: u64) -> VaRange {
    memory::map(process.pool(), handle, units, DEVICE)
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

/// Gives `handle` of `owner` to `importer`: its handle and its place there.
pub(crate) fn share(
    owner: &Process,
    handle: VirtualHandle,
    importer: &Process,
    units: u64,
) -> (VirtualHandle, VaRange) {
    let ticket = owner.sharing().issue_ticket(&owner.pool().enter(), handle).expect("a ticket");
    let imported = redeem(importer, &ticket).expect("imported");
    (imported, map(importer, imported, units))
}

pub(crate) fn write(process: &Process, range: VaRange, seed: u64) {
    memory::write(process.pool().driver(), DEVICE, range, seed);
}

/// Does `range` hold what `seed` says? An error where it is not readable.
pub(crate) fn holds(process: &Process, range: VaRange, seed: u64) -> Result<bool, DriverCode> {
    memory::holds(process.pool().driver(), DEVICE, range, seed)
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
