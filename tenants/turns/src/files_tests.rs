//! Pipes, links and files that are no text, in the place of files of turns.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use sublet_stage::apart::{in_own_process, make_fifo, without_waiting};
use tenants::run_dir::{RunDir, RunDirError};

use crate::turn_files::TurnDir;
use crate::turn_files::tests::soon;

fn run_dir(base: &tempfile::TempDir) -> RunDir {
    RunDir::open(Some(base.path().join("run")), None).unwrap()
}

#[test]
fn files_beyond_the_limit_of_their_process_are_an_error_and_no_signal() {
    const TEST: &str =
        "files_tests::files_beyond_the_limit_of_their_process_are_an_error_and_no_signal";
    if !in_own_process(TEST) {
        return;
    }
    let is_too_large = |error: RunDirError| {
        let RunDirError::Io { source, .. } = error else { panic!("{error}") };
        assert_eq!(source.raw_os_error(), Some(nix::libc::EFBIG), "{source}");
    };
    let base = tempfile::tempdir().unwrap();
    let turns = TurnDir::make(&run_dir(&base)).unwrap();
    let lock = turns.lock(soon()).unwrap();
    let claim = crate::claims::tests::claim("a");
    let own = turns.claim(&lock, &claim, None).unwrap();
    let line = ["x".repeat(1000)];
    turns.log(Some(&lock), &line).unwrap();
    let hard = getrlimit(Resource::RLIMIT_FSIZE).unwrap().1;
    let limit = |bytes| setrlimit(Resource::RLIMIT_FSIZE, bytes, hard).unwrap();
    limit(1500);
    is_too_large(turns.log(None, &line).unwrap_err());
    limit(0);
    is_too_large(own.say(&claim).unwrap_err());
    is_too_large(turns.claim(&lock, &claim, None).unwrap_err());
    is_too_large(turns.keep_history(&lock, &[1]).unwrap_err());
    limit(hard);
}

#[test]
fn pipes_and_links_in_the_place_of_files_of_turns_make_nobody_wait_and_lead_nowhere() {
    const NAMES: [&str; 5] = ["history", "history.next", "silent", "silent.next", "claim.next"];
    without_waiting(|| {
        let base = tempfile::tempdir().unwrap();
        let outside = base.path().join("outside");
        fs::write(&outside, "[3]").unwrap();
        let link = |path: &Path| symlink(&outside, path).unwrap();
        let broken_link = |path: &Path| symlink(base.path().join("made"), path).unwrap();
        for make in [&make_fifo as &dyn Fn(&Path), &link, &broken_link] {
            let turns = TurnDir::make(&run_dir(&base)).unwrap();
            let lock = turns.lock(soon()).unwrap();
            for file in NAMES.iter().chain(&["log", "0000000000000009.claim"]) {
                make(&turns.path.join(file));
            }
            assert!(turns.history::<Vec<u32>>().is_empty());
            assert!(turns.silent::<Vec<u32>>().is_empty());
            assert!(turns.log_lines().is_empty() && turns.claims(Some(&lock)).unwrap().is_empty());
            let error = turns.log(None, &["a line".to_owned()]).unwrap_err().to_string();
            assert!(error.contains("no regular file"), "{error}");
            // What is about to be a file of ours takes their place.
            let claim = crate::claims::tests::claim("train");
            let own = turns.claim(&lock, &claim, None).unwrap();
            turns.keep_history(&lock, &[7]).unwrap();
            turns.keep_silent(&[8]);
            assert_eq!(turns.history::<Vec<u32>>(), [7]);
            assert_eq!(turns.silent::<Vec<u32>>(), [8]);
            drop(own);
            fs::remove_dir_all(&turns.path).unwrap();
        }
        assert_eq!(fs::read(&outside).unwrap(), b"[3]");
        assert!(!base.path().join("made").exists());
    });
}

#[test]
fn a_claim_that_is_no_text_and_one_that_nobody_may_read_cost_themselves_alone() {
    let base = tempfile::tempdir().unwrap();
    let turns = TurnDir::make(&run_dir(&base)).unwrap();
    let lock = turns.lock(soon()).unwrap();
    let path = turns.path.join("0000000000000001.claim");
    fs::write(&path, [0xff, 0xfe]).unwrap();
    let held = File::open(&path).unwrap();
    held.lock().unwrap();
    let closed = turns.path.join("0000000000000002.claim");
    fs::write(&closed, "").unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    let claim = crate::claims::tests::claim("train");
    let _own = turns.claim(&lock, &claim, None).unwrap();
    let found = turns.claims(Some(&lock)).unwrap();
    assert_eq!(found.iter().map(|found| &*found.claim.tenant).collect::<Vec<_>>(), ["train"]);
}
