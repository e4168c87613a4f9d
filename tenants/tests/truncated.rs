//! Descriptors that do not all fit into this process. Alone in its file: the limit is the whole process's.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::IoSlice;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use tenants::transport::frame::encode;
use tenants::transport::{Connection, TransportError};
use tenants::wire::{Reply, Request};

const SENT: usize = 10;
/// Of them, how many fit.
const FIT: usize = 4;

fn open_fds() -> Vec<RawFd> {
    let entries = fs::read_dir("/proc/self/fd").unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
}

#[test]
fn descriptors_that_do_not_all_fit_are_refused_and_those_that_did_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut ours = Connection::connect(&path, deadline).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    let files: Vec<File> = (0..SENT).map(|_| File::open("/dev/null").unwrap()).collect();
    let raw: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let reply =
        Reply::Fds { count: 10, tags: Vec::new(), missing: Vec::new(), devices: Vec::new() };
    let frame = encode(&reply, SENT).unwrap();
    let rights = [ControlMessage::ScmRights(&raw)];
    let data = [IoSlice::new(&frame)];
    sendmsg::<UnixAddr>(theirs.as_raw_fd(), &data, &rights, MsgFlags::empty(), None).unwrap();

    let before = open_fds();
    let (limit, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let mut free = (0..).filter(|fd| !before.contains(fd));
    let last = free.nth(FIT - 1).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, u64::try_from(last + 1).unwrap(), most).unwrap();
    let error = ours.exchange(&Request::Hello, SENT, deadline).unwrap_err();
    setrlimit(Resource::RLIMIT_NOFILE, limit, most).unwrap();

    assert!(matches!(error, TransportError::FdsTruncated { .. }), "{error}");
    assert_eq!(open_fds().len(), before.len(), "some of those that did fit are still open");
}
