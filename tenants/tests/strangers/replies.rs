//! Members of a tenant that answer with more, or with other text, than a process says.

use std::thread::JoinHandle;

use tenants::coordinator::{Coordinator, Holdings, Options};
use tenants::identity::MemberId;
use tenants::region::{TAG_BYTES_MAX, TAGS_MAX};
use tenants::transport::{Connection, Listener};
use tenants::wire::{
    Failure, FailureKind, MemberStats, Reply, Request, STATS_BYTES_MAX, Stats, TagBytes,
};

use super::stage::{Stage, name, soon};

/// A member that answers the first request with `reply`.
fn answering(stage: &Stage, id: u64, reply: Reply) -> JoinHandle<()> {
    let dir = stage.run_dir.tenant(&name("train")).unwrap();
    let listener = Listener::bind(&dir.socket_path(MemberId(id)).unwrap()).unwrap();
    std::thread::spawn(move || {
        let deadline = soon();
        let mut connection = loop {
            let mut fds = [nix::poll::PollFd::new(
                std::os::fd::AsFd::as_fd(&listener),
                nix::poll::PollFlags::POLLIN,
            )];
            assert!(tenants::transport::poll_until(&mut fds, deadline).unwrap());
            let mut connection = listener.accept().unwrap().unwrap();
            // Others look whether it lives, and ask nothing.
            if connection.receive::<Request>(deadline).is_ok() {
                break connection;
            }
        };
        // The other side hangs up on what it does not take.
        let _sent = connection.send(&reply, &[], deadline);
        let _ended = connection.receive::<Request>(deadline);
        listener.close().unwrap();
    })
}

fn tag(length: usize) -> TagBytes {
    TagBytes {
        tag: "t".repeat(length),
        resident_bytes: 0,
        away_bytes: 0,
        imported_away_bytes: 0,
        runs_without: false,
    }
}

fn failed(message: String) -> Reply {
    Reply::Failed(Failure { kind: FailureKind::Driver, message })
}

#[test]
fn a_member_that_says_too_much_or_what_terminals_obey_is_named_and_costs_itself_alone() {
    let stage = Stage::new();
    let member = stage.member("train");
    let mut connection = Connection::connect(member.presence().socket_path(), soon()).unwrap();
    let real = connection.call(&Stats, soon()).unwrap().unwrap();
    let with = |change: &dyn Fn(&mut MemberStats)| {
        let mut stats = real.clone();
        change(&mut stats);
        Reply::Stats(Box::new(stats))
    };
    let evil = "\u{1b}]0;OWNED\u{7}\u{1b}[2J\nsublet: all is well\u{202e}".to_owned();
    let cases = [
        (failed(evil), "\\u001b]0;OWNED\\u0007\\u001b[2J\\u000asublet: all is well\\u202e"),
        (failed("\u{1b}[31mA".repeat(2_000)), "..."),
        (failed("\u{1b}[31mA".repeat(1_000_000)), "bytes, and 2097152 are the limit"),
        (with(&|stats| stats.member.tags = vec![tag(0); 500_000]), "2097152 are the limit"),
        (with(&|stats| stats.notes = vec![String::new(); 3 << 20]), "2097152 are the limit"),
        (with(&|stats| stats.member.tags = vec![tag(1); TAGS_MAX + 9]), "could not be decoded"),
        (with(&|stats| stats.member.tags = vec![tag(TAG_BYTES_MAX + 1)]), "could not be decoded"),
    ];
    for (reply, why) in cases {
        let fake = answering(&stage, 7, reply);
        let tenant = name("train");
        let coordinator = Coordinator::new(stage.run_dir.clone(), tenant, Options::default());
        let found = Holdings::of_all(&[&coordinator]).remove(0).stats.unwrap();
        assert_eq!(found.members.len(), 1, "the other is shown");
        assert_eq!(found.members[0].member.id, member.presence().id());
        let said: Vec<String> = found.failures.iter().map(ToString::to_string).collect();
        assert!(said.len() == 1 && said[0].contains(why), "{why}: {said:?}");
        assert!(said[0].len() < 32 << 10 && !said[0].contains(char::is_control), "{said:?}");
        assert!(said[0].contains(&format!("process {}", std::process::id())), "{said:?}");
        fake.join().unwrap();
    }
    member.leave();
}

#[test]
fn a_process_with_as_many_and_as_long_tags_as_it_may_have_is_heard() {
    let stage = Stage::new();
    let member = stage.member("train");
    let mut connection = Connection::connect(member.presence().socket_path(), soon()).unwrap();
    let mut stats = connection.call(&Stats, soon()).unwrap().unwrap();
    stats.member.tags = vec![tag(TAG_BYTES_MAX); TAGS_MAX];
    let class = vmm_pool::ClassBytes {
        library: "torch".to_owned(),
        tag: "t".repeat(TAG_BYTES_MAX),
        own_bytes: 1 << 40,
        resident_bytes: 1 << 40,
        ..vmm_pool::ClassBytes::default()
    };
    let (device, uuid) = (vmm_pool::driver::DeviceOrdinal(0), "GPU-".repeat(10));
    let classes = vec![class; TAGS_MAX];
    stats.pool.devices = vec![vmm_pool::DeviceReport { device, uuid, classes, pinned: Vec::new() }];
    let reply = Reply::Stats(Box::new(stats));
    let bytes = tenants::transport::frame::encode(&reply, 0).unwrap();
    assert!(bytes.len() < STATS_BYTES_MAX, "{}", bytes.len());
    let limits = tenants::transport::Limits::REPLIES;
    assert!(tenants::transport::frame::decode::<Reply>(&bytes, limits) == Ok(reply));
    member.leave();
}
