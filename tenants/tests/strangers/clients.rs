//! What a client can send to an agent, in which order, and how slowly.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use sublet_stage::redeem;
use tenants::coordinator::{Coordinator, Options, Outcome};
use tenants::identity::MemberId;
use tenants::member::{CONNECTIONS_MAX, OPEN_REQUESTS_MAX, STALL_MAX};
use tenants::scope::Scope;
use tenants::transport::frame::{HEADER_BYTES, Header, decode, encode};
use tenants::transport::{Connection, Limits, REQUEST_BYTES_MAX, poll_until};
use tenants::wire::{
    Action, AwaitConsent, FDS_PER_MESSAGE_MAX, FailureKind, FetchFds, FetchPurpose, MemberState,
    PROTOCOL_VERSION, Phase, Reply, Request, TakePhase, Told,
};
use vmm_pool::AllocationId;
use vmm_pool::driver::sim::GRANULARITY_BYTES;
use vmm_pool::driver::{DeviceAddress, Driver as _, VaRange};

use crate::stage::{SimMember, Stage, answers, name, rest_of, soon, stream, ticket_of};

fn header(fds: usize, payload_bytes: usize) -> Vec<u8> {
    Header { fds, payload_bytes }.encode().to_vec()
}

fn connect(member: &SimMember) -> Connection {
    Connection::connect(member.presence().socket_path(), soon()).unwrap()
}

fn ask(connection: &mut Connection, request: &Request) -> Reply {
    connection.exchange(request, FDS_PER_MESSAGE_MAX, soon()).unwrap().0
}

fn failure_of(reply: Reply) -> (FailureKind, String) {
    let Reply::Failed(failure) = reply else { panic!("{reply:?}") };
    (failure.kind, failure.message)
}

fn pause_and_resume(stage: &Stage, tenant: &str) {
    let mut coordinator = Coordinator::new(stage.run_dir.clone(), name(tenant), Options::default());
    assert!(matches!(coordinator.pause(&mut |_| {}).unwrap(), Outcome::Completed(_)));
    assert!(matches!(coordinator.resume(&mut |_| {}).unwrap(), Outcome::Completed(_)));
}

#[test]
fn garbage_ends_its_own_connection_and_nothing_else() {
    let stage = Stage::new();
    let member = stage.member("train");
    let mut kept = connect(&member);
    let bad_payload = [header(0, 4), vec![0xff; 4]].concat();
    let bytes_left_over = [header(0, 2), vec![0, 0]].concat();
    let an_answer = encode(&Reply::Consented, 0).unwrap();
    let too_long = header(0, REQUEST_BYTES_MAX + 1);
    let with_descriptors = header(1, 0);
    for bytes in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 64],
        bad_payload,
        bytes_left_over,
        an_answer,
        too_long,
        with_descriptors,
    ] {
        let mut client = stream(&member);
        client.write_all(&bytes).unwrap();
        assert!(rest_of(&mut client, soon()).is_empty(), "{bytes:?} was answered");
    }
    assert!(matches!(ask(&mut kept, &Request::Hello), Reply::Member(_)));
    pause_and_resume(&stage, "train");
    member.leave();
}

#[test]
fn a_client_of_a_newer_version_is_told_ours() {
    let stage = Stage::new();
    let member = stage.member("train");
    let mut newer = header(0, 0);
    newer[4..6].copy_from_slice(&(PROTOCOL_VERSION + 1).to_le_bytes());
    let mut client = stream(&member);
    client.write_all(&newer).unwrap();
    assert_eq!(rest_of(&mut client, soon()), header(0, 0));
    answers(&member);
    member.leave();
}

#[test]
fn a_request_cut_short_anywhere_is_dropped() {
    let stage = Stage::new();
    let member = stage.member("train");
    let request = Request::Phase(TakePhase {
        round: 1,
        alone: false,
        order: Phase::CloseGate.order(&Told::new(&Scope::Whole, &[])),
        timeout_ms: 1000,
    });
    let frame = encode(&request, 0).unwrap();
    for length in 0..frame.len() {
        let mut client = stream(&member);
        client.write_all(&frame[..length]).unwrap();
        drop(client);
    }
    answers(&member);
    assert_eq!(member.lifecycle().state(), MemberState::Active);
    member.leave();
}

#[test]
fn the_longest_request_is_read_and_one_byte_more_is_not() {
    let stage = Stage::new();
    let member = stage.member("train");
    // Too many identities, but as a message it is one that can be read.
    let allocations = vec![AllocationId([7; 16]); REQUEST_BYTES_MAX / 16 - 1];
    let request = Request::FetchFds(FetchFds {
        allocations,
        purpose: FetchPurpose::Redeem { serial: 0 },
        importer: member.presence().id(),
        borrower: None,
    });
    let frame = encode(&request, 0).unwrap();
    assert!(frame.len() - HEADER_BYTES > REQUEST_BYTES_MAX - 32);
    let (kind, message) = failure_of(ask(&mut connect(&member), &request));
    assert_eq!(kind, FailureKind::Unknown);
    assert!(message.contains("250 are the limit"), "{message}");
    let mut client = stream(&member);
    client.write_all(&header(0, REQUEST_BYTES_MAX + 1)).unwrap();
    assert!(rest_of(&mut client, soon()).is_empty());
    member.leave();
}

fn send_with_fds(client: &UnixStream, bytes: &[u8], fds: &[RawFd]) -> nix::Result<usize> {
    let rights = [ControlMessage::ScmRights(fds)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<UnixAddr>(client.as_raw_fd(), &[IoSlice::new(bytes)], &rights, flags, None)
}

#[test]
fn descriptors_sent_to_an_agent_are_never_held_by_it() {
    let stage = Stage::new();
    let member = stage.member("train");
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let flood = vec![writer.as_raw_fd(); FDS_PER_MESSAGE_MAX];
    let mut clients = Vec::new();
    for _ in 0..40 {
        let client = stream(&member);
        // Half a header, so that an agent that took them would hold them until the rest came.
        send_with_fds(&client, &header(0, 1)[..6], &flood).unwrap();
        clients.push(client);
    }
    drop(writer);
    // The pipe ends when nobody holds its other end, though all these clients are still there.
    assert!(rest_of(&mut File::from(reader), soon()).is_empty());
    for mut client in clients {
        assert!(rest_of(&mut client, soon()).is_empty());
    }
    answers(&member);
    member.leave();
}

#[test]
fn clients_that_stand_still_hold_nobody_up_and_are_closed() {
    let stage = Stage::new();
    let member = stage.member("train");
    // One sends half a request and waits.
    let mut half = stream(&member);
    half.write_all(&header(0, 10)[..7]).unwrap();
    // One asks without end, and never reads an answer.
    let mut deaf = stream(&member);
    deaf.set_nonblocking(true).unwrap();
    let question = encode(&Request::Stats, 0).unwrap();
    let mut asked = 0;
    let deadline = soon();
    let mut quiet_since = Instant::now();
    while quiet_since.elapsed() < Duration::from_millis(200) && Instant::now() < deadline {
        match deaf.write(&question) {
            Ok(length) if length == question.len() => {
                (asked, quiet_since) = (asked + 1, Instant::now());
            }
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
    assert!(asked > 100, "the agent stopped reading after {asked} requests");
    // Nobody else notices: the answer comes before this one's time is up.
    let mut third = stream(&member);
    third.write_all(&header(0, 10)[..7]).unwrap();
    answers(&member);
    third.set_nonblocking(true).unwrap();
    let open = third.read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(open, Err(ErrorKind::WouldBlock), "the agent was held up until it closed a client");
    pause_and_resume(&stage, "train");
    // Both are closed when their time is up.
    let deadline = Instant::now() + STALL_MAX + Duration::from_secs(15);
    rest_of(&mut half, deadline);
    // No event is requested: what remains is that the other end has gone.
    let mut fds = [PollFd::new(deaf.as_fd(), PollFlags::empty())];
    assert!(poll_until(&mut fds, deadline).unwrap(), "a deaf client was kept");
    answers(&member);
    member.leave();
}

#[test]
fn when_all_connections_are_taken_the_longest_idle_one_goes() {
    let stage = Stage::new();
    let member = stage.member("train");
    let mut clients: Vec<_> = (0..CONNECTIONS_MAX).map(|_| connect(&member)).collect();
    for client in &mut clients {
        assert!(matches!(ask(client, &Request::Hello), Reply::Member(_)));
    }
    // All of them are kept, and the first is no more the longest idle.
    assert!(matches!(ask(&mut clients[0], &Request::Hello), Reply::Member(_)));
    answers(&member);
    let error = clients[1].exchange(&Request::Hello, 0, soon()).unwrap_err();
    assert!(error.peer_is_gone(), "{error}");
    assert!(matches!(ask(&mut clients[0], &Request::Hello), Reply::Member(_)));
    assert!(matches!(ask(&mut clients[2], &Request::Hello), Reply::Member(_)));
    member.leave();
}

/// They all ask the owner at the same moment, and those that asked before have kept their connections.
#[test]
fn more_importers_than_connections_pause_and_resume_together() {
    let stage = Stage::new();
    let owner = stage.member("train");
    let (_, handle) = ticket_of(&owner);
    let importers: Vec<_> = (0..CONNECTIONS_MAX + 44).map(|_| stage.member("train")).collect();
    for importer in &importers {
        let fd = owner.sharing().issue_ticket(&owner.pool().enter(), handle).unwrap();
        let imported = redeem(importer, &fd).unwrap();
        let driver = importer.pool().driver();
        let at = driver.address_reserve(GRANULARITY_BYTES, 0, DeviceAddress(0)).unwrap();
        importer.pool().enter().map(VaRange::new(at, GRANULARITY_BYTES), 0, imported).unwrap();
    }
    for _ in 0..2 {
        pause_and_resume(&stage, "train");
    }
    for member in importers.into_iter().chain([owner]) {
        member.leave();
    }
}

#[test]
fn as_many_requests_wait_as_the_limit_says_and_one_more_ends_the_connection() {
    let stage = Stage::new();
    let member = stage.member("train");
    let mut client = connect(&member);
    // The longest wait that can be requested must not break the agent's clock.
    let wait = Request::AwaitConsent(AwaitConsent { action: Action::Pause, timeout_ms: u64::MAX });
    for _ in 0..OPEN_REQUESTS_MAX {
        client.send(&wait, &[], soon()).unwrap();
    }
    answers(&member);
    member.asking().begin_consent(Action::Pause);
    for _ in 0..OPEN_REQUESTS_MAX {
        assert_eq!(client.receive::<Reply>(soon()).unwrap().0, Reply::Consented);
    }
    member.asking().end_consent();
    // All are answered, so there is room again; but not for one more than that.
    for _ in 0..=OPEN_REQUESTS_MAX {
        client.send(&wait, &[], soon()).unwrap();
    }
    let error = client.receive::<Reply>(soon()).unwrap_err();
    assert!(error.peer_is_gone(), "{error}");
    answers(&member);
    member.leave();
}

#[test]
fn phases_that_come_twice_late_or_out_of_order_change_nothing() {
    let stage = Stage::new();
    let member = stage.member("train");
    let mut client = connect(&member);
    let phase_of = |round, phase: Phase| {
        Request::Phase(TakePhase {
            round,
            alone: false,
            order: phase.order(&Told::new(&Scope::Whole, &[])),
            timeout_ms: 5000,
        })
    };
    let out_of_order = [
        Phase::Drain,
        Phase::Prepare,
        Phase::Release,
        Phase::Verify,
        Phase::Create,
        Phase::Restore,
        Phase::Import,
        Phase::Activate,
    ];
    for late in out_of_order {
        let (kind, _) = failure_of(ask(&mut client, &phase_of(1, late)));
        assert_eq!(
            (kind, member.lifecycle().state()),
            (FailureKind::WrongState, MemberState::Active)
        );
    }
    drop(client);
    let mut client = connect(&member);
    let phase = |phase| phase_of(2, phase);
    let done = ask(&mut client, &phase(Phase::CloseGate));
    assert!(matches!(done, Reply::PhaseDone(Phase::CloseGate, _)));
    let (kind, _) = failure_of(ask(&mut client, &phase(Phase::CloseGate)));
    assert_eq!(
        (kind, member.lifecycle().state()),
        (FailureKind::WrongState, MemberState::Offloading)
    );
    for _ in 0..2 {
        let done = ask(&mut client, &phase(Phase::Abort));
        assert!(matches!(done, Reply::PhaseDone(Phase::Abort, _)));
        assert_eq!(member.lifecycle().state(), MemberState::Active);
    }
    pause_and_resume(&stage, "train");
    member.leave();
}

#[test]
fn memory_is_handed_to_members_of_the_tenant_and_in_numbers_within_the_limit() {
    let stage = Stage::new();
    let (owner, peer) = (stage.member("train"), stage.member("train"));
    let stranger = stage.member("infer");
    let (ticket, _handle) = ticket_of(&owner);
    let mut client = connect(&owner);
    let fetch = |allocations, importer| {
        Request::FetchFds(FetchFds {
            allocations,
            purpose: FetchPurpose::Redeem { serial: 0 },
            importer,
            borrower: None,
        })
    };
    for nobody in [stranger.presence().id(), MemberId(0), MemberId(u64::MAX)] {
        let (kind, message) = failure_of(ask(&mut client, &fetch(vec![ticket.allocation], nobody)));
        assert_eq!(kind, FailureKind::Unknown);
        assert!(message.contains("is no process of tenant train"), "{message}");
    }
    let unknown = AllocationId([9; 16]);
    let missing =
        Reply::Fds { count: 0, tags: Vec::new(), missing: vec![unknown], devices: Vec::new() };
    assert_eq!(ask(&mut client, &fetch(vec![unknown], peer.presence().id())), missing);
    let many = fetch(vec![ticket.allocation; FDS_PER_MESSAGE_MAX + 1], peer.presence().id());
    assert_eq!(failure_of(ask(&mut client, &many)).0, FailureKind::Unknown);
    let most = fetch(vec![ticket.allocation; FDS_PER_MESSAGE_MAX], peer.presence().id());
    let (reply, fds) = client.exchange(&most, FDS_PER_MESSAGE_MAX, soon()).unwrap();
    assert_eq!(
        reply,
        Reply::Fds {
            count: 250,
            tags: vec![String::new(); 250],
            missing: Vec::new(),
            devices: Vec::new()
        }
    );
    assert_eq!(fds.len(), FDS_PER_MESSAGE_MAX);
    // A client that did not ask for descriptors gets none, though they were sent.
    let one = encode(&fetch(vec![ticket.allocation], peer.presence().id()), 0).unwrap();
    assert!(decode::<Request>(&one, Limits::REQUESTS).is_ok());
    let error = client
        .exchange(&fetch(vec![ticket.allocation], peer.presence().id()), 0, soon())
        .unwrap_err();
    assert!(error.to_string().contains("descriptors where none belong"), "{error}");
    for member in [owner, peer, stranger] {
        member.leave();
    }
}

/// The command that leads it holds a lock that may have gone with the directory. Another command must not find it meanwhile.
#[test]
fn a_process_that_is_led_makes_its_name_again_only_behind_that() {
    let stage = Stage::new();
    let member = stage.member("train");
    let mut client = connect(&member);
    let told = Told::new(&Scope::Whole, &[]);
    let mut takes = |phase: Phase| {
        let order = phase.order(&told);
        let request = Request::Phase(TakePhase { round: 1, alone: false, order, timeout_ms: 5000 });
        let reply = ask(&mut client, &request);
        assert!(matches!(reply, Reply::PhaseDone(..)), "{reply:?}");
    };
    takes(Phase::CloseGate);
    std::fs::remove_file(member.presence().socket_path()).unwrap();
    let waits = |limit: Duration| {
        let deadline = Instant::now() + limit;
        while !member.presence().socket_path().exists() && Instant::now() < deadline {
            poll_until(&mut [], Instant::now() + Duration::from_millis(20)).unwrap();
        }
        member.presence().socket_path().exists()
    };
    // It looks for its name every three seconds.
    assert!(!waits(Duration::from_secs(7)), "another command could find it");
    takes(Phase::Abort);
    assert!(waits(Duration::from_mins(2)), "nobody can find it any more");
    answers(&member);
    member.leave();
}
