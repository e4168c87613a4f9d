//! `sublet top`: tenants, GPUs, switches and who waits for whom, drawn again each second.

mod keys;
mod screen;
mod waiting;

use std::io::{self, IsTerminal as _};
use std::mem::ManuallyDrop;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::PollTimeout;
use ratatui::DefaultTerminal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use tenants::run_dir::RunDir;

use crate::environment::Environment;
use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::gpus::Gpus;
use crate::view::View;
use keys::{Input, Key};
use screen::{Screen, Style};

/// Between two looks.
const REFRESH: Duration = Duration::from_secs(1);
/// How soon a signal or a look that has come in is noticed.
const TICK_MS: u8 = 100;
/// GPUs are looked for each so many looks: the management library takes its time.
const GPUS_EVERY: u32 = 5;

/// One look, or why there was none.
type Look = Result<View, String>;

pub(crate) fn top(run_dir: &RunDir, environment: &Environment) -> Result<ExitCode, Failure> {
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        let message = "`sublet top` needs a terminal; use `sublet ps` in scripts";
        return Err(Failure::new(message.to_owned(), EXIT_UNCHANGED));
    }
    let signals =
        Signals::watch().map_err(|error| failed("signals could not be watched", &error))?;
    // Panics restore the terminal, too. Its own end panics if the terminal and standard error are gone.
    let terminal =
        ratatui::try_init().map_err(|error| failed("the terminal could not be set up", &error))?;
    let mut terminal = ManuallyDrop::new(terminal);
    let style = Style { is_coloured: environment.get("NO_COLOR").is_none() };
    let done = run(&mut terminal, &looks(run_dir.clone()), style, &signals);
    let shown = terminal.show_cursor();
    let restored = ratatui::try_restore();
    done.and(shown)
        .and(restored)
        .map_err(|error| failed("the terminal could not be used", &error))?;
    Ok(ExitCode::SUCCESS)
}

fn failed(what: &str, error: &io::Error) -> Failure {
    Failure::new(format!("{what}: {error}"), EXIT_UNCHANGED)
}

/// Signals that have come.
struct Signals {
    /// One that ends a program, which restores the terminal first.
    ended: Arc<AtomicBool>,
    /// The terminal has another size.
    resized: Arc<AtomicBool>,
}

impl Signals {
    fn watch() -> io::Result<Self> {
        let (ended, resized) = (Arc::default(), Arc::default());
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&ended))?;
        }
        signal_hook::flag::register(SIGWINCH, Arc::clone(&resized))?;
        Ok(Self { ended, resized })
    }
}

/// Looks each second, on a thread of its own: a process that does not answer holds up the figures, and no key.
fn looks(run_dir: RunDir) -> Receiver<Look> {
    let (say, said) = channel();
    thread::spawn(move || look_on(&run_dir, &say));
    said
}

/// Returns when nobody listens any more.
fn look_on(run_dir: &RunDir, say: &Sender<Look>) {
    let mut gpus = Gpus::default();
    let (mut answers, mut somebody_rests) = (true, false);
    for count in 0_u32.. {
        let began = Instant::now();
        // What one that is paused has left is of now.
        if answers && (count % GPUS_EVERY == 0 || somebody_rests) {
            let found = Gpus::try_look();
            answers = found.is_some();
            gpus = found.unwrap_or(gpus);
        }
        let look = View::gather_with(run_dir, None, &gpus).map_err(|failure| failure.to_string());
        let is_left = |view: &View| view.tenants.iter().any(|tenant| !tenant.left.is_empty());
        somebody_rests = look.as_ref().is_ok_and(is_left);
        if say.send(look).is_err() {
            return;
        }
        thread::park_timeout(REFRESH.saturating_sub(began.elapsed()));
    }
}

/// Returns when a person leaves, a signal ends it, or the terminal is gone.
fn run(
    terminal: &mut DefaultTerminal,
    looks: &Receiver<Look>,
    style: Style,
    signals: &Signals,
) -> io::Result<()> {
    let mut screen = Screen::new(style);
    let mut is_new = true;
    while !signals.ended.load(Ordering::Relaxed) {
        loop {
            match looks.try_recv() {
                Ok(look) => screen.show(look),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    return Err(io::Error::other("the thread that looks has ended"));
                }
            }
            is_new = true;
        }
        is_new |= signals.resized.swap(false, Ordering::Relaxed);
        if is_new || screen.is_late() {
            terminal.draw(|frame| screen.draw(frame))?;
        }
        let Input::Keys(pressed) = keys::within(PollTimeout::from(TICK_MS), &io::stdin())? else {
            return Ok(());
        };
        is_new = !pressed.is_empty();
        for key in pressed {
            if key == Key::Leave {
                return Ok(());
            }
            screen.press(key);
        }
    }
    Ok(())
}
