//! Two tenants that change places by tag: members over the simulated driver, in one process.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sublet_stage::{Place, Process, memory as on};
use sublet_tests::{Boundary, MIB, Outcome as TestOutcome, Steps, Trouble};
use tenants::budget::{Budgets, Counts};
use tenants::coordinator::{Coordinator, Options, Outcome, Report, Trouble as Told};
use tenants::identity::TenantName;
use tenants::requests::act;
use tenants::scope::{Scope, TagNames};
use tenants::swap::{Swap, swap};
use tenants::wire::{Action, MemberState, Phase};
use vmm_pool::driver::sim::{FaultSpan, SimOptions};
use vmm_pool::driver::{DeviceOrdinal, DriverCode, DriverOp, VaRange};
use vmm_pool::{Class, Contents};

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
const UNIT: u64 = 2 * MIB;
/// Allocations of one unit that each process has of each tag.
const COUNT: u64 = 4;
const WINDOW: u64 = UNIT;
const STATE_TIMEOUT: Duration = Duration::from_mins(2);

/// A process, and what it holds: each allocation with its tag and what is written to it.
struct Holder {
    process: Process,
    held: Vec<(&'static str, VaRange, u64)>,
}

impl Holder {
    fn new(place: &Place, tenant: &str, tags: &[&'static str]) -> TestOutcome<Self> {
        let process = place.join(tenant, SimOptions::default())?;
        let mut holder = Self { process, held: Vec::new() };
        for tag in tags {
            holder.take(tag);
        }
        Ok(holder)
    }

    fn take(&mut self, tag: &'static str) {
        let pool = self.process.pool();
        for _ in 0..COUNT {
            let seed = on_seed(self.process.presence().id().0, self.held.len());
            let class = Class { library: "test", tag: tag.to_owned(), contents: Contents::Keep };
            let range = on::map(pool, on::create(pool, DEVICE, 1, class), 1, DEVICE);
            on::write(pool.driver(), DEVICE, range, seed);
            self.held.push((tag, range, seed));
        }
    }

    /// Is all of `tag` there, as it was written?
    fn has(&self, tag: &str) -> bool {
        let mut held = self.held.iter().filter(|(of, ..)| *of == tag);
        let driver = self.process.pool().driver();
        held.all(|(_, range, seed)| on::holds(driver, DEVICE, *range, *seed).unwrap_or(false))
    }

    /// Is all of `tag` away?
    fn lacks(&self, tag: &str) -> bool {
        self.process.tags().iter().all(|row| row.tag != tag || row.resident_bytes == 0)
    }
}

fn on_seed(process: u64, index: usize) -> u64 {
    process.wrapping_mul(1000).wrapping_add(index as u64)
}

/// `train` and `infer`, of two processes each on one device, with memory of these tags.
struct World {
    train: Vec<Holder>,
    infer: Vec<Holder>,
    place: Place,
}

impl World {
    fn new(
        capacity_bytes: u64,
        train: &[&'static str],
        infer: &[&'static str],
    ) -> TestOutcome<Self> {
        let place = Place::new(&[capacity_bytes])?;
        let holders = |tenant, tags: &[&'static str]| -> TestOutcome<Vec<Holder>> {
            (0..2).map(|_| Holder::new(&place, tenant, tags)).collect()
        };
        Ok(Self { train: holders("train", train)?, infer: holders("infer", infer)?, place })
    }

    fn act(&self, tenant: &str, action: Action, scope: Scope) -> TestOutcome {
        let tenant = TenantName::new(tenant)?;
        let options = Options { scope, ..Options::default() };
        act(self.place.run_dir(), &tenant, action, options).map(drop)?;
        Ok(())
    }

    fn swap(&self, out: Scope, back: Scope) -> Result<Swap, Told> {
        let coordinator = |name: &str, scope| {
            let tenant = TenantName::new(name).unwrap_or_else(|error| panic!("{error}"));
            let options = Options { scope, ..Options::default() };
            Coordinator::new(self.place.run_dir().clone(), tenant, options)
        };
        let (mut from, mut to) = (coordinator("train", out), coordinator("infer", back));
        swap(&mut from, &mut to, Some(WINDOW), &mut |_| {})
    }

    fn used(&self) -> TestOutcome<u64> {
        Ok(self.place.used_bytes(DEVICE)?)
    }

    fn states(&self) -> [Vec<MemberState>; 2] {
        let of = |holders: &[Holder]| {
            holders.iter().map(|holder| holder.process.lifecycle().state()).collect()
        };
        [of(&self.train), of(&self.infer)]
    }

    /// Waits until nobody is on the way any more.
    fn settled(&self) -> TestOutcome {
        let deadline = Instant::now() + STATE_TIMEOUT;
        let rests =
            |state: &MemberState| matches!(state, MemberState::Active | MemberState::Paused);
        while !self.states().iter().flatten().all(rests) {
            if Instant::now() >= deadline {
                return Err(Trouble::new(format!("the processes stay {:?}", self.states())));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

fn tag(name: &str) -> Scope {
    Scope::Tags { tags: TagNames::Named([name.to_owned()].into()), owner: None }
}

fn completed(outcome: Outcome) -> TestOutcome<Report> {
    match outcome {
        Outcome::Completed(report) => Ok(*report),
        Outcome::AlreadyPaused { .. } | Outcome::AlreadyActive => {
            Err(Trouble::new("there was nothing to do"))
        }
    }
}

fn all(holders: &[Holder], is_so: impl Fn(&Holder) -> bool) -> bool {
    holders.iter().all(is_so)
}

const ACTIVE: [MemberState; 2] = [MemberState::Active; 2];
const PAUSED: [MemberState; 2] = [MemberState::Paused; 2];

#[test]
fn tags_change_places_at_once_and_both_tenants_run_on() -> TestOutcome {
    // Room for the untagged memory of both, one tag, and a window.
    let world = World::new(3 * 2 * COUNT * UNIT + WINDOW, &["", "kv"], &[""])?;
    let mut world = world;
    world.act("train", Action::Pause, tag("kv"))?;
    world.infer.iter_mut().for_each(|holder| holder.take("kv"));
    world.act("infer", Action::Pause, tag("kv"))?;
    world.act("train", Action::Resume, tag("kv"))?;
    let before_bytes = world.used()?;
    let (most_bytes, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let done = std::thread::scope(|scope| -> TestOutcome<Swap> {
        let look = scope.spawn(|| -> TestOutcome {
            while !is_over.load(Ordering::Relaxed) {
                most_bytes.fetch_max(world.used()?, Ordering::Relaxed);
            }
            Ok(())
        });
        let done = world.swap(tag("kv"), tag("kv"));
        is_over.store(true, Ordering::Relaxed);
        look.join().map_err(|_| Trouble::new("the thread panicked"))??;
        Ok(done?)
    })?;
    let (out, back) = (completed(done.paused)?, completed(done.resumed)?);
    assert!(most_bytes.into_inner() <= before_bytes + WINDOW);
    assert_eq!((out.window_bytes, back.window_bytes), (Some(WINDOW), Some(WINDOW)));
    let first_in = back.stages.iter().map(|stage| stage.began_us).min();
    let last_out = out.stages.iter().map(|stage| stage.ended_us).max();
    assert!(first_in < last_out, "in at {first_in:?}, out until {last_out:?}");
    assert_eq!(world.states(), [ACTIVE, ACTIVE]);
    assert_eq!(world.used()?, before_bytes);
    assert!(all(&world.train, |holder| holder.lacks("kv") && holder.has("")));
    assert!(all(&world.infer, |holder| holder.has("kv") && holder.has("")));
    // And back, by the same call.
    world.act("infer", Action::Pause, tag("kv"))?;
    world.act("train", Action::Resume, tag("kv"))?;
    assert!(all(&world.train, |holder| holder.has("kv")));
    Ok(())
}

#[test]
fn a_tag_may_make_room_for_a_whole_tenant_and_a_whole_tenant_for_a_tag() -> TestOutcome {
    let mut world = World::new(2 * 2 * COUNT * UNIT + WINDOW, &["", "kv"], &[])?;
    world.act("train", Action::Pause, tag("kv"))?;
    world.infer.iter_mut().for_each(|holder| holder.take("weights"));
    world.act("infer", Action::Pause, Scope::Whole)?;
    world.act("train", Action::Resume, tag("kv"))?;
    // What has no tag comes with the tags of a tenant that was paused as a whole.
    let done = world.swap(tag("kv"), Scope::Whole)?;
    assert!(completed(done.resumed)?.window_bytes.is_some());
    assert_eq!(world.states(), [ACTIVE, ACTIVE]);
    assert!(all(&world.train, |holder| holder.lacks("kv") && holder.has("")));
    assert!(all(&world.infer, |holder| holder.has("weights")));
    world.act("infer", Action::Pause, tag("weights"))?;
    world.act("train", Action::Resume, tag("kv"))?;
    let done = world.swap(Scope::Whole, tag("weights"))?;
    assert!(completed(done.resumed)?.window_bytes.is_some());
    assert_eq!(world.states(), [PAUSED, ACTIVE]);
    assert!(all(&world.infer, |holder| holder.has("weights")));
    Ok(())
}

#[test]
fn a_tag_of_a_tenant_that_is_paused_as_a_whole_comes_with_what_has_none() -> TestOutcome {
    let mut world = World::new(3 * 2 * COUNT * UNIT + WINDOW, &["kv"], &[])?;
    world
        .infer
        .iter_mut()
        .for_each(|holder| ["", "kv"].into_iter().for_each(|tag| holder.take(tag)));
    world.act("infer", Action::Pause, Scope::Whole)?;
    world.swap(Scope::Whole, tag("kv")).map(drop)?;
    assert_eq!(world.states(), [PAUSED, ACTIVE]);
    assert!(all(&world.infer, |holder| holder.has("") && holder.has("kv")));
    Ok(())
}

#[test]
fn when_the_second_cannot_come_the_tags_that_left_are_back_and_no_others() -> TestOutcome {
    for op in [DriverOp::Create, DriverOp::CopyToDevice] {
        let world = World::new(256 * MIB, &["", "kv", "old"], &["kv"])?;
        world.act("train", Action::Pause, tag("old"))?;
        world.act("infer", Action::Pause, tag("kv"))?;
        let faults = world.infer[1].process.pool().driver().faults();
        faults.fail(op, FaultSpan::From(1), DriverCode::UNKNOWN);
        let both = TagNames::Named(["kv", "old"].map(str::to_owned).into());
        let error = world.swap(Scope::Tags { tags: both, owner: None }, tag("kv")).unwrap_err();
        faults.clear();
        assert!(matches!(error, Told::WentBack { .. }), "{op:?}: {error}");
        let said = error.to_string();
        assert!(
            said.contains("Tag 'kv' of tenant 'train' was paused for it, and is active again"),
            "{said}"
        );
        assert!(said.contains("the memory of these tags is paused"), "{said}");
        assert_eq!(world.states(), [ACTIVE, ACTIVE]);
        assert!(all(&world.train, |holder| holder.has("kv") && holder.has("")));
        assert!(all(&world.train, |holder| holder.lacks("old")), "it was away before");
        assert!(all(&world.infer, |holder| holder.lacks("kv")));
        // Nothing is lost.
        world.act("train", Action::Resume, tag("old"))?;
        world.act("infer", Action::Resume, tag("kv"))?;
        assert!(all(&world.train, |holder| holder.has("old")));
        assert!(all(&world.infer, |holder| holder.has("kv")));
    }
    Ok(())
}

#[test]
fn tags_that_find_their_room_kept_by_the_second_stay_away_and_the_message_says_what_runs()
-> TestOutcome {
    let mut world = World::new(2 * 2 * COUNT * UNIT + WINDOW, &["", "kv"], &[])?;
    world.act("train", Action::Pause, tag("kv"))?;
    world.infer.iter_mut().for_each(|holder| holder.take("kv"));
    world.act("infer", Action::Pause, tag("kv"))?;
    world.act("train", Action::Resume, tag("kv"))?;
    // One has taken some of the room when it fails, and its driver gives nothing back.
    let faults = world.infer[1].process.pool().driver().faults();
    faults.fail(DriverOp::Create, FaultSpan::From(COUNT), DriverCode::UNKNOWN);
    faults.fail(DriverOp::Release, FaultSpan::From(1), DriverCode::UNKNOWN);
    let error = world.swap(tag("kv"), tag("kv")).unwrap_err();
    faults.clear();
    let Told::NotBack { resume, .. } = &error else { panic!("{error}") };
    assert!(resume.missing_device_bytes().is_some(), "{resume}");
    let said = error.to_string();
    for part in [
        "the memory of these tags is paused, contents kept, as before",
        ". Tag 'kv' of tenant 'train' is paused with all contents, and the tenant runs without that memory: \
         `sublet resume train --tag kv` tries again",
    ] {
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(world.states(), [ACTIVE, ACTIVE]);
    assert!(all(&world.train, |holder| holder.lacks("kv") && holder.has("")));
    // With the next step its driver takes it back.
    world.act("infer", Action::Resume, tag("kv"))?;
    world.act("infer", Action::Pause, tag("kv"))?;
    world.act("train", Action::Resume, tag("kv"))?;
    assert!(all(&world.train, |holder| holder.has("kv")));
    Ok(())
}

#[test]
fn what_does_not_fit_or_is_not_there_stops_nobody() -> TestOutcome {
    let mut world = World::new(3 * 2 * COUNT * UNIT, &["", "kv"], &[])?;
    world.act("train", Action::Pause, tag("kv"))?;
    world
        .infer
        .iter_mut()
        .for_each(|holder| ["a", "b"].into_iter().for_each(|tag| holder.take(tag)));
    world.act("infer", Action::Pause, Scope::Whole)?;
    world.act("train", Action::Resume, tag("kv"))?;
    let changes = || {
        world.train.iter().map(|holder| holder.process.lifecycle().changes()).collect::<Vec<_>>()
    };
    let before = changes();
    let filler = Holder::new(&world.place, "other", &["x", "y"])?;
    let error = world.swap(tag("kv"), Scope::Whole).unwrap_err();
    assert!(
        error.is_about(&TenantName::new("infer")?) && error.missing_device_bytes().is_some(),
        "{error}"
    );
    assert!(error.to_string().contains("not even without tag 'kv' of tenant 'train'"), "{error}");
    for (out, back) in [(tag("no"), Scope::Whole), (tag("kv"), tag("no"))] {
        let error = world.swap(out, back).unwrap_err();
        assert!(matches!(error, Told::UnknownTags { .. }), "{error}");
    }
    assert_eq!(changes(), before, "nobody was stopped");
    drop(filler);
    Ok(())
}

#[test]
fn a_tag_that_the_seconds_budget_does_not_have_stops_nobody() -> TestOutcome {
    let place = Place::new(&[256 * MIB])?;
    let budgets: Budgets = format!("{}MiB", 2 * COUNT * UNIT / MIB).parse()?;
    let join = |tenant: &str| {
        place.join_with(tenant, SimOptions::default(), |config| {
            let budgets = (tenant == "infer").then_some(budgets.clone());
            let counts = Counts::of(budgets, |it, _| it.0.try_into().ok(), |_| 256 * MIB);
            config.counting = Some(counts);
        })
    };
    let holder =
        |tenant| -> TestOutcome<Holder> { Ok(Holder { process: join(tenant)?, held: Vec::new() }) };
    let mut world = World { train: vec![holder("train")?], infer: vec![holder("infer")?], place };
    world.train[0].take("kv");
    world.infer[0].take("kv");
    world.act("infer", Action::Pause, tag("kv"))?;
    // What it may hold is taken meanwhile.
    world.infer[0].take("a");
    world.infer[0].take("b");
    let before = world.train[0].process.lifecycle().changes();
    let error = world.swap(tag("kv"), tag("kv")).unwrap_err();
    assert!(error.is_about(&TenantName::new("infer")?), "{error}");
    assert!(error.to_string().contains("budget"), "{error}");
    assert_eq!(world.train[0].process.lifecycle().changes(), before, "it was not stopped");
    world.act("infer", Action::Pause, tag("a"))?;
    world.swap(tag("kv"), tag("kv")).map(drop)?;
    assert!(world.infer[0].has("kv"));
    Ok(())
}

/// The command is killed wherever it has come to: what is away then comes back by the usual commands, and nothing is lost.
#[test]
fn a_command_that_is_killed_leaves_a_way_on() -> TestOutcome {
    // With no room for a window besides both, and with room for more than the window of that command.
    let held_bytes = (3 + 2) * 2 * COUNT * UNIT;
    killed_half_way(held_bytes, &Boundary::HALF_WAY_THROUGH_A_SWAP, Phase::Release)?;
    let boundaries = [
        Boundary::Done(Phase::Prepare),
        Boundary::Started(Phase::Release),
        Boundary::Started(Phase::Restore),
        Boundary::Done(Phase::Restore),
    ];
    killed_half_way(256 * MIB, &boundaries, Phase::Release)
}

/// Of `first` on, the memory that is to leave does so.
fn killed_half_way(capacity_bytes: u64, boundaries: &[Boundary], first: Phase) -> TestOutcome {
    let world = World::new(capacity_bytes, &["", "kv", "kv"], &["", "kv"])?;
    world.act("infer", Action::Pause, tag("kv"))?;
    for boundary in boundaries.iter().copied() {
        let program = Command::new(Path::new(env!("CARGO_BIN_EXE_sublet-steps")));
        let words = ["swap", "infer", "kv", "kv"];
        let mut steps = Steps::start_by(program, &world.place.run_dir_path(), "train", &words)?;
        steps.until(boundary)?;
        steps.kill()?;
        world.settled()?;
        assert_eq!(world.states(), [ACTIVE, ACTIVE], "{boundary}");
        assert!(all(&world.infer, |holder| holder.lacks("kv") && holder.has("")), "{boundary}");
        let has_left =
            boundary != Boundary::Done(Phase::Prepare) && boundary != Boundary::Started(first);
        assert!(all(&world.train, |holder| holder.has("kv") != has_left), "{boundary}");
        world.act("train", Action::Resume, tag("kv"))?;
        assert!(all(&world.train, |holder| holder.has("kv") && holder.has("")), "{boundary}");
    }
    world.swap(tag("kv"), tag("kv")).map(drop)?;
    assert!(all(&world.infer, |holder| holder.has("kv")));
    Ok(())
}
