//! The commands of a program about tenants, each as one value.
//!
//! Each function of the C interface makes one. Python writes it as JSON, such as
//! `{"pause": {"tenant": "train", "tags": ["kv"]}}`. The result is JSON too.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vmm_pool::PinnedBytes;
use vmm_pool::driver::Driver;
use vmm_pool::sync::lock;

use sublet_turns::{SwitchOptions, Switched, Turn};
use tenants::budget::{self, BudgetReport, Budgets, gpus};
use tenants::checkpoints::Checkpointer;
use tenants::coordinator::{
    Coordinator, LentMemory, Meanwhile, Options, Outcome, Trouble, staying,
};
use tenants::error_text::chain;
use tenants::identity::TenantName;
use tenants::keep;
use tenants::member::{AskingThread, Member};
use tenants::requests;
use tenants::run_dir::RunDir;
use tenants::scope::{Scope, TagNames};
use tenants::swap::{swap, swap_with_itself};
use tenants::wire::Action;

/// A tenant's name; none for the tenant of the requesting process.
type Name = Option<String>;

type Tags = BTreeSet<String>;

/// The longest wait for a turn, in milliseconds, if the command names none.
const TURN_WAIT_MS: u32 = 600_000;

/// A command about tenants. The functions of the same names in `sublet.h` describe each.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[expect(missing_docs, reason = "the header has the words")]
pub enum Command {
    Pause(Change),
    Resume(Change),
    /// A pause that every process of the tenant requests.
    PauseTogether {},
    /// A resume that every process of the tenant requests.
    ResumeTogether {},
    ResumeInTurn(Wait),
    Switch(Wait),
    Prepare(Wait),
    TurnBegin {
        wait_ms: u32,
    },
    /// A swap of two tenants. Without tags, a whole tenant is moved.
    Swap {
        tenant: Name,
        #[serde(default)]
        out_tags: Tags,
        to: Name,
        #[serde(default)]
        in_tags: Tags,
        timeout_ms: u32,
    },
    /// Changes a tenant's budgets, or shows them.
    Budget {
        tenant: Name,
        budgets: Option<String>,
    },
    Stats {
        tenant: Name,
    },
    /// The names of all tenants.
    Tenants {},
}

/// A pause or a resume, of a tenant or of tags.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Change {
    /// Of which tenant.
    pub tenant: Name,
    /// Only memory of these tags; of all tags if the list is empty.
    pub tags: Option<Tags>,
    /// Is the change limited to memory that the requesting process owns?
    pub is_own: bool,
    /// Does a pause leave memory that other tenants have open, and release the rest? Not for own tags.
    pub leave_lent: bool,
    /// The timeout of each phase, in milliseconds; 0 keeps the phases' own.
    pub timeout_ms: u32,
}

/// A tenant, and the longest wait for it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wait {
    /// Of which tenant.
    pub tenant: Name,
    /// The longest wait, in milliseconds.
    pub wait_ms: u32,
}

/// The process that gives the command.
#[derive(Debug)]
pub struct Asker<'a, D: Driver> {
    /// The directory in which it meets others.
    pub run_dir: fn() -> Result<RunDir, Trouble>,
    /// Its membership in its tenant.
    pub member: fn() -> Result<&'a Member<D>, Trouble>,
    /// Its tenant.
    pub tenant: fn() -> Result<TenantName, Trouble>,
    /// The longest wait until the other processes of the tenant make the same call.
    pub together_wait: Duration,
    /// Returns the value of [`SwitchOptions::checkpointer`].
    pub checkpointer: fn() -> Option<Arc<dyn Checkpointer>>,
    /// See [`SwitchOptions::asks`].
    pub asks: fn() -> bool,
    /// See [`Turn::begin`].
    pub is_paused: fn() -> bool,
    /// Turns that the process has begun and not ended.
    pub turns: &'a Mutex<Vec<Turn>>,
}

/// Runs `command`, and returns the report in JSON. Blocks.
///
/// # Errors
/// [`Trouble`].
pub fn run<D: Driver>(command: Command, asker: &Asker<'_, D>) -> Result<String, Trouble> {
    let done = match command {
        Command::Pause(change) => asker.change(change, Action::Pause)?,
        Command::Resume(change) => asker.change(change, Action::Resume)?,
        Command::PauseTogether {} => asker.act_together(Action::Pause)?,
        Command::ResumeTogether {} => asker.act_together(Action::Resume)?,
        Command::ResumeInTurn(Wait { tenant, wait_ms }) => {
            let ((tenant, run_dir), options) = (asker.place_of(tenant)?, asker.waits(wait_ms));
            queued(&sublet_turns::resume_in_turn(&run_dir, &tenant, &options, &mut |_| {})?)
        }
        Command::Switch(Wait { tenant, wait_ms }) => {
            let ((tenant, run_dir), options) = (asker.place_of(tenant)?, asker.waits(wait_ms));
            switched(&sublet_turns::switch(&run_dir, &tenant, &options, &mut |_| {})?)
        }
        Command::TurnBegin { wait_ms } => {
            let (tenant, run_dir) = asker.place_of(None)?;
            let options = asker.waits(if wait_ms == 0 { TURN_WAIT_MS } else { wait_ms });
            let (turn, done) = Turn::begin(&run_dir, &tenant, &options, asker.is_paused)?;
            lock(asker.turns).push(turn);
            switched(&done)
        }
        Command::Prepare(Wait { tenant, wait_ms }) => {
            let until = Instant::now() + millis(wait_ms);
            let report = keep::prepare(&asker.coordinator(tenant)?, Some(until), &mut |_| {})?;
            with_completeness(&report, report.is_complete())
        }
        Command::Swap { tenant: from, out_tags, to, in_tags, timeout_ms } => {
            let ((from, run_dir), (to, _)) = (asker.place_of(from)?, asker.place_of(to)?);
            if from == to {
                return Err(Trouble::Usage(swap_with_itself(&from)));
            }
            let asking = asker.asks_for(&from);
            let (timeout, meanwhile) = (timeout_of(timeout_ms), meanwhile(asking.is_some()));
            let half = |tenant, tags: Tags| {
                let scope = scope_of((!tags.is_empty()).then_some(tags));
                let options = Options { timeout, scope, meanwhile, ..Options::default() };
                let options = Options { room: Some(keep::room), ..options };
                Coordinator::new(run_dir.clone(), tenant, options)
            };
            let (mut from, mut to) = (half(from, out_tags), half(to, in_tags));
            let swap = swap(&mut from, &mut to, None, &mut |_| {})?;
            let [paused, resumed] = [&swap.paused, &swap.resumed].map(changed);
            json!({"paused": paused, "resumed": resumed, "wall_us": swap.wall_us})
        }
        Command::Budget { tenant, budgets: None } => {
            let coordinator = asker.coordinator(tenant)?;
            let none = || BudgetReport::none(coordinator.tenant());
            return text(&budget::budgets(&coordinator)?.unwrap_or_else(none));
        }
        Command::Budget { tenant, budgets: Some(budgets) } => {
            let budgets: Budgets = budgets.parse().map_err(usage)?;
            budgets.check(|| gpus::places(Path::new(gpus::NODE_GPUS)).len()).map_err(usage)?;
            let report = budget::change(&asker.coordinator(tenant)?, &budgets)?;
            with_completeness(&report, report.failures.is_empty())
        }
        Command::Stats { tenant } => {
            let coordinator = asker.coordinator(tenant)?;
            let stats = coordinator.stats().and_then(|it| budget::with_budgets(&coordinator, it));
            return text(&stats.map_err(usage)?);
        }
        Command::Tenants {} => {
            let tenants = (asker.run_dir)()?.live_tenants()?;
            json!(tenants.iter().map(TenantName::as_str).collect::<Vec<_>>())
        }
    };
    text(&done)
}

impl<D: Driver> Asker<'_, D> {
    fn tenant_of(&self, name: Name) -> Result<TenantName, Trouble> {
        name.map_or_else(self.tenant, |name| TenantName::new(&name).map_err(usage))
    }

    /// Returns the tenant of that name, and its run directory.
    fn place_of(&self, name: Name) -> Result<(TenantName, RunDir), Trouble> {
        Ok((self.tenant_of(name)?, (self.run_dir)()?))
    }

    fn coordinator(&self, name: Name) -> Result<Coordinator, Trouble> {
        let (tenant, run_dir) = self.place_of(name)?;
        Ok(Coordinator::new(run_dir, tenant, Options::default()))
    }

    fn waits(&self, wait_ms: u32) -> SwitchOptions {
        let (wait, checkpointer) = (millis(wait_ms), (self.checkpointer)());
        SwitchOptions { wait, checkpointer, asks: Some(self.asks), ..SwitchOptions::default() }
    }

    /// Marks this thread as the requester, if the tenant is the process's own, for as long as the value lives.
    fn asks_for(&self, tenant: &TenantName) -> Option<AskingThread<'_>> {
        let member = (self.member)().ok().filter(|member| member.presence().tenant() == tenant);
        member.map(|member| member.asking().begin())
    }

    fn act_together(&self, action: Action) -> Result<Value, Trouble> {
        // If nothing was ever allocated, there is nothing to pause, and no process waits for this one.
        let Ok(member) = (self.member)() else { return Ok(json!({"outcome": NOTHING})) };
        // Callers of ncclPause read only its code, so the message goes to the log.
        let done = requests::act_together(member, action, self.together_wait)
            .inspect_err(|error| tracing::warn!("{}", chain(error)))?;
        // If there is no outcome, another process has it.
        Ok(done.map_or_else(|| json!({"outcome": COMPLETED}), |outcome| changed(&outcome)))
    }

    fn change(&self, change: Change, action: Action) -> Result<Value, Trouble> {
        let Change { tenant: name, tags, is_own, leave_lent, timeout_ms } = change;
        let timeout = timeout_of(timeout_ms);
        if is_own {
            let member = (self.member)()?;
            let (tenant, own) = (self.tenant_of(name)?, member.presence().tenant());
            if tenant != *own {
                let message = format!("this process is of tenant '{own}', not of '{tenant}'");
                return Err(Trouble::Usage(message));
            }
            let tags = names_of(tags.unwrap_or_default());
            if let (true, 1..) = tags.names_nccl() {
                let message = "tag 'nccl' is NCCL's memory in all processes: name it in a call of its own, or with \
                               SUBLET_WHOSE_TENANT";
                return Err(Trouble::Usage(message.to_owned()));
            }
            return Ok(changed(&requests::act_for_own_tags(member, tags, action, timeout)?));
        }
        // In the caller's own tenant, possibly no process has GPU memory yet.
        let may_be_gone = name.is_none() && tags.is_none();
        let ((tenant, run_dir), scope) = (self.place_of(name)?, scope_of(tags));
        let by_name = action == Action::Pause && scope == Scope::Whole;
        let asking = self.asks_for(&tenant);
        let meanwhile = meanwhile(asking.is_some());
        let lent = if leave_lent { LentMemory::Leave } else { LentMemory::WaitFor };
        let options = Options { scope, meanwhile, lent, ..Options::within(timeout) };
        let act = || requests::act(&run_dir, &tenant, action, options);
        let done = if by_name { sublet_turns::by_name(&run_dir, &tenant, act) } else { act() };
        match done {
            Err(trouble) if may_be_gone && trouble.is_gone() => Ok(json!({"outcome": NOTHING})),
            done => done.map(|outcome| changed(&outcome)),
        }
    }
}

/// Values of `outcome` in a report.
const COMPLETED: &str = "completed";
const PARTIAL: &str = "partial";
const NOTHING: &str = "nothing";

fn usage(error: impl Error + 'static) -> Trouble {
    Trouble::Usage(chain(&error))
}

fn millis(ms: u32) -> Duration {
    Duration::from_millis(u64::from(ms))
}

fn timeout_of(ms: u32) -> Option<Duration> {
    (ms > 0).then(|| millis(ms))
}

/// Returns what processes do while their memory is paused by tag: at their own wish, or at another's.
fn meanwhile(is_own_wish: bool) -> Meanwhile {
    if is_own_wish { Meanwhile::RunOn } else { Meanwhile::AsAgreed }
}

fn names_of(tags: Tags) -> TagNames {
    if tags.is_empty() { TagNames::All } else { TagNames::Named(tags) }
}

fn scope_of(tags: Option<Tags>) -> Scope {
    tags.map_or(Scope::Whole, |tags| Scope::Tags { tags: names_of(tags), owner: None })
}

fn text(report: &impl Serialize) -> Result<String, Trouble> {
    serde_json::to_string(report).map_err(usage)
}

/// Returns the report of a switch.
fn switched(done: &Switched) -> Value {
    let changes: Vec<_> = done.changes.iter().map(|(_, outcome)| changed(outcome)).collect();
    let how = if done.had_them { "already" } else { COMPLETED };
    with_victims(json!({"outcome": how, "changes": changes}), done)
}

/// Returns the report of a resume that queued, with the paused tenants and the reasons.
fn queued(done: &Switched) -> Value {
    let resumed = done.changes.last().map(|(_, own)| own);
    with_victims(changed(resumed.unwrap_or(&Outcome::AlreadyActive)), done)
}

fn with_victims(mut report: Value, done: &Switched) -> Value {
    let paused: Vec<_> = done.victims.iter().map(TenantName::as_str).collect();
    report["paused"] = json!(paused);
    report["reasons"] = json!(done.reasons);
    report["unrecorded"] = json!(done.unrecorded);
    report
}

fn with_outcome(report: &impl Serialize, outcome: &str) -> Value {
    let mut report = serde_json::to_value(report).unwrap_or_default();
    report["outcome"] = json!(outcome);
    report
}

fn with_completeness(report: &impl Serialize, is_complete: bool) -> Value {
    with_outcome(report, if is_complete { COMPLETED } else { PARTIAL })
}

fn changed(outcome: &Outcome) -> Value {
    match outcome {
        Outcome::Completed(report) if report.is_partial() => {
            // Callers that read only the code would not notice.
            tracing::warn!("not wholly as asked: {}", report.remarks().join("; "));
            with_outcome(report, PARTIAL)
        }
        Outcome::Completed(report) => with_outcome(report, COMPLETED),
        Outcome::AlreadyPaused { stays } if !stays.is_empty() => {
            let stayed_bytes = PinnedBytes::total_bytes(stays);
            tracing::warn!("paused already: {}", staying(stays).collect::<Vec<_>>().join("; "));
            json!({"outcome": PARTIAL, "stayed_bytes": stayed_bytes, "stays": stays})
        }
        Outcome::AlreadyPaused { .. } | Outcome::AlreadyActive => json!({"outcome": "already"}),
    }
}
