//! Parts of a test that must not touch the rest of it: in a process of their own, or on a thread that may wait for ever.

#![expect(clippy::expect_used, reason = "a test fails by panicking, helpers of it too")]

use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use nix::sys::stat::Mode;

/// For a process of the test's own: a limit is a whole process's.
const APART: &str = "SUBLET_TEST_APART";

/// Runs `test`, which is the one that calls, once more in a process of its own. True in that process.
pub fn in_own_process(test: &str) -> bool {
    if std::env::var_os(APART).is_some() {
        return true;
    }
    let mut again = Command::new(std::env::current_exe().expect("this program"));
    let output = again.args(["--exact", test]).env(APART, "1").output().expect("it starts");
    let has_run = String::from_utf8_lossy(&output.stdout).contains("1 passed");
    assert!(output.status.success() && has_run, "{output:?}");
    false
}

/// Does `work` on a thread of its own: what waits for the other end of a pipe waits for ever.
pub fn without_waiting(work: impl FnOnce() + Send + 'static) {
    let (say, done) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        work();
        say.send(()).expect("somebody waits");
    });
    let ended = done.recv_timeout(Duration::from_mins(2));
    let waits = ended == Err(mpsc::RecvTimeoutError::Timeout);
    assert!(!waits, "it waits for the other end of a pipe");
    worker.join().expect("no panic");
}

/// Makes a pipe with a name.
pub fn make_fifo(path: &Path) {
    nix::unistd::mkfifo(path, Mode::S_IRWXU).expect("a pipe");
}
