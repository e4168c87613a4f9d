//! `sublet simulate`: a command on a machine with simulated GPUs.
//!
//! The machine is a directory, which goes with the command: the simulated driver keeps its devices there, and tenants meet
//! there. All processes that the command starts find both by their environment. Those that it leaves behind are ended.

#![expect(
    unsafe_code,
    reason = "calls a function of the simulated driver, and one between fork and exec"
)]

use std::ffi::{CString, OsStr, OsString, c_char, c_int};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use clap::{Args, value_parser};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::statvfs::statvfs;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, mkdtemp};
use procfs::process::all_processes;
use tenants::run_dir::RUN_DIR_VARIABLE;
use tenants::size::{NoSize, Size};

use crate::environment::Environment;
use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::output;

/// Next to this command or in `../lib`: the folder of the simulated driver.
const FOLDER: &str = "simulated";
/// File name of the simulated driver.
const DRIVER: &str = "libcuda.so.1";
/// The function of the simulated driver that makes a node.
const MAKE_NODE: &[u8] = b"simcuda_make_node";
/// Tells the simulated driver where its node is.
const NODE_VARIABLE: &str = "SIMCUDA_NODE";
/// The variable of the folders in which the loader looks for libraries first.
const LIBRARIES_VARIABLE: &str = "LD_LIBRARY_PATH";
/// It may number the GPUs that this machine really has.
const VISIBLE_VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
/// Marks the prompt of an interactive shell, once: its own files have set it by then.
const PROMPT: &str = "unset PROMPT_COMMAND; PS1=\"(simulated) $PS1\"";
/// Of the directories that hold a simulated machine.
const PREFIX: &str = "sublet-simulated-";
/// Time for processes to end by themselves, and again for the system to end them.
const LEFT_BEHIND_TIMEOUT: Duration = Duration::from_secs(2);
/// The number that a shell adds to the number of a signal that ended a command.
const EXIT_SIGNAL: i32 = 128;

/// As many as the simulated management library knows.
const GPUS_MAX: i64 = 16;
/// The granularity of device memory.
const GPU_BYTES_MIN: Size = Size(2 << 20);

type MakeNode = unsafe extern "C" fn(*const c_char, usize, u64) -> c_int;

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// How many GPUs
    #[arg(long, value_name = "NUMBER", default_value_t = 2, value_parser = value_parser!(u16).range(1..=GPUS_MAX))]
    gpus: u16,
    /// Memory of each GPU, which comes from this machine's
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = gpu_memory)]
    memory: Size,
    /// The command and its arguments, such as bash
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl SimulateArgs {
    fn in_words(&self) -> String {
        match self.gpus {
            1 => format!("1 simulated GPU of {}", self.memory),
            gpus => format!("{gpus} simulated GPUs of {} each", self.memory),
        }
    }
}

fn gpu_memory(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: NoSize| error.to_string())?;
    if size < GPU_BYTES_MIN {
        return Err(format!("a GPU needs at least {GPU_BYTES_MIN}"));
    }
    Ok(size)
}

/// Returns as the command does, when that has ended.
pub(crate) fn simulate(
    args: &SimulateArgs,
    environment: &Environment,
) -> Result<ExitCode, Failure> {
    let driver = find_driver(environment)?;
    let (signals, mask) =
        watch_signals().map_err(|error| failed("signals cannot be watched", error))?;
    set_child_subreaper(true)
        .map_err(|error| failed("processes that are left cannot be waited for", error))?;
    let machine = Machine::make(args, &driver)?;
    let [program, rest @ ..] = args.command.as_slice() else {
        return Err(Failure::new("no command was given".to_owned(), EXIT_UNCHANGED));
    };
    let mut command = Command::new(program);
    command
        .args(rest)
        .env(LIBRARIES_VARIABLE, libraries(&driver, environment))
        .env(NODE_VARIABLE, machine.node())
        .env(RUN_DIR_VARIABLE, machine.run_dir())
        .env_remove(VISIBLE_VARIABLE);
    if Path::new(program).file_name() == Some(OsStr::new("bash")) {
        command.env("PROMPT_COMMAND", PROMPT);
    }
    // SAFETY: it makes one call, which POSIX allows between fork and exec.
    unsafe { command.pre_exec(move || Ok(mask.thread_set_mask()?)) };
    let started = command.spawn();
    let mut child = started.map_err(|error| Failure::of_start(program, &error))?;
    let gpus = args.in_words();
    output::complain(&format!("{gpus}, until '{}' ends", program.display()));
    let ended = wait(&mut child, &signals);
    end_all_left(&signals);
    let status = ended.map_err(|error| failed("the command cannot be waited for", error))?;
    Ok(exit_code(status))
}

/// Blocks the signals that are waited for, before the command starts, so that none is missed. Returns what was blocked before,
/// which is the command's.
fn watch_signals() -> nix::Result<(SignalFd, SigSet)> {
    let watched =
        [Signal::SIGCHLD, Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];
    let watched: SigSet = watched.into_iter().collect();
    let mask = SigSet::thread_get_mask()?;
    watched.thread_block()?;
    Ok((SignalFd::with_flags(&watched, SfdFlags::SFD_CLOEXEC)?, mask))
}

/// Waits for the end of `child`. Passes on what ends it from outside. Ctrl-C and Ctrl-\ the terminal sends to `child` as well.
fn wait(child: &mut Child, signals: &SignalFd) -> io::Result<ExitStatus> {
    loop {
        let signal = signals.read_signal()?.and_then(|info| i32::try_from(info.ssi_signo).ok());
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        let signal = signal.and_then(|number| Signal::try_from(number).ok());
        if let Some(signal @ (Signal::SIGHUP | Signal::SIGTERM)) = signal {
            // It is not waited for yet, so the number is its own.
            kill(pid_of(child), signal)?;
        }
    }
}

fn pid_of(child: &Child) -> Pid {
    // Linux has no process number above 4 million.
    Pid::from_raw(child.id().cast_signed())
}

fn exit_code(status: ExitStatus) -> ExitCode {
    let by_signal = || status.signal().map(|signal| EXIT_SIGNAL + signal);
    let code = status.code().or_else(by_signal).and_then(|code| u8::try_from(code).ok());
    ExitCode::from(code.unwrap_or(EXIT_UNCHANGED))
}

/// Ends all processes that the command has left behind: the devices that they use go.
fn end_all_left(signals: &SignalFd) {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let deadline = Instant::now() + LEFT_BEHIND_TIMEOUT;
        while has_children() {
            for pid in children() {
                // One that has ended since needs no signal.
                kill(pid, signal).ok();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let mut ended = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut ended, timeout) {
                Ok(1..) => drop(signals.read_signal()),
                Err(Errno::EINTR) => {}
                _ => break,
            }
        }
    }
}

/// Waits for children that have ended, for no time; is there another?
fn has_children() -> bool {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) => return true,
            Err(Errno::EINTR) | Ok(_) => {}
            Err(_) => return false,
        }
    }
}

/// The processes whose parent this one is, by birth or because their own has ended.
fn children() -> Vec<Pid> {
    let all = all_processes().into_iter().flatten().flatten();
    let own = Pid::this().as_raw();
    let children = all.filter(|process| process.stat().is_ok_and(|stat| stat.ppid == own));
    children.map(|child| Pid::from_raw(child.pid())).collect()
}

/// A directory that goes when this is dropped, with a simulated node and a run directory.
struct Machine {
    dir: PathBuf,
    /// Locked while the machine is in use.
    _lock: File,
}

impl Machine {
    fn make(args: &SimulateArgs, driver: &Path) -> Result<Self, Failure> {
        let wanted_bytes = args.memory.0.saturating_mul(args.gpus.into());
        let candidates = [PathBuf::from("/dev/shm"), std::env::temp_dir()];
        for base in &candidates {
            sweep(base);
        }
        let base = candidates.iter().find(|base| free_bytes(base) >= wanted_bytes);
        let base = base.ok_or_else(|| {
            let rooms = candidates
                .each_ref()
                .map(|base| format!("{} has {} free", base.display(), Size(free_bytes(base))));
            let message = format!(
                "there is no room for {}: {}; ask for less with --gpus and --memory",
                args.in_words(),
                rooms.join(", ")
            );
            Failure::new(message, EXIT_UNCHANGED)
        })?;
        let made = || -> io::Result<Self> {
            let dir = mkdtemp(&base.join(format!("{PREFIX}XXXXXX")))?;
            let lock = File::open(&dir)?;
            lock.lock()?;
            let machine = Self { dir, _lock: lock };
            DirBuilder::new().mode(0o700).create(machine.run_dir())?;
            Ok(machine)
        };
        let machine = made().map_err(|error| {
            failed(&format!("a directory in {} cannot be made", base.display()), error)
        })?;
        make_node(driver, &machine.node(), args)?;
        Ok(machine)
    }

    fn node(&self) -> PathBuf {
        self.dir.join("node")
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.join("run")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // What stays is removed by the next simulation.
        fs::remove_dir_all(&self.dir).ok();
    }
}

/// Removes what simulations have left in `base` that were killed. A directory without a node is just being made.
fn sweep(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let dir = entry.path();
        let is_ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        if is_ours
            && dir.join("node/node.conf").is_file()
            && File::open(&dir).is_ok_and(|lock| lock.try_lock().is_ok())
        {
            fs::remove_dir_all(&dir).ok();
        }
    }
}

/// Returns the bytes that a user may still write below `base`; zero if it is not there.
fn free_bytes(base: &Path) -> u64 {
    statvfs(base).map_or(0, |found| found.blocks_available().saturating_mul(found.fragment_size()))
}

fn make_node(driver: &Path, node: &Path, args: &SimulateArgs) -> Result<(), Failure> {
    let cannot = |error: &dyn std::error::Error| {
        Failure::new(format!("{} makes no GPUs: {error}", driver.display()), EXIT_UNCHANGED)
    };
    let path = CString::new(node.as_os_str().as_bytes()).map_err(|error| cannot(&error))?;
    // SAFETY: its initialisers are Rust's and do nothing.
    let library = unsafe { libloading::Library::new(driver) }.map_err(|error| cannot(&error))?;
    // SAFETY: the library declares it so.
    let make = unsafe { library.get::<MakeNode>(MAKE_NODE) }.map_err(|error| cannot(&error))?;
    // SAFETY: the path ends with a zero byte.
    match unsafe { make(path.as_ptr(), args.gpus.into(), args.memory.0) } {
        0 => Ok(()),
        code => Err(cannot(&io::Error::from_raw_os_error(code))),
    }
}

/// The simulated driver: next to this command, or in `../lib`.
fn find_driver(environment: &Environment) -> Result<PathBuf, Failure> {
    environment.installed(Path::new(FOLDER).join(DRIVER)).ok_or_else(|| {
        let message = format!(
            "the simulated driver, {FOLDER}/{DRIVER}, was found neither next to this command nor in ../lib: use the command of \
             the Python package, which has it (cargo xtask wheel)"
        );
        Failure::new(message, EXIT_UNCHANGED)
    })
}

/// Returns the folders in which the loader looks: the driver's first, then those where it looked before.
fn libraries(driver: &Path, environment: &Environment) -> OsString {
    let mut list = driver.parent().unwrap_or(Path::new("")).as_os_str().to_owned();
    if let Some(before) = environment.get(LIBRARIES_VARIABLE) {
        list.push(":");
        list.push(before);
    }
    list
}

fn failed(what: &str, error: impl Into<io::Error>) -> Failure {
    Failure::new(format!("{what}: {}", error.into()), EXIT_UNCHANGED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_looked_for_next_to_the_command_and_in_lib() {
        let base = tempfile::tempdir().unwrap();
        let root = base.path().canonicalize().unwrap();
        let environment = Environment::of(&[], Some(root.join("bin/sublet")));
        let error = find_driver(&environment).unwrap_err().to_string();
        assert!(error.contains("simulated/libcuda.so.1") && error.contains("cargo xtask wheel"));
        fs::create_dir(root.join("bin")).unwrap();
        for place in ["lib/simulated", "bin/simulated"] {
            fs::create_dir_all(root.join(place)).unwrap();
            fs::write(root.join(place).join(DRIVER), "").unwrap();
            assert_eq!(find_driver(&environment).unwrap(), root.join(place).join(DRIVER));
        }
    }

    #[test]
    fn only_machines_that_nobody_uses_are_removed() {
        let base = tempfile::tempdir().unwrap();
        let [used, left, unfinished, other] = ["a", "b", "c", "other"].map(|name| {
            let name = if name == "other" { name.to_owned() } else { format!("{PREFIX}{name}") };
            base.path().join(name)
        });
        for dir in [&used, &left, &unfinished, &other] {
            fs::create_dir_all(dir.join("node")).unwrap();
            if dir != &unfinished {
                fs::write(dir.join("node/node.conf"), "").unwrap();
            }
        }
        let lock = File::open(&used).unwrap();
        lock.lock().unwrap();
        sweep(base.path());
        assert!(used.is_dir() && unfinished.is_dir() && other.is_dir() && !left.exists());
    }
}
