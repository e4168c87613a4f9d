//! The inputs that fuzzing has collected (`fuzz/corpus`), through the same decoders, in every build.
//!
//! Files called `seed-*` are whole messages of today's version: where fuzzing starts. After a change of
//! the wire, `SUBLET_WRITE_SEEDS=1 cargo test -p tenants --test corpus` writes them anew.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tenants::cut::{
    CommunicatorId, CutReport, Inside, Lane, Need, PostCount, Seat, Seen, Series, Waiting,
};
use tenants::host_memory::{HostLimit, HostNeed, LimitKind};
use tenants::identity::{MemberId, TenantName};
use tenants::references::{References, Stay};
use tenants::saving::DirName;
use tenants::saving::map::SaveAccount;
use tenants::scope::{Scope, TagNames};
use tenants::ticket::Ticket;
use tenants::transport::Limits;
use tenants::transport::frame::{HEADER_BYTES, decode, decode_payload, encode};
use tenants::wire::{
    Action, Asked, DeviceDelta, Failure, FailureKind, FetchPurpose, MemberInfo, MemberState,
    MemberStats, Phase, PhaseReport, Reply, Request, SaveProgress, SaveStage, SaveStep, TagBytes,
};
use vmm_pool::driver::DeviceOrdinal;
use vmm_pool::{AllocationId, Held, PoolReport, StayReason};

const ID: AllocationId = AllocationId(*b"0123456789abcdef");

/// Inputs by file name.
type Inputs = BTreeMap<String, Vec<u8>>;

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

fn inputs(target: &str) -> Inputs {
    let entries = fs::read_dir(corpus(target)).unwrap().map(Result::unwrap);
    entries
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect()
}

/// The corpus of `target`, which must hold today's `seeds`.
fn inputs_with(target: &str, seeds: &Inputs) -> Inputs {
    if std::env::var_os("SUBLET_WRITE_SEEDS").is_some() {
        fs::create_dir_all(corpus(target)).unwrap();
        for (name, bytes) in seeds {
            fs::write(corpus(target).join(name), bytes).unwrap();
        }
    }
    let inputs = inputs(target);
    for (name, bytes) in seeds {
        assert!(
            inputs.get(name) == Some(bytes),
            "{target}/{name} is not what is sent today: \
             run SUBLET_WRITE_SEEDS=1 cargo test -p tenants --test corpus"
        );
    }
    inputs
}

fn seeds<T: Serialize>(messages: &[T], fds: usize) -> Inputs {
    let frames = messages.iter().map(|message| encode(message, fds).unwrap());
    (0..).zip(frames).map(|(number, frame)| (format!("seed-{number:02}"), frame)).collect()
}

/// Every input gives a message or an error; says how many whole frames gave a message.
fn replay<T>(inputs: &Inputs, limits: Limits) -> usize
where
    T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let mut whole = 0;
    for bytes in inputs.values() {
        // As the fuzz targets do: the frame, and its payload whatever the header says.
        let framed = decode::<T>(bytes, limits).ok();
        whole += usize::from(framed.is_some());
        let payload = bytes.get(HEADER_BYTES..).unwrap_or_default();
        for message in framed.into_iter().chain(decode_payload(payload).ok()) {
            let frame = encode(&message, 0).unwrap();
            assert_eq!(decode::<T>(&frame, Limits::ALL).unwrap(), message);
        }
    }
    whole
}

fn lane() -> Lane {
    Lane { communicator: seat().communicator, series: Series::Collectives }
}

fn seat() -> Seat {
    Seat { communicator: CommunicatorId(0x0123_4567_89ab_cdef), rank: 1, ranks: 4 }
}

fn requests() -> Vec<Request> {
    let mut limits = tenants::cut::Limits::default();
    limits.raise(lane(), 7);
    let names = ["kv", "weights"].map(str::to_owned);
    let tags = Scope::Tags { tags: TagNames::Named(names.into()), owner: Some(MemberId(7)) };
    vec![
        Request::Cut { limits, seen: Seen { waits: 3, at_rest: true }, wait_ms: 25 },
        Request::Hello,
        Request::Stats,
        Request::Phase {
            phase: Phase::Save,
            round: 1 << 40,
            scope: tags,
            stays: vec![Stay { id: ID, reason: StayReason::LetGo }],
            timeout_ms: 120_000,
        },
        Request::AwaitConsent { action: Action::Resume, timeout_ms: u64::MAX },
        Request::FetchFds {
            allocations: vec![ID; 3],
            purpose: FetchPurpose::Again,
            importer: MemberId(0x0123_4567_89ab_cdef),
        },
        Request::Withdraw { round: 7 },
        Request::GiveUp { action: Action::Pause, why: "process 1 has ended".to_owned() },
        Request::Save(SaveStep::Begin {
            dir: DirName { path: b"/data/saved".to_vec(), device: 66305, inode: u64::MAX },
        }),
        Request::Save(SaveStep::WriteOn { for_ms: 500 }),
        Request::Save(SaveStep::CallOff),
    ]
}

fn replies() -> Vec<Reply> {
    let member = MemberInfo {
        id: MemberId(7),
        pid: 4242,
        command: "python train.py".to_owned(),
        version: "0.1.0".to_owned(),
        state: MemberState::Paused,
        held: true,
        asked: Some(Asked { round: 1 << 40, phase: Phase::Verify }),
        tags: vec![TagBytes {
            tag: "kv".to_owned(),
            resident_bytes: 2 << 20,
            away_bytes: 40 << 30,
            imported_away_bytes: 1 << 30,
        }],
    };
    let report = PhaseReport {
        elapsed_us: 1_234_567,
        driver_calls: 300,
        bytes: 3 << 30,
        steps: vec![("unmap".to_owned(), 17)],
        devices: vec![DeviceDelta {
            device: DeviceOrdinal(1),
            uuid: "00112233445566778899aabbccddeeff".to_owned(),
            bytes: 1 << 30,
            free_bytes: 2 << 30,
            total_bytes: 80 << 30,
        }],
        notes: vec!["something stays".to_owned()],
        host: Some(HostNeed {
            saved_bytes: 3 << 30,
            held_bytes: 1 << 30,
            grow_bytes: 2 << 30,
            limits: vec![HostLimit { kind: LimitKind::Configured, bytes: 8 << 30 }],
        }),
        references: Some(Box::new(References {
            given: vec![Held { id: ID, is_pinned: true }],
            taken: vec![(MemberId(9), vec![Held { id: ID, is_pinned: false }])],
            shares_scope: true,
        })),
    };
    let stats = MemberStats {
        member: member.clone(),
        pool: PoolReport {
            host_arena_bytes: 1 << 40,
            file_bytes: 1 << 41,
            ..PoolReport::default()
        },
        pauses: 3,
        resumes: 2,
        last_pause: vec![(Phase::Release, report.clone())],
        last_resume: Vec::new(),
        communicators: vec![seat()],
        notes: vec!["a note".to_owned()],
    };
    let need = Need { lane: lane(), rank: 1, needed: 8 };
    let cut = CutReport {
        seen: Seen { waits: 3, at_rest: false },
        progress: 99,
        seats: vec![seat()],
        posts: vec![PostCount { lane: lane(), rank: 1, launched: 7 }],
        waiting: vec![Waiting {
            what: "ncclAllReduce".to_owned(),
            needs: vec![need],
            waited_ms: 5,
        }],
        inside: vec![Inside { what: "ncclGroupEnd".to_owned(), inside_ms: 1 }],
        captures: 0,
    };
    let kind = FailureKind::OutOfDeviceMemory { missing_bytes: u64::MAX };
    vec![
        Reply::Member(member),
        Reply::Stats(Box::new(stats)),
        Reply::Cut(Box::new(cut)),
        Reply::PhaseDone(Phase::Verify, report),
        Reply::Consented,
        Reply::Noted,
        Reply::Fds { count: 0, tags: Vec::new(), missing: vec![ID] },
        Reply::Saving(Box::new(SaveProgress {
            account: SaveAccount { saved_bytes: 3 << 30, ..SaveAccount::default() },
            written_bytes: 1 << 30,
            stage: SaveStage::Written { map: "process-1.json".to_owned() },
        })),
        Reply::Failed(Failure { kind, message: "process 1: no memory".to_owned() }),
    ]
}

fn tickets() -> Inputs {
    let ticket = Ticket {
        allocation: ID,
        serial: 7,
        size_bytes: 2 << 20,
        owner: MemberId(0x0123_4567_89ab_cdef),
        owner_socket: PathBuf::from("/tmp/sublet-0/train/0123456789abcdef.sock"),
        tenant: TenantName::new("train").unwrap(),
    };
    BTreeMap::from([("seed-00".to_owned(), ticket.encode().unwrap())])
}

#[test]
fn every_request_of_the_corpus_gives_a_request_or_an_error() {
    let inputs = inputs_with("requests", &seeds(&requests(), 0));
    assert!(replay::<Request>(&inputs, Limits::REQUESTS) >= requests().len());
}

#[test]
fn every_reply_of_the_corpus_gives_a_reply_or_an_error() {
    let inputs = inputs_with("replies", &seeds(&replies(), 0));
    assert!(replay::<Reply>(&inputs, Limits::ALL) >= replies().len());
}

#[test]
fn every_ticket_of_the_corpus_gives_a_ticket_or_an_error() {
    let inputs = inputs_with("tickets", &tickets());
    let mut read = 0;
    for bytes in inputs.values() {
        if let Ok(ticket) = Ticket::decode(bytes) {
            assert_eq!(ticket.encode().as_ref(), Some(bytes));
            read += 1;
        }
    }
    assert!(read >= 1);
}
