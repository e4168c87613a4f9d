//! Tests of directories, sockets and locks of tenants, in a directory of the test.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use sublet_stage::apart::{in_own_process, make_fifo, without_waiting};

use super::*;
use crate::ticket::Ticket;

pub(super) fn run_dir(base: &tempfile::TempDir) -> RunDir {
    RunDir::open(Some(base.path().join("run")), None).unwrap()
}

pub(super) fn name(text: &str) -> TenantName {
    TenantName::new(text).unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

/// Makes a socket whose process is dead.
pub(super) fn leave_dead_socket(dir: &TenantDir, id: MemberId) -> PathBuf {
    let path = dir.socket_path(id).unwrap();
    drop(UnixListener::bind(&path).unwrap());
    path
}

#[test]
fn the_first_of_the_three_places_that_is_given_is_used() {
    let xdg = tempfile::tempdir().unwrap();
    let explicit = || Some(PathBuf::from("/given"));
    let xdg_dir = || Some(xdg.path().to_owned());
    assert_eq!(RunDir::choose(explicit(), xdg_dir()), Path::new("/given"));
    assert_eq!(RunDir::choose(Some(PathBuf::new()), xdg_dir()), xdg.path().join("sublet"));
    let fallback = PathBuf::from(format!("/tmp/sublet-{}", geteuid()));
    assert_eq!(RunDir::choose(None, None), fallback);
    assert_eq!(RunDir::choose(None, Some(PathBuf::from("/not/there"))), fallback);
}

#[test]
fn a_parent_that_is_not_there_is_named_with_what_to_do() {
    let base = tempfile::tempdir().unwrap();
    let error = RunDir::open(Some(base.path().join("none/run")), None).unwrap_err().to_string();
    let path = base.path().join("none");
    let expected = " failed (create it, or set SUBLET_RUN_DIR to a directory that is there)";
    assert_eq!(error, format!("inspection of {}{expected}", path.display()));
}

#[test]
fn directories_are_created_for_us_alone() {
    let base = tempfile::tempdir().unwrap();
    let run = run_dir(&base);
    let tenant = run.tenant(&name("train")).unwrap();
    for path in [run.path(), tenant.path()] {
        let mode = fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
    assert_eq!(run.tenants().unwrap(), [name("train")]);
    assert!(run.existing_tenant(&name("other")).unwrap().is_none());
    assert!(run.existing_tenant(&name("train")).unwrap().is_some());
}

#[test]
fn a_directory_that_others_reach_a_link_and_a_file_are_refused() {
    let base = tempfile::tempdir().unwrap();
    let open = base.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o750)).unwrap();
    let error = RunDir::open(Some(open.clone()), None).unwrap_err();
    assert!(error.to_string().contains("mode 750"), "{error}");
    assert!(error.to_string().contains("chmod 700"), "{error}");

    fs::set_permissions(&open, fs::Permissions::from_mode(0o700)).unwrap();
    RunDir::open(Some(open.clone()), None).unwrap();
    let link = base.path().join("link");
    symlink(&open, &link).unwrap();
    let error = RunDir::open(Some(link), None).unwrap_err();
    assert!(error.to_string().contains("symbolic link"), "{error}");

    let file = base.path().join("file");
    fs::write(&file, "").unwrap();
    let error = RunDir::open(Some(file), None).unwrap_err();
    assert!(error.to_string().contains("not a directory"), "{error}");
}

#[test]
fn a_socket_path_that_is_too_long_is_named_with_its_length() {
    let base = tempfile::tempdir().unwrap();
    let run = RunDir::open(Some(base.path().join("r".repeat(90))), None).unwrap();
    let dir = run.tenant(&name("train")).unwrap();
    let error = dir.socket_path(MemberId(1)).unwrap_err();
    let RunDirError::PathTooLong { length, .. } = &error else {
        panic!("{error}");
    };
    assert!(*length > SOCKET_PATH_BYTES_MAX);
    let text = error.to_string();
    assert!(text.contains("0000000000000001.sock"), "{text}");
    assert!(text.contains("SUBLET_RUN_DIR"), "{text}");
}

#[test]
fn only_tenants_with_a_process_that_listens_live() {
    let base = tempfile::tempdir().unwrap();
    let run = run_dir(&base);
    let (_dir, _listener) = run.listen(&name("train"), MemberId(1)).unwrap();
    let (dead, listener) = run.listen(&name("infer"), MemberId(2)).unwrap();
    drop(listener);
    leave_dead_socket(&dead, MemberId(3));
    assert_eq!(run.live_tenants().unwrap(), [name("train")]);
    assert_eq!(run.tenants().unwrap().len(), 2, "nothing was removed");
}

#[test]
fn who_tidies_an_empty_directory_up_holds_its_lock() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base).tenant(&name("train")).unwrap();
    // Without a lock file no process has coordinated there, and one may just begin to.
    assert!(!dir.path().join(LOCK_NAME).exists());
    let late = open_lock_file(&dir.path().join(LOCK_NAME)).unwrap();
    late.try_lock().unwrap();
    dir.remove_stale().unwrap();
    assert!(is_still_named(&late, &dir.path().join(LOCK_NAME)));
    drop(late);
    dir.remove_stale().unwrap();
    assert!(!dir.path().exists());
}

#[test]
fn an_empty_directory_stays_while_somebody_coordinates_in_it() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base).tenant(&name("train")).unwrap();
    let lock = dir.lock(soon()).unwrap();
    dir.remove_stale().unwrap();
    assert!(dir.path().exists());
    dir.remove_stale_holding(&lock).unwrap();
    assert!(!dir.path().exists());
    // The lock file was removed with the directory; the next coordinator makes a new one.
    drop(dir.lock(soon()).unwrap());
}

#[test]
fn a_held_lock_is_refused_at_the_deadline_with_its_holder() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base).tenant(&name("train")).unwrap();
    let lock = dir.lock(soon()).unwrap();
    let error = dir.lock(Instant::now() + Duration::from_millis(20)).unwrap_err();
    assert!(error.to_string().contains(&format!("by process {},", std::process::id())), "{error}");
    drop(lock);
    drop(dir.lock(Instant::now()).unwrap());
}

thread_local! {
    static REMOVED_FIRST: std::cell::Cell<Option<PathBuf>> = const { std::cell::Cell::new(None) };
}

#[test]
fn a_lock_on_a_file_that_its_last_holder_has_removed_is_none() {
    // Acts like a last holder that removes the directory between the opening of the file and its locking.
    fn lock_late(file: &File) -> Result<(), fs::TryLockError> {
        if let Some(path) = REMOVED_FIRST.take() {
            fs::remove_file(path).unwrap();
        }
        file.try_lock()
    }
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base).tenant(&name("train")).unwrap();
    drop(dir.lock(soon()).unwrap());
    REMOVED_FIRST.set(Some(dir.path().join(LOCK_NAME)));
    let lock = dir.lock_with(soon(), lock_late).unwrap();
    let second = dir.lock(Instant::now());
    assert!(matches!(second, Err(RunDirError::Locked { .. })), "{second:?}");
    drop(lock);
}

#[test]
fn a_lock_is_young_when_it_is_taken_and_knows_when_its_file_is_removed() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base).tenant(&name("train")).unwrap();
    drop(dir.lock(soon()).unwrap());
    let path = dir.path().join(LOCK_NAME);
    let old = SystemTime::now() - Duration::from_hours(240);
    File::open(&path).unwrap().set_modified(old).unwrap();
    let lock = dir.lock(soon()).unwrap();
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    assert!(modified > old + Duration::from_hours(200), "{modified:?}");
    assert!(lock.is_named());
    fs::remove_file(&path).unwrap();
    assert!(!lock.is_named());
    let _second = dir.lock(soon()).unwrap();
    assert!(!lock.is_named());
}

#[test]
fn those_that_share_the_lock_are_named_and_nobody_who_held_it_before() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base).tenant(&name("train")).unwrap();
    // Some versions wrote a process id into this file.
    fs::write(dir.path().join(LOCK_NAME), "4123456789\n").unwrap();
    let _one = dir.lock_shared(soon(), soon()).unwrap();
    let _other = dir.lock_shared(soon(), soon()).unwrap();
    let error = dir.lock(Instant::now() + Duration::from_millis(20)).unwrap_err();
    let own_pid = std::process::id();
    assert!(
        matches!(&error, RunDirError::Locked { holder_pids, .. } if *holder_pids == [own_pid]),
        "{error}"
    );
}

#[test]
fn who_wants_the_lock_alone_has_it_before_those_that_come_later_to_share_it() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base).tenant(&name("train")).unwrap();
    let shared = dir.lock_shared(soon(), soon()).unwrap();
    let file = open_lock_file(&dir.path().join(LOCK_NAME)).unwrap();
    std::thread::scope(|scope| {
        let alone = scope.spawn(|| dir.lock(Instant::now() + Duration::from_mins(1)));
        while !locks::Wish::is_on(&file) {
            std::thread::yield_now();
        }
        let later = dir.lock_shared(soon(), Instant::now());
        assert!(matches!(later, Err(RunDirError::Locked { .. })), "{later:?}");
        drop(shared);
        let alone = alone.join().unwrap().unwrap();
        assert!(!locks::Wish::is_on(&file));
        drop(alone);
    });
    // A caller that has given up does not block others any more.
    let shared = dir.lock_shared(soon(), soon()).unwrap();
    dir.lock(Instant::now()).unwrap_err();
    drop((dir.lock_shared(soon(), Instant::now()).unwrap(), shared));
}

#[test]
fn who_wants_the_lock_alone_and_is_stopped_keeps_nobody_from_sharing_it_for_long() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base).tenant(&name("train")).unwrap();
    let _stopped = dir.want_alone().unwrap();
    let later = dir.lock_shared(soon(), Instant::now());
    assert!(matches!(later, Err(RunDirError::Locked { .. })), "{later:?}");
    let now = Instant::now();
    drop(dir.lock_shared(now, now).unwrap());
}

#[test]
fn a_waiter_gets_the_lock_when_its_holder_gives_it_up() {
    let base = tempfile::tempdir().unwrap();
    let dir = run_dir(&base).tenant(&name("train")).unwrap();
    let lock = dir.lock(soon()).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| dir.lock(soon()).map(drop));
        dir.remove_stale_holding(&lock).unwrap();
        drop(lock);
        waiter.join().unwrap().unwrap();
    });
}

#[test]
fn files_beyond_the_limit_of_their_process_are_an_error_and_no_signal() {
    const TEST: &str =
        "run_dir::tests::files_beyond_the_limit_of_their_process_are_an_error_and_no_signal";
    if !in_own_process(TEST) {
        return;
    }
    let hard = getrlimit(Resource::RLIMIT_FSIZE).unwrap().1;
    let limit = |bytes| setrlimit(Resource::RLIMIT_FSIZE, bytes, hard).unwrap();
    limit(0);
    let refused = crate::ticket::lease().and_then(|_| ticket().issue()).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EFBIG), "{refused}");
    limit(hard);
    ticket().issue().unwrap();
}

fn ticket() -> Ticket {
    Ticket::uncounted(vmm_pool::AllocationId([1; 16]), 4096, MemberId(1), name("a"))
}

#[test]
fn a_name_that_is_no_file_is_refused_and_waits_for_nobody() {
    let base = tempfile::tempdir().unwrap();
    let run = run_dir(&base);
    for make in [make_fifo, make_directory] {
        let dir = run.tenant(&name("train")).unwrap();
        let path = dir.path().join(LOCK_NAME);
        make(&path);
        assert!(dir.lock_holders().is_empty());
        let error = dir.lock(soon()).unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
        fs::remove_dir_all(dir.path()).unwrap();
    }
}

#[test]
fn pipes_and_links_in_the_place_of_a_tenants_files_make_nobody_wait_and_lead_nowhere() {
    without_waiting(|| {
        let base = tempfile::tempdir().unwrap();
        let link = |path: &Path| symlink(base.path().join("made"), path).unwrap();
        for make in [&make_fifo as &dyn Fn(&Path), &link] {
            let dir = run_dir(&base).tenant(&name("train")).unwrap();
            make(&dir.path().join("names-again"));
            let error = dir.note_names_again().unwrap_err();
            assert!(error.to_string().contains("no regular file"), "{error}");
            dir.until_names_are_back(|| true);
            fs::remove_dir_all(dir.path()).unwrap();
        }
        assert!(!base.path().join("made").exists());
    });
}

fn make_directory(path: &Path) {
    fs::create_dir(path).unwrap();
}
