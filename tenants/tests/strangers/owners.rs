//! What the owner of memory can answer to one who redeems a ticket, and where a ticket can lead.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags};
use tenants::identity::MemberId;
use tenants::member::ImportError;
use tenants::run_dir::MEMBERS_MAX;
use tenants::ticket::Ticket;
use tenants::transport::frame::{Header, encode};
use tenants::transport::{Connection, Listener, poll_until};
use tenants::wire::{Failure, FailureKind, Reply, Request};
use vmm_pool::AllocationId;

use crate::stage::{SimMember, Stage, answers, name, soon, ticket_of};

const OWNER: MemberId = MemberId(0xabc);

fn redeem(importer: &SimMember, ticket: &Ticket) -> Result<(), ImportError> {
    importer.sharing().redeem_ticket(&importer.pool().enter(), ticket, "test").map(drop)
}

/// A ticket whose owner is member [`OWNER`] of the importer's tenant.
fn ticket(importer: &SimMember) -> Ticket {
    Ticket::uncounted(AllocationId([3; 16]), 2 << 20, OWNER, importer.presence().tenant().clone())
}

/// An owner that answers one request with these bytes and descriptors, and hangs up.
fn answering(path: &Path, bytes: Vec<u8>, files: Vec<File>) -> JoinHandle<()> {
    let listener = Listener::bind(path).unwrap();
    std::thread::spawn(move || {
        let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        assert!(poll_until(&mut fds, soon()).unwrap());
        let mut connection = listener.accept().unwrap().unwrap();
        connection.receive::<Request>(soon()).unwrap();
        let fds: Vec<BorrowedFd<'_>> = files.iter().map(File::as_fd).collect();
        send_raw(&connection, &bytes, &fds);
        listener.close().unwrap();
    })
}

fn send_raw(connection: &Connection, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    use std::os::fd::AsRawFd as _;
    let raw: Vec<_> = fds.iter().map(std::os::fd::AsRawFd::as_raw_fd).collect();
    let rights = [nix::sys::socket::ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights[..] };
    let sent = nix::sys::socket::sendmsg::<nix::sys::socket::UnixAddr>(
        connection.as_fd().as_raw_fd(),
        &[std::io::IoSlice::new(bytes)],
        control,
        nix::sys::socket::MsgFlags::MSG_NOSIGNAL,
        None,
    );
    assert_eq!(sent, Ok(bytes.len()));
}

fn files(count: usize) -> Vec<File> {
    (0..count).map(|_| File::open("/dev/null").unwrap()).collect()
}

/// An answer that says to have sent `count` descriptors, and announces `fds`.
fn sent(count: u32, fds: usize) -> Vec<u8> {
    let (tags, missing, devices) = Default::default();
    encode(&Reply::Fds { count, tags, missing, devices }, fds).unwrap()
}

#[test]
fn an_owner_that_answers_nonsense_is_refused_and_named() {
    let stage = Stage::new();
    let importer = stage.member("train");
    let good = sent(1, 1);
    let newer = {
        let mut header = Header { fds: 0, payload_bytes: 0 }.encode();
        header[4] += 1;
        header.to_vec()
    };
    let refusal = Failure { kind: FailureKind::Unknown, message: "no".to_owned() };
    let pipe = || vec![File::from(nix::unistd::pipe().unwrap().0)];
    let cases: Vec<(&str, Vec<u8>, Vec<File>)> = vec![
        ("closed its connection", Vec::new(), Vec::new()),
        ("in the middle of a message", good[..7].to_vec(), Vec::new()),
        ("no Sublet message", b"HTTP/1.1 200 OK\r\n".to_vec(), Vec::new()),
        ("protocol version", newer, Vec::new()),
        (
            "could not be decoded",
            [Header { fds: 0, payload_bytes: 3 }.encode().to_vec(), vec![0xff; 3]].concat(),
            Vec::new(),
        ),
        ("announced 1 descriptors and 0 came", good.clone(), Vec::new()),
        ("2 descriptors, and 1 are the limit", good.clone(), files(2)),
        ("are the limit", sent(2, 2), files(2)),
        ("sent 0 descriptors for 1", sent(0, 0), Vec::new()),
        ("sent 0 descriptors for 1", sent(1, 0), Vec::new()),
        ("sent 1 descriptors for 1", sent(9, 1), files(1)),
        ("answered another question", encode(&Reply::Consented, 0).unwrap(), Vec::new()),
        ("refused", encode(&Reply::Failed(refusal), 0).unwrap(), Vec::new()),
        ("no device's", good.clone(), pipe()),
        ("import of a peer's allocation", good, files(1)),
    ];
    for (words, bytes, files) in cases {
        let ticket = ticket(&importer);
        let owner = answering(&importer.presence().socket_path_of(OWNER), bytes, files);
        let error = redeem(&importer, &ticket).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(words), "no '{words}' in: {text}");
        owner.join().unwrap();
    }
    // None of it broke the importer: memory of a real peer still comes.
    let peer = stage.member("train");
    let (ticket, _handle) = ticket_of(&peer);
    redeem(&importer, &ticket).unwrap();
    answers(&importer);
    importer.leave();
    peer.leave();
}

#[test]
fn an_owner_that_closed_the_idle_connection_is_asked_anew() {
    let stage = Stage::new();
    let (owner, importer) = (stage.member("train"), stage.member("train"));
    let (first, _handle) = ticket_of(&owner);
    redeem(&importer, &first).unwrap();
    // As many clients as the owner keeps: the importer's idle connection is closed.
    let mut others = Vec::new();
    for _ in 0..tenants::member::CONNECTIONS_MAX {
        let mut other = Connection::connect(owner.presence().socket_path(), soon()).unwrap();
        other.exchange(&Request::Hello, 0, soon()).unwrap();
        others.push(other);
    }
    let (second, _handle) = ticket_of(&owner);
    redeem(&importer, &second).unwrap();
    owner.leave();
    importer.leave();
}

#[test]
fn a_ticket_leads_nowhere_but_into_the_directory_of_our_own_tenant() {
    let stage = Stage::new();
    let importer = stage.member("train");
    // The owner is a number in a ticket: whichever it is, its name is looked for there and nowhere else.
    let other = stage.member("infer");
    for owner in [OWNER, MemberId(0), MemberId(u64::MAX), other.presence().id()] {
        let elsewhere = stage.base().join(format!("{owner}.sock"));
        let trap = UnixListener::bind(&elsewhere).unwrap();
        trap.set_nonblocking(true).unwrap();
        let error = redeem(&importer, &Ticket { owner, ..ticket(&importer) }).unwrap_err();
        assert!(
            matches!(&error, ImportError::Owner { path, .. }
            if path.parent() == importer.presence().socket_path().parent()),
            "{error}"
        );
        assert!(trap.accept().is_err(), "somebody came");
    }
    other.leave();
    importer.leave();
}

#[test]
fn a_ticket_of_another_tenant_is_of_no_use_even_when_it_says_otherwise() {
    let stage = Stage::new();
    let (owner, importer) = (stage.member("train"), stage.member("infer"));
    let (good, _handle) = ticket_of(&owner);
    let error = redeem(&importer, &good).unwrap_err();
    assert!(matches!(error, ImportError::OtherTenant { .. }), "{error}");
    let forged = Ticket { tenant: name("infer"), ..good };
    let error = redeem(&importer, &forged).unwrap_err();
    assert!(matches!(error, ImportError::Owner { .. }), "{error}");
    owner.leave();
    importer.leave();
}

#[test]
fn a_link_in_place_of_a_members_socket_is_no_member() {
    let stage = Stage::new();
    let (member, other) = (stage.member("train"), stage.member("infer"));
    let link = member.presence().socket_path().with_file_name(format!("{OWNER}.sock"));
    std::os::unix::fs::symlink(other.presence().socket_path(), &link).unwrap();
    let dir = stage.run_dir.existing_tenant(&name("train")).unwrap().unwrap();
    let members = dir.members().unwrap();
    assert_eq!(members.iter().map(|m| m.id).collect::<Vec<_>>(), [member.presence().id()]);
    member.leave();
    other.leave();
}

#[test]
fn as_many_members_as_the_limit_says_are_listed_and_one_more_is_an_error() {
    let stage = Stage::new();
    let dir = stage.run_dir.tenant(&name("train")).unwrap();
    let path = |id| dir.socket_path(MemberId(id)).unwrap();
    // One process that listens has all the names: it costs one descriptor.
    let _listener = UnixListener::bind(path(0)).unwrap();
    for id in 1..MEMBERS_MAX as u64 {
        std::fs::hard_link(path(0), path(id)).unwrap();
    }
    assert_eq!(dir.members().unwrap().len(), MEMBERS_MAX);
    std::fs::hard_link(path(0), path(u64::MAX)).unwrap();
    let error = dir.members().unwrap_err();
    assert!(error.to_string().contains("more than 1024 live processes"), "{error}");
}

#[test]
fn a_client_that_hangs_up_is_told_by_the_end_of_its_stream() {
    let stage = Stage::new();
    let member = stage.member("train");
    let client = std::os::unix::net::UnixStream::connect(member.presence().socket_path()).unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut fds = [PollFd::new(client.as_fd(), PollFlags::POLLIN)];
    assert!(poll_until(&mut fds, soon()).unwrap(), "the agent kept a dead connection");
    member.leave();
}
