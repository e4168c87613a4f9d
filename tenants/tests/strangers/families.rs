//! What a process of another tenant may say to be lent memory, and what an owner of another tenant may answer.

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use tenants::coordinator::{Coordinator, Event, Options, Step};
use tenants::identity::MemberId;
use tenants::member::ImportError;
use tenants::scope::Scope;
use tenants::ticket::Ticket;
use tenants::transport::Connection;
use tenants::wire::{
    AskLent, Borrower, FDS_PER_MESSAGE_MAX, Failure, FailureKind, FetchFds, FetchPurpose, Lending,
    MemberState, Phase, Reply, Request, TakePhase, Told,
};
use vmm_pool::AllocationId;

use crate::stage::{SimMember, Stage, answers, name, soon, ticket_of};

const RL: Option<&str> = Some("rl");

fn fetch(
    ids: Vec<AllocationId>,
    importer: MemberId,
    tenant: &str,
    family: Option<&str>,
) -> Request {
    let family = family.map(str::to_owned);
    Request::FetchFds(FetchFds {
        allocations: ids,
        purpose: FetchPurpose::Redeem { serial: 0 },
        importer,
        borrower: Some(Borrower { tenant: tenant.to_owned(), family }),
    })
}

fn refused(client: &mut Connection, request: &Request) -> Failure {
    let (reply, fds) = client.exchange(request, FDS_PER_MESSAGE_MAX, soon()).unwrap();
    assert!(fds.is_empty(), "descriptors with {reply:?}");
    let Reply::Failed(failure) = reply else { panic!("{reply:?}") };
    failure
}

fn lending(lender: &SimMember) -> Lending {
    let mut client = Connection::connect(lender.presence().socket_path(), soon()).unwrap();
    let question = Request::Lent(AskLent { scope: Scope::Whole });
    let (reply, _) = client.exchange(&question, 0, soon()).unwrap();
    let Reply::Lent(lending) = reply else { panic!("{reply:?}") };
    *lending
}

#[test]
fn who_is_no_process_of_the_tenant_that_it_names_is_lent_nothing() {
    let stage = Stage::new();
    let (lender, borrower) = (stage.relative("train", RL), stage.relative("infer", RL));
    let (ticket, _handle) = ticket_of(&lender);
    let mut client = Connection::connect(lender.presence().socket_path(), soon()).unwrap();
    let ids = || vec![ticket.allocation];
    for (importer, tenant) in [
        (MemberId(1), "infer"),
        (lender.presence().id(), "infer"),
        (borrower.presence().id(), "score"),
        (borrower.presence().id(), "train"),
    ] {
        let failure = refused(&mut client, &fetch(ids(), importer, tenant, RL));
        assert!(failure.message.contains("is no process of tenant"), "{failure}");
    }
    for (tenant, family, words) in [
        ("../infer", RL, "names no tenant"),
        ("infer", Some("a/b"), "names no family"),
        ("infer", None, "only 'train' names family 'rl'"),
        ("infer", Some("other"), "in family 'other'"),
    ] {
        let failure = refused(&mut client, &fetch(ids(), borrower.presence().id(), tenant, family));
        assert!(failure.message.contains(words), "{failure}");
    }
    let many = vec![ticket.allocation; FDS_PER_MESSAGE_MAX / 2 + 1];
    let failure = refused(&mut client, &fetch(many, borrower.presence().id(), "infer", RL));
    assert!(failure.message.contains("125 are the limit"), "{failure}");
    assert_eq!(lending(&lender), Lending::default());
    // This process is the borrower, too. Two descriptors for each: the driver's, and the lease.
    let good = fetch(ids(), borrower.presence().id(), "infer", RL);
    let (reply, fds) = client.exchange(&good, FDS_PER_MESSAGE_MAX, soon()).unwrap();
    assert!(matches!(&reply, Reply::Fds { count: 2, devices, .. } if devices.len() == 1));
    assert_eq!((fds.len(), lending(&lender).lent.len()), (2, 1));
    drop(fds);
    assert_eq!(lending(&lender), Lending::default());
    answers(&lender);
    lender.leave();
    borrower.leave();
}

#[test]
fn a_process_that_names_no_family_asks_nobody_of_another_tenant() {
    let stage = Stage::new();
    let (lender, stranger) = (stage.relative("train", RL), stage.relative("infer", None));
    // A process that is asked there would be seen.
    let dir = lender.presence().socket_path().parent().unwrap().to_owned();
    let trap = UnixListener::bind(dir.join(format!("{}.sock", MemberId(77)))).unwrap();
    trap.set_nonblocking(true).unwrap();
    let (good, _handle) = ticket_of(&lender);
    let ticket = Ticket { owner: MemberId(77), ..good };
    let error =
        stranger.sharing().redeem_ticket(&stranger.pool().enter(), &ticket, "test").unwrap_err();
    assert!(matches!(error, ImportError::OtherTenant { .. }), "{error}");
    trap.accept().unwrap_err();
    assert_eq!(stranger.sharing().tenant_of(MemberId(77)), name("train"));
    lender.leave();
    stranger.leave();
}

#[test]
fn a_lender_that_answers_nothing_is_given_up_in_time() {
    let stage = Stage::new();
    let lender = stage.relative("train", RL);
    let borrower = stage.patient("infer", RL, Duration::from_secs(3));
    let dir = lender.presence().socket_path().parent().unwrap().to_owned();
    // It listens, and says nothing.
    let _silent = UnixListener::bind(dir.join(format!("{}.sock", MemberId(78)))).unwrap();
    let (good, _handle) = ticket_of(&lender);
    let ticket = Ticket { owner: MemberId(78), ..good.clone() };
    let began = Instant::now();
    let error =
        borrower.sharing().redeem_ticket(&borrower.pool().enter(), &ticket, "test").unwrap_err();
    assert!(matches!(error, ImportError::Owner { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let elsewhere = Ticket { tenant: name("nowhere"), ..good.clone() };
    let error =
        borrower.sharing().redeem_ticket(&borrower.pool().enter(), &elsewhere, "test").unwrap_err();
    assert!(matches!(error, ImportError::NoLender { .. }), "{error}");
    borrower.sharing().redeem_ticket(&borrower.pool().enter(), &good, "test").unwrap();
    lender.leave();
    borrower.leave();
}

#[test]
fn the_applications_own_pause_together_waits_once_and_is_told_who_holds_what() {
    let stage = Stage::new();
    let (lender, borrower) = (stage.relative("train", RL), stage.relative("infer", RL));
    let (ticket, _handle) = ticket_of(&lender);
    let borrowed =
        borrower.sharing().redeem_ticket(&borrower.pool().enter(), &ticket, "test").unwrap();
    let options = Options {
        timeout: Some(Duration::from_secs(3)),
        consent: Some(Duration::from_secs(5)),
        ..Options::default()
    };
    lender.asking().begin_consent(tenants::wire::Action::Pause);
    let mut coordinator = Coordinator::new(stage.run_dir.clone(), name("train"), options);
    let error = coordinator.pause(&mut |_| {}).unwrap_err();
    assert!(error.failures().iter().all(|member| member.failure.kind == FailureKind::Lent));
    assert!(error.to_string().contains("of tenant 'infer'"), "{error}");
    assert!(error.left_unchanged() && error.is_retryable());
    lender.asking().end_consent();
    borrower.pool().enter_giving_up().release(borrowed).unwrap();
    assert_eq!(lending(&lender), Lending::default());
    lender.leave();
    borrower.leave();
}

fn order(round: u64, phase: Phase) -> Request {
    let order = phase.order(&Told::new(&Scope::Whole, &[]));
    Request::Phase(TakePhase { round, alone: true, order, timeout_ms: 600_000 })
}

fn lead(client: &mut Connection, round: u64, phases: &[Phase]) {
    for phase in phases {
        let (reply, _) = client.exchange(&order(round, *phase), 0, soon()).unwrap();
        assert!(matches!(&reply, Reply::PhaseDone(done, _) if done == phase), "{reply:?}");
    }
}

#[test]
fn nothing_is_lent_from_the_moment_that_a_gate_is_shut_for_a_pause() {
    let stage = Stage::new();
    let (lender, borrower) = (stage.relative("train", RL), stage.relative("infer", RL));
    let (ticket, _handle) = ticket_of(&lender);
    let question = fetch(vec![ticket.allocation], borrower.presence().id(), "infer", RL);
    let mut client = Connection::connect(lender.presence().socket_path(), soon()).unwrap();
    let mut coordinator = Connection::connect(lender.presence().socket_path(), soon()).unwrap();
    for phase in [Phase::CloseGate, Phase::Drain] {
        lead(&mut coordinator, 1, &[phase]);
        let failure = refused(&mut client, &question);
        assert_eq!(failure.kind, FailureKind::NotNow, "{failure}");
        assert_eq!(lending(&lender), Lending::default());
    }
    lead(&mut coordinator, 1, &[Phase::Abort]);
    let (reply, fds) = client.exchange(&question, FDS_PER_MESSAGE_MAX, soon()).unwrap();
    assert!(matches!(reply, Reply::Fds { count: 2, .. }) && fds.len() == 2);
    lender.leave();
    borrower.leave();
}

#[test]
fn what_is_lent_in_the_last_moment_ends_a_pause_before_its_devices_are_drained() {
    let stage = Stage::new();
    let (lender, borrower) = (stage.relative("train", RL), stage.relative("infer", RL));
    let (ticket, _handle) = ticket_of(&lender);
    let options = Options { timeout: Some(Duration::from_secs(3)), ..Options::default() };
    let mut coordinator = Coordinator::new(stage.run_dir.clone(), name("train"), options);
    let (mut borrowed, mut drains) = (None, 0);
    let error = coordinator
        .pause(&mut |event| {
            let Event::StepStarted { step: Step::Phase(phase), .. } = event else { return };
            drains += i32::from(phase == Phase::Drain);
            // Behind the first look, and before the gate is shut.
            if phase == Phase::CloseGate {
                borrowed.get_or_insert_with(|| {
                    borrower
                        .sharing()
                        .redeem_ticket(&borrower.pool().enter(), &ticket, "test")
                        .unwrap()
                });
            }
        })
        .unwrap_err();
    assert!(error.failures().iter().all(|member| member.failure.kind == FailureKind::Lent));
    assert!(error.left_unchanged(), "{error}");
    assert_eq!((borrowed.is_some(), drains), (true, 0));
    assert_eq!(lender.lifecycle().state(), MemberState::Active);
    lender.leave();
    borrower.leave();
}

#[test]
fn a_resume_that_waits_for_a_lender_on_its_way_ends_when_it_is_called_off() {
    let stage = Stage::new();
    let (lender, borrower) = (stage.relative("train", RL), stage.relative("infer", RL));
    let (ticket, _handle) = ticket_of(&lender);
    borrower.sharing().redeem_ticket(&borrower.pool().enter(), &ticket, "test").unwrap();
    let mut coordinator = Connection::connect(borrower.presence().socket_path(), soon()).unwrap();
    let pause = [Phase::CloseGate, Phase::Drain, Phase::Prepare, Phase::Release, Phase::Verify];
    lead(&mut coordinator, 1, &pause);
    let mut on_its_way = Connection::connect(lender.presence().socket_path(), soon()).unwrap();
    lead(&mut on_its_way, 1, &[Phase::CloseGate]);
    lead(&mut coordinator, 2, &[Phase::Create, Phase::Restore]);
    // Which has ten minutes.
    coordinator.send(&order(2, Phase::Import), &[], soon()).unwrap();
    coordinator.send(&order(2, Phase::Abort), &[], soon()).unwrap();
    let (reply, _) = coordinator.receive::<Reply>(soon()).unwrap();
    assert!(matches!(&reply, Reply::Failed(_)), "{reply:?}");
    let (reply, _) = coordinator.receive::<Reply>(soon()).unwrap();
    assert!(matches!(reply, Reply::PhaseDone(Phase::Abort, _)), "{reply:?}");
    assert_eq!(borrower.lifecycle().state(), MemberState::Paused);
    lead(&mut on_its_way, 1, &[Phase::Abort]);
    lead(&mut coordinator, 3, &[Phase::Create, Phase::Restore, Phase::Import, Phase::Activate]);
    assert_eq!(borrower.lifecycle().state(), MemberState::Active);
    lender.leave();
    borrower.leave();
}
