//! The options of a coordinator.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use super::contexts::Contexts;
use super::interrupt::Interrupt;
use super::report::Event;
use sublet_protocol::host_memory::HostShortage;
use sublet_protocol::identity::{MemberId, TenantName};
use sublet_protocol::run_dir::{RunDir, pause_thread};
use sublet_protocol::wire::Phase;
use sublet_protocol::{phase::Stage, scope::Scope};

/// The options of a coordinator: how long it waits and for what, and how it acts.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a wish of its own")]
pub struct Options {
    /// For each phase that prepares, and at least that for the greeting; none for their own defaults
    /// ([`Options::phase_timeout`]).
    pub timeout: Option<Duration>,
    /// At least, for phases that finish or undo what was begun: one that is slow there is not lost.
    pub finish_timeout: Duration,
    /// For the ranks to come to a common cut before a pause, when there is no `timeout`.
    pub cut_timeout: Duration,
    /// Beyond a phase's timeout, for the answer to arrive.
    pub reply_margin: Duration,
    /// For a connection and for the answer to a plain question.
    pub contact_timeout: Duration,
    /// For another coordinator of the tenant to finish.
    pub lock_timeout: Duration,
    /// When given, do nothing until every member's application has requested the action too, for at most
    /// this long.
    pub consent: Option<Duration>,
    /// Before a resume creates anything, ask every member what is needed and free. For trying again and
    /// again: one that cannot succeed then takes no memory from others even for a moment.
    pub look_first: bool,
    /// The rule of a resume for memory that was imported from processes that have ended.
    pub lost_imports: LostImports,
    /// Calls the action off when it is raised before the point of no return.
    pub interrupt: Option<Interrupt>,
    /// Does a pause give a tenant up, of which a process that others wait for waits for device memory itself? Else it waits for that too, for as
    /// long as for the cut.
    pub passes_by_memory_waits: bool,
    /// Does a pause give memory back while the rest is still saved, also where that does not pay? Its point of no return is before
    /// it saves, then. A pause for which it pays does so anyway.
    pub releases_early: bool,
    /// The fate of memory that other tenants have open, in a pause. One that takes contexts too waits in any case.
    pub lent: LentMemory,
    /// Does a pause take the processes' contexts too, with all that the driver keeps of them on the devices?
    pub is_deep: bool,
    /// The way to the processes' contexts, for a pause that takes them and for the way back. Without it both are refused.
    pub contexts: Option<Arc<dyn Contexts>>,
    /// Makes the room in host memory for one pause that lacks it. Without it such a pause is refused.
    pub room: Option<fn() -> Box<dyn MakesRoom>>,
    /// The memory that the action is about.
    pub scope: Scope,
    /// The members that take part.
    pub takes_part: TakesPart,
    /// The conduct of processes while a pause by tag lasts.
    pub meanwhile: Meanwhile,
}

/// Room in host memory for one pause that has none. It is made between two tries, when all processes of its tenant run again.
pub trait MakesRoom: Debug {
    /// Has other tenants than `tenant` give back what is `short`. True when some was given, and the same pause may succeed
    /// now. Blocks for a bounded time.
    fn make(
        &mut self,
        run_dir: &RunDir,
        tenant: &TenantName,
        options: &Options,
        short: &HostShortage,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> bool;

    /// An account of it, for the report of the pause.
    fn notes(&self) -> Vec<String>;
}

/// The conduct of a tenant's processes while memory of theirs is away by tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Meanwhile {
    /// They run on: the pause is their own wish.
    #[default]
    RunOn,
    /// They run on where each of them has agreed to run without these tags. Else all stand still, as in a whole pause.
    AsAgreed,
}

/// The fate of memory that other tenants have open when its tenant is paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LentMemory {
    /// The pause waits until they close it, and is refused in the end.
    #[default]
    WaitFor,
    /// It stays on its devices, counted, until the next pause after they have closed it. The rest leaves.
    Leave,
}

/// The members of a tenant that take part in a pause or resume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TakesPart {
    /// All.
    #[default]
    Everybody,
    /// This one alone, while others do the same. For memory that no other holds, of a process whose
    /// peers run on: nobody is brought to a cut, so what it has launched must be able to end without more
    /// launches of its own.
    Alone(MemberId),
}

/// The fate of memory that was imported from a process that ended while its tenant was paused. Such memory cannot come
/// back: its contents were that process's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LostImports {
    /// The resume is refused, and the tenant stays paused.
    #[default]
    Refuse,
    /// The resume goes on without it. Its addresses stay reserved and unmapped: a kernel that touches
    /// them fails with an illegal address, which ends the use of its context.
    LeaveOut,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: None,
            finish_timeout: Duration::from_mins(1),
            cut_timeout: Duration::from_secs(30),
            reply_margin: Duration::from_secs(2),
            contact_timeout: Duration::from_secs(5),
            lock_timeout: Duration::from_secs(10),
            consent: None,
            look_first: false,
            lost_imports: LostImports::default(),
            interrupt: None,
            passes_by_memory_waits: false,
            releases_early: false,
            lent: LentMemory::WaitFor,
            is_deep: false,
            contexts: None,
            room: None,
            scope: Scope::Whole,
            takes_part: TakesPart::Everybody,
            meanwhile: Meanwhile::RunOn,
        }
    }
}

impl Options {
    /// The usual ones, but that a phase, and the wait for the tenant's lock, may take so long.
    pub fn within(timeout: Option<Duration>) -> Self {
        let usual = Self::default();
        Self { timeout, lock_timeout: timeout.unwrap_or(usual.lock_timeout), ..usual }
    }

    /// Returns the time that the ranks may take to come to a common cut.
    pub fn cut_timeout(&self) -> Duration {
        self.timeout.unwrap_or(self.cut_timeout)
    }

    /// Returns the time that members may take for `phase`.
    pub fn phase_timeout(&self, phase: Phase) -> Duration {
        let timeout = self.timeout.unwrap_or_else(|| phase.timeout());
        if phase.stage() == Stage::Prepare { timeout } else { timeout.max(self.finish_timeout) }
    }

    /// Does a pause wait for other tenants that have memory open?
    pub(super) fn waits_for_borrowers(&self) -> bool {
        self.lent == LentMemory::WaitFor || self.is_deep
    }

    /// Does somebody want it called off?
    pub fn is_called_off(&self) -> bool {
        self.interrupt.as_ref().is_some_and(Interrupt::is_raised)
    }

    /// Waits for as long as `rest`, or until it is called off.
    pub fn rest(&self, rest: Duration) {
        match &self.interrupt {
            Some(interrupt) => interrupt.wait(rest),
            None => pause_thread(rest),
        }
    }
}
