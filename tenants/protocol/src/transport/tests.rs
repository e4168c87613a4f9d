use std::fs::File;
use std::io::{Read as _, Write as _};

use proptest::prelude::*;

use super::frame::MAGIC;
use super::process::{command_next_to_library, stat_words};
use super::*;
use crate::wire::{Action, Failure, FailureKind, GiveUp, Hello, PROTOCOL_VERSION, Reply, Request};

#[test]
fn a_process_has_any_name_and_its_state_and_parent_are_read_behind_it() {
    let words: Vec<_> = stat_words("7 (a) T (b) t 1 7 7 0").take(2).collect();
    assert_eq!(words, ["t", "1"]);
    assert_eq!(stat_words("").next(), None);
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

fn shortly() -> Instant {
    Instant::now() + Duration::from_millis(30)
}

fn pair() -> (Connection, Connection) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (
        Connection::with_limits(ours, Limits::ALL).unwrap(),
        Connection::with_limits(theirs, Limits::ALL).unwrap(),
    )
}

/// Makes a pair: one end is a connection, the other a bare stream.
fn half_pair() -> (Connection, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Connection::with_limits(ours, Limits::ALL).unwrap(), theirs)
}

fn header(fds: usize, payload_bytes: usize) -> [u8; HEADER_BYTES] {
    Header { fds, payload_bytes }.encode()
}

fn raw_header(magic: [u8; 4], version: u16, fds: u16, length: u32) -> Vec<u8> {
    let mut bytes = magic.to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(fds.to_le_bytes());
    bytes.extend(length.to_le_bytes());
    bytes
}

fn receive_error(bytes: &[u8]) -> TransportError {
    let (mut ours, mut theirs) = half_pair();
    theirs.write_all(bytes).unwrap();
    drop(theirs);
    ours.receive::<Request>(soon()).unwrap_err()
}

fn some_fds(count: usize) -> Vec<File> {
    (0..count).map(|_| File::open("/dev/null").unwrap()).collect()
}

fn borrow(files: &[File]) -> Vec<BorrowedFd<'_>> {
    files.iter().map(AsFd::as_fd).collect()
}

#[test]
fn messages_arrive_in_order_with_their_descriptors() {
    let (mut a, mut b) = pair();
    let file = tempfile::tempfile().unwrap();
    (&file).write_all(b"within").unwrap();
    a.send(&Request::Hello, &[], soon()).unwrap();
    a.send(&Request::Stats, &[file.as_fd()], soon()).unwrap();
    a.send(&Request::Hello, &[], soon()).unwrap();

    let (first, fds) = b.receive::<Request>(soon()).unwrap();
    assert_eq!((first, fds.len()), (Request::Hello, 0));
    let (second, mut fds) = b.receive::<Request>(soon()).unwrap();
    assert_eq!((second, fds.len()), (Request::Stats, 1));
    let mut text = String::new();
    let mut received = File::from(fds.remove(0));
    std::io::Seek::rewind(&mut received).unwrap();
    received.read_to_string(&mut text).unwrap();
    assert_eq!(text, "within");
    let flags = nix::fcntl::fcntl(&received, nix::fcntl::FcntlArg::F_GETFD).unwrap();
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    let (third, fds) = b.receive::<Request>(soon()).unwrap();
    assert_eq!((third, fds.len()), (Request::Hello, 0));
    assert_eq!(b.peer().pid(), Some(std::process::id()));
}

#[test]
fn as_many_descriptors_as_the_limit_says_travel_and_one_more_does_not() {
    let (mut a, mut b) = pair();
    let files = some_fds(FDS_PER_MESSAGE_MAX + 1);
    let fds = borrow(&files);
    a.send(&Reply::Consented, &fds[..FDS_PER_MESSAGE_MAX], soon()).unwrap();
    let (_, received) = b.receive::<Reply>(soon()).unwrap();
    assert_eq!(received.len(), FDS_PER_MESSAGE_MAX);
    for fd in &received {
        let flags = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    }
    let error = a.send(&Reply::Consented, &fds, soon()).unwrap_err();
    assert!(matches!(error, TransportError::TooManyFds { .. }));
    a.send(&Reply::Consented, &[], soon()).unwrap();
}

#[test]
fn a_long_message_passes_a_full_socket_buffer() {
    let (mut a, mut b) = pair();
    let message = "x".repeat(PAYLOAD_BYTES_MAX - 16);
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || b.receive::<String>(soon()).unwrap().0);
        a.send(&message, &[], soon()).unwrap();
        assert_eq!(receiver.join().unwrap(), message);
    });
}

#[test]
fn a_message_over_the_limit_is_refused_before_it_is_sent() {
    let (mut a, mut b) = pair();
    let error = a.send(&"x".repeat(PAYLOAD_BYTES_MAX), &[], soon()).unwrap_err();
    assert!(matches!(error, TransportError::TooLong { .. }));
    a.send(&Request::Hello, &[], soon()).unwrap();
    assert_eq!(b.receive::<Request>(soon()).unwrap().0, Request::Hello);
}

#[test]
fn a_send_that_nobody_takes_ends_at_its_deadline_and_breaks_the_connection() {
    let (mut a, _b) = pair();
    let message = "x".repeat(PAYLOAD_BYTES_MAX - 16);
    let error = a.send(&message, &[], shortly()).unwrap_err();
    assert!(matches!(error, TransportError::Deadline { waiting_to: Direction::Send, .. }));
    let error = a.send(&Request::Hello, &[], soon()).unwrap_err();
    assert!(matches!(error, TransportError::OutOfStep { .. }));
}

#[test]
fn a_receive_that_ran_out_of_time_mid_frame_can_be_continued() {
    let (mut ours, mut theirs) = half_pair();
    let payload = postcard::to_stdvec(&Request::Stats).unwrap();
    let frame = [header(0, payload.len()).as_slice(), &payload].concat();
    for byte in &frame[..frame.len() - 1] {
        theirs.write_all(&[*byte]).unwrap();
        let error = ours.receive::<Request>(Instant::now()).unwrap_err();
        assert!(matches!(error, TransportError::Deadline { .. }));
    }
    theirs.write_all(&frame[frame.len() - 1..]).unwrap();
    assert_eq!(ours.receive::<Request>(soon()).unwrap().0, Request::Stats);
}

#[test]
fn a_peer_that_hangs_up_is_told_apart_by_where_it_did() {
    assert!(matches!(receive_error(&[]), TransportError::Closed { .. }));
    assert!(matches!(receive_error(&header(0, 40)[..5]), TransportError::ClosedMidFrame { .. }));
    let mut cut = header(0, 40).to_vec();
    cut.extend([0; 39]);
    assert!(matches!(receive_error(&cut), TransportError::ClosedMidFrame { .. }));
    let (mut a, b) = pair();
    drop(b);
    let error = a.send(&Request::Hello, &[], soon()).unwrap_err();
    assert!(error.peer_is_gone(), "{error}");
}

#[test]
fn headers_that_are_wrong_are_refused_by_what_is_wrong() {
    let wrong_magic = raw_header(*b"HTTP", PROTOCOL_VERSION, 0, 4);
    assert!(matches!(receive_error(&wrong_magic), TransportError::NotSublet { .. }));
    let too_long = raw_header(MAGIC, PROTOCOL_VERSION, 0, u32::MAX);
    assert!(matches!(receive_error(&too_long), TransportError::TooLong { .. }));
    let too_many = raw_header(MAGIC, PROTOCOL_VERSION, 251, 0);
    assert!(matches!(receive_error(&too_many), TransportError::TooManyFds { count: 251, .. }));
}

#[test]
fn both_sides_of_different_versions_learn_who_speaks_what() {
    let (mut ours, mut theirs) = half_pair();
    theirs.write_all(&raw_header(MAGIC, PROTOCOL_VERSION + 1, 0, 0)).unwrap();
    let error = ours.receive::<Request>(soon()).unwrap_err();
    let text = error.to_string();
    let own_pid = std::process::id();
    let theirs_is = format!("process {own_pid} speaks protocol version {}", PROTOCOL_VERSION + 1);
    assert!(text.contains(&theirs_is), "{text}");
    assert!(text.contains(&format!("(this one) speaks {PROTOCOL_VERSION}")), "{text}");
    assert!(text.contains("with one Sublet version"), "{text}");
    assert!(
        text.contains(&format!("no command lies next to the library of process {own_pid}")),
        "{text}"
    );
    // The answer that lets the other side report the same.
    let mut answer = [0; HEADER_BYTES];
    theirs.read_exact(&mut answer).unwrap();
    assert_eq!(answer, header(0, 0));
    let error = ours.receive::<Request>(soon()).unwrap_err();
    assert!(matches!(error, TransportError::OutOfStep { .. }));
}

#[test]
fn the_command_of_another_version_lies_next_to_its_library() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let library = maps
        .lines()
        .find_map(|line| line.get(line.find('/')?..).filter(|path| path.contains("/libc.so")))
        .unwrap();
    let root = tempfile::tempdir().unwrap();
    let [lib, bin] = ["lib", "bin"].map(|name| root.path().join(name));
    for folder in [&lib, &bin] {
        std::fs::create_dir(folder).unwrap();
    }
    let preloaded = lib.join("libsublet.so");
    std::fs::copy(library, &preloaded).unwrap();
    let mut child = std::process::Command::new("sleep")
        .arg("60")
        .env("LD_PRELOAD", &preloaded)
        .spawn()
        .unwrap();
    let pid = child.id();
    let is_loaded =
        || std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains("libsublet.so");
    while !is_loaded() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    assert_eq!(command_next_to_library(pid), None);
    for command in [bin.join("sublet"), lib.join("sublet")] {
        std::fs::write(&command, "").unwrap();
        assert_eq!(command_next_to_library(pid), Some(command));
    }
    // An upgrade in place removes the library.
    std::fs::remove_file(&preloaded).unwrap();
    assert_eq!(command_next_to_library(pid), None);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn descriptors_that_are_missing_or_too_many_are_refused_and_closed() {
    let files = some_fds(2);
    for (announced, attached) in [(2, 1), (1, 2), (0, 1), (1, 0)] {
        let (a, mut b) = pair();
        let frame = [header(announced, 1).as_slice(), &[0]].concat();
        a.send_frame(&frame, &borrow(&files[..attached]), soon()).unwrap();
        let error = b.receive::<Request>(soon()).unwrap_err();
        assert!(
            matches!(error, TransportError::FdCount { announced: a, received: r, .. }
                if a == announced && r == attached),
            "{error}"
        );
        assert!(b.incoming.fds.is_empty());
    }
}

#[test]
fn a_refused_message_closes_its_descriptors() {
    let (mut a, mut b) = pair();
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let frame = [header(0, 1).as_slice(), &[0]].concat();
    a.send_frame(&frame, &[writer.as_fd()], soon()).unwrap();
    drop(writer);
    b.receive::<Request>(soon()).unwrap_err();
    // End of file comes only when every copy of the writing end is closed.
    let mut rest = Vec::new();
    File::from(reader).read_to_end(&mut rest).unwrap();
    a.send(&Request::Hello, &[], soon()).unwrap();
}

#[test]
fn descriptors_for_a_side_that_expects_none_are_never_installed() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut ours = Connection::with_limits(ours, Limits::REQUESTS).unwrap();
    let a = Connection::with_limits(theirs, Limits::ALL).unwrap();
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let frame = frame::encode(&Request::Hello, 1).unwrap();
    a.send_frame(&frame, &[writer.as_fd()], soon()).unwrap();
    drop(writer);
    let error = ours.receive::<Request>(soon()).unwrap_err();
    assert!(matches!(error, TransportError::UnexpectedFds { .. }), "{error}");
    let mut rest = Vec::new();
    File::from(reader).read_to_end(&mut rest).unwrap();
}

#[test]
fn descriptors_that_are_read_in_pieces_of_two_frames_stay_with_their_own() {
    let (a, mut b) = pair();
    let files = some_fds(3);
    let payload = postcard::to_stdvec(&Request::Hello).unwrap();
    for (count, files) in [(1, &files[..1]), (2, &files[1..])] {
        let frame = [header(count, payload.len()).as_slice(), &payload].concat();
        a.send_frame(&frame, &borrow(files), soon()).unwrap();
    }
    assert_eq!(b.receive::<Request>(soon()).unwrap().1.len(), 1);
    assert_eq!(b.receive::<Request>(soon()).unwrap().1.len(), 2);
}

#[test]
fn bytes_after_a_message_are_an_error() {
    let mut bytes = header(0, 2).to_vec();
    bytes.extend([0, 0]);
    assert!(matches!(receive_error(&bytes), TransportError::Malformed { .. }));
}

#[test]
fn silence_ends_at_the_deadline() {
    let (mut a, _b) = pair();
    let started = Instant::now();
    let error = a.receive::<Reply>(shortly()).unwrap_err();
    assert!(error.to_string().contains("did not answer in time"));
    assert!(started.elapsed() >= Duration::from_millis(30));
    assert!(started.elapsed() < Duration::from_mins(1));
}

#[test]
fn a_reply_of_another_kind_is_an_error_and_ends_the_connection() {
    let (mut asker, mut other) = pair();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for reply in [Reply::Noted, Reply::Consented] {
                other.receive::<Request>(soon()).unwrap();
                other.send(&reply, &[], soon()).unwrap();
            }
        });
        let news = GiveUp { action: Action::Pause, why: String::new() };
        assert_eq!(asker.call(&news, soon()).unwrap(), Ok(()));
        let error = asker.call(&news, soon()).unwrap_err();
        assert!(matches!(error, TransportError::AnotherAnswer { .. }), "{error}");
    });
    let error = asker.call(&Hello, soon()).unwrap_err();
    assert!(matches!(error, TransportError::OutOfStep { .. }), "{error}");
}

#[test]
fn a_listener_takes_connections_and_its_name_goes_when_it_closes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.sock");
    assert!(!has_ended(&path), "nobody is there, and nobody is known to have ended");
    let listener = Listener::bind(&path).unwrap();
    assert!(listener.accept().unwrap().is_none());
    assert!(!has_ended(&path));
    assert!(listener.accept().unwrap().is_some());
    let mut client = Connection::connect(&path, soon()).unwrap();
    let mut server = listener.accept().unwrap().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            assert_eq!(server.receive::<Request>(soon()).unwrap().0, Request::Hello);
            let failure = Failure { kind: FailureKind::WrongState, message: "not now".to_owned() };
            server.send(&Reply::Failed(failure), &[], soon()).unwrap();
        });
        let (reply, _) = client.exchange(&Request::Hello, 0, soon()).unwrap();
        assert!(matches!(reply, Reply::Failed(_)));
    });
    assert!(Listener::bind(&path).is_err(), "bound over a live socket");
    listener.close().unwrap();
    assert!(!path.exists());
    let error = Connection::connect(&path, soon()).unwrap_err();
    assert!(error.nobody_listens());
}

proptest! {
    #[test]
    fn any_bytes_give_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _error = receive_error(&bytes);
    }

    #[test]
    fn any_payload_gives_a_message_or_an_error(
        payload in prop::collection::vec(any::<u8>(), 0..256),
    ) {
        let (mut ours, mut theirs) = half_pair();
        theirs.write_all(&header(0, payload.len())).unwrap();
        theirs.write_all(&payload).unwrap();
        drop(theirs);
        let message = ours.receive::<Reply>(soon());
        let decoded = matches!(message, Ok(_) | Err(TransportError::Malformed { .. }));
        prop_assert!(decoded, "{:?}", message);
    }
}
