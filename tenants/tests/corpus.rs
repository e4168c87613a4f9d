//! Where fuzzing starts (`fuzz/corpus`), through the same decoders, in every build.
//!
//! Each file is one message of today as it is sent, without the magic and version before it. After a change of
//! the wire, `SUBLET_WRITE_SEEDS=1 cargo test -p tenants --test corpus` writes them again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tenants::class::{Class, Weight};
use tenants::cut::{
    CommunicatorId, CutReport, Inside, Lane, LaunchCount, Need, Rank, Seen, Series, Waiting,
};
use tenants::host_memory::{HostLimit, HostNeed, LimitKind};
use tenants::identity::{MemberId, TENANT_NAME_BYTES_MAX, TenantName};
use tenants::references::{Partner, References, Stay};
use tenants::saving::{DirName, SaveAccount};
use tenants::scope::{Scope, TagNames};
use tenants::stepping::{Activity, Calls, HeldCall, StepOrder};
use tenants::ticket::{HEAD, Ticket};
use tenants::transport::Limits;
use tenants::transport::frame::{HEAD_BYTES, HEADER_BYTES, decode, decode_payload, encode};
use tenants::wire::{
    Action, AskLent, Asked, AwaitConsent, Borrower, DeviceDelta, Drained, Failure, FailureKind,
    FetchFds, FetchPurpose, GiveUp, Hold, HostProgress, HostStage, HostStep, Idleness, Lending,
    Lent, LookIdle, MemberInfo, MemberState, MemberStats, Needed, Needs, Order, PauseTimes, Phase,
    PhaseAnswer, PhaseReport, Reply, Request, RoundEnd, SaveProgress, SaveStage, SaveStep,
    SpillProgress, SpillStep, StageLeft, StageReport, StepOn, TagBytes, TakePhase, Told, Wanted,
    Window, Withdraw,
};
use vmm_pool::driver::DeviceOrdinal;
use vmm_pool::{
    AllocationId, CopiedBytes, Copying, HostDemand, KeptBytes, Part, PinnedBytes, PoolReport,
    Schedule, Shareable, SlabTotals, StayReason,
};

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

/// The corpus of `target` is these seeds and nothing else, so that none is left from an older format.
fn assert_corpus(target: &str, seeds: Vec<Vec<u8>>) {
    let names = (0..).map(|number| format!("seed-{number:02}"));
    let seeds: Inputs = names.zip(seeds).collect();
    if std::env::var_os("SUBLET_WRITE_SEEDS").is_some() {
        fs::remove_dir_all(corpus(target)).ok();
        fs::create_dir_all(corpus(target)).unwrap();
        for (name, bytes) in &seeds {
            fs::write(corpus(target).join(name), bytes).unwrap();
        }
    }
    assert!(
        inputs(target) == seeds,
        "{target} is not what is sent today: \
         run SUBLET_WRITE_SEEDS=1 cargo test -p tenants --test corpus"
    );
}

/// The payload that `message` is sent as, which the decoder takes for the same message.
fn payload<T>(message: &T) -> Vec<u8>
where
    T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let frame = encode(message, 0).unwrap();
    assert_eq!(decode::<T>(&frame, Limits::ALL).unwrap(), *message);
    let payload = &frame[HEADER_BYTES..];
    assert_eq!(decode_payload::<T>(payload).unwrap(), *message);
    payload.to_vec()
}

/// Every way to cut `payload` short, and every byte of it changed, gives a message or an error.
fn damage<T: DeserializeOwned>(payload: &[u8]) {
    for length in 0..payload.len() {
        let _either = decode_payload::<T>(&payload[..length]);
    }
    let mut changed = payload.to_vec();
    for at in 0..changed.len() {
        for bit in 0..8 {
            changed[at] ^= 1 << bit;
            let _either = decode_payload::<T>(&changed);
            changed[at] ^= 1 << bit;
        }
    }
}

fn lane() -> Lane {
    Lane { communicator: rank().communicator, series: Series::Collectives }
}

fn rank() -> Rank {
    Rank { communicator: CommunicatorId(0x0123_4567_89ab_cdef), rank: 1, ranks: 4 }
}

fn activity() -> Activity {
    Activity {
        order: 3,
        inside: 1,
        waiting: 2,
        ready: 1,
        calls: vec![HeldCall { what: "cuLaunchKernel".to_owned(), waited_ms: 12 }],
        busy: vec!["GPU 0".to_owned()],
        steps: 70,
        ..Activity::default()
    }
}

fn window() -> Window {
    Window { stage: 3, devices: vec![("00ff".to_owned(), 2 << 30)] }
}

fn requests() -> Vec<Request> {
    let mut limits = tenants::cut::Limits::default();
    limits.raise(lane(), 7);
    let names = ["kv", "weights"].map(str::to_owned);
    let tags = Scope::Tags { tags: TagNames::Named(names.into()), owner: Some(MemberId(7)) };
    vec![
        Request::Cut(Hold {
            limits: limits.clone(),
            seen: Seen { waits: 3, at_rest: true },
            wait_ms: 25,
        }),
        Request::Step(StepOn {
            round: 1 << 40,
            step: StepOrder { order: 3, limits: Some(limits), calls: Calls::Ready(64) },
            seen: activity().seen(),
            wait_ms: 200,
        }),
        Request::Hello,
        Request::Stats,
        Request::Phase(TakePhase {
            round: 1 << 40,
            alone: false,
            order: Phase::Prepare
                .order(&Told::new(&tags, &[Stay { id: ID, reason: StayReason::LetGo }])),
            timeout_ms: 120_000,
        }),
        Request::Needs(Needs { scope: Scope::Whole, timeout_ms: 60_000, all_devices: true }),
        Request::AwaitConsent(AwaitConsent { action: Action::Resume, timeout_ms: u64::MAX }),
        Request::FetchFds(FetchFds {
            allocations: vec![ID; 3],
            purpose: FetchPurpose::Again,
            importer: MemberId(0x0123_4567_89ab_cdef),
            borrower: None,
        }),
        Request::FetchFds(FetchFds {
            allocations: vec![ID],
            purpose: FetchPurpose::Redeem { serial: 0 },
            importer: MemberId(9),
            borrower: Some(Borrower { tenant: "infer".to_owned(), family: Some("rl".to_owned()) }),
        }),
        Request::Lent(AskLent { scope: tags.clone() }),
        Request::FetchFds(FetchFds {
            allocations: vec![ID],
            purpose: FetchPurpose::Redeem { serial: u64::MAX },
            importer: MemberId(9),
            borrower: None,
        }),
        Request::Phase(TakePhase {
            round: 7,
            alone: false,
            order: Phase::Release.order(&Told::new(&Scope::Whole, &[])),
            timeout_ms: 1,
        }),
        Request::Phase(TakePhase {
            round: 8,
            alone: false,
            order: Order::Release { window: Some(window()), rest: Schedule::SaveMeanwhile },
            timeout_ms: 60_000,
        }),
        Request::Phase(TakePhase {
            round: 9,
            alone: false,
            order: Order::Restore { scope: Scope::Whole, window: Some(window()) },
            timeout_ms: 60_000,
        }),
        Request::Withdraw(Withdraw { round: 7 }),
        Request::GiveUp(GiveUp { action: Action::Pause, why: "process 1 has ended".to_owned() }),
        Request::Save(SaveStep::Begin {
            dir: DirName { path: b"/data/saved".to_vec(), device: 66305, inode: u64::MAX },
        }),
        Request::Save(SaveStep::WriteOn { for_ms: 500 }),
        Request::Save(SaveStep::CallOff),
        Request::Spill(SpillStep { most_bytes: 1 << 30 }),
        Request::Host(HostStep::Need),
        Request::Host(HostStep::Begin),
        Request::Host(HostStep::Look),
        Request::Host(HostStep::CallOff),
        Request::Count,
        Request::Idle(LookIdle { quiet_us: 500_000 }),
    ]
}

fn host_progress() -> [HostProgress; 2] {
    let grows = HostProgress {
        held_bytes: 1 << 30,
        wanted_bytes: 3 << 30,
        brought_in_bytes: 1 << 28,
        elapsed_us: 40_000,
        touching_us: 30_000,
        pinning_us: 7_000,
        stage: HostStage::Grows,
        need: Some(drained().host),
    };
    let too_little = Failure {
        kind: FailureKind::OutOfHostMemory,
        message: "process 1: a tenth stays free".to_owned(),
    };
    let stopped = HostProgress { stage: HostStage::Stopped(too_little), ..grows.clone() };
    [grows, stopped]
}

fn phase_report() -> PhaseReport {
    PhaseReport {
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
        stays: vec![stays()],
        kept: Some(KeptBytes { zero_bytes: 7 << 30, unchanged_bytes: 2 << 30, copied_bytes: 1 }),
        stage: Some(StageReport {
            copied_bytes: 1 << 30,
            left: vec![StageLeft { uuid: "00ff".to_owned(), bytes: 5, smallest_bytes: 2 }],
        }),
    }
}

fn stays() -> PinnedBytes {
    PinnedBytes { reason: "the driver has it".to_owned(), bytes: 5 << 20, count: 2 }
}

fn drained() -> Drained {
    let demand = HostDemand {
        saved_bytes: 3 << 30,
        copying: Copying { to_memory_bytes: 2 << 30, to_file_bytes: 1 << 30 },
        held_bytes: 1 << 30,
        grow_bytes: 2 << 30,
        grow_with_needed_bytes: 3 << 30,
        grow_with_all_bytes: 5 << 30,
    };
    let limits = vec![HostLimit { kind: LimitKind::Configured, bytes: 8 << 30 }];
    let references = References {
        given: vec![Shareable { id: ID, is_pinned: true }],
        taken: vec![(MemberId(9), vec![Shareable { id: ID, is_pinned: false }])],
        shares_scope: true,
        lent: vec![MemberId(11)],
        partners: vec![Partner { member: MemberId(12), pid: Some(4244) }],
    };
    Drained { host: HostNeed { demand, limits }, references }
}

fn drained_answer() -> PhaseAnswer {
    PhaseAnswer { drained: Some(Box::new(drained())), ..PhaseAnswer::default() }
}

fn lending() -> Lending {
    let lent = Lent {
        tenant: "infer".to_owned(),
        pid: Some(4243),
        handles: 2,
        tickets: 1,
        bytes: 3 << 30,
    };
    let wanted = Wanted { tenant: "train".to_owned(), count: 4, bytes: 1 << 30 };
    Lending {
        lent: vec![lent],
        wanted: vec![wanted],
        partners: vec![Partner { member: MemberId(9), pid: None }],
    }
}

const IDLENESS: Idleness = Idleness { quiet_us: 12_000_000, is_drained: true, waiting_calls: 2 };

fn member() -> MemberInfo {
    MemberInfo {
        id: MemberId(7),
        pid: 4242,
        family: Some("rl".to_owned()),
        class: Class::Guaranteed,
        weight: Weight::default(),
        queues: true,
        goes_deep: true,
        command: "python train.py".to_owned(),
        version: "0.1.0".to_owned(),
        state: MemberState::Paused,
        stands_without: Some(TagNames::Named(["kv".to_owned()].into())),
        stays: vec![stays()],
        held: true,
        in_round: true,
        nccl_waits: true,
        asked: Some(Asked { round: 1 << 40, phase: Phase::Verify }),
        tags: vec![TagBytes {
            tag: "kv".to_owned(),
            resident_bytes: 2 << 20,
            away_bytes: 40 << 30,
            imported_away_bytes: 1 << 30,
            runs_without: true,
        }],
    }
}

fn replies() -> Vec<Reply> {
    let member = member();
    let report = phase_report();
    let [grows, stopped] = host_progress();
    let stats = MemberStats {
        host: HostProgress { need: None, ..grows.clone() },
        member: member.clone(),
        copied: CopiedBytes { done_bytes: 12 << 30, of_bytes: 48 << 30 },
        pool: PoolReport {
            host_arena_bytes: 1 << 40,
            file_bytes: 1 << 41,
            slabs: SlabTotals { slabs: 3, slab_bytes: 48 << 20, ..SlabTotals::default() },
            ..PoolReport::default()
        },
        pauses: 3,
        resumes: 2,
        last_pause: vec![(Phase::Release, report.clone())],
        last_resume: Vec::new(),
        pause_times: PauseTimes::default(),
        idleness: IDLENESS,
        lent: lending().lent,
        communicators: vec![rank()],
        notes: vec!["a note".to_owned()],
    };
    let need = Need { lane: lane(), rank: 1, needed: 8 };
    let cut = CutReport {
        seen: Seen { waits: 3, at_rest: false },
        progress: 99,
        ranks: vec![rank()],
        counters: vec![LaunchCount { lane: lane(), rank: 1, launched: 7 }],
        waiting: vec![Waiting {
            what: "ncclAllReduce".to_owned(),
            needs: vec![need],
            waited_ms: 5,
        }],
        inside: vec![Inside { what: "ncclGroupEnd".to_owned(), inside_ms: 1 }],
        captures: 0,
        waits_for_memory_ms: Some(12),
        given_up: vec![rank().communicator],
        aliases: vec![(rank().communicator, CommunicatorId(1))],
    };
    let needed = Needed { devices: report.devices.clone(), largest_bytes: 20 << 20 };
    let kind = FailureKind::OutOfDeviceMemory { missing_bytes: u64::MAX };
    vec![
        Reply::Member(member),
        Reply::Told(RoundEnd::Commit),
        Reply::Stats(Box::new(stats)),
        Reply::Needs(needed),
        Reply::Cut(Box::new(cut)),
        Reply::Activity(Box::new(activity())),
        Reply::PhaseDone(Phase::Verify, report.into()),
        Reply::PhaseDone(Phase::Drain, drained_answer()),
        Reply::Consented,
        Reply::Noted,
        Reply::Fds { count: 0, tags: Vec::new(), missing: vec![ID], devices: Vec::new() },
        Reply::Fds {
            count: 2,
            tags: vec!["kv".to_owned(), String::new()],
            missing: Vec::new(),
            devices: vec!["00ff".to_owned()],
        },
        Reply::Lent(Box::new(lending())),
        Reply::Spilled(Box::new(SpillProgress {
            left_bytes: 5 << 30,
            given_back_bytes: 1 << 28,
            rests_ms: 60_000,
            limits: vec![HostLimit { kind: LimitKind::Available, bytes: 1 << 40 }],
        })),
        Reply::Saving(Box::new(SaveProgress {
            account: SaveAccount { saved_bytes: 3 << 30, ..SaveAccount::default() },
            written_bytes: 1 << 30,
            stage: SaveStage::Written { map: "process-1.json".to_owned() },
        })),
        Reply::Host(Box::new(grows)),
        Reply::Host(Box::new(stopped)),
        Reply::Counts,
        Reply::Idleness(IDLENESS),
        Reply::Failed(Failure { kind, message: "process 1: no memory".to_owned() }),
        Reply::Failed(Failure { kind: FailureKind::Faulted, message: String::new() }),
        Reply::Failed(Failure { kind: FailureKind::Lent, message: String::new() }),
        Reply::Failed(Failure { kind: FailureKind::LenderAway, message: String::new() }),
    ]
}

fn tickets() -> [Ticket; 2] {
    let ticket = Ticket {
        allocation: ID,
        serial: 7,
        size_bytes: 2 << 20,
        owner: MemberId(0x0123_4567_89ab_cdef),
        tenant: TenantName::new("train").unwrap(),
        part: None,
    };
    let longest = Ticket {
        tenant: TenantName::new(&"t".repeat(TENANT_NAME_BYTES_MAX)).unwrap(),
        part: Some(Part { offset_bytes: 1 << 20, size_bytes: 1 << 20 }),
        ..ticket.clone()
    };
    [ticket, longest]
}

#[test]
fn requests_of_the_corpus_are_those_of_today_and_damaged_ones_give_requests_or_errors() {
    let payloads: Vec<_> = requests().iter().map(payload).collect();
    for payload in &payloads {
        damage::<Request>(payload);
    }
    assert_corpus("requests", payloads);
}

#[test]
fn replies_of_the_corpus_are_those_of_today_and_damaged_ones_give_replies_or_errors() {
    let payloads: Vec<_> = replies().iter().map(payload).collect();
    for payload in &payloads {
        damage::<Reply>(payload);
    }
    assert_corpus("replies", payloads);
}

#[test]
fn frames_of_the_corpus_are_those_of_today() {
    let request = encode(&Request::Stats, 0).unwrap();
    let (tags, missing, devices) = Default::default();
    let sent = Reply::Fds { count: 3, tags, missing, devices };
    let reply = encode(&sent, 3).unwrap();
    decode::<Request>(&request, Limits::REQUESTS).unwrap();
    decode::<Reply>(&reply, Limits::ALL).unwrap();
    assert_corpus("frames", [request, reply].map(|frame| frame[HEAD_BYTES..].to_vec()).to_vec());
}

#[test]
fn tickets_of_the_corpus_are_those_of_today() {
    let tickets = tickets().map(|ticket| {
        let bytes = ticket.encode();
        assert_eq!(Ticket::decode(&bytes).unwrap(), ticket);
        bytes.strip_prefix(HEAD.as_slice()).unwrap().to_vec()
    });
    assert_corpus("tickets", tickets.to_vec());
}
