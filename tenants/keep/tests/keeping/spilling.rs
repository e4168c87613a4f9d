//! A real member that moves saved contents to a file, and what ends that, or is ended by it.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

use sublet_keep::Settings;
use sublet_stage::fake::quiet;
use sublet_stage::job::{Job, Line, SOON, patient, until};
use sublet_stage::memory;
use tenants::coordinator::Outcome;
use tenants::host_memory::HostLimit;
use tenants::saving::DirName;
use tenants::wire::{FailureKind, Reply, Request, SaveStage, SaveStep, SpillProgress, SpillStep};
use vmm_pool::driver::{DeviceOrdinal, Driver as _};
use vmm_pool::{Class, Contents};

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
/// More than a save writes at a time.
const UNITS: u64 = 20;
const ALL: SpillStep = SpillStep { most_bytes: u64::MAX };

/// A paused process that may move its contents to a file in `dir`.
fn paused_in(dir: &Path, host_limits: fn() -> Vec<HostLimit>) -> Job {
    let settings = Settings { spills: Some(|_| true), ..Settings::default() };
    let job = Job::keeping(1, settings, |_, config| config.host_limits = host_limits);
    let pool = job.members[0].pool();
    pool.host_memory().set_file_dir(dir.to_owned());
    pool.driver().make_current(DEVICE).unwrap();
    let class = Class { library: "test", contents: Contents::Keep, ..Class::default() };
    let handle = memory::create(pool, DEVICE, UNITS, class);
    let range = memory::map(pool, handle, UNITS, DEVICE);
    memory::write(pool.driver(), DEVICE, range, 7);
    let paused = job.coordinator(patient()).pause(&mut quiet).unwrap();
    assert!(matches!(paused, Outcome::Completed(_)), "{paused:?}");
    job
}

fn comes_back(job: &Job) {
    let resumed = job.coordinator(patient()).resume(&mut quiet).unwrap();
    assert!(matches!(resumed, Outcome::Completed(_)), "{resumed:?}");
}

fn spilled(reply: Reply) -> SpillProgress {
    let Reply::Spilled(progress) = reply else { panic!("{reply:?}") };
    *progress
}

fn left_bytes(job: &Job) -> u64 {
    let question = Request::Spill(SpillStep { most_bytes: 0 });
    spilled(Line::to(&job.members[0]).ask(&question)).left_bytes
}

/// Holds the worker before it moves anything, as long as it is raised.
static IS_HELD: Mutex<bool> = Mutex::new(false);
static CHANGED: Condvar = Condvar::new();
static HAS_BEGUN: AtomicBool = AtomicBool::new(false);

fn limits_that_wait() -> Vec<HostLimit> {
    let held = IS_HELD.lock().unwrap();
    HAS_BEGUN.store(*held, Ordering::SeqCst);
    let _let_go = CHANGED.wait_timeout_while(held, SOON, |held| *held).unwrap();
    Vec::new()
}

#[test]
fn a_step_whose_asker_has_hung_up_moves_nothing() {
    let base = tempfile::tempdir().unwrap();
    let job = paused_in(base.path(), limits_that_wait);
    let all_bytes = left_bytes(&job);
    assert!(all_bytes > 0);
    *IS_HELD.lock().unwrap() = true;
    let mut asker = Line::to(&job.members[0]);
    asker.0.send(&Request::Spill(ALL), &[], Instant::now() + SOON).unwrap();
    until("the step", || HAS_BEGUN.load(Ordering::SeqCst));
    drop(asker);
    // The agent sees that in the round of the first question at the latest, perhaps behind it; the second is of a later round.
    for _ in 0..2 {
        assert!(matches!(Line::to(&job.members[0]).ask(&Request::Hello), Reply::Member(_)));
    }
    *IS_HELD.lock().unwrap() = false;
    CHANGED.notify_all();
    assert_eq!(left_bytes(&job), all_bytes);
    let mut asker = Line::to(&job.members[0]);
    assert_eq!(spilled(asker.ask(&Request::Spill(ALL))).left_bytes, 0);
    comes_back(&job);
}

#[test]
fn a_step_ends_the_writing_of_a_save() {
    let base = tempfile::tempdir().unwrap();
    let job = paused_in(base.path(), Vec::new);
    let private = std::fs::Permissions::from_mode(0o700);
    let dir = tempfile::Builder::new().permissions(private).tempdir().unwrap();
    let metadata = std::fs::metadata(dir.path()).unwrap();
    let path = dir.path().to_str().unwrap().as_bytes().to_vec();
    let begin =
        SaveStep::Begin { dir: DirName { path, device: metadata.dev(), inode: metadata.ino() } };
    let mut saver = Line::to(&job.members[0]);
    let reply = saver.ask(&Request::Save(begin));
    let Reply::Saving(progress) = reply else { panic!("{reply:?}") };
    assert_eq!(progress.stage, SaveStage::Writing);
    // A question moves nothing, and ends nothing.
    let all_bytes = left_bytes(&job);
    assert!(all_bytes > 0);
    let write_on = Request::Save(SaveStep::WriteOn { for_ms: 0 });
    let reply = saver.ask(&write_on);
    assert!(matches!(reply, Reply::Saving(_)), "{reply:?}");
    let mut spiller = Line::to(&job.members[0]);
    assert_eq!(spilled(spiller.ask(&Request::Spill(ALL))).left_bytes, 0);
    let reply = saver.ask(&write_on);
    let Reply::Failed(failure) = reply else { panic!("{reply:?}") };
    assert_eq!(failure.kind, FailureKind::WrongState, "{failure}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing half written");
    comes_back(&job);
}
