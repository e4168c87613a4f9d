//! The thread that resumes a tenant of the queue after it was paused for another tenant. If its settings say so, the thread also
//! removes its contexts after it has rested for a while.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_pool::driver::Driver;

use super::SwitchOptions;
use super::acting::to_depth;
use super::gather::Displaced;
use super::queue::{CallsOff, Queue};
use super::turn::{AFTER_FAILURE, AFTER_FAILURE_MAX, KEPT_EVERY};
use crate::decision::is_due;
use crate::decision::scene::Wish;
use tenants::error_text::chain;
use tenants::member::Member;
use tenants::wire::MemberState;

/// The interval at which a paused process checks whether one of its calls waits.
const LOOK: Duration = Duration::from_millis(20);
/// The time for which the thread rests while the process neither runs nor is paused.
const ON_ITS_WAY: Duration = Duration::from_millis(100);
/// The interval at which a running process checks whether it still runs. It is also notified.
const REST: Duration = Duration::from_hours(1);

/// Starts a thread that resumes the tenant of `member` after it was paused for another tenant. Once a call of this process waits
/// for its memory, the thread queues for the GPUs. A tenant that was paused by name stays paused. A tenant without a waiting call
/// leaves the GPUs to others. If the tenant's settings say so, its contexts leave while it rests
/// ([`tenants::class::TurnSettings::deep`]).
pub fn come_back_by_itself<D: Driver>(member: &Arc<Member<D>>) {
    let (watched, after_panic) = (Arc::clone(member), Arc::clone(member));
    let again = move |text: &str| {
        // The thread that resumes this tenant at its turn has failed, and starts again. The job runs on. This is a
        // fault of Sublet.
        after_panic.notes().add(format!(
            "Sublet failed inside, watching for its turn ({text}), and begins again; report this"
        ));
        after_panic.lifecycle().rest(AFTER_FAILURE_MAX);
        come_back_by_itself(&after_panic);
    };
    let thread = vmm_pool::threads::spawn("sublet-back", move || watch(&watched), again);
    if let Err(error) = thread {
        // The system gave the process no thread that resumes the tenant at its turn. The job runs on. If another
        // tenant has it paused, run `sublet resume TENANT`. Raise the limit of threads (`ulimit -u`) for the next
        // start.
        member.notes().add(format!(
            "nobody brings this tenant back when others have it paused for theirs: no thread ({error})"
        ));
    }
}

fn watch<D: Driver>(member: &Member<D>) {
    let is_paused = || member.lifecycle().state().is_away();
    let options = || SwitchOptions {
        checkpointer: (member.config().checkpointer)(),
        ..SwitchOptions::default()
    };
    let mut depth = Sinking { after_failure: AFTER_FAILURE, not_before: None };
    let mut after_failure = AFTER_FAILURE;
    let presence = member.presence();
    let (run_dir, tenant) = (presence.run_dir(), presence.tenant());
    // Known since the pause, and checked now and then: the run directory may be removed before a call of this process waits.
    let (mut away, mut look_at) = (Displaced::default(), Instant::now());
    while !presence.has_left() {
        member.lifecycle().wait_while_active(REST);
        if !is_paused() {
            // It is being paused or resumed, or it has faulted.
            (away, look_at) = (Displaced::default(), Instant::now());
            member.lifecycle().rest(ON_ITS_WAY);
            continue;
        }
        let wants_back = member.config().turns.queues && member.has_waiting_calls();
        let is_away = (wants_back || Instant::now() >= look_at) && {
            look_at = Instant::now() + KEPT_EVERY;
            away.look(run_dir, tenant)
        };
        if !wants_back || !is_away {
            depth.look(member);
            member.lifecycle().rest(LOOK);
            continue;
        }
        let is_over = || !is_paused() || presence.has_left();
        let queue =
            Queue::enter(run_dir, tenant, Wish::Back, Duration::MAX, CallsOff::when(&is_over));
        let back = queue.and_then(|mut queue| {
            queue.displaced = away;
            queue.wait_and_go(&options(), &is_over, &mut |_| {})
        });
        if let Err(error) = back
            && is_paused()
        {
            tracing::info!(%tenant, %error, "the tenant was not brought back yet");
            member.lifecycle().rest(after_failure);
            after_failure = (after_failure * 2).min(AFTER_FAILURE_MAX);
        } else {
            after_failure = AFTER_FAILURE;
        }
    }
}

/// Removes the contexts of this process's tenant after it has rested for the time of its settings.
struct Sinking {
    after_failure: Duration,
    not_before: Option<Instant>,
}

impl Sinking {
    fn look<D: Driver>(&mut self, member: &Member<D>) {
        let (state, rested) = member.lifecycle().since();
        let is_early = self.not_before.is_some_and(|not_before| Instant::now() < not_before);
        let is_whole = member.info().stands_without.is_none();
        let is_due =
            state == MemberState::Paused && is_whole && is_due(rested, member.config().turns.deep);
        if !is_due || is_early {
            return;
        }
        let failed = if is_first(member) { sink(member).err() } else { None };
        self.after_failure = if failed.is_some() {
            (self.after_failure * 2).min(AFTER_FAILURE_MAX)
        } else {
            AFTER_FAILURE
        };
        self.not_before = Some(Instant::now() + self.after_failure);
        if let Some(why) = failed {
            // The settings want a deep pause for the turns of other tenants (`SUBLET_TURNS=deep`), and the driver
            // cannot do one here. The tenant is paused with its CUDA contexts on the GPUs. The reason follows.
            member.notes().add(format!("its contexts stay on the GPUs while it rests: {why}"));
        }
    }
}

/// Is this the process that acts for all processes of its tenant?
pub(super) fn is_first<D: Driver>(member: &Member<D>) -> bool {
    let presence = member.presence();
    let dir = presence.run_dir().existing_tenant(presence.tenant()).ok().flatten();
    dir.is_some_and(|dir| dir.pids().first() == Some(&std::process::id()))
}

fn sink<D: Driver>(member: &Member<D>) -> Result<(), String> {
    let checkpointer = (member.config().checkpointer)();
    let options = SwitchOptions { checkpointer, ..SwitchOptions::default() };
    let (run_dir, tenant) = (member.presence().run_dir(), member.presence().tenant());
    let mut coordinator = to_depth(run_dir, tenant, &options, true);
    // It is no failure if the tenant was resumed, or if another process was faster.
    let outcome = coordinator.deepen(&mut |_| {}).map_err(|error| chain(&error))?;
    outcome.not_deep().map_or(Ok(()), Err)
}
