//! Pauses by tag across the processes of a tenant: members over the simulated driver, in one process.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::time::Duration;

use sublet_stage::{Place, Process, memory as on};
use sublet_tests::{MIB, Outcome as TestOutcome, Trouble};
use tenants::coordinator::{Meanwhile, Options, Outcome, Trouble as Told};
use tenants::identity::TenantName;
use tenants::requests::{act, act_for_own_tags};
use tenants::scope::{Scope, TagNames};
use tenants::ticket::Ticket;
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::sim::SimOptions;
use vmm_pool::driver::{DeviceOrdinal, VaRange};
use vmm_pool::{Class, Contents, VirtualHandle};

/// For a wait that is to be in vain.
const BRIEF: Duration = Duration::from_millis(200);
const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
const UNIT: u64 = 2 * MIB;
const CAPACITY: u64 = 128 * MIB;

struct Tenant {
    members: Vec<Process>,
    name: TenantName,
    place: Place,
}

impl Tenant {
    fn new(count: usize) -> Result<Self, Trouble> {
        let place = Place::new(&[CAPACITY])?;
        let join = |_| place.join("train", SimOptions::default());
        let members = (0..count).map(join).collect::<Result<_, _>>()?;
        Ok(Self { members, name: TenantName::new("train")?, place })
    }

    fn act(&self, action: Action, scope: Scope) -> Result<Outcome, Told> {
        act(self.place.run_dir(), &self.name, action, Options { scope, ..Options::default() })
    }

    /// As somebody does who is of no process of the tenant.
    fn ask_from_outside(&self, action: Action, scope: Scope) -> Result<Outcome, Told> {
        let options = Options { scope, meanwhile: Meanwhile::AsAgreed, ..Options::default() };
        act(self.place.run_dir(), &self.name, action, options)
    }

    fn used(&self) -> Result<u64, Trouble> {
        Ok(self.place.used_bytes(DEVICE)?)
    }

    fn states(&self) -> Vec<MemberState> {
        self.members.iter().map(|member| member.lifecycle().state()).collect()
    }
}

fn tags(names: &[&str]) -> TagNames {
    TagNames::Named(names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>())
}

fn of_all(names: &[&str]) -> Scope {
    Scope::Tags { tags: tags(names), owner: None }
}

/// Memory of one unit, and where it is mapped.
fn memory(member: &Process, tag: &str) -> (VirtualHandle, VaRange) {
    let class = Class { library: "test", tag: tag.to_owned(), contents: Contents::Keep };
    let handle = on::create(member.pool(), DEVICE, 1, class);
    (handle, on::map(member.pool(), handle, 1, DEVICE))
}

fn completed(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Completed(_))
}

#[test]
fn a_process_pauses_its_own_tag_and_the_others_notice_nothing() -> TestOutcome {
    let tenant = Tenant::new(3)?;
    for member in &tenant.members {
        memory(member, "kv");
        memory(member, "");
    }
    assert_eq!(tenant.used()?, 6 * UNIT);
    let first = &tenant.members[0];
    assert!(completed(&act_for_own_tags(first, tags(&["kv"]), Action::Pause, None)?));
    assert_eq!(tenant.used()?, 5 * UNIT);
    assert_eq!(tenant.states(), [MemberState::Active; 3]);
    let asked: Vec<_> = tenant.members.iter().map(|member| member.info().asked.is_some()).collect();
    assert_eq!(asked, [true, false, false], "only the owner took part");
    let again = act_for_own_tags(first, tags(&["kv"]), Action::Pause, None)?;
    assert_eq!(again, Outcome::AlreadyPaused { stays: Vec::new() });
    assert!(completed(&act_for_own_tags(first, TagNames::All, Action::Resume, None)?));
    assert_eq!(tenant.used()?, 6 * UNIT);
    Ok(())
}

#[test]
fn many_processes_pause_their_own_tags_at_once() -> TestOutcome {
    let tenant = Tenant::new(4)?;
    for member in &tenant.members {
        memory(member, "kv");
    }
    for action in [Action::Pause, Action::Resume].repeat(5) {
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for member in &tenant.members {
                threads.push(
                    scope.spawn(move || act_for_own_tags(member, tags(&["kv"]), action, None)),
                );
            }
            threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        for outcome in outcomes {
            let outcome = outcome.map_err(|_| Trouble::new("a thread panicked"))?;
            assert!(completed(&outcome?));
        }
        let left = if action == Action::Pause { 0 } else { 4 * UNIT };
        assert_eq!(tenant.used()?, left);
    }
    Ok(())
}

#[test]
fn imports_leave_and_come_back_with_their_owners_tag() -> TestOutcome {
    let tenant = Tenant::new(2)?;
    let [owner, importer] = [&tenant.members[0], &tenant.members[1]];
    let (shared, _) = memory(owner, "shared");
    memory(importer, "shared");
    let fd = owner.sharing().issue_ticket(&owner.pool().enter(), shared)?;
    let ticket = Ticket::read(fd.as_fd())?.ok_or_else(|| Trouble::new("no ticket"))?;
    let imported = importer.sharing().redeem_ticket(&importer.pool().enter(), &ticket, "test")?;
    on::map(importer.pool(), imported, 1, DEVICE);
    assert_eq!(tenant.used()?, 2 * UNIT);
    // The importer touches it whenever it likes, unless it has agreed not to.
    let pause = || act_for_own_tags(owner, tags(&["shared"]), Action::Pause, Some(BRIEF));
    let refused = pause().err().ok_or_else(|| Trouble::new("the importer was not asked"))?;
    let said = refused.to_string();
    let pid = std::process::id();
    assert!(
        said.contains(&format!("process {pid} of tenant")) && said.contains("VMM import"),
        "{said}"
    );
    assert!(refused.left_unchanged(), "{said}");
    assert_eq!((tenant.used()?, tenant.states()), (2 * UNIT, vec![MemberState::Active; 2]));
    tenants::region::agree_to_run_without("shared");
    // It must let go, or the memory would not be free; its own stays.
    assert!(completed(&act_for_own_tags(owner, tags(&["shared"]), Action::Pause, None)?));
    assert_eq!(tenant.used()?, UNIT);
    assert_eq!(tenant.states(), [MemberState::Active; 2]);
    assert!(completed(&act_for_own_tags(owner, tags(&["shared"]), Action::Resume, None)?));
    assert_eq!(tenant.used()?, 2 * UNIT);
    assert!(completed(&tenant.act(Action::Pause, of_all(&["shared"]))?));
    assert_eq!(tenant.used()?, 0);
    // A resume without tags of a tenant that runs is one of all its tags.
    assert!(completed(&tenant.act(Action::Resume, Scope::Whole)?));
    assert_eq!(tenant.used()?, 2 * UNIT);
    assert_eq!(tenant.act(Action::Resume, Scope::Whole)?, Outcome::AlreadyActive);
    Ok(())
}

#[test]
fn a_paused_tenant_comes_back_in_stages() -> TestOutcome {
    let tenant = Tenant::new(2)?;
    for member in &tenant.members {
        for tag in ["weights", "kv", ""] {
            memory(member, tag);
        }
    }
    assert!(completed(&tenant.act(Action::Pause, Scope::Whole)?));
    assert_eq!(tenant.used()?, 0);
    let refused = tenant
        .act(Action::Pause, of_all(&["kv"]))
        .err()
        .ok_or_else(|| Trouble::new("it was paused already"))?;
    assert!(refused.to_string().contains("paused as a whole"), "{refused}");
    assert!(completed(&tenant.act(Action::Resume, of_all(&["weights"]))?));
    assert_eq!(tenant.used()?, 4 * UNIT, "the tag, and what has none");
    assert_eq!(tenant.states(), [MemberState::Active; 2]);
    assert!(completed(&tenant.act(Action::Resume, of_all(&["kv"]))?));
    assert_eq!(tenant.used()?, 6 * UNIT);
    Ok(())
}

#[test]
fn an_unknown_tag_is_refused_with_the_tags_there_are() -> TestOutcome {
    let tenant = Tenant::new(1)?;
    memory(&tenant.members[0], "weights");
    let error = tenant
        .act(Action::Pause, of_all(&["wieghts"]))
        .err()
        .ok_or_else(|| Trouble::new("no such tag"))?;
    assert!(error.to_string().contains("'wieghts'"), "{error}");
    let Told::UnknownTags { known, .. } = error else {
        return Err(Trouble::new("another error"));
    };
    assert!(known.contains(&"weights".to_owned()), "{known:?}");
    assert_eq!(tenant.used()?, UNIT);
    Ok(())
}

#[test]
fn a_tag_that_does_not_fit_stays_away_and_comes_back_when_it_does() -> TestOutcome {
    let tenant = Tenant::new(2)?;
    let [first, second] = [&tenant.members[0], &tenant.members[1]];
    memory(first, "kv");
    assert!(completed(&act_for_own_tags(first, tags(&["kv"]), Action::Pause, None)?));
    let mut filler = Vec::new();
    while tenant.used()? < CAPACITY {
        filler.push(memory(second, ""));
    }
    let error = act_for_own_tags(first, tags(&["kv"]), Action::Resume, None);
    let error = error.err().ok_or_else(|| Trouble::new("there is no room"))?;
    assert_eq!(error.missing_device_bytes(), Some(UNIT), "{error}");
    assert_eq!(first.lifecycle().state(), MemberState::Active, "it runs on without the tag");
    let (handle, range) = filler.pop().ok_or_else(|| Trouble::new("none"))?;
    second.pool().enter_giving_up().unmap(range)?;
    second.pool().enter_giving_up().release(handle)?;
    assert!(completed(&act_for_own_tags(first, tags(&["kv"]), Action::Resume, None)?));
    Ok(())
}

#[test]
fn who_asks_from_outside_has_processes_stand_still_and_what_was_away_before_stays_so() -> TestOutcome
{
    let tenant = Tenant::new(2)?;
    let [owner, importer] = [&tenant.members[0], &tenant.members[1]];
    for member in &tenant.members {
        for tag in ["kv", ""] {
            memory(member, tag);
        }
    }
    let (shared, _) = memory(owner, "weights");
    let fd = owner.sharing().issue_ticket(&owner.pool().enter(), shared)?;
    let ticket = Ticket::read(fd.as_fd())?.ok_or_else(|| Trouble::new("no ticket"))?;
    let imported = importer.sharing().redeem_ticket(&importer.pool().enter(), &ticket, "test")?;
    on::map(importer.pool(), imported, 1, DEVICE);
    assert!(completed(&act_for_own_tags(owner, tags(&["kv"]), Action::Pause, None)?));
    assert_eq!(tenant.used()?, 4 * UNIT);
    for back in [Scope::Whole, of_all(&["weights"])] {
        let Outcome::Completed(report) =
            tenant.ask_from_outside(Action::Pause, of_all(&["weights"]))?
        else {
            return Err(Trouble::new("nothing was done"));
        };
        assert!(report.stands_still && report.stayed_bytes == 0, "{report:?}");
        assert_eq!((tenant.states(), tenant.used()?), (vec![MemberState::Paused; 2], 3 * UNIT));
        assert!(owner.pool().gate().is_offloaded() && importer.pool().gate().is_offloaded());
        assert!(completed(&tenant.act(Action::Resume, back)?));
        assert_eq!((tenant.states(), tenant.used()?), (vec![MemberState::Active; 2], 4 * UNIT));
        assert!(
            owner.pool().holdings().is_set_aside("kv")
                && !importer.pool().holdings().is_set_aside("kv")
        );
        assert!(owner.info().stands_without.is_none());
    }
    assert!(completed(&tenant.act(Action::Resume, Scope::Whole)?));
    assert_eq!(tenant.used()?, 5 * UNIT);
    Ok(())
}
