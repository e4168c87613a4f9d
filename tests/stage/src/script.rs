//! The script of a member of a test: where it stands, what it holds, what it says, and where it misbehaves.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use tenants::coordinator::{Outcome, Report};
use tenants::host_memory::HostNeed;
use tenants::identity::MemberId;
use tenants::phase::Told;
use tenants::references::Partner;
use tenants::scope::Scope;
use tenants::stepping::{Activity, Calls};
use tenants::wire::{FailureKind, MemberState, Order, Phase, Window};

/// One GiB.
pub const GIB: u64 = 1 << 30;

/// The phases of a pause, in order.
pub const PAUSE: [Phase; 5] =
    [Phase::CloseGate, Phase::Drain, Phase::Prepare, Phase::Release, Phase::Verify];
/// The phases of a resume, in order.
pub const RESUME: [Phase; 4] = [Phase::Create, Phase::Restore, Phase::Import, Phase::Activate];

/// A member that runs, and does what it is told.
pub fn active() -> Script {
    Script::new(MemberState::Active)
}

/// A member that is paused, and does what it is told.
pub fn paused() -> Script {
    Script::new(MemberState::Paused)
}

/// The report of a pause or resume that was made.
///
/// # Panics
/// There was nothing to be done.
pub fn report(outcome: Outcome) -> Report {
    match outcome {
        Outcome::Completed(report) => *report,
        Outcome::AlreadyPaused { .. } | Outcome::AlreadyActive => panic!("{outcome:?}"),
    }
}

/// A phase, or one window of it, which is another thing to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Deed {
    /// All of it.
    All(Phase),
    /// One window of it.
    Window(Phase),
}

/// One window of a release.
pub const RELEASE_WINDOW: Deed = Deed::Window(Phase::Release);
/// One window of a restore.
pub const RESTORE_WINDOW: Deed = Deed::Window(Phase::Restore);

impl Deed {
    /// The deed that `order` asks for.
    pub fn of(order: &Order) -> Self {
        let (Order::Release { window, .. } | Order::Restore { window, .. }) = order else {
            return Self::All(order.phase());
        };
        if window.is_some() { Self::Window(order.phase()) } else { Self::All(order.phase()) }
    }

    /// Its phase.
    pub fn phase(self) -> Phase {
        let (Self::All(phase) | Self::Window(phase)) = self;
        phase
    }

    /// To do it of `scope`; a window is the first, and of nothing.
    pub fn order(self, scope: &Scope) -> Order {
        let window = matches!(self, Self::Window(_)).then(Window::default);
        self.phase().order(&Told { window, ..Told::new(scope, &[]) })
    }
}

impl From<Phase> for Deed {
    fn from(phase: Phase) -> Self {
        Self::All(phase)
    }
}

/// The act that a member does instead of its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Refuses.
    Fail(FailureKind),
    /// Ends, and answers nobody.
    Die,
    /// Does nothing, and says nothing.
    Silent,
    /// Answers after so many milliseconds.
    Slow(u64),
    /// Answers once that member has begun that phase.
    AfterBegan(u64, Deed),
    /// Answers once that member has ended that phase.
    AfterEnded(u64, Deed),
    /// Answers right before it answers to the next order.
    Late,
    /// Answers another question.
    WrongAnswer,
    /// Answers for another phase than the one that was requested.
    OtherPhase,
    /// Answers, and says the same once more.
    Twice,
    /// Sends what is no message.
    Garbage,
    /// Sends the first half of its answer, then nothing.
    HalfAnswer,
    /// Sends a descriptor with its answer.
    WithFd,
}

/// Behind the shut gates.
#[derive(Clone, Debug)]
pub enum AtTheGate {
    /// Its device is busy until the other is let make calls.
    WaitsForCalls(Arc<AtomicBool>),
    /// Has a thread that makes the calls it is let make, and never ends with them by itself.
    MakesCalls(Arc<AtomicBool>),
}

/// The number of members that have been asked, and the signal for those that wait for more.
pub type Meeting = Arc<(Mutex<usize>, Condvar)>;

/// See the head of this module.
#[derive(Clone, Debug)]
pub struct Script {
    /// The state that it begins in.
    pub state: MemberState,
    /// The version that it says it has.
    pub version: &'static str,
    /// Instead of these deeds.
    pub faults: HashMap<Deed, Fault>,
    /// Instead of consenting.
    pub consent: Option<Fault>,
    /// Instead of a greeting.
    pub hello: Option<Fault>,
    /// Instead of figures.
    pub stats: Option<Fault>,
    /// It says what it holds once so many as the number have been asked that, for at most half a minute.
    pub stats_with: Option<(Meeting, usize)>,
    /// Instead of writing on, the second time.
    pub save: Option<Fault>,
    /// The bytes that it has to write; none when it runs with all its memory.
    pub saved_bytes: Option<u64>,
    /// Its need for host memory, as it says when it is drained.
    pub host: HostNeed,
    /// Whom it has lent memory to, as it says when its devices are drained.
    pub lent: Option<MemberId>,
    /// With whom it says that it shares memory.
    pub partner: Option<Partner>,
    /// The bytes that it has on its one device, or needs there.
    pub holds_bytes: u64,
    /// Of that device.
    pub free_bytes: u64,
    /// That device's name.
    pub uuid: &'static str,
    /// Of its allocations.
    pub unit_bytes: u64,
    /// None when its device is idle and no thread waits.
    pub at_the_gate: Option<AtTheGate>,
    /// The number of the order for a phase that its fault is about, from 0; each order where that is none.
    pub fault_at: Option<usize>,
}

impl AtTheGate {
    /// Returns its answers to this order, and to those that it has not answered.
    pub fn answers(&self, order: u64, calls: Calls) -> Vec<Activity> {
        let idle = Activity { order, is_idle: true, ..Activity::default() };
        match self {
            Self::WaitsForCalls(are_made) => {
                vec![Activity { is_idle: are_made.load(Ordering::Relaxed), ..idle }]
            }
            Self::MakesCalls(are_made) if calls != Calls::None => {
                are_made.store(true, Ordering::Relaxed);
                Vec::new()
            }
            Self::MakesCalls(are_made) => {
                let waiting = Activity { waiting: 1, ready: 1, ..idle };
                let before = || Activity { order: order - 1, ..waiting.clone() };
                let owed = are_made.load(Ordering::Relaxed).then(before);
                owed.into_iter().chain([waiting]).collect()
            }
        }
    }
}

impl Script {
    /// One that does all that it is told, from `state` on.
    pub fn new(state: MemberState) -> Self {
        Self {
            state,
            version: "0.1.0",
            faults: HashMap::new(),
            consent: None,
            hello: None,
            stats: None,
            stats_with: None,
            save: None,
            saved_bytes: Some(3000),
            host: HostNeed::default(),
            lent: None,
            partner: None,
            holds_bytes: GIB,
            free_bytes: 5 * GIB,
            uuid: "gpu-a",
            unit_bytes: GIB / 64,
            at_the_gate: None,
            fault_at: None,
        }
    }

    /// The same, but for `deed`.
    #[must_use]
    pub fn with(mut self, deed: impl Into<Deed>, fault: Fault) -> Self {
        self.faults.insert(deed.into(), fault);
        self
    }

    /// Is there an answer that nobody gets in time?
    pub fn is_ever_silent(&self) -> bool {
        let others = [self.consent, self.hello, self.stats, self.save];
        let mut all = self.faults.values().copied().chain(others.into_iter().flatten());
        all.any(|fault| matches!(fault, Fault::Silent | Fault::HalfAnswer | Fault::Late))
    }
}
