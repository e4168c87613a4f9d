//! Saved contents into files: who writes, who fails, and what is left then.

use std::fs;
use std::path::Path;

use sublet_keep::map::{TENANT_MAP, TenantMap};
use sublet_keep::save;
use sublet_stage::fake::{Line, World, options, quiet, tenant};
use sublet_stage::script::{Fault, Script, active, paused};
use tenants::coordinator::{Coordinator, Interrupt, Options, Trouble};
use tenants::identity::MemberId;
use tenants::wire::{FailureKind, MemberState, Phase};

fn saved(script: Script, saved_bytes: Option<u64>) -> Script {
    Script { saved_bytes, ..script }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

#[test]
fn all_write_at_the_same_time_and_the_map_of_all_comes_last() {
    let world = World::of(&[saved(paused(), Some(2500)), saved(active(), None), paused()]);
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("saved");
    let mut seen = Vec::new();
    let report = save(&world.coordinator(), &dir, &mut |states| {
        assert!(!dir.join(TENANT_MAP).exists());
        seen.push(states.iter().map(|state| state.written_bytes).sum::<u64>());
    })
    .unwrap();
    // At first, and for each of three answers of both.
    assert_eq!(seen.len(), 1 + 3 + 3);
    assert_eq!((seen[0], seen[6]), (0, 5500));
    assert_eq!(world.lines(), [], "no phase of a pause or resume");
    let map: TenantMap = serde_json::from_slice(&fs::read(dir.join(TENANT_MAP)).unwrap()).unwrap();
    assert_eq!(map, report.map);
    assert!(map.complete && map.failed.is_empty());
    let maps: Vec<_> = map.processes.iter().map(|process| process.map.as_str()).collect();
    assert_eq!(maps.len(), 2);
    assert!(maps.contains(&"process-1.json") && maps.contains(&"process-3.json"), "{maps:?}");
    assert_eq!(map.nothing_saved.len(), 1);
    assert_eq!(map.nothing_saved[0].state, MemberState::Active);
}

#[test]
fn one_that_fails_dies_or_is_silent_does_not_keep_the_others_from_writing() {
    for fault in [Fault::Fail(FailureKind::OutOfHostMemory), Fault::Die, Fault::Silent] {
        let world = World::of(&[Script { save: Some(fault), ..paused() }, paused()]);
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("saved");
        let leave_part = || fs::write(dir.join("process-1.bin.part"), "half").unwrap();
        let report = save(&world.coordinator(), &dir, &mut |states| {
            if states.iter().any(|state| state.written_bytes == 1000) {
                leave_part();
            }
        })
        .unwrap();
        assert!(!report.map.complete, "{fault:?}");
        assert_eq!(report.map.processes[0].map, "process-2.json");
        assert_eq!(report.map.failed[0].member, MemberId(1).to_string());
        assert_eq!(names(&dir), [TENANT_MAP], "no half files");
        assert_eq!(world.lines(), [], "nobody was called off");
    }
}

#[test]
fn a_process_that_does_not_say_who_it_is_is_passed_over() {
    let world = World::of(&[Script { hello: Some(Fault::Silent), ..paused() }, paused()]);
    let base = tempfile::tempdir().unwrap();
    let report = save(&world.coordinator(), &base.path().join("saved"), &mut |_| {}).unwrap();
    assert_eq!(report.map.processes.len(), 1);
    assert!(report.map.failed[0].why.contains("did not answer"), "{:?}", report.map.failed);
}

#[test]
fn when_nobody_can_write_or_nobody_has_anything_no_directory_is_left() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("saved");
    let fault = Some(Fault::Fail(FailureKind::OutOfHostMemory));
    let world = World::of(&[Script { save: fault, ..paused() }]);
    let error = save(&world.coordinator(), &dir, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Trouble::SaveFailed { .. }), "{error}");
    assert!(error.to_string().contains("told to fail"), "{error}");
    let world = World::of(&[saved(active(), None)]);
    let error = save(&world.coordinator(), &dir, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Trouble::NothingSaved { .. }), "{error}");
    assert!(!dir.exists());
    let world = World::new();
    let error = save(&world.coordinator(), &dir, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Trouble::NoSuchTenant { .. }), "{error}");
    assert!(!dir.exists());
}

#[test]
fn more_than_the_disk_holds_is_refused_before_anything_is_written() {
    let world = World::of(&[saved(paused(), Some(1 << 62)), paused()]);
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("saved");
    let error =
        save(&world.coordinator(), &dir, &mut |_| panic!("nothing is written")).unwrap_err();
    let Trouble::NoSpace { needed_bytes, .. } = error else { panic!("{error}") };
    assert_eq!(needed_bytes, (1 << 62) + 3000);
    assert!(error.to_string().contains("name a directory on another disk"), "{error}");
    assert!(!dir.exists());
    let mut called_off = world.lines();
    called_off.sort_by_key(|line| format!("{line:?}"));
    assert_eq!(called_off, [Line::CalledOff(1), Line::CalledOff(2)]);
}

#[test]
fn a_save_that_is_called_off_leaves_nothing() {
    let world = World::of(&[saved(paused(), Some(1_000_000)), saved(paused(), Some(500))]);
    let (interrupt, raise) = Interrupt::new().unwrap();
    let options = Options { interrupt: Some(interrupt), ..options() };
    let coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
    let base = tempfile::tempdir().unwrap();
    fs::write(base.path().join("process-9.bin"), "mine").unwrap();
    let refused = save(&coordinator, base.path(), &mut |_| {}).unwrap_err();
    assert!(refused.to_string().contains("is not empty"), "{refused}");
    assert!(base.path().join("process-9.bin").exists());
    let dir = base.path().join("saved");
    let error = save(&coordinator, &dir, &mut |states| {
        if states.iter().any(|state| state.written_bytes >= 3000) {
            nix::unistd::write(&raise, &[1]).unwrap();
        }
    })
    .unwrap_err();
    assert!(matches!(error, Trouble::NotSaved { .. }), "{error}");
    assert!(!dir.exists());
    assert_eq!(world.lines().len(), 2);
}

#[test]
fn a_resume_that_may_never_succeed_says_how_to_save() {
    let world = World::of(&[paused().with(Phase::Import, Fault::Fail(FailureKind::PeerGone))]);
    let error = world.coordinator().resume(&mut quiet).unwrap_err().to_string();
    assert!(error.ends_with("`sublet save train DIR` writes what is saved to files"), "{error}");
    let kind = FailureKind::OutOfDeviceMemory { missing_bytes: 1 };
    let world = World::of(&[paused().with(Phase::Create, Fault::Fail(kind))]);
    let error = world.coordinator().resume(&mut quiet).unwrap_err().to_string();
    assert!(!error.contains("sublet save"), "it will fit one day: {error}");
    let world = World::of(&[Script::new(MemberState::Faulted)]);
    let error = world.coordinator().resume(&mut quiet).unwrap_err().to_string();
    assert!(error.contains("`sublet save train DIR`"), "{error}");
}
