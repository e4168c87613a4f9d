//! A progress line on the terminal for commands that take longer than a second: the step, or the bytes copied so far.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tenants::coordinator::{Coordinator, Event, Holdings, Options, Step, TenantStats, Who};
use tenants::error_text::plain;
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::wire::MemberState;
use vmm_pool::CopiedBytes;

use crate::args::ShowArgs;
use crate::{output, signals, units};

const QUIET_TIME: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(100);
/// The time between two looks at the bytes that processes have copied.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The timeout of an answer. Processes answer in milliseconds, and the command's end waits no longer than this.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Shows the step of the coordinator. Shows nothing if standard error is no terminal, or if the command prints a document for
/// programs.
#[derive(Debug)]
pub(crate) struct Progress {
    shown: Arc<Shown>,
    done: usize,
    members: usize,
    /// Was it reported that the pause or resume cannot be called off any more?
    goes_on: bool,
    /// Wakes and ends the thread that shows the line after [`QUIET_TIME`].
    shower: Option<(Sender<()>, JoinHandle<()>)>,
}

/// The line, which two threads write.
#[derive(Debug)]
struct Shown {
    bar: ProgressBar,
    texts: Mutex<Texts>,
}

#[derive(Debug, Default)]
struct Texts {
    /// The last message of the coordinator.
    step: String,
    /// The progress of the copies, which says more than `step`; empty while nothing is copied.
    copies: String,
    /// The tenants whose pause or resume is under way.
    tenants: BTreeSet<TenantName>,
}

impl Shown {
    fn texts(&self) -> MutexGuard<'_, Texts> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Texts)) {
        let message = {
            let mut texts = self.texts();
            change(&mut texts);
            if texts.copies.is_empty() { texts.step.clone() } else { texts.copies.clone() }
        };
        self.bar.set_message(plain(&message));
    }
}

impl Progress {
    /// Starts the line of a command on tenants of `run_dir`.
    pub(crate) fn start(show: ShowArgs, run_dir: &RunDir) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let is_shown = !show.json && std::io::stderr().is_terminal();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
            bar.set_style(style);
        }
        let shown = Arc::new(Shown { bar, texts: Mutex::default() });
        let shower = is_shown.then(|| show_later(Arc::clone(&shown), run_dir.clone()));
        Self { shown, done: 0, members: 0, goes_on: false, shower }
    }

    pub(crate) fn note(&mut self, event: &Event<'_>) {
        match event {
            Event::StepStarted { tenant, step, members } => {
                if step.is_commit() {
                    signals::past_recall();
                }
                self.done = 0;
                self.members = *members;
                self.shown.change(|texts| {
                    texts.step = step_line(tenant.as_str(), *step, 0, *members);
                    texts.tenants.insert((*tenant).clone());
                });
            }
            Event::MemberDone { step, .. } => {
                self.done += 1;
                let text = format!("{step}: {} of {} processes", self.done, self.members);
                self.say(text);
            }
            // The report lists what was cleaned up.
            Event::StepDone { .. } | Event::StaleRemoved { .. } => {}
            Event::WaitingForCut { who, laggard, others } => {
                let more =
                    if *others > 0 { format!(" (and {others} more)") } else { String::new() };
                self.say(format!("waiting for a cut: {who}, {laggard}{more}"));
            }
            Event::WaitingForDevices { who, activity, others } => {
                let more =
                    if *others > 0 { format!(" (and {others} more)") } else { String::new() };
                self.say(format!("waiting for the devices of {who}: {activity}{more}"));
            }
            Event::GoingOn if self.goes_on => {}
            Event::GoingOn => {
                self.goes_on = true;
                self.warn(
                    "past the point of no return: it will finish; Ctrl-C again leaves this command",
                );
            }
            Event::RollingBack { failures: [] } => {
                self.warn(
                    "cancelling, and undoing what was done; Ctrl-C again leaves this command",
                );
            }
            Event::RollingBack { failures } => {
                let why = failures.first().map(ToString::to_string);
                self.say(format!("going back: {}", why.unwrap_or_default()));
            }
            Event::Recovering { who } => {
                self.warn(&format!(
                    "an earlier pause or resume was left half done in {who}; putting it right first"
                ));
            }
        }
    }

    /// Shows `text` until the next event.
    pub(crate) fn say(&self, text: String) {
        self.shown.change(|texts| texts.step = text);
    }

    /// Prints a message that a person should read even if standard error is a file.
    pub(crate) fn tell(&self, message: &str) {
        self.warn(message);
    }

    fn warn(&self, message: &str) {
        self.shown.bar.suspend(|| output::complain(message));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.shower.take() {
            drop(stop);
            // The thread only waits, queries and draws. If it has failed, only the line is missing.
            thread.join().ok();
        }
        self.shown.bar.finish_and_clear();
    }
}

fn show_later(shown: Arc<Shown>, run_dir: RunDir) -> (Sender<()>, JoinHandle<()>) {
    let (stop, stopped) = channel();
    let goes_on =
        |stopped: &Receiver<()>, time| stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
    let thread = std::thread::spawn(move || {
        if !goes_on(&stopped, QUIET_TIME) {
            return;
        }
        shown.bar.set_draw_target(ProgressDrawTarget::stderr());
        shown.bar.enable_steady_tick(TICK);
        let mut pace = Pace::default();
        loop {
            let tenants = shown.texts().tenants.clone();
            let moves = look(&run_dir, tenants);
            let left = pace.left(Instant::now(), &moves);
            shown.change(|texts| texts.copies = copies_line(&moves, left));
            if !goes_on(&stopped, LOOK_EVERY) {
                return;
            }
        }
    });
    (stop, thread)
}

/// The copies of one tenant, of all its processes together.
#[derive(Debug, PartialEq, Eq)]
struct Move {
    tenant: String,
    is_pause: bool,
    copied: CopiedBytes,
}

/// Queries the processes of `tenants` on new connections, because those of the coordinator are busy.
fn look(run_dir: &RunDir, tenants: BTreeSet<TenantName>) -> Vec<Move> {
    let options = || Options { contact_timeout: ANSWER_TIMEOUT, ..Options::default() };
    let coordinator = |tenant| Coordinator::new(run_dir.clone(), tenant, options());
    let coordinators: Vec<_> = tenants.into_iter().map(coordinator).collect();
    let all = Holdings::of_all(&coordinators.iter().collect::<Vec<_>>());
    all.into_iter().filter_map(|holdings| move_of(&holdings.stats.ok()?)).collect()
}

/// Returns the copies of one tenant; none if it copies nothing.
fn move_of(stats: &TenantStats) -> Option<Move> {
    let each = || stats.members.iter().map(|member| member.copied);
    let copied = CopiedBytes {
        done_bytes: each().map(|copied| copied.done_bytes).sum(),
        of_bytes: each().map(|copied| copied.of_bytes).sum(),
    };
    let is_pause =
        stats.members.iter().any(|process| process.member.state == MemberState::Offloading);
    (copied.of_bytes > 0).then(|| Move { tenant: stats.tenant.clone(), is_pause, copied })
}

/// Returns a line such as "pausing train: 12.4 of 48 GiB, 11 s left".
fn copies_line(moves: &[Move], left: Option<Duration>) -> String {
    let each = moves.iter().map(|Move { tenant, is_pause, copied }| {
        let verb = if *is_pause { "pausing" } else { "resuming" };
        let [done, of] = [copied.done_bytes, copied.of_bytes].map(units::bytes);
        let (number, unit) = done.rsplit_once(' ').unwrap_or((&done, ""));
        match copied.done_bytes {
            // Copies to a GPU are all queued, and counted together.
            0 => format!("{verb} {tenant}: {of}"),
            _ if of.ends_with(&format!(" {unit}")) => format!("{verb} {tenant}: {number} of {of}"),
            _ => format!("{verb} {tenant}: {done} of {of}"),
        }
    });
    let each: Vec<_> = each.collect();
    let left = left.map(|left| format!(", {} s left", left.as_secs_f64().ceil()));
    each.join("; ") + &left.unwrap_or_default()
}

/// The speed of the copies, since the first bytes were seen.
#[derive(Debug, Default)]
struct Pace(Option<(Instant, u64)>);

impl Pace {
    /// Returns the time for the rest at the speed so far; none before the first bytes.
    fn left(&mut self, now: Instant, moves: &[Move]) -> Option<Duration> {
        let done_bytes: u64 = moves.iter().map(|one| one.copied.done_bytes).sum();
        let of_bytes: u64 = moves.iter().map(|one| one.copied.of_bytes).sum();
        if done_bytes == 0 {
            self.0 = None;
            return None;
        }
        let (began, begun_bytes) = *self.0.get_or_insert((now, done_bytes));
        let since_bytes = done_bytes.checked_sub(begun_bytes).filter(|bytes| *bytes > 0)?;
        #[expect(clippy::cast_precision_loss, reason = "shown in whole seconds")]
        let share = (of_bytes - done_bytes) as f64 / since_bytes as f64;
        Some(now.duration_since(began).mul_f64(share))
    }
}

/// Returns the line of a command whose bytes are `what`: of all, and of each process. Each process has its name, the bytes done
/// and the total.
pub(crate) fn bytes_line(
    tenant: &TenantName,
    what: &str,
    each: impl Iterator<Item = (Who, u64, u64)> + Clone,
) -> String {
    let done = units::bytes(each.clone().map(|(_, done, _)| done).sum());
    let all = units::bytes(each.clone().map(|(_, _, all)| all).sum());
    let each: Vec<_> = each.map(|(who, done, _)| format!("{who} {}", units::bytes(done))).collect();
    format!("{tenant}: {done} of {all} {what} ({})", each.join(", "))
}

fn step_line(tenant: &str, step: Step, done: usize, members: usize) -> String {
    format!("{tenant}: {step}: {done} of {members} processes")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn moving(tenant: &str, is_pause: bool, done_bytes: u64, of_bytes: u64) -> Move {
        Move { tenant: tenant.to_owned(), is_pause, copied: CopiedBytes { done_bytes, of_bytes } }
    }

    #[test]
    fn the_line_says_how_much_is_copied_and_how_long_the_rest_takes() {
        let began = Instant::now();
        let mut pace = Pace::default();
        let mut line = |seconds, moves: &[Move]| {
            let left = pace.left(began + Duration::from_secs(seconds), moves);
            copies_line(moves, left)
        };
        assert_eq!(line(0, &[]), "");
        assert_eq!(line(1, &[moving("train", true, 0, 48 * GIB)]), "pausing train: 48 GiB");
        let first = [moving("train", true, GIB / 2, 48 * GIB)];
        assert_eq!(line(2, &first), "pausing train: 512 MiB of 48 GiB");
        let later = [moving("train", true, GIB / 2 + 10 * GIB, 48 * GIB)];
        assert_eq!(line(12, &later), "pausing train: 10.5 of 48 GiB, 38 s left");
        // What undoes it copies nothing.
        assert_eq!(line(13, &[]), "");
        let swap = [moving("infer", false, 4 * GIB, 8 * GIB), moving("train", true, GIB, 2 * GIB)];
        let text = "resuming infer: 4 of 8 GiB; pausing train: 1 of 2 GiB";
        assert_eq!(line(14, &swap), text);
    }

    #[test]
    fn processes_of_a_tenant_count_together() {
        let process = |state, done_bytes, of_bytes| {
            let copied = CopiedBytes { done_bytes, of_bytes };
            tenants::wire::MemberStats { copied, ..crate::ps::tests::member(1, state) }
        };
        let of = |members| {
            let tenant = "train".to_owned();
            move_of(&TenantStats { tenant, members, budgets: Vec::new(), failures: Vec::new() })
        };
        assert_eq!(of(vec![process(MemberState::Active, 0, 0)]), None);
        let two = vec![process(MemberState::Offloading, 1, 4), process(MemberState::Paused, 0, 0)];
        assert_eq!(of(two), Some(moving("train", true, 1, 4)));
        let two =
            vec![process(MemberState::Restoring, 1, 4), process(MemberState::Restoring, 3, 5)];
        assert_eq!(of(two), Some(moving("train", false, 4, 9)));
    }
}
