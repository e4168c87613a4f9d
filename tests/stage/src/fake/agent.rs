//! One member: it answers over its socket as its script says.

use std::io::IoSlice;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use vmm_pool::driver::DeviceOrdinal;
use vmm_pool::{ClassBytes, CopiedBytes, DeviceReport, PoolReport};

use crate::script::{Deed, Fault, GIB, RELEASE_WINDOW, Script};
use tenants::identity::MemberId;
use tenants::references::References;
use tenants::saving::SaveAccount;
use tenants::stepping::{Activity, StepOrder};
use tenants::transport::frame::encode;
use tenants::transport::{Connection, Listener, TransportError, poll_until};
use tenants::wire::{
    DeviceDelta, Drained, Failure, FailureKind, GiveUp, HostProgress, Idleness, Lending,
    MemberInfo, MemberState, MemberStats, Needed, Order, PauseTimes, Phase, PhaseAnswer,
    PhaseReport, Reply, Request, RoundEnd, SaveProgress, SaveStage, SaveStep, StageLeft,
    StageReport, StepOn, TakePhase, Window,
};

use super::{Line, STEP};

pub(super) struct Agent {
    pub(super) id: u64,
    pub(super) script: Script,
    pub(super) state: Arc<Mutex<MemberState>>,
    pub(super) log: Arc<Mutex<Vec<Line>>>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) written: AtomicU64,
    /// Of what it holds, out or in.
    pub(super) moved: AtomicU64,
    /// The connection of the coordinator that leads a pause or resume of it: orders that come over another are refused. Zero for none.
    pub(super) leader: AtomicU64,
    /// An answer that is late.
    pub(super) held_back: Mutex<Option<Reply>>,
}

impl Agent {
    /// Serves until told to stop, or until a fault ends the process.
    pub(super) fn serve(&self, listener: Listener) {
        let mut connections: Vec<(u64, Connection)> = Vec::new();
        let mut numbers = 1..;
        while !self.stop.load(Ordering::Relaxed) {
            let mut fds = vec![PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
            fds.extend(
                connections
                    .iter()
                    .map(|(_, connection)| PollFd::new(connection.as_fd(), PollFlags::POLLIN)),
            );
            poll_until(&mut fds, Instant::now() + STEP).unwrap();
            drop(fds);
            while let Some(connection) = listener.accept().unwrap() {
                connections.extend(numbers.next().map(|number| (number, connection)));
            }
            let mut alive = true;
            connections.retain_mut(|(number, connection)| {
                match connection.try_receive::<Request>() {
                    Ok(None) => true,
                    Ok(Some((request, _))) => {
                        alive = alive && self.answer(*number, connection, &request);
                        true
                    }
                    // Hung up on, or while the last answer was on its way.
                    Err(TransportError::Closed { .. } | TransportError::OutOfStep { .. }) => {
                        self.leads_no_more(*number);
                        false
                    }
                    Err(error) => panic!("{error}"),
                }
            });
            if !alive {
                return;
            }
        }
        listener.close().unwrap();
    }

    /// Does the coordinator of this connection lead from here on, until the last phase of its round?
    fn is_led_by(&self, number: u64, phase: Phase) -> bool {
        let leader = self.leader.load(Ordering::Relaxed);
        let leads = leader == 0 || leader == number || phase == Phase::Settle;
        if leads {
            self.leader.store(if phase.is_last() { 0 } else { number }, Ordering::Relaxed);
        }
        leads
    }

    fn leads_no_more(&self, number: u64) {
        if self.leader.load(Ordering::Relaxed) == number {
            self.leader.store(0, Ordering::Relaxed);
        }
    }

    /// False when the member dies of it.
    fn answer(&self, number: u64, connection: &mut Connection, request: &Request) -> bool {
        if let (Request::Stats, Some((meeting, number))) = (request, &self.script.stats_with) {
            let mut come = meeting.0.lock().unwrap();
            *come += 1;
            meeting.1.notify_all();
            let limit = Duration::from_secs(30);
            drop(meeting.1.wait_timeout_while(come, limit, |come| *come < *number).unwrap());
        }
        if let (Request::Step(step), Some(part)) = (request, &self.script.at_the_gate) {
            for activity in part.answers(step.step.order, step.step.calls) {
                let reply = Reply::Activity(Box::new(activity));
                connection.send(&reply, &[], Instant::now() + Duration::from_secs(1)).ok();
            }
            return true;
        }
        if matches!(request, Request::Phase(_))
            && let Some(reply) = self.held_back.lock().unwrap().take()
        {
            connection.send(&reply, &[], Instant::now() + Duration::from_secs(1)).ok();
        }
        let fault = match request {
            Request::Hello | Request::Withdraw(_) => self.script.hello,
            Request::Stats | Request::Count | Request::Idle(_) => self.script.stats,
            Request::Needs(_)
            | Request::Cut(_)
            | Request::Step(_)
            | Request::Host(_)
            | Request::Spill(_)
            | Request::Lent(_)
            | Request::Save(SaveStep::Begin { .. } | SaveStep::CallOff) => None,
            Request::AwaitConsent(_) => {
                self.log.lock().unwrap().push(Line::Consent(self.id));
                self.script.consent
            }
            Request::Phase(TakePhase { order, .. }) if !self.is_led_by(number, order.phase()) => {
                Some(Fault::Fail(FailureKind::WrongState))
            }
            Request::Phase(TakePhase { order, .. }) => {
                if let Order::Prepare { schedule, .. } = order {
                    self.log.lock().unwrap().push(Line::Schedule(self.id, *schedule));
                }
                let line = Line::Began(self.id, Deed::of(order));
                let mut log = self.log.lock().unwrap();
                let earlier = log.iter().filter(|before| **before == line).count();
                log.push(line);
                let is_due = self.script.fault_at.is_none_or(|at| at == earlier);
                self.script.faults.get(&Deed::of(order)).copied().filter(|_| is_due)
            }
            Request::GiveUp(GiveUp { why, .. }) => {
                self.log.lock().unwrap().push(Line::GivenUp(self.id, why.clone()));
                None
            }
            Request::FetchFds(_) => Some(Fault::WrongAnswer),
            Request::Save(SaveStep::WriteOn { .. }) => {
                let is_second = self.written.load(Ordering::Relaxed) > 0;
                self.script.save.filter(|_| is_second)
            }
        };
        let reply = match fault {
            None => self.good_reply(request),
            Some(Fault::Slow(delay_ms)) => {
                // Nothing arrives on an empty list: a wait without a sleep.
                poll_until(&mut [], Instant::now() + Duration::from_millis(delay_ms)).unwrap();
                self.good_reply(request)
            }
            Some(Fault::AfterBegan(id, phase)) => {
                self.wait_for(&Line::Began(id, phase));
                self.good_reply(request)
            }
            Some(Fault::AfterEnded(id, phase)) => {
                self.wait_for(&Line::Ended(id, phase));
                self.good_reply(request)
            }
            Some(Fault::Late) => {
                *self.held_back.lock().unwrap() = Some(self.good_reply(request));
                return true;
            }
            Some(Fault::Silent) => return true,
            Some(Fault::Die) => return false,
            Some(Fault::WrongAnswer) => no_fds(),
            Some(Fault::OtherPhase) => Reply::PhaseDone(Phase::Verify, PhaseAnswer::default()),
            Some(fault @ (Fault::Twice | Fault::Garbage | Fault::HalfAnswer | Fault::WithFd)) => {
                let frame = encode(&self.good_reply(request), 0).unwrap();
                let mut bytes = frame.clone();
                if fault == Fault::Twice {
                    bytes.extend(&frame);
                } else if fault == Fault::Garbage {
                    bytes = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
                } else if fault == Fault::HalfAnswer {
                    bytes.truncate(frame.len() / 2);
                }
                send_raw(connection, &bytes, fault == Fault::WithFd);
                return true;
            }
            Some(Fault::Fail(kind)) => {
                Reply::Failed(Failure { kind, message: format!("told to fail with {kind:?}") })
            }
        };
        // The asker may have hung up meanwhile, which is its right.
        connection.send(&reply, &[], Instant::now() + Duration::from_secs(1)).ok();
        true
    }

    /// Half a minute at most, and as long as the world is there.
    fn wait_for(&self, line: &Line) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.log.lock().unwrap().contains(line)
            && Instant::now() < deadline
            && !self.stop.load(Ordering::Relaxed)
        {
            // Nothing arrives on an empty list: a wait without a sleep.
            poll_until(&mut [], Instant::now() + Duration::from_millis(5)).unwrap();
        }
    }

    fn good_reply(&self, request: &Request) -> Reply {
        match request {
            Request::Hello => Reply::Member(self.info()),
            Request::Withdraw(_) => Reply::Told(RoundEnd::Open),
            Request::Stats => Reply::Stats(Box::new(MemberStats {
                member: self.info(),
                pool: self.pool(),
                copied: CopiedBytes::default(),
                pauses: 0,
                resumes: 0,
                last_pause: Vec::new(),
                last_resume: Vec::new(),
                pause_times: PauseTimes::default(),
                host: HostProgress::default(),
                idleness: Idleness::default(),
                lent: Vec::new(),
                communicators: Vec::new(),
                notes: Vec::new(),
            })),
            // No communicators: at a cut at any time.
            Request::Cut(_) => Reply::Cut(Box::default()),
            Request::Step(StepOn { step: StepOrder { order, .. }, .. }) => {
                Reply::Activity(Box::new(Activity {
                    order: *order,
                    is_idle: true,
                    ..Activity::default()
                }))
            }
            Request::Host(_) => Reply::Host(Box::default()),
            Request::Spill(_) => Reply::Spilled(Box::default()),
            Request::Count => Reply::Counts,
            Request::Idle(_) => Reply::Idleness(Idleness::default()),
            Request::AwaitConsent(_) => Reply::Consented,
            Request::Needs(_) => {
                let devices = vec![self.needed(); usize::from(self.script.holds_bytes > 0)];
                Reply::Needs(Needed { devices, largest_bytes: self.script.unit_bytes })
            }
            Request::Phase(TakePhase { order, .. }) => self.phase(order),
            Request::GiveUp(_) => Reply::Noted,
            Request::FetchFds(_) => no_fds(),
            Request::Lent(_) => {
                let partners = self.script.partner.into_iter().collect();
                Reply::Lent(Box::new(Lending { partners, ..Lending::default() }))
            }
            Request::Save(step) => self.save(step),
        }
    }

    /// Counts what this order moves of the one device. Returns the bytes of the order, and the bytes that are left
    /// then.
    fn moved(&self, order: &Order) -> (u64, u64) {
        let all = self.script.holds_bytes;
        let left = all - self.moved.load(Ordering::Relaxed);
        let all_at_most = |window: &Window| window.devices.iter().map(|(_, bytes)| *bytes).sum();
        let most: u64 = match order {
            Order::Release { window: Some(window), .. }
            | Order::Restore { window: Some(window), .. } => all_at_most(window),
            Order::Restore { .. } if self.moved.load(Ordering::Relaxed) == 0 => return (0, 0),
            Order::Release { .. } | Order::Restore { .. } => left,
            Order::CloseGate { .. } | Order::Verify | Order::Abort | Order::Activate => {
                self.moved.store(0, Ordering::Relaxed);
                return (all, all);
            }
            Order::Drain
            | Order::Prepare { .. }
            | Order::Freeze
            | Order::Thaw
            | Order::Create { .. }
            | Order::Import { .. }
            | Order::Settle => return (all, left),
        };
        // In units of what cannot be divided.
        let bytes = if most >= left {
            left
        } else {
            most / self.script.unit_bytes * self.script.unit_bytes
        };
        self.moved.fetch_add(bytes, Ordering::Relaxed);
        (bytes, left - bytes)
    }

    fn phase(&self, order: &Order) -> Reply {
        let phase = order.phase();
        let (bytes, left) = self.moved(order);
        let mut state = self.state.lock().unwrap();
        *state = match phase {
            Phase::CloseGate | Phase::Drain | Phase::Prepare => MemberState::Offloading,
            Phase::Release if Deed::of(order) == RELEASE_WINDOW => MemberState::Offloading,
            Phase::Release | Phase::Verify | Phase::Thaw => MemberState::Paused,
            Phase::Freeze => MemberState::Deep,
            Phase::Create | Phase::Restore | Phase::Import => MemberState::Restoring,
            Phase::Abort | Phase::Settle => match *state {
                MemberState::Restoring => MemberState::Paused,
                MemberState::Offloading => MemberState::Active,
                rests @ (MemberState::Active
                | MemberState::Paused
                | MemberState::Deep
                | MemberState::Faulted) => rests,
            },
            Phase::Activate => MemberState::Active,
        };
        self.log.lock().unwrap().push(Line::Ended(self.id, Deed::of(order)));
        let report = PhaseReport {
            elapsed_us: 1000 * self.id,
            driver_calls: 3,
            bytes,
            steps: Vec::new(),
            devices: vec![DeviceDelta { bytes, ..self.needed() }; usize::from(bytes > 0)],
            notes: Vec::new(),
            stays: Vec::new(),
            kept: None,
            stage: Some(StageReport {
                copied_bytes: bytes,
                left: if left == 0 { Vec::new() } else { vec![self.left(left)] },
            }),
        };
        let drained = (phase == Phase::Drain).then(|| {
            let lent = self.script.lent.into_iter().collect();
            let partners = self.script.partner.into_iter().collect();
            let references = References { lent, partners, ..References::default() };
            Box::new(Drained { host: self.script.host.clone(), references })
        });
        Reply::PhaseDone(phase, PhaseAnswer { report, drained })
    }

    /// Returns what the member has on its device, or needs there.
    fn needed(&self) -> DeviceDelta {
        DeviceDelta {
            device: DeviceOrdinal(0),
            uuid: self.script.uuid.to_owned(),
            bytes: self.script.holds_bytes,
            free_bytes: self.script.free_bytes,
            total_bytes: 80 * GIB,
        }
    }

    fn pool(&self) -> PoolReport {
        let is_active = *self.state.lock().unwrap() == MemberState::Active;
        let resident_bytes = if is_active { self.script.holds_bytes } else { 0 };
        let class = ClassBytes { resident_bytes, ..ClassBytes::default() };
        let device = DeviceReport {
            device: DeviceOrdinal(0),
            uuid: self.script.uuid.to_owned(),
            classes: vec![class],
            pinned: Vec::new(),
        };
        PoolReport { devices: vec![device], ..PoolReport::default() }
    }

    fn left(&self, bytes: u64) -> StageLeft {
        StageLeft {
            uuid: self.needed().uuid,
            bytes,
            smallest_bytes: self.script.unit_bytes.min(bytes),
        }
    }

    /// A thousand bytes a step, and no files.
    fn save(&self, step: &SaveStep) -> Reply {
        let saved_bytes = self.script.saved_bytes.unwrap_or(0);
        let stage = match step {
            SaveStep::Begin { .. } if self.script.saved_bytes.is_none() => SaveStage::Nothing,
            SaveStep::Begin { .. } => SaveStage::Writing,
            SaveStep::WriteOn { .. } => {
                let written = self.written.fetch_add(1000, Ordering::Relaxed) + 1000;
                if written >= saved_bytes {
                    SaveStage::Written { map: format!("process-{}.json", self.id) }
                } else {
                    SaveStage::Writing
                }
            }
            SaveStep::CallOff => {
                self.log.lock().unwrap().push(Line::CalledOff(self.id));
                SaveStage::CalledOff
            }
        };
        let written_bytes = self.written.load(Ordering::Relaxed).min(saved_bytes);
        let account = SaveAccount { saved_bytes, ..SaveAccount::default() };
        Reply::Saving(Box::new(SaveProgress { account, written_bytes, stage }))
    }

    fn info(&self) -> MemberInfo {
        MemberInfo {
            id: MemberId(self.id),
            // As in a pid namespace of its own: the kernel tells the other side a better one.
            pid: 1,
            family: None,
            class: tenants::class::Class::default(),
            weight: tenants::class::Weight::default(),
            queues: false,
            goes_deep: false,
            command: "python train.py".to_owned(),
            version: self.script.version.to_owned(),
            state: *self.state.lock().unwrap(),
            stands_without: None,
            stays: Vec::new(),
            held: false,
            in_round: false,
            nccl_waits: false,
            asked: None,
            tags: Vec::new(),
        }
    }
}

fn no_fds() -> Reply {
    Reply::Fds { count: 0, tags: Vec::new(), missing: Vec::new(), devices: Vec::new() }
}

/// Bytes as they are, in one piece.
fn send_raw(connection: &Connection, bytes: &[u8], with_fd: bool) {
    let null = std::fs::File::open("/dev/null").unwrap();
    let fds = [null.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&fds)];
    let control = if with_fd { &rights[..] } else { &[] };
    let socket = connection.as_fd().as_raw_fd();
    let data = [IoSlice::new(bytes)];
    let sent = sendmsg::<UnixAddr>(socket, &data, control, MsgFlags::MSG_NOSIGNAL, None);
    assert_eq!(sent, Ok(bytes.len()));
}
