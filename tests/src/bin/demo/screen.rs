//! What a person sees: a picture of the GPUs that is redrawn in place on a terminal, one line per change
//! elsewhere, and lines that stay.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sublet_tests::MIB;

use crate::watch::{Gpu, TENANTS};

/// Columns of one GPU's bar.
const BAR_COLUMNS: usize = 24;
const MARKS: [char; TENANTS.len()] = ['#', '='];
/// What takes longer than this gets a line that says so.
const QUIET_TIME: Duration = Duration::from_secs(1);
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// The picture and the lines above it. Drawn on by two threads.
#[derive(Debug)]
pub(crate) struct Screen {
    gpu_count: usize,
    gpu_bytes: u64,
    is_terminal: bool,
    begin: Instant,
    state: Mutex<State>,
    looked: Condvar,
}

#[derive(Debug, Default)]
struct State {
    gpus: Vec<Gpu>,
    /// How often somebody has looked at the GPUs.
    looks: u64,
    /// Elsewhere than on a terminal: what was printed last, so that only changes are.
    printed: Vec<Gpu>,
    activity: Option<(String, Instant)>,
    /// Seconds of the activity that were told.
    told_seconds: u64,
    /// Lines of the picture that are on the terminal now.
    drawn_lines: usize,
}

impl Screen {
    pub(crate) fn start(gpu_count: usize, gpu_bytes: u64) -> Self {
        Self {
            gpu_count,
            gpu_bytes,
            is_terminal: io::stdout().is_terminal(),
            begin: Instant::now(),
            state: Mutex::default(),
            looked: Condvar::new(),
        }
    }

    pub(crate) fn gpu_count(&self) -> usize {
        self.gpu_count
    }

    /// Seconds since the start, for the head of a line.
    fn clock(&self) -> String {
        format!("{:6.1} s", self.begin.elapsed().as_secs_f64())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A line that stays.
    pub(crate) fn log(&self, line: &str) {
        let mut state = self.state();
        self.print(&mut state, line);
    }

    /// A line that stays, with the time.
    pub(crate) fn event(&self, line: &str) {
        self.log(&format!("{}  {line}", self.clock()));
    }

    /// What is being done from now on.
    pub(crate) fn activity(&self, text: &str) {
        let mut state = self.state();
        state.activity = Some((text.to_owned(), Instant::now()));
        state.told_seconds = 0;
        self.redraw(&mut state);
    }

    /// What the GPUs hold now.
    pub(crate) fn show(&self, gpus: &[Gpu]) {
        let mut state = self.state();
        let is_settled = state.gpus == gpus;
        state.gpus = gpus.to_vec();
        state.looks += 1;
        self.looked.notify_all();
        if self.is_terminal {
            self.redraw(&mut state);
        } else if is_settled && state.printed != gpus {
            state.printed = gpus.to_vec();
            let line = format!("{}  {}", self.clock(), one_line(gpus));
            self.print(&mut state, &line);
        }
    }

    /// Waits until the GPUs as they are now have been shown, so that nobody misses it.
    pub(crate) fn settle(&self) {
        const LOOKS: u64 = 3;
        let state = self.state();
        let wanted = state.looks + LOOKS;
        let seen =
            self.looked.wait_timeout_while(state, SETTLE_TIMEOUT, |state| state.looks < wanted);
        drop(seen.unwrap_or_else(PoisonError::into_inner));
    }

    /// Says what takes long, where there is no picture to say it.
    pub(crate) fn tick(&self) {
        let mut state = self.state();
        let Some((text, since)) = state.activity.clone() else { return };
        let seconds = since.elapsed().as_secs();
        if !self.is_terminal && since.elapsed() > QUIET_TIME && seconds > state.told_seconds {
            state.told_seconds = seconds;
            let line = format!("{}  ... {text}, for {seconds} s", self.clock());
            self.print(&mut state, &line);
        }
    }

    /// Takes the picture away; lines still come.
    pub(crate) fn finish(&self) {
        let mut state = self.state();
        let erased = erase(&mut state);
        state.gpus.clear();
        state.activity = None;
        put(&erased);
    }

    fn print(&self, state: &mut State, line: &str) {
        let mut text = erase(state);
        text.push_str(line);
        text.push('\n');
        self.draw(state, &mut text);
        put(&text);
    }

    fn redraw(&self, state: &mut State) {
        let mut text = erase(state);
        self.draw(state, &mut text);
        put(&text);
    }

    fn draw(&self, state: &mut State, text: &mut String) {
        if !self.is_terminal || state.gpus.is_empty() {
            return;
        }
        let mut lines = vec![String::new()];
        let gpu_mib = self.gpu_bytes / MIB;
        lines
            .extend(state.gpus.iter().enumerate().map(|(index, gpu)| picture(index, gpu, gpu_mib)));
        if let Some((activity, since)) = &state.activity {
            lines.push(String::new());
            lines.push(format!("  {activity} ({:.1} s)", since.elapsed().as_secs_f64()));
        }
        state.drawn_lines = lines.len();
        for line in lines {
            text.push_str(&line);
            text.push('\n');
        }
    }
}

/// Moves to the first line of the picture and clears from there on.
fn erase(state: &mut State) -> String {
    let lines = std::mem::take(&mut state.drawn_lines);
    if lines == 0 { String::new() } else { format!("\u{1b}[{lines}A\u{1b}[J") }
}

fn put(text: &str) {
    let mut stdout = io::stdout().lock();
    // A reader that has gone misses the show; the exit code tells how it went.
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).ok();
}

fn picture(index: usize, gpu: &Gpu, gpu_mib: u64) -> String {
    let mut bar = String::new();
    let mut words = String::new();
    for ((tenant, mib), mark) in TENANTS.iter().zip(gpu.tenants_mib).zip(MARKS) {
        let columns = (mib * BAR_COLUMNS as u64).div_ceil(gpu_mib.max(1));
        bar.extend((0..columns).map(|_| mark));
        let _written = write!(words, "{tenant} {mib:3}  ");
    }
    format!("  GPU {index} [{bar:.<BAR_COLUMNS$.BAR_COLUMNS$}] {words}free {:3} MiB", gpu.free_mib)
}

fn one_line(gpus: &[Gpu]) -> String {
    let mut line = format!("MiB of {}|free by GPU:", TENANTS.join("|"));
    for gpu in gpus {
        let held: Vec<_> = gpu.tenants_mib.iter().map(u64::to_string).collect();
        let _written = write!(line, "  {}|{}", held.join("|"), gpu.free_mib);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_one_line_of_less_than_eighty_columns() {
        let gpu = Gpu { tenants_mib: [128, 64], free_mib: 64 };
        let line = picture(0, &gpu, 256);
        assert_eq!(line, "  GPU 0 [############======......] train 128  infer  64  free  64 MiB");
        assert!(line.len() < 80);
        assert_eq!(one_line(&[gpu]), "MiB of train|infer|free by GPU:  128|64|64");
    }
}
