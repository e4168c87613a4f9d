//! Real members whose run directory is removed.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use super::*;
use sublet_protocol::run_dir::RunDir;
use sublet_stage::job::{Job, patient, until};

fn sockets(job: &Job) -> usize {
    let dir = job.run_dir.existing_tenant(&tenant("train")).ok().flatten();
    dir.map_or(0, |dir| dir.members().unwrap().len())
}

#[test]
fn members_whose_directory_is_removed_make_it_again_and_are_found() {
    let job = Job::new(2);
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
    let ids: Vec<_> = job.members.iter().map(|member| member.presence().id()).collect();
    fs::remove_dir_all(job.run_dir.path()).unwrap();
    let error = job.coordinator(patient()).resume(&mut quiet).unwrap_err();
    assert!(matches!(error, Trouble::NoSuchTenant { .. } | Trouble::RunDir(_)));
    until("both sockets", || sockets(&job) == 2);
    for path in [job.run_dir.path().to_owned(), job.run_dir.path().join("train")] {
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o700);
    }
    let resumed = report(job.coordinator(patient()).resume(&mut quiet).unwrap());
    assert_eq!(resumed.phases[0].members.len(), 2);
    assert_eq!(job.states(), [MemberState::Active; 2]);
    assert_eq!(ids, job.members.iter().map(|member| member.presence().id()).collect::<Vec<_>>());
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
}

#[test]
fn a_command_waits_until_all_members_have_sockets_again() {
    let job = Job::new(2);
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
    fs::remove_dir_all(job.run_dir.path()).unwrap();
    // This is the state that a member leaves that looked first and has ended.
    let run_dir = RunDir::open(Some(job.run_dir.path().to_owned()), None).unwrap();
    run_dir.tenant(&tenant("train")).unwrap().note_names_again().unwrap();
    let resumed = report(job.coordinator(patient()).resume(&mut quiet).unwrap());
    assert_eq!(resumed.phases[0].members.len(), 2);
    assert_eq!(job.states(), [MemberState::Active; 2]);
}

#[test]
fn a_directory_that_others_can_enter_is_not_used_in_the_place_of_one_that_has_gone() {
    let job = Job::new(1);
    fs::remove_dir_all(job.run_dir.path()).unwrap();
    fs::create_dir(job.run_dir.path()).unwrap();
    fs::set_permissions(job.run_dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let complained = || job.members[0].stats().notes.iter().any(|note| note.contains("chmod 700"));
    until("a complaint", complained);
    assert_eq!(fs::read_dir(job.run_dir.path()).unwrap().count(), 0);
    fs::set_permissions(job.run_dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
    until("its socket", || sockets(&job) == 1);
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
}

#[test]
fn one_that_has_left_does_not_come_back() {
    let job = Job::new(2);
    job.members[0].leave();
    fs::remove_dir_all(job.run_dir.path()).unwrap();
    until("the other's socket", || sockets(&job) == 1);
    // A second look of the other member would follow one of the first. The other member may still be making files there.
    until("it has gone again", || fs::remove_dir_all(job.run_dir.path()).is_ok());
    until("the other's socket again", || sockets(&job) == 1);
    let dir = job.run_dir.existing_tenant(&tenant("train")).unwrap().unwrap();
    assert_eq!(dir.members().unwrap()[0].id, job.members[1].presence().id());
}
