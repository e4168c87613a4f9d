//! A pause that host memory is too short for: saved contents of the tenant that has been paused for longest make room. Members over
//! the simulated driver, in one process, under a limit that tells what their arenas leave.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sublet_stage::{Place, Process, memory as on};
use sublet_tests::{MIB, Outcome as TestOutcome, Steps, Trouble};
use tenants::coordinator::{Coordinator, Options, Outcome, Report, Trouble as Told};
use tenants::host_memory::{HostLimit, LimitKind};
use tenants::identity::TenantName;
use tenants::wire::{FailureKind, MemberState};
use vmm_pool::driver::sim::{SimDriver, SimOptions};
use vmm_pool::driver::{DeviceOrdinal, VaRange};
use vmm_pool::{Class, Contents, Pool};

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
/// What each tenant's pause takes.
const CHUNK_BYTES: u64 = 4 * MIB;
/// What one tenant finds room in, and two, a tenth of what is left staying free.
const ONE_ARENA: u64 = CHUNK_BYTES + CHUNK_BYTES / 2;
const TWO_ARENAS: u64 = ONE_ARENA + CHUNK_BYTES;

/// A machine of its own for each test: how much host memory it has, and whose arenas take of it.
struct Machine {
    total_bytes: AtomicU64,
    kind: fn() -> LimitKind,
    pools: Mutex<Vec<Arc<Pool<SimDriver>>>>,
}

impl Machine {
    const fn new(kind: fn() -> LimitKind) -> Self {
        Self { total_bytes: AtomicU64::new(TWO_ARENAS), kind, pools: Mutex::new(Vec::new()) }
    }
}

fn available() -> LimitKind {
    LimitKind::Available
}

static MACHINES: [Machine; 6] = [
    Machine::new(available),
    Machine::new(available),
    Machine::new(available),
    Machine::new(|| LimitKind::Configured),
    Machine::new(available),
    Machine::new(available),
];

fn limits<const MACHINE: usize>() -> Vec<HostLimit> {
    let machine = &MACHINES[MACHINE];
    let pools = machine.pools.lock().unwrap_or_else(PoisonError::into_inner);
    let held: u64 = pools.iter().map(|pool| pool.report().host_arena_bytes).sum();
    let total_bytes = machine.total_bytes.load(Ordering::Relaxed);
    let (kind, free_bytes) = ((machine.kind)(), total_bytes.saturating_sub(held));
    let bytes = match kind {
        LimitKind::Configured => total_bytes,
        LimitKind::Available | LimitKind::ControlGroup { .. } => free_bytes - free_bytes / 10,
    };
    vec![HostLimit { kind, bytes }]
}

/// A tenant of one process, with an allocation whose contents a pause keeps.
struct Tenant {
    name: TenantName,
    process: Process,
    range: VaRange,
    seed: u64,
}

struct World<const MACHINE: usize> {
    place: Place,
    files: PathBuf,
}

impl<const MACHINE: usize> World<MACHINE> {
    fn new() -> TestOutcome<Self> {
        let place = Place::new(&[64 * MIB])?;
        let files = place.path().join("files");
        std::fs::create_dir(&files)?;
        Ok(Self { place, files })
    }

    /// One that may move its contents to a file in `dir`, if there is one.
    fn tenant(&self, name: &str, dir: Option<&Path>) -> TestOutcome<Tenant> {
        let process = self.place.join_keeping(name, SimOptions::default(), |config, keeps| {
            config.host_limits = limits::<MACHINE>;
            keeps.spills = dir.is_some().then_some(|_| true);
        })?;
        let pool = process.pool();
        if let Some(dir) = dir {
            pool.host_memory().set_file_dir(dir.to_owned());
        }
        let mut pools = MACHINES[MACHINE].pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.push(Arc::clone(pool));
        let class = Class { library: "test", contents: Contents::Keep, ..Class::default() };
        let range = on::map(pool, on::create(pool, DEVICE, 2, class), 2, DEVICE);
        let seed = process.presence().id().0;
        on::write(pool.driver(), DEVICE, range, seed);
        Ok(Tenant { name: TenantName::new(name)?, process, range, seed })
    }

    /// One that has opted in.
    fn willing(&self, name: &str) -> TestOutcome<Tenant> {
        self.tenant(name, Some(&self.files))
    }

    fn coordinator(&self, tenant: &Tenant) -> Coordinator {
        let run_dir = self.place.run_dir().clone();
        let options = Options { room: Some(tenants::keep::room), ..Options::default() };
        Coordinator::new(run_dir, tenant.name.clone(), options)
    }

    fn pause(&self, tenant: &Tenant) -> Result<Outcome, Told> {
        let paused = self.coordinator(tenant).pause(&mut |_| {});
        // The next one rests for less, as far as clocks tell.
        let since = Instant::now();
        while since.elapsed() < Duration::from_millis(5) {
            std::thread::yield_now();
        }
        paused
    }

    fn resume(&self, tenant: &Tenant) -> TestOutcome {
        self.coordinator(tenant).resume(&mut |_| {}).map(drop)?;
        assert!(tenant.has_all(), "{}", tenant.name);
        Ok(())
    }
}

impl Tenant {
    fn has_all(&self) -> bool {
        let driver = self.process.pool().driver();
        on::holds(driver, DEVICE, self.range, self.seed).unwrap_or(false)
    }

    fn spilled(&self) -> bool {
        self.process.pool().report().spilled_bytes > 0
    }
}

fn report(outcome: Outcome) -> TestOutcome<Report> {
    match outcome {
        Outcome::Completed(report) => Ok(*report),
        Outcome::AlreadyPaused { .. } | Outcome::AlreadyActive => {
            Err(Trouble::new("nothing was done"))
        }
    }
}

#[test]
fn the_one_that_has_been_paused_for_longest_makes_room_and_comes_back_whole() -> TestOutcome {
    let world = World::<0>::new()?;
    // Each tells its age in the order of their names. The older tells it last, so that its age is no less for that.
    let (old, young) = (world.willing("c-old")?, world.willing("b-young")?);
    let train = world.willing("a-train")?;
    world.pause(&young).map(drop)?;
    world.pause(&old).map(drop)?;
    world.resume(&young)?;
    world.pause(&young).map(drop)?;
    let done = report(world.pause(&train)?)?;
    assert!(old.spilled() && !young.spilled() && !train.spilled());
    assert!(done.notes.iter().any(|note| note.contains("tenant 'c-old'")), "{:?}", done.notes);
    assert_eq!(std::fs::read_dir(&world.files)?.count(), 0, "the file has no name");
    let more = world.willing("more")?;
    world.pause(&more).map(drop)?;
    assert!(young.spilled() && !train.spilled(), "the next in turn");
    for tenant in [&old, &young, &train, &more] {
        world.resume(tenant)?;
        assert!(!tenant.spilled());
    }
    Ok(())
}

#[test]
fn one_that_has_not_opted_in_or_is_busy_is_passed_over() -> TestOutcome {
    let world = World::<1>::new()?;
    let (old, young) = (world.tenant("old", None)?, world.willing("young")?);
    let train = world.tenant("train", None)?;
    world.pause(&old).map(drop)?;
    world.pause(&young).map(drop)?;
    {
        // Somebody pauses or resumes it.
        let dir = world.place.run_dir().existing_tenant(&young.name)?;
        let dir = dir.ok_or_else(|| Trouble::new("no directory"))?;
        let _lock = dir.lock(Instant::now())?;
        let error = world.pause(&train).unwrap_err();
        assert!(is_short(&error), "{error}");
        assert_eq!(train.process.lifecycle().state(), MemberState::Active);
    }
    world.pause(&train).map(drop)?;
    assert!(young.spilled() && !old.spilled());
    for tenant in [&old, &young, &train] {
        world.resume(tenant)?;
    }
    Ok(())
}

fn is_short(error: &Told) -> bool {
    let failures = error.failures();
    failures.iter().any(|failure| failure.failure.kind == FailureKind::OutOfHostMemory)
}

#[test]
fn where_the_disk_takes_nothing_the_pause_is_refused_and_nothing_has_changed() -> TestOutcome {
    let world = World::<2>::new()?;
    let nowhere = world.place.path().join("nowhere");
    let (old, train) = (world.tenant("old", Some(&nowhere))?, world.willing("train")?);
    MACHINES[2].total_bytes.store(ONE_ARENA, Ordering::Relaxed);
    world.pause(&old).map(drop)?;
    let error = world.pause(&train).unwrap_err();
    assert!(is_short(&error) && error.left_unchanged(), "{error}");
    assert!(!old.spilled() && train.has_all());
    let notes = old.process.stats().notes;
    assert!(notes.iter().any(|note| note.contains("/nowhere")), "{notes:?}");
    assert_eq!(old.process.lifecycle().state(), MemberState::Paused);
    world.resume(&old)
}

#[test]
fn a_limit_of_the_tenant_itself_takes_nothing_from_others() -> TestOutcome {
    let world = World::<3>::new()?;
    let (old, train) = (world.willing("old")?, world.willing("train")?);
    world.pause(&old).map(drop)?;
    MACHINES[3].total_bytes.store(CHUNK_BYTES / 2, Ordering::Relaxed);
    let error = world.pause(&train).unwrap_err();
    assert!(is_short(&error), "{error}");
    assert!(!old.spilled());
    world.resume(&old)
}

#[test]
fn a_swap_has_room_made_for_it_too() -> TestOutcome {
    let world = World::<4>::new()?;
    let (old, infer) = (world.willing("old")?, world.willing("infer")?);
    let train = world.willing("train")?;
    world.pause(&old).map(drop)?;
    world.pause(&infer).map(drop)?;
    let (mut from, mut to) = (world.coordinator(&train), world.coordinator(&infer));
    let done = tenants::swap::swap(&mut from, &mut to, None, &mut |_| {})?;
    assert!(report(done.paused)?.notes.iter().any(|note| note.contains("tenant 'old'")));
    assert!(old.spilled() && infer.has_all());
    // What is in a file comes by stages too.
    let (mut from, mut to) = (world.coordinator(&infer), world.coordinator(&old));
    let done = tenants::swap::swap(&mut from, &mut to, None, &mut |_| {})?;
    assert!(report(done.resumed)?.window_bytes.is_some());
    assert!(old.has_all() && !old.spilled());
    for tenant in [&infer, &train] {
        world.resume(tenant)?;
    }
    Ok(())
}

/// The command is killed before the first step and after the last: all contents are where they may be.
#[test]
fn a_command_that_is_killed_while_it_makes_room_loses_nothing() -> TestOutcome {
    let world = World::<5>::new()?;
    let (old, train) = (world.willing("old")?, world.willing("train")?);
    MACHINES[5].total_bytes.store(ONE_ARENA, Ordering::Relaxed);
    world.pause(&old).map(drop)?;
    for (line, has_moved) in
        [("started room in host memory", false), ("done room in host memory", true)]
    {
        let program = Command::new(Path::new(env!("CARGO_BIN_EXE_sublet-steps")));
        let run_dir = world.place.run_dir_path();
        let mut steps = Steps::start_by(program, &run_dir, "train", &["pause"])?;
        steps.until_line(line)?;
        steps.kill()?;
        assert_eq!(old.spilled(), has_moved, "{line}");
        assert_eq!(old.process.lifecycle().state(), MemberState::Paused, "{line}");
        assert!(
            train.has_all() && train.process.lifecycle().state() == MemberState::Active,
            "{line}"
        );
    }
    world.pause(&train).map(drop)?;
    // Room for what passes from the file to the device.
    MACHINES[5].total_bytes.store(4 * CHUNK_BYTES, Ordering::Relaxed);
    world.resume(&old)?;
    world.resume(&train)
}
