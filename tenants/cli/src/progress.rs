//! A line on the terminal for whatever takes longer than a second.

use std::io::IsTerminal as _;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tenants::coordinator::{Event, Step};

use crate::{output, signals};

const QUIET_TIME: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(100);

/// Shows what the coordinator is at; nothing when standard error is no terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    done: usize,
    members: usize,
    /// It was said that a pause or resume cannot be called off any more.
    goes_on: bool,
    /// Wakes and ends the thread that shows the line after [`QUIET_TIME`].
    starter: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    pub(crate) fn start() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let shown = std::io::stderr().is_terminal();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
            bar.set_style(style);
        }
        Self {
            starter: shown.then(|| show_later(bar.clone())),
            bar,
            done: 0,
            members: 0,
            goes_on: false,
        }
    }

    pub(crate) fn note(&mut self, event: &Event<'_>) {
        match event {
            Event::StepStarted { tenant, step, members } => {
                if step.is_commit() {
                    signals::past_recall();
                }
                self.done = 0;
                self.members = *members;
                self.bar.set_message(step_line(tenant.as_str(), *step, 0, *members));
            }
            Event::MemberDone { step, .. } => {
                self.done += 1;
                let text = format!("{step}: {} of {} processes", self.done, self.members);
                self.bar.set_message(text);
            }
            // What was cleaned up is in the report.
            Event::StepDone { .. } | Event::StaleRemoved { .. } => {}
            Event::WaitingForCut { who, laggard, others } => {
                let more =
                    if *others > 0 { format!(" (and {others} more)") } else { String::new() };
                self.bar.set_message(format!("waiting for a cut: {who}, {laggard}{more}"));
            }
            Event::WaitingForDevices { who, activity, others } => {
                let more =
                    if *others > 0 { format!(" (and {others} more)") } else { String::new() };
                self.bar.set_message(format!("waiting for the devices of {who}: {activity}{more}"));
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
                self.bar.set_message(format!("going back: {}", why.unwrap_or_default()));
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
        self.bar.set_message(text);
    }

    /// Says something that a person should read also when standard error is a file.
    pub(crate) fn tell(&self, message: &str) {
        self.warn(message);
    }

    fn warn(&self, message: &str) {
        self.bar.suspend(|| output::complain(message));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.starter.take() {
            drop(stop);
            // It only waits and draws; should it have failed, the line is simply not there.
            thread.join().ok();
        }
        self.bar.finish_and_clear();
    }
}

fn show_later(bar: ProgressBar) -> (Sender<()>, JoinHandle<()>) {
    let (stop, stopped) = channel();
    let thread = std::thread::spawn(move || {
        if stopped.recv_timeout(QUIET_TIME) == Err(RecvTimeoutError::Timeout) {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.enable_steady_tick(TICK);
        }
    });
    (stop, thread)
}

fn step_line(tenant: &str, step: Step, done: usize, members: usize) -> String {
    format!("{tenant}: {step}: {done} of {members} processes")
}
