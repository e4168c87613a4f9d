//! Saved contents are written to files wherever a process stands, and by whomever it is asked.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use tenants::coordinator::{Coordinator, Interrupt, Options, Trouble};
use tenants::keep::map::{ProcessMap, SavedAllocation, WhyNot};
use tenants::keep::{self, PART_SUFFIX, SaveReport};
use tenants::saving::DirName;
use tenants::transport::Connection;
use tenants::wire::{
    Action, FailureKind, MemberState, Reply, Request, SaveProgress, SaveStage, SaveStep,
};
use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{DriverCode, DriverOp};

use crate::stage::{Stage, UNIT, by_tag, page_of, tenant};

const SOON: Duration = Duration::from_secs(30);

fn save(stage: &Stage, dir: &Path) -> Result<SaveReport, Trouble> {
    let coordinator = Coordinator::new(stage.run_dir.clone(), tenant(), Options::default());
    keep::save(&coordinator, dir, &mut |_| {})
}

fn map_of(stage: &Stage, dir: &Path, member: usize) -> ProcessMap {
    let id = stage.members[member].presence().id().to_string();
    let names = fs::read_dir(dir).expect("a directory");
    let mut names = names.map(|entry| entry.expect("an entry").path());
    let map = names.find(|path| path.to_string_lossy().ends_with(&format!("{id}.json")));
    serde_json::from_slice(&fs::read(map.expect("a map")).expect("readable")).expect("a map")
}

fn holds(dir: &Path, map: &ProcessMap, found: &SavedAllocation, seed: u64) -> bool {
    let file = File::open(dir.join(map.data.as_ref().expect("a file"))).expect("a file");
    let mut bytes = vec![0; usize::try_from(found.bytes).expect("small")];
    file.read_exact_at(&mut bytes, found.file_offset.expect("a place")).expect("all of it");
    let page = page_of(seed);
    bytes.chunks(page.len()).all(|chunk| *chunk == page[..chunk.len()])
}

/// All that a member owns and keeps is in its file.
fn assert_saved(stage: &Stage, dir: &Path, member: usize, when: &str) {
    let map = map_of(stage, dir, member);
    let mut seen = 0;
    for spot in stage.spots_of(member) {
        let address = format!("{:#x}", spot.range.start.0);
        let is_there = |found: &&SavedAllocation| {
            found.addresses.iter().any(|mapped| mapped.address == address)
        };
        if let Some(found) = map.allocations.iter().find(is_there) {
            assert!(holds(dir, &map, found, spot.seed), "{when}: {spot:?}");
            seen += 1;
        } else {
            let imported = |import: &&tenants::keep::map::ImportedAllocation| {
                import.addresses.iter().any(|mapped| mapped.address == address)
            };
            let import = map.imports.iter().find(imported).expect("neither own nor imported");
            let owner = stage.members[1 - member].presence().id().to_string();
            assert_eq!(import.owner, Some(owner), "{when}");
        }
    }
    assert!(seen >= 6, "{when}: {seen} of {}", map.allocations.len());
    let scratch: Vec<_> = map.allocations.iter().filter_map(|a| a.why_not).collect();
    let is_half_way = when.starts_with("half") || when == "faulted";
    let expected = if is_half_way { WhyNot::InPlace } else { WhyNot::Discarded };
    assert!(scratch == [expected] || scratch == [WhyNot::Discarded], "{when}: {scratch:?}");
}

#[test]
fn a_paused_tenant_and_one_whose_tag_is_away_are_written_whole() {
    let stage = Stage::new();
    let base = tempfile::tempdir().expect("a directory");
    for (index, scope) in [tenants::scope::Scope::Whole, by_tag()].into_iter().enumerate() {
        let paused = stage.act_on(Action::Pause, scope.clone());
        assert!(paused.is_ok(), "{paused:?}");
        let states = stage.states();
        let dir = base.path().join(index.to_string());
        let report = save(&stage, &dir).expect("written");
        assert!(report.map.complete && report.map.processes.len() == 2, "{report:?}");
        for member in 0..2 {
            assert_saved(&stage, &dir, member, "paused");
        }
        assert_eq!(stage.states(), states);
        let resumed = stage.act_on(Action::Resume, scope);
        assert!(resumed.is_ok(), "{resumed:?}");
        stage.assert_intact("written and resumed");
    }
    let error = save(&stage, &base.path().join("active")).expect_err("nothing to write");
    assert!(matches!(error, Trouble::NothingSaved { .. }), "{error}");
    stage.assert_ticket_is_good();
}

#[test]
fn a_process_that_stands_half_way_in_a_pause_is_written_and_goes_back() {
    let stage = Stage::new();
    let base = tempfile::tempdir().expect("a directory");
    // One saves and cannot map again; the other cannot save.
    // The first calls are for views, to copy through.
    stage.faults(0).fail(DriverOp::Map, FaultSpan::From(4), DriverCode::UNKNOWN);
    stage.faults(1).fail(DriverOp::CopyToHost, FaultSpan::From(1), DriverCode::UNKNOWN);
    let error = stage.act(Action::Pause).expect_err("a fault");
    assert_eq!(stage.states()[0], MemberState::Offloading, "{error}");
    let dir = base.path().join("saved");
    let report = save(&stage, &dir).expect("written");
    assert!(report.map.complete, "{report:?}");
    assert_saved(&stage, &dir, 0, "half paused");
    assert_eq!(stage.states()[0], MemberState::Offloading, "as it was");
    stage.clear_faults();
    stage.must(Action::Resume);
    stage.assert_intact("written and undone");
}

#[test]
fn a_process_that_stands_half_way_in_a_resume_is_written_and_goes_back() {
    let stage = Stage::new();
    let base = tempfile::tempdir().expect("a directory");
    stage.must(Action::Pause);
    // One has everything back and cannot give its imports up again; the other cannot import.
    // If that fails before the first has its imports, both go back: then once more.
    let is_half_way = (0..50).any(|_| {
        stage.clear_faults();
        stage.faults(0).fail(DriverOp::Unmap, FaultSpan::From(4), DriverCode::UNKNOWN);
        stage.faults(1).fail(DriverOp::Import, FaultSpan::From(1), DriverCode::UNKNOWN);
        let error = stage.act(Action::Resume).expect_err("a fault");
        assert!(error.to_string().contains("import"), "{error}");
        stage.states()[0] == MemberState::Restoring
    });
    assert!(is_half_way, "{:?}", stage.states());
    let dir = base.path().join("saved");
    let report = save(&stage, &dir).expect("written");
    assert!(report.map.complete, "{report:?}");
    for member in 0..2 {
        assert_saved(&stage, &dir, member, "half resumed");
    }
    assert_eq!(stage.states()[0], MemberState::Restoring, "as it was");
    stage.clear_faults();
    stage.must(Action::Resume);
    stage.assert_intact("written and resumed");
}

#[test]
fn what_a_process_had_saved_when_it_lost_its_context_is_written() {
    let stage = Stage::new();
    let base = tempfile::tempdir().expect("a directory");
    stage.must(Action::Pause);
    stage.faults(0).fail_any(FaultSpan::From(15), DriverCode::ILLEGAL_ADDRESS);
    let error = stage.act(Action::Resume).expect_err("a lost context");
    assert_eq!(stage.states(), [MemberState::Faulted, MemberState::Paused]);
    assert!(error.to_string().contains("`sublet save train DIR`"), "{error}");
    let dir = base.path().join("saved");
    let report = save(&stage, &dir).expect("written");
    assert!(report.map.complete, "{report:?}");
    for member in 0..2 {
        assert_saved(&stage, &dir, member, "faulted");
    }
    let map = map_of(&stage, &dir, 0);
    assert_eq!(map.process.state, MemberState::Faulted);
}

#[test]
fn a_save_that_is_called_off_leaves_the_tenant_paused_and_no_file() {
    let stage = Stage::new();
    let base = tempfile::tempdir().expect("a directory");
    stage.must(Action::Pause);
    let (interrupt, raise) = Interrupt::new().expect("a pipe");
    let options = Options { interrupt: Some(interrupt), ..Options::default() };
    let coordinator = Coordinator::new(stage.run_dir.clone(), tenant(), options);
    let dir = base.path().join("saved");
    let error = keep::save(&coordinator, &dir, &mut |_| {
        nix::unistd::write(&raise, &[1]).expect("raised");
    });
    let error = error.expect_err("called off");
    assert!(matches!(error, Trouble::NotSaved { .. }), "{error}");
    assert!(!dir.exists());
    stage.assert_all(MemberState::Paused, "called off");
    stage.must(Action::Resume);
    stage.assert_intact("called off and resumed");
}

/// Somebody that asks one member to write, step by step.
struct Asker(Connection);

impl Asker {
    fn of(stage: &Stage, member: usize) -> Self {
        let path = stage.members[member].presence().socket_path();
        Self(Connection::connect(path, Instant::now() + SOON).expect("a connection"))
    }

    fn ask(&mut self, step: SaveStep) -> Reply {
        let call = self.0.exchange(&Request::Save(step), 0, Instant::now() + SOON);
        call.expect("an answer").0
    }

    fn progress(&mut self, step: SaveStep) -> SaveProgress {
        let reply = self.ask(step);
        let Reply::Saving(progress) = reply else { panic!("{reply:?}") };
        *progress
    }

    fn refusal(&mut self, step: SaveStep) -> (FailureKind, String) {
        let reply = self.ask(step);
        let Reply::Failed(failure) = reply else { panic!("{reply:?}") };
        (failure.kind, failure.message)
    }
}

fn named(path: &Path) -> DirName {
    let metadata = fs::metadata(path).expect("a directory");
    let path = path.to_str().expect("text").as_bytes().to_vec();
    DirName { path, device: metadata.dev(), inode: metadata.ino() }
}

fn private_dir() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt as _;
    let private = fs::Permissions::from_mode(0o700);
    tempfile::Builder::new().permissions(private).tempdir().expect("a directory")
}

fn parts_in(dir: &Path) -> usize {
    let names = fs::read_dir(dir).expect("a directory");
    let names = names.map(|entry| entry.expect("an entry").file_name());
    names.filter(|name| name.to_string_lossy().ends_with(PART_SUFFIX)).count()
}

const NO_TIME: SaveStep = SaveStep::WriteOn { for_ms: 0 };

#[test]
fn what_is_not_whole_goes_with_its_asker_and_with_any_other_step() {
    let stage = Stage::new();
    // More than is written in one piece.
    let large = crate::stage::create(
        &stage.members[0],
        crate::stage::device_of(0),
        20,
        vmm_pool::Contents::Keep,
    );
    stage.must(Action::Pause);
    let dir = private_dir();
    let begin = || SaveStep::Begin { dir: named(dir.path()) };
    let mut first = Asker::of(&stage, 0);
    let progress = first.progress(begin());
    assert_eq!((progress.written_bytes, progress.stage), (0, SaveStage::Writing));
    assert!(progress.account.saved_bytes > 20 * UNIT);
    assert_eq!(parts_in(dir.path()), 0, "nothing is written yet");
    let progress = first.progress(NO_TIME);
    assert!(progress.written_bytes > 0 && progress.stage == SaveStage::Writing, "{progress:?}");
    assert_eq!(parts_in(dir.path()), 1);

    // Another asker is one that has the tenant's lock after the first.
    let mut second = Asker::of(&stage, 0);
    let (kind, text) = second.refusal(NO_TIME);
    assert!(kind == FailureKind::WrongState && text.contains("another save"), "{text}");
    assert_eq!(parts_in(dir.path()), 1, "it is another's");
    second.progress(begin());
    assert_eq!(parts_in(dir.path()), 0);
    assert_eq!(first.refusal(NO_TIME).0, FailureKind::WrongState);
    drop(first);
    second.progress(NO_TIME);
    assert_eq!(second.progress(SaveStep::CallOff).stage, SaveStage::CalledOff);
    assert_eq!(parts_in(dir.path()), 0);

    second.progress(begin());
    second.progress(NO_TIME);
    stage.must(Action::Resume);
    let (_, text) = second.refusal(NO_TIME);
    assert!(text.contains("a pause, a resume or another save has begun"), "{text}");
    assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0);
    stage.members[0].pool().enter_giving_up().release(large).expect("released");
    stage.assert_intact("begun and resumed");
}

#[test]
fn a_directory_that_is_another_one_or_open_to_others_is_refused_by_each_process() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let stage = Stage::new();
    stage.must(Action::Pause);
    let mut asker = Asker::of(&stage, 0);
    let (dir, other) = (private_dir(), private_dir());
    let elsewhere = DirName { inode: named(other.path()).inode, ..named(dir.path()) };
    let (_, text) = asker.refusal(SaveStep::Begin { dir: elsewhere });
    assert!(text.contains("is another directory for this process"), "{text}");
    let link = other.path().join("link");
    symlink(dir.path(), &link).expect("a link");
    asker.refusal(SaveStep::Begin { dir: named(&link) });
    let relative = DirName { path: b"here".to_vec(), ..named(dir.path()) };
    asker.refusal(SaveStep::Begin { dir: relative });
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).expect("a mode");
    let (_, text) = asker.refusal(SaveStep::Begin { dir: named(dir.path()) });
    assert!(text.contains("is open to others (mode 711)"), "{text}");
    assert_eq!(asker.refusal(NO_TIME).0, FailureKind::WrongState);
}
