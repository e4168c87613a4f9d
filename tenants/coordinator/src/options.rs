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

/// The options of a coordinator: the time limits of its waits, and its rules.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a wish of its own")]
pub struct Options {
    /// The time limit of each phase that prepares, and the least time limit of the greeting; none for the phases' defaults
    /// ([`Options::phase_timeout`]).
    pub timeout: Option<Duration>,
    /// The least time limit of phases that finish or undo an action: a slow member is not lost there.
    pub finish_timeout: Duration,
    /// The time limit for the ranks to reach a common cut before a pause, without a `timeout`.
    pub cut_timeout: Duration,
    /// The time for the answer to arrive, in addition to a phase's timeout.
    pub reply_margin: Duration,
    /// The time limit of a connection, and of the answer to a simple question.
    pub contact_timeout: Duration,
    /// The time limit for another coordinator of the tenant to finish.
    pub lock_timeout: Duration,
    /// If given: do nothing until every member's application has requested the action too, for at most this long.
    pub consent: Option<Duration>,
    /// Does a resume ask every member for the needed and the free memory before it creates anything? For repeated tries: a try
    /// that cannot succeed then uses no memory of others even for a moment.
    pub look_first: bool,
    /// The rule of a resume for memory that was imported from processes that have ended.
    pub lost_imports: LostImports,
    /// Calls the action off when it is raised before the point of no return.
    pub interrupt: Option<Interrupt>,
    /// Does a pause give up on a tenant if a process for which others wait is itself waiting for device memory? Otherwise the
    /// pause waits for that process too, as long as for the cut.
    pub passes_by_memory_waits: bool,
    /// Does a pause release memory while the rest is still saved, even if that does not pay? Its point of no return then comes
    /// before it saves. A pause for which it pays does so anyway.
    pub releases_early: bool,
    /// The treatment of memory that other tenants have open, in a pause. A pause that takes contexts too always waits.
    pub lent: LentMemory,
    /// Does a pause take the processes' contexts too, with all that the driver keeps of them on the devices?
    pub is_deep: bool,
    /// Access to the processes' contexts, for a deep pause and for its resume. Without it both are refused.
    pub contexts: Option<Arc<dyn Contexts>>,
    /// Makes the room in host memory for one pause that lacks it. Without it such a pause is refused.
    pub room: Option<fn() -> Box<dyn MakesRoom>>,
    /// The memory to pause or resume.
    pub scope: Scope,
    /// The members that take part.
    pub takes_part: TakesPart,
    /// The behaviour of processes while a pause by tag lasts.
    pub meanwhile: Meanwhile,
}

/// Makes room in host memory for one pause that lacks it, between two tries, when all processes of its tenant run again.
pub trait MakesRoom: Debug {
    /// Makes tenants other than `tenant` return the host memory that is `short`. True if some was returned, and the same pause
    /// may succeed now. Blocks for a bounded time.
    fn make(
        &mut self,
        run_dir: &RunDir,
        tenant: &TenantName,
        options: &Options,
        short: &HostShortage,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> bool;

    /// The account of this work, for the report of the pause.
    fn notes(&self) -> Vec<String>;
}

/// The behaviour of a tenant's processes while some of their memory is released by tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Meanwhile {
    /// They run on: the tenant itself requested the pause.
    #[default]
    RunOn,
    /// They run on if each of them has agreed to run without these tags. Otherwise all stop, as in a whole pause.
    AsAgreed,
}

/// The treatment of memory that other tenants have open when its tenant is paused.
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
    /// This one alone, while others may do the same. For memory that no other process holds, of a process whose peers run on.
    /// No rank is brought to a cut, so the launched work of the process must be able to end without further launches of its
    /// own.
    Alone(MemberId),
}

/// The treatment of memory that was imported from a process that ended while its tenant was paused. Such memory cannot be
/// restored: its contents ended with that process.
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
    /// The default options, with this time limit for each phase and for the wait for the tenant's lock.
    pub fn within(timeout: Option<Duration>) -> Self {
        let usual = Self::default();
        Self { timeout, lock_timeout: timeout.unwrap_or(usual.lock_timeout), ..usual }
    }

    /// Returns the time within which the ranks must reach a common cut.
    pub fn cut_timeout(&self) -> Duration {
        self.timeout.unwrap_or(self.cut_timeout)
    }

    /// Returns the time within which members must finish `phase`.
    pub fn phase_timeout(&self, phase: Phase) -> Duration {
        let timeout = self.timeout.unwrap_or_else(|| phase.timeout());
        if phase.stage() == Stage::Prepare { timeout } else { timeout.max(self.finish_timeout) }
    }

    /// Does a pause wait for other tenants that have memory open?
    pub(super) fn waits_for_borrowers(&self) -> bool {
        self.lent == LentMemory::WaitFor || self.is_deep
    }

    /// Has a caller requested to call the action off?
    pub fn is_called_off(&self) -> bool {
        self.interrupt.as_ref().is_some_and(Interrupt::is_raised)
    }

    /// Waits for `rest`, or until the action is called off.
    pub fn rest(&self, rest: Duration) {
        match &self.interrupt {
            Some(interrupt) => interrupt.wait(rest),
            None => pause_thread(rest),
        }
    }
}
