//! Real members whose coordinator ends after it has told some of them to go on, and others not.

use std::os::fd::AsFd as _;

use nix::poll::{PollFd, PollFlags};

use super::*;
use sublet_protocol::transport::{Connection, poll_until};
use sublet_protocol::wire::{Asked, RoundEnd};
use sublet_stage::job::{Job, SOON, patient, until};

const BEFORE_RELEASE: [Phase; 3] = [Phase::CloseGate, Phase::Drain, Phase::Prepare];
const BEFORE_ACTIVATE: [Phase; 3] = [Phase::Create, Phase::Restore, Phase::Import];
const BEFORE_STAGES: [Phase; 3] = [Phase::CloseGate, Phase::Drain, Phase::Prepare];
const ROUND: u64 = 11;

/// A coordinator that the test itself plays.
struct Hand {
    connections: Vec<Connection>,
}

impl Hand {
    fn on(job: &Job) -> Self {
        let connect = |path| Connection::connect(path, Instant::now() + SOON).unwrap();
        let paths = job.members.iter().map(|member| member.presence().socket_path());
        Self { connections: paths.map(connect).collect() }
    }

    fn tell(&mut self, index: usize, deed: impl Into<Deed>) {
        self.tell_within(index, deed, 30_000);
    }

    fn tell_within(&mut self, index: usize, deed: impl Into<Deed>, timeout_ms: u64) {
        let request = Request::Phase(TakePhase {
            round: ROUND,
            alone: false,
            order: deed.into().order(&Scope::Whole),
            timeout_ms,
        });
        self.connections[index].send(&request, &[], Instant::now() + SOON).unwrap();
    }

    fn lead<T: Copy + Into<Deed>>(&mut self, deeds: &[T]) {
        for deed in deeds {
            for index in 0..self.connections.len() {
                self.tell(index, *deed);
            }
            for connection in &mut self.connections {
                let (reply, _) = connection.receive::<Reply>(Instant::now() + SOON).unwrap();
                assert!(matches!(reply, Reply::PhaseDone(..)), "{reply:?}");
            }
        }
    }
}

/// Ends after `phases`, with `decision` told to these members only, and returns the states that follow.
fn ended<T: Copy + Into<Deed>>(
    job: &Job,
    deeds: &[T],
    decision: impl Into<Deed> + Copy,
    told: &[usize],
) -> Vec<MemberState> {
    let mut hand = Hand::on(job);
    hand.lead(deeds);
    for index in told {
        hand.tell(*index, decision);
    }
    drop(hand);
    until("the members to settle", || {
        let states = job.states();
        !states.contains(&MemberState::Offloading) && !states.contains(&MemberState::Restoring)
    });
    job.states()
}

#[test]
fn one_that_was_told_to_release_takes_all_along() {
    for told in [&[0][..], &[2], &[0, 1]] {
        let job = Job::new(3);
        let states = ended(&job, &BEFORE_RELEASE, Phase::Release, told);
        assert_eq!(states, [MemberState::Paused; 3], "{told:?}");
        report(job.coordinator(patient()).resume(&mut quiet).unwrap());
    }
}

#[test]
fn one_that_was_told_to_release_a_stage_takes_all_along() {
    for told in [&[0][..], &[2], &[0, 1], &[0, 1, 2]] {
        let job = Job::new(3);
        let states = ended(&job, &BEFORE_STAGES, RELEASE_WINDOW, told);
        assert_eq!(states, [MemberState::Paused; 3], "{told:?}");
        report(job.coordinator(patient()).resume(&mut quiet).unwrap());
    }
}

#[test]
fn when_none_was_told_to_release_a_stage_all_go_back() {
    let job = Job::new(3);
    let states = ended(&job, &BEFORE_STAGES, RELEASE_WINDOW, &[]);
    assert_eq!(states, [MemberState::Active; 3]);
}

#[test]
fn those_who_were_to_come_by_stages_stay_paused() {
    for phases in [&[RESTORE_WINDOW][..], &[RESTORE_WINDOW, Phase::Restore.into()]] {
        let job = Job::new(3);
        report(job.coordinator(patient()).pause(&mut quiet).unwrap());
        let states = ended(&job, phases, Phase::Activate, &[]);
        assert_eq!(states, [MemberState::Paused; 3], "{phases:?}");
        report(job.coordinator(patient()).resume(&mut quiet).unwrap());
    }
}

#[test]
fn a_stage_out_of_turn_is_refused_and_changes_nothing() {
    let job = Job::new(1);
    let mut hand = Hand::on(&job);
    hand.lead(&BEFORE_STAGES);
    let window = sublet_protocol::wire::Window { stage: 1, ..Default::default() };
    let told = Told { window: Some(window), ..Told::new(&Scope::Whole, &[]) };
    let order = Phase::Release.order(&told);
    let request =
        Request::Phase(TakePhase { round: ROUND, alone: false, order, timeout_ms: 30_000 });
    hand.connections[0].send(&request, &[], Instant::now() + SOON).unwrap();
    let (reply, _) = hand.connections[0].receive::<Reply>(Instant::now() + SOON).unwrap();
    assert!(matches!(reply, Reply::Failed(_)), "{reply:?}");
    assert_eq!(job.states(), [MemberState::Offloading]);
    hand.lead(&[RELEASE_WINDOW]);
    hand.lead(&[Phase::Release, Phase::Verify]);
    assert_eq!(job.states(), [MemberState::Paused]);
}

#[test]
fn when_none_was_told_to_release_all_go_back() {
    for count in 0..=BEFORE_RELEASE.len() {
        let job = Job::new(3);
        let states = ended(&job, &BEFORE_RELEASE[..count], Phase::Release, &[]);
        assert_eq!(states, [MemberState::Active; 3], "after {count} phases");
    }
}

#[test]
fn one_that_was_told_to_open_its_gate_takes_all_along() {
    for told in [&[0][..], &[2], &[0, 1]] {
        let job = Job::new(3);
        report(job.coordinator(patient()).pause(&mut quiet).unwrap());
        let states = ended(&job, &BEFORE_ACTIVATE, Phase::Activate, told);
        assert_eq!(states, [MemberState::Active; 3], "{told:?}");
        report(job.coordinator(patient()).pause(&mut quiet).unwrap());
    }
}

#[test]
fn when_none_was_told_to_open_its_gate_all_go_back() {
    for count in 0..=BEFORE_ACTIVATE.len() {
        let job = Job::new(3);
        report(job.coordinator(patient()).pause(&mut quiet).unwrap());
        let states = ended(&job, &BEFORE_ACTIVATE[..count], Phase::Activate, &[]);
        assert_eq!(states, [MemberState::Paused; 3], "after {count} phases");
    }
}

/// Is the connection closed, so that nothing sent on it is read any more?
fn is_closed(connection: &mut Connection) -> bool {
    connection.receive::<Reply>(Instant::now() + SOON).is_err_and(|error| error.peer_is_gone())
}

#[test]
fn a_coordinator_that_stands_still_is_hung_up_on_and_all_go_back() {
    let job = Job::new(3);
    let mut hand = Hand::on(&job);
    hand.lead(&BEFORE_RELEASE[..2]);
    // The last member has less time than the others, and ends the wait of the others too.
    for (index, timeout_ms) in [(0, 60_000), (1, 60_000), (2, 10)] {
        hand.tell_within(index, Phase::Prepare, timeout_ms);
    }
    for connection in &mut hand.connections {
        connection.receive::<Reply>(Instant::now() + SOON).unwrap();
    }
    until("the members to settle", || job.states() == [MemberState::Active; 3]);
    // The coordinator continues, and no member hears it.
    assert!(hand.connections.iter_mut().all(is_closed));
    for index in 0..3 {
        let request = Request::Phase(TakePhase {
            round: ROUND,
            alone: false,
            order: Phase::Release.order(&Told::new(&Scope::Whole, &[])),
            timeout_ms: 30_000,
        });
        hand.connections[index].send(&request, &[], Instant::now() + SOON).unwrap_err();
    }
    assert_eq!(job.states(), [MemberState::Active; 3]);
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
}

#[test]
fn a_coordinator_that_stands_still_behind_the_point_of_no_return_is_followed() {
    let job = Job::new(3);
    let mut hand = Hand::on(&job);
    hand.lead(&BEFORE_RELEASE[..2]);
    for index in 0..3 {
        hand.tell_within(index, Phase::Prepare, 10);
    }
    for connection in &mut hand.connections {
        connection.receive::<Reply>(Instant::now() + SOON).unwrap();
    }
    hand.tell(1, Phase::Release);
    until("the members to settle", || job.states() == [MemberState::Paused; 3]);
    assert!(is_closed(&mut hand.connections[0]) && is_closed(&mut hand.connections[2]));
    report(job.coordinator(patient()).resume(&mut quiet).unwrap());
}

/// A process that accepts questions and answers none, like a stopped one; all others ask it first.
fn silent(job: &Job) -> sublet_protocol::transport::Listener {
    job.run_dir.listen(&tenant("train"), MemberId(0)).unwrap().1
}

const QUICK: Duration = Duration::from_secs(4);

/// Returns the time that three members take to settle after their coordinator has ended. One of them was told to go on,
/// and one more process is silent.
fn settle_beside_a_silent_one(told: usize, is_pause: bool) -> Duration {
    let job = Job::new(3);
    if !is_pause {
        report(job.coordinator(patient()).pause(&mut quiet).unwrap());
    }
    let _silent = silent(&job);
    let begin = Instant::now();
    let (states, wanted) = if is_pause {
        (ended(&job, &BEFORE_RELEASE, Phase::Release, &[told]), MemberState::Paused)
    } else {
        (ended(&job, &BEFORE_ACTIVATE, Phase::Activate, &[told]), MemberState::Active)
    };
    assert_eq!(states, [wanted; 3], "member {told} was told, {is_pause}");
    begin.elapsed()
}

#[test]
fn one_that_is_silent_takes_nobody_elses_time_to_answer() {
    for told in 0..3 {
        for is_pause in [true, false] {
            // A member that waits for the silent process needs five seconds each time. On a busy machine that may happen now
            // and then.
            let is_quick = (0..10).any(|_| settle_beside_a_silent_one(told, is_pause) < QUICK);
            assert!(is_quick, "member {told} was told, {is_pause}");
        }
    }
}

#[test]
fn beside_one_that_is_silent_all_that_were_told_nothing_go_back() {
    let job = Job::new(3);
    let _silent = silent(&job);
    let states = ended(&job, &BEFORE_RELEASE, Phase::Release, &[]);
    assert_eq!(states, [MemberState::Active; 3]);
}

/// A process that gives the next of these answers each time others request its order.
fn says(job: &Job, answers: [RoundEnd; 2]) -> std::thread::JoinHandle<()> {
    let (_, listener) = job.run_dir.listen(&tenant("train"), MemberId(1)).unwrap();
    std::thread::spawn(move || {
        let deadline = Instant::now() + SOON;
        for told in answers {
            let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
            if !poll_until(&mut fds, deadline).unwrap() {
                return;
            }
            let mut connection = listener.accept().unwrap().unwrap();
            connection.receive::<Request>(deadline).unwrap();
            connection.send(&Reply::Told(told), &[], deadline).unwrap();
        }
    })
}

#[test]
fn beside_one_that_is_silent_those_that_have_answered_are_asked_once_more() {
    let job = Job::new(1);
    let mut hand = Hand::on(&job);
    hand.lead(&BEFORE_RELEASE);
    let _silent = silent(&job);
    // The process learns of the decision while the first waits for the silent one.
    let other = says(&job, [RoundEnd::Open, RoundEnd::Commit]);
    drop(hand);
    until("the first to settle", || job.states() != [MemberState::Offloading]);
    assert_eq!(job.states(), [MemberState::Paused]);
    other.join().unwrap();
}

#[test]
fn one_that_was_stopped_before_it_had_prepared_and_those_that_had_go_back() {
    let job = Job::new(3);
    let mut hand = Hand::on(&job);
    hand.lead(&BEFORE_RELEASE[..2]);
    // The other members cannot reach the first while they settle, and it continues afterwards.
    let path = job.members[0].presence().socket_path();
    let elsewhere = path.with_extension("elsewhere");
    std::fs::rename(path, &elsewhere).unwrap();
    let first = hand.connections.remove(0);
    let _silent = silent(&job);
    hand.lead(&[Phase::Prepare]);
    drop(hand);
    until("the others to settle", || job.states()[1..] == [MemberState::Active; 2]);
    std::fs::rename(&elsewhere, path).unwrap();
    drop(first);
    until("the first to settle", || job.states() == [MemberState::Active; 3]);
}

#[test]
fn what_was_told_in_another_round_counts_for_nothing() {
    let job = Job::new(2);
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
    // A resume of its own leaves the first member active.
    let mut hand = Hand::on(&job);
    let second = hand.connections.pop().unwrap();
    hand.lead(&[Phase::Create, Phase::Restore, Phase::Import, Phase::Activate]);
    let asked = job.members[0].info().asked;
    assert_eq!(asked, Some(Asked { round: ROUND, phase: Phase::Activate }));
    drop(hand);
    // The second gets equally far in another round, whose coordinator ends.
    let mut alone = Hand { connections: vec![second] };
    for phase in BEFORE_ACTIVATE {
        let request = Request::Phase(TakePhase {
            round: ROUND + 1,
            alone: false,
            order: phase.order(&Told::new(&Scope::Whole, &[])),
            timeout_ms: 30_000,
        });
        alone.connections[0].send(&request, &[], Instant::now() + SOON).unwrap();
        alone.connections[0].receive::<Reply>(Instant::now() + SOON).unwrap();
    }
    drop(alone);
    until("the second to go back", || job.states()[1] == MemberState::Paused);
    assert_eq!(job.states()[0], MemberState::Active);
}
