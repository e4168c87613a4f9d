//! Tests of the coordinator with members whose ranks launch: real members on the simulated driver, each with threads that go
//! through its cut.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use super::*;
use sublet_protocol::cut::{CommunicatorId, Increment, Lane, Limits, Rank, Seen, Series};
use sublet_protocol::wire::Hold;
use sublet_stage::job::{Job, SOON, WORLD, collectives, launch, patient, until};

/// A rank that launches until told to stop. It never gets more than a few launches ahead of the slowest rank, as with a
/// device's queue.
struct Ranks {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Steps {
    done: Mutex<Vec<u64>>,
    changed: Condvar,
}

impl Ranks {
    fn run(job: &Job) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let steps = Arc::new(Steps::default());
        steps.done.lock().unwrap().resize(job.members.len(), 0);
        let members = job.members.iter().cloned().enumerate();
        let threads = members.map(|(rank, member)| {
            let (stop, steps) = (Arc::clone(&stop), Arc::clone(&steps));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    launch(&member, rank);
                    let mut done = steps.done.lock().unwrap();
                    done[rank] += 1;
                    steps.changed.notify_all();
                    while done[rank] > done.iter().min().unwrap() + 3
                        && !stop.load(Ordering::Relaxed)
                    {
                        done = steps.changed.wait_timeout(done, SOON / 300).unwrap().0;
                    }
                }
            })
        });
        Self { threads: threads.collect(), stop }
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

#[test]
fn a_running_job_is_cut_where_all_ranks_have_launched_the_same() {
    let job = Job::new(3);
    let ranks = Ranks::run(&job);
    for round in 0..20 {
        until("a launch", || job.launched().iter().all(|count| *count > round));
        let paused = report(job.coordinator(patient()).pause(&mut quiet).unwrap());
        let cut = paused.cut.unwrap();
        let launched = job.launched();
        assert!(launched.iter().all(|count| *count == launched[0]), "{launched:?} {cut:?}");
        assert_eq!(paused.notes, [""; 0]);
        assert_eq!(job.states(), [MemberState::Paused; 3]);
        assert_eq!(job.launched(), launched);
        let resumed = report(job.coordinator(patient()).resume(&mut quiet).unwrap());
        assert_eq!(resumed.cut, None);
    }
    ranks.end();
}

#[test]
fn a_rank_that_is_behind_is_waited_for() {
    let job = Job::new(2);
    job.launch(0);
    job.launch(0);
    job.launch(1);
    let mut told = Vec::new();
    std::thread::scope(|scope| {
        let (go, wait) = std::sync::mpsc::channel();
        let job = &job;
        scope.spawn(move || {
            wait.recv_timeout(SOON).unwrap();
            job.launch(1);
        });
        let outcome = job.coordinator(patient()).pause(&mut |event| {
            if let Event::WaitingForCut { who, laggard, others } = event {
                assert_eq!((who.pid, others), (Some(std::process::id()), 0));
                told.push(laggard.to_string());
                go.send(()).ok();
            }
        });
        assert_eq!(report(outcome.unwrap()).cut.unwrap().launches, 1);
    });
    assert_eq!(job.launched(), [2, 2]);
    let words = "rank 1 of communicator ab12cd34 at collective 1 of 2: running host code";
    assert!(told[0].starts_with(words), "{told:?}");
}

#[test]
fn a_rank_that_is_stuck_is_named_and_the_others_run_on() {
    let job = Job::new(3);
    job.launch(0);
    job.launch(1);
    let stuck = job.members[2].cut().counter(collectives(), 2);
    let options = Options { timeout: Some(Duration::from_secs(3)), ..Options::default() };
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let error = std::thread::scope(|scope| {
        let cut = job.members[2].cut();
        let other = Lane { communicator: WORLD, series: Series::Pair { from: 2, to: 0 } };
        // The thread is inside a call of another kind, which does not return while the pause waits.
        scope.spawn(move || {
            let increments = [Increment { counter: cut.counter(other, 2), launches: 0 }];
            let launch = cut.enter("ncclSend", &increments);
            wait.recv_timeout(SOON).unwrap();
            drop(launch);
        });
        until("the call", || !cut.report(0).inside.is_empty());
        let error = job.coordinator(options).pause(&mut quiet).unwrap_err();
        go.send(()).unwrap();
        error
    });
    let text = error.to_string();
    assert!(text.contains("rank 2 of communicator ab12cd34 at collective 0 of 1"), "{text}");
    assert!(text.contains("inside ncclSend for"), "{text}");
    assert!(text.contains("give a longer timeout"), "{text}");
    assert!(text.contains("The tenant is active as before"), "{text}");
    assert!(!text.contains("rank 0 of") && !text.contains("rank 1 of"), "{text}");
    assert!(error.is_retryable() && error.left_unchanged());
    assert_eq!(job.states(), [MemberState::Active; 3]);
    job.launch(0);
    job.launch(1);
    assert_eq!(stuck.launched(), 0);
    job.launch(2);
    job.launch(2);
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
}

#[test]
fn a_rank_that_waits_on_its_host_for_one_that_is_held_is_helped_by_the_stall_rule() {
    let job = Job::new(2);
    job.launch(0);
    let (meet, met) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let job = &job;
        // Rank 0 launches once more and then reaches the meeting; rank 1 launches only after it.
        let first = scope.spawn(move || {
            until("the hold", || job.members[0].cut().is_held());
            job.launch(0);
            meet.send(()).unwrap();
        });
        let second = scope.spawn(move || {
            met.recv_timeout(SOON).unwrap();
            job.launch(1);
            job.launch(1);
        });
        let paused = report(job.coordinator(patient()).pause(&mut quiet).unwrap());
        let cut = paused.cut.unwrap();
        assert!(cut.stalls >= 1, "{cut:?}");
        assert_eq!(job.launched(), [2, 2]);
        first.join().unwrap();
        second.join().unwrap();
    });
}

#[test]
fn a_capture_under_way_is_waited_for() {
    let job = Job::new(2);
    job.members[1].captures().begun();
    let outcome = job.coordinator(patient()).pause(&mut |event| {
        if let Event::WaitingForCut { laggard, .. } = event
            && job.members[1].captures().under_way() > 0
        {
            assert!(laggard.to_string().starts_with("capturing 1 stream(s)"), "{laggard}");
            job.members[1].captures().ended();
        }
    });
    assert_eq!(report(outcome.unwrap()).phases.len(), 5);
}

#[test]
fn a_coordinator_that_hangs_up_lets_go_at_once() {
    let job = Job::new(1);
    let path = job.members[0].presence().socket_path();
    let mut coordinator =
        sublet_protocol::transport::Connection::connect(path, Instant::now() + SOON).unwrap();
    let hold = Request::Cut(Hold { limits: Limits::default(), seen: Seen::default(), wait_ms: 0 });
    coordinator.send(&hold, &[], Instant::now() + SOON).unwrap();
    let (reply, _) = coordinator.receive::<Reply>(Instant::now() + SOON).unwrap();
    assert!(job.members[0].info().held);
    // The member is told to look for ten minutes, and the asking process dies meanwhile.
    let Reply::Cut(stood) = reply else { panic!("{reply:?}") };
    let watch =
        Request::Cut(Hold { limits: Limits::default(), seen: stood.seen, wait_ms: 600_000 });
    coordinator.send(&watch, &[], Instant::now() + SOON).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| job.launch(0));
        until("the wait", || !job.members[0].cut().report(0).waiting.is_empty());
        assert!(!waiting.is_finished());
        drop(coordinator);
        waiting.join().unwrap();
    });
    assert!(!job.members[0].info().held);
    assert_eq!(job.states(), [MemberState::Active]);
    // The member's worker is free for the next pause.
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
}

#[test]
fn a_paused_job_holds_its_launches_until_it_is_active_again() {
    let job = Job::new(2);
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let job = &job;
            scope.spawn(move || job.launch(rank))
        });
        until("both", || job.members.iter().all(|m| m.cut().report(0).waiting.len() == 1));
        // A resume that goes half way and is undone leaves the launches where they are.
        let path = job.members[0].presence().socket_path();
        let mut half =
            sublet_protocol::transport::Connection::connect(path, Instant::now() + SOON).unwrap();
        for phase in [Phase::Create, Phase::Abort] {
            let request = Request::Phase(TakePhase {
                round: 7,
                alone: false,
                order: phase.order(&Told::new(&Scope::Whole, &[])),
                timeout_ms: 30_000,
            });
            half.send(&request, &[], Instant::now() + SOON).unwrap();
            let (reply, _) = half.receive::<Reply>(Instant::now() + SOON).unwrap();
            assert!(matches!(reply, Reply::PhaseDone(..)), "{reply:?}");
        }
        drop(half);
        assert_eq!(job.states(), [MemberState::Paused; 2]);
        assert_eq!(job.launched(), [0, 0]);
        assert!(ranks.iter().all(|rank| !rank.is_finished()));
        report(job.coordinator(patient()).resume(&mut quiet).unwrap());
        for rank in ranks {
            rank.join().unwrap();
        }
    });
    assert_eq!(job.launched(), [1, 1]);
}

#[test]
fn ranks_that_live_elsewhere_are_noted() {
    let job = Job::new(2);
    let local = Rank { communicator: CommunicatorId(0x77 << 96), rank: 1, ranks: 8 };
    job.members[0].cut().add_rank(local);
    let paused = report(job.coordinator(patient()).pause(&mut quiet).unwrap());
    assert_eq!(paused.notes.len(), 1);
    let note = &paused.notes[0];
    assert!(note.starts_with("communicator 00000077 has 8 ranks, and no live process"), "{note}");
    assert!(note.contains("some of them (0, 2, 3, 4, 5, 6, 7)"), "{note}");
    let stats = job.coordinator(patient()).stats().unwrap();
    assert_eq!(stats.members.iter().map(|member| member.communicators.len()).sum::<usize>(), 3);
}

#[test]
fn the_applications_own_pause_goes_through_the_cut_too() {
    let job = Job::new(2);
    job.launch(0);
    let mut options = patient();
    options.consent = Some(SOON);
    for member in &job.members {
        member.asking().begin_consent(Action::Pause);
    }
    // Both ranks are in the call; a thread of the second still has a launch to make.
    std::thread::scope(|scope| {
        let job = &job;
        scope.spawn(move || {
            until("the hold", || job.members[1].cut().is_held());
            job.launch(1);
        });
        report(job.coordinator(options).pause(&mut quiet).unwrap());
    });
    assert_eq!(job.launched(), [1, 1]);
    assert_eq!(job.states(), [MemberState::Paused; 2]);
}

#[test]
fn ranks_that_wait_for_one_that_waits_for_memory_are_given_up_for_others_and_waited_for_by_name() {
    let job = Job::new(2);
    job.launch(0);
    let waits = job.members[1].cut().wait_for_memory_since(Instant::now());
    let mut for_another = job.coordinator(Options { passes_by_memory_waits: true, ..patient() });
    let error = for_another.pause(&mut quiet).unwrap_err();
    let [failure] = error.failures() else { panic!("{error}") };
    assert_eq!(failure.failure.kind, FailureKind::NotNow);
    let said = error.to_string();
    for part in
        ["for device memory that others hold", "rank 1 of communicator", "at collective 0 of 1"]
    {
        assert!(said.contains(part), "{said}");
    }
    assert!(error.left_unchanged() && error.is_retryable(), "{error}");
    assert_eq!(job.states(), [MemberState::Active; 2]);
    // The memory becomes available, and the launch follows.
    let (tell, told) = crossbeam_channel::bounded(1);
    std::thread::scope(|scope| {
        let by_name = scope.spawn(|| {
            let mut since = None;
            job.coordinator(patient()).pause(&mut |event: Event<'_>| {
                // The wait is longer than that of the other pause.
                let begun = matches!(event, Event::WaitingForCut { .. })
                    .then(|| *since.get_or_insert_with(Instant::now));
                if begun.is_some_and(|begun| begun.elapsed() > Duration::from_millis(1500)) {
                    tell.try_send(()).ok();
                }
            })
        });
        told.recv_timeout(SOON).expect("it waits");
        drop(waits);
        job.launch(1);
        by_name.join().unwrap().map(drop).unwrap();
    });
    assert_eq!(job.states(), [MemberState::Paused; 2]);
    for_another.resume(&mut quiet).map(drop).unwrap();
    // A rank for which no other rank waits may wait for memory without delaying a pause.
    let _waits = job.members[1].cut().wait_for_memory_since(Instant::now());
    for_another.pause(&mut quiet).map(drop).unwrap();
}
