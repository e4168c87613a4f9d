//! Two members of one tenant on a node of two devices, and what they must never lose.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use sublet_stage::memory::{UNIT, page_of};
use sublet_stage::{Place, Process, memory, redeem};
use tenants::coordinator::{Coordinator, Meanwhile, Options, Outcome, Trouble};
use tenants::identity::TenantName;
use tenants::member::MemberConfig;
use tenants::run_dir::RunDir;
use tenants::scope::{Scope, TagNames};
use tenants::ticket::Ticket;
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::sim::{Census, Faults, SimOptions};
use vmm_pool::driver::{AllocationProp, DeviceAddress, DeviceOrdinal, RawContext, VaRange};
use vmm_pool::{Class, Contents, Schedule, VirtualHandle};

/// Memory of each device.
pub(crate) const CAPACITY_BYTES: u64 = 128 << 20;
const TENANT: &str = "train";
/// Long enough for a busy machine; no test waits for it.
const PHASE_TIMEOUT: Duration = Duration::from_mins(1);

/// A place, who reads it as which device, and what it must hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spot {
    pub(crate) member: usize,
    pub(crate) device: DeviceOrdinal,
    pub(crate) range: VaRange,
    pub(crate) seed: u64,
}

/// See the head of this module.
pub(crate) struct Stage {
    pub(crate) members: Vec<Process>,
    pub(crate) run_dir: RunDir,
    spots: Vec<Spot>,
    /// A ticket that nobody has redeemed, for memory that nothing else holds, and its contents.
    ticket: (OwnedFd, u64),
    seeds: u64,
    resident: Vec<u64>,
    census: Vec<Census>,
    /// Host memory that each held then.
    held_bytes: Vec<u64>,
    /// When pauses save.
    pub(crate) schedule: Schedule,
    _place: Arc<Place>,
}

/// The device that a member's memory lies on.
pub(crate) fn device_of(member: usize) -> DeviceOrdinal {
    DeviceOrdinal(i32::try_from(member).expect("0 or 1"))
}

pub(crate) fn peer_of(member: usize) -> usize {
    1 - member
}

/// The tags of the memory on the stage: that of plain blocks, and that of all else. A whole pause looks at neither.
const BLOCKS: &str = "blocks";
const TAG: &str = "others";

pub(crate) fn class(contents: Contents) -> Class {
    Class { library: "test", tag: TAG.to_owned(), contents }
}

/// All memory on the stage, by its tags.
pub(crate) fn by_tag() -> Scope {
    named(&[TAG, BLOCKS])
}

/// Plain blocks, by their tag.
pub(crate) fn blocks() -> Scope {
    named(&[BLOCKS])
}

fn named(tags: &[&str]) -> Scope {
    let tags = tags.iter().map(|&tag| tag.to_owned()).collect();
    Scope::Tags { tags: TagNames::Named(tags), owner: None }
}

pub(crate) fn tenant() -> TenantName {
    TenantName::new(TENANT).expect("a good name")
}

pub(crate) fn config(run_dir: &RunDir) -> MemberConfig {
    MemberConfig::new(run_dir.clone(), tenant(), "python train.py", "0.1.0")
}

impl Stage {
    /// On devices with much room.
    pub(crate) fn new() -> Self {
        Self::on(&Arc::new(Place::new(&[CAPACITY_BYTES; 2]).expect("a place")), TENANT)
    }

    /// Both members of `tenant` with all their memory, after one whole pause and resume.
    pub(crate) fn on(place: &Arc<Place>, tenant: &str) -> Self {
        let join = |_| place.join(tenant, SimOptions::default()).expect("joined");
        let members: Vec<Process> = (0..2).map(join).collect();
        // Several groups, so that some is unmapped, or given back, while other contents are still on their way.
        for member in &members {
            member.pool().copies().set_group_bytes(UNIT);
        }
        // A memfd is replaced by the real one below.
        let ticket = (tempfile::tempfile().expect("a file").into(), 0);
        let mut stage = Self {
            members,
            run_dir: place.run_dir().clone(),
            spots: Vec::new(),
            ticket,
            seeds: 0,
            resident: Vec::new(),
            census: Vec::new(),
            held_bytes: Vec::new(),
            schedule: Schedule::SaveFirst,
            _place: Arc::clone(place),
        };
        (0..2).for_each(|member| stage.fill(member));
        stage.hide(0);
        stage.issue(0);
        // The host memory of the first pause stays, and so belongs to the census.
        stage.must(Action::Pause);
        stage.must(Action::Resume);
        stage.resident = stage.used();
        stage.census = stage.members.iter().map(Self::census_of).collect();
        let held = |member: &Process| member.pool().report().host_arena_bytes;
        stage.held_bytes = stage.members.iter().map(held).collect();
        stage.assert_intact("at first");
        stage
    }

    fn next_seed(&mut self) -> u64 {
        self.seeds += 1;
        self.seeds
    }

    fn spot(&mut self, member: usize, device: DeviceOrdinal, range: VaRange, seed: u64) {
        self.spots.push(Spot { member, device, range, seed });
    }

    fn fill(&mut self, index: usize) {
        let (member, peer) = (Arc::clone(&self.members[index]), peer_of(index));
        let importer = Arc::clone(&self.members[peer]);
        let (device, elsewhere) = (device_of(index), device_of(peer));
        // A window mapped twice, imported by the peer, which maps it twice too and lets its handle go.
        let seed = self.next_seed();
        let shared = create(&member, device, 2, Contents::Keep);
        let places = [(); 2].map(|()| memory::map(member.pool(), shared, 2, device));
        write(&member, device, places[0], seed);
        let fd = member.sharing().issue_ticket(&member.pool().enter(), shared).expect("a ticket");
        let imported = redeem(&importer, &fd).expect("import");
        for place in places {
            self.spot(index, device, place, seed);
            let there = memory::map(importer.pool(), imported, 2, elsewhere);
            self.spot(peer, elsewhere, there, seed);
        }
        importer.pool().enter_giving_up().release(imported).expect("the mappings keep it");
        // A plain block, one that only the other device reaches, and one that the peer has opened.
        for accessor in [device, elsewhere, device] {
            let seed = self.next_seed();
            let prop = AllocationProp::pinned_on(device);
            let kept = Class { tag: BLOCKS.to_owned(), ..class(Contents::Keep) };
            let block = member.pool().enter().block_allocate(UNIT - 512, &prop, &[accessor], kept);
            let range = VaRange::new(block.expect("a block"), UNIT);
            write(&member, accessor, range, seed);
            self.spot(index, accessor, range, seed);
        }
        let last = *self.spots.last().expect("a block");
        let opened = open_block(&member, &importer, last.range.start, elsewhere);
        self.spot(peer, elsewhere, opened, last.seed);
        let scratch = create(&member, device, 1, Contents::Discard);
        memory::map(member.pool(), scratch, 1, device);
        // Contents that go to a file, of memory that the peer has imported.
        let seed = self.next_seed();
        let filed = create(&member, device, 1, Contents::File);
        let range = memory::map(member.pool(), filed, 1, device);
        write(&member, device, range, seed);
        self.spot(index, device, range, seed);
        let fd = member.sharing().issue_ticket(&member.pool().enter(), filed).expect("a ticket");
        let imported = redeem(&importer, &fd).expect("import");
        let there = memory::map(importer.pool(), imported, 1, elsewhere);
        self.spot(peer, elsewhere, there, seed);
        importer.pool().enter_giving_up().release(imported).expect("the mapping keeps it");
    }

    /// Kept memory that is mapped nowhere for a while: its contents are looked at through a mapping.
    fn hide(&mut self, index: usize) {
        let member = Arc::clone(&self.members[index]);
        let seed = self.next_seed();
        let hidden = create(&member, device_of(index), 1, Contents::Keep);
        let range = memory::map(member.pool(), hidden, 1, device_of(index));
        write(&member, device_of(index), range, seed);
        // Nobody may touch it through this one, so a pause needs a view.
        member.pool().enter_giving_up().unmap(range).expect("unmap");
        member.pool().enter().map(range, 0, hidden).expect("mapping without rights");
    }

    fn issue(&mut self, index: usize) {
        let member = Arc::clone(&self.members[index]);
        let seed = self.next_seed();
        let lonely = create(&member, device_of(index), 1, Contents::Keep);
        let range = memory::map(member.pool(), lonely, 1, device_of(index));
        write(&member, device_of(index), range, seed);
        let ticket =
            member.sharing().issue_ticket(&member.pool().enter(), lonely).expect("a ticket");
        member.pool().enter_giving_up().unmap(range).expect("unmap");
        free_addresses(&member, range);
        member.pool().enter_giving_up().release(lonely).expect("the ticket keeps it");
        self.ticket = (ticket, seed);
    }

    /// Pauses or resumes, as the command does.
    pub(crate) fn act(&self, action: Action) -> Result<Outcome, Trouble> {
        self.act_on(action, Scope::Whole)
    }

    /// As [`Stage::act`], on a part of the memory.
    pub(crate) fn act_on(&self, action: Action, scope: Scope) -> Result<Outcome, Trouble> {
        self.act_with(action, Options { scope, ..Options::default() })
    }

    /// Pauses plain blocks of processes that have not agreed to run without them.
    pub(crate) fn must_stand_without_blocks(&self) {
        let options =
            Options { scope: blocks(), meanwhile: Meanwhile::AsAgreed, ..Options::default() };
        let paused = self.act_with(Action::Pause, options);
        assert!(matches!(paused, Ok(Outcome::Completed(_))), "{paused:?}");
    }

    fn act_with(&self, action: Action, options: Options) -> Result<Outcome, Trouble> {
        let mut coordinator = self.coordinator(options);
        match action {
            Action::Pause => coordinator.pause(&mut |_| {}),
            Action::Resume => coordinator.resume(&mut |_| {}),
        }
    }

    /// One that waits long enough for a busy machine, and pauses by the stage's schedule.
    pub(crate) fn coordinator(&self, options: Options) -> Coordinator {
        let releases_early = self.schedule == Schedule::SaveMeanwhile;
        let options = Options { timeout: Some(PHASE_TIMEOUT), releases_early, ..options };
        Coordinator::new(self.run_dir.clone(), self.members[0].presence().tenant().clone(), options)
    }

    /// Pauses or resumes without a fault.
    pub(crate) fn must(&self, action: Action) {
        self.must_then(action, "without a fault");
    }

    /// As [`Stage::must`], after `what`.
    pub(crate) fn must_then(&self, action: Action, what: &str) {
        if let Err(error) = self.act(action) {
            panic!("{what}, then {action:?}: {error} ({:?})", self.states());
        }
    }

    pub(crate) fn faults(&self, member: usize) -> &Faults {
        self.members[member].pool().driver().faults()
    }

    /// No call fails any more; says how many were made to.
    pub(crate) fn clear_faults(&self) -> u64 {
        let counts = (0..2).map(|member| {
            self.faults(member).clear();
            self.faults(member).fired()
        });
        counts.sum()
    }

    pub(crate) fn states(&self) -> Vec<MemberState> {
        self.members.iter().map(|member| member.lifecycle().state()).collect()
    }

    pub(crate) fn assert_all(&self, state: MemberState, when: &str) {
        assert_eq!(self.states(), [state; 2], "{when}");
    }

    /// Bytes that the tenant holds on each device while it is active.
    pub(crate) fn resident(&self) -> &[u64] {
        &self.resident
    }

    /// Objects of the driver's, without streams that the pool keeps from step to step: the next step makes its own.
    fn census_of(member: &Process) -> Census {
        let _none = member.pool().take_plain_memory(RawContext(0));
        member.pool().driver().census()
    }

    /// Bytes that anybody holds, by device.
    pub(crate) fn used(&self) -> Vec<u64> {
        let driver = self.members[0].pool().driver();
        let info = |device| driver.memory_of(device_of(device)).expect("memory");
        (0..2).map(|device| info(device).total_bytes - info(device).free_bytes).collect()
    }

    /// Nothing of the tenant is on a device.
    pub(crate) fn assert_gone(&self, when: &str) {
        assert_eq!(self.used(), [0, 0], "{when}: memory stays");
    }

    /// All contents are as they were written, every byte is accounted for, and no driver object is left over.
    pub(crate) fn assert_intact(&self, when: &str) {
        self.assert_contents_of(&[0, 1], when);
        assert_eq!(self.used(), self.resident, "{when}: bytes in use");
        for (index, member) in self.members.iter().enumerate() {
            let census = Self::census_of(member);
            let report = member.pool().report();
            // A pause that had more to save has made more host memory, one range a chunk.
            let more_bytes = report.host_arena_bytes.saturating_sub(self.held_bytes[index]);
            let expected = self.census[index];
            let host_ranges = census.host_ranges;
            let more = host_ranges.saturating_sub(expected.host_ranges) as u64;
            assert!(more <= more_bytes / UNIT, "{when}: {more} ranges of {more_bytes} bytes");
            let expected =
                Census { host_ranges: host_ranges.max(expected.host_ranges), ..expected };
            assert_eq!(census, expected, "{when}: objects of member {index}");
            for row in &report.devices {
                let resident: u64 = row.classes.iter().map(|class| class.resident_bytes).sum();
                assert_eq!(resident, row.own_bytes(), "{when}: accounts of member {index}");
                assert!(row.pinned.is_empty(), "{when}: {:?}", row.pinned);
            }
            assert_eq!(report.file_bytes, 0, "{when}: disk of member {index}");
        }
    }

    pub(crate) fn assert_contents_of(&self, members: &[usize], when: &str) {
        for spot in self.spots.iter().filter(|spot| members.contains(&spot.member)) {
            let member = &self.members[spot.member];
            assert!(holds(member, spot.device, spot.range, spot.seed), "{when}: {spot:?}");
        }
    }

    /// What one member must not lose, its own and what it has imported.
    pub(crate) fn spots_of(&self, member: usize) -> impl Iterator<Item = &Spot> {
        self.spots.iter().filter(move |spot| spot.member == member)
    }

    /// Redeems the ticket that nobody has redeemed: its memory must have come all the way.
    pub(crate) fn assert_ticket_is_good(self) {
        let importer = &self.members[1];
        let (fd, seed) = &self.ticket;
        let handle = redeem(importer, fd).expect("redeemed");
        let range = memory::map(importer.pool(), handle, 1, device_of(1));
        assert!(holds(importer, device_of(1), range, *seed), "the memory behind the ticket");
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        for member in &self.members {
            member.leave();
        }
    }
}

pub(crate) fn create(
    member: &Process,
    device: DeviceOrdinal,
    units: u64,
    contents: Contents,
) -> VirtualHandle {
    memory::create(member.pool(), device, units, class(contents))
}

pub(crate) fn free_addresses(member: &Process, range: VaRange) {
    member.pool().driver().free_addresses(range).expect("a reservation with nothing mapped");
}

/// As a `cudaIpc` handle is opened: a ticket made of what the handle says.
fn open_block(
    owner: &Process,
    importer: &Process,
    block: DeviceAddress,
    accessor: DeviceOrdinal,
) -> VaRange {
    let handle = redeem_block(owner, importer, block).expect("import");
    let opened = importer.pool().enter().block_open(handle, UNIT - 512, accessor).expect("open");
    VaRange::new(opened, UNIT)
}

/// The importer's handle of a block, which it has not opened yet.
pub(crate) fn redeem_block(
    owner: &Process,
    importer: &Process,
    block: DeviceAddress,
) -> Result<VirtualHandle, ()> {
    let identity = owner.pool().enter_giving_up().block_identity(block);
    let (allocation, _, size_bytes) = identity.expect("a block");
    let ticket = Ticket::uncounted(
        allocation,
        size_bytes,
        owner.presence().id(),
        owner.presence().tenant().clone(),
    );
    importer.sharing().redeem_ticket(&importer.pool().enter(), &ticket, "test").map_err(drop)
}

pub(crate) fn write(member: &Process, device: DeviceOrdinal, range: VaRange, seed: u64) {
    memory::write(member.pool().driver(), device, range, seed);
}

pub(crate) fn holds(member: &Process, device: DeviceOrdinal, range: VaRange, seed: u64) -> bool {
    memory::holds(member.pool().driver(), device, range, seed).expect("a readable range")
}
