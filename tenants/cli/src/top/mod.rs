//! `sublet top`: tenants, GPUs, switches and who waits for whom, drawn anew each second.

mod screen;
mod waiting;

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tenants::run_dir::RunDir;

use crate::environment::Environment;
use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::gpus::Gpus;
use crate::view::View;
use screen::{Screen, Style};

/// Between two looks.
const REFRESH: Duration = Duration::from_secs(1);
/// How soon a signal or a look that has come in is noticed.
const TICK: Duration = Duration::from_millis(100);
/// GPUs are looked for each so many looks: the management library takes its time.
const GPUS_EVERY: u32 = 5;

/// One look, or why there was none.
type Look = Result<View, String>;

pub(crate) fn top(run_dir: &RunDir, environment: &Environment) -> Result<ExitCode, Failure> {
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        let message = "`sublet top` needs a terminal, and standard input or output is none; `sublet ps` prints once what there is";
        return Err(Failure::new(message.to_owned(), EXIT_UNCHANGED));
    }
    let ended =
        ended_by_signal().map_err(|error| failed("signals could not be watched", &error))?;
    // Panics restore the terminal, too.
    let mut terminal =
        ratatui::try_init().map_err(|error| failed("the terminal could not be set up", &error))?;
    let style = Style { is_coloured: environment.get("NO_COLOR").is_none() };
    let done = run(&mut terminal, &looks(run_dir.clone()), style, &ended);
    ratatui::restore();
    done.map_err(|error| failed("the terminal could not be used", &error))?;
    Ok(ExitCode::SUCCESS)
}

fn failed(what: &str, error: &io::Error) -> Failure {
    Failure::new(format!("{what}: {error}"), EXIT_UNCHANGED)
}

/// Is raised by signals that end a program, so that it can restore the terminal first.
fn ended_by_signal() -> io::Result<Arc<AtomicBool>> {
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&ended))?;
    }
    Ok(ended)
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
    let mut answers = true;
    for count in 0_u32.. {
        let began = Instant::now();
        if answers && count % GPUS_EVERY == 0 {
            let found = Gpus::try_look();
            answers = found.is_some();
            gpus = found.unwrap_or(gpus);
        }
        let look = View::gather_with(run_dir, None, &gpus).map_err(|failure| failure.to_string());
        if say.send(look).is_err() {
            return;
        }
        thread::park_timeout(REFRESH.saturating_sub(began.elapsed()));
    }
}

fn run(
    terminal: &mut DefaultTerminal,
    looks: &Receiver<Look>,
    style: Style,
    ended: &AtomicBool,
) -> io::Result<()> {
    let mut screen = Screen::new(style);
    let mut is_new = true;
    while !ended.load(Ordering::Relaxed) {
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
        if is_new || screen.is_late() {
            terminal.draw(|frame| screen.draw(frame))?;
        }
        is_new = false;
        if !event::poll(TICK)? {
            continue;
        }
        match event::read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                if is_end(key) {
                    return Ok(());
                }
                screen.press(key.code);
                is_new = true;
            }
            Event::Resize(..) => is_new = true,
            Event::Key(_)
            | Event::FocusGained
            | Event::FocusLost
            | Event::Mouse(_)
            | Event::Paste(_) => {}
        }
    }
    Ok(())
}

/// In raw mode the terminal turns Ctrl-C into no signal.
fn is_end(key: KeyEvent) -> bool {
    let is_interrupt =
        key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
    is_interrupt || key.code == KeyCode::Char('q')
}
