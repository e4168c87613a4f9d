//! A [`Checkpointer`] that uses a child process, the `sublet` command. The child gets one line for each call and answers each
//! with one line.
//!
//! ```text
//!   7 lock 4711 5000         call 7: lock process 4711, and wait for 5000 ms at most
//!   7 ok 0                   done; a question has its answer there
//!   8 code 801               the driver refused call 8
//!   9 no the driver is ...   there is no driver that can
//! ```
//!
//! The child ends after the process that has started it, when the calls under way are done: half a checkpoint is of no use.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use nix::unistd::geteuid;
use vmm_pool::Uninherited;
use vmm_pool::driver::DriverCode;
use vmm_pool::sync::lock;

use super::{limit, word};
use sublet_protocol::checkpoints::{
    Call, CheckpointError, Checkpointer, ProcessState, unavailable,
};

/// The subcommand that makes the command such a child.
pub const SUBCOMMAND: &str = "checkpoints";
/// The timeout of an answer that waits for no process. The first call also starts the driver.
const SOON: Duration = Duration::from_mins(1);

/// A [`Checkpointer`] by a child process. The first call starts the child, and a drop of this value ends it. Usable from any
/// thread.
#[derive(Debug)]
pub struct ByCommand {
    command: PathBuf,
    installer: u32,
    child: Mutex<Option<Arc<Child>>>,
}

type Answer = Result<u32, CheckpointError>;

/// Calls without an answer yet; none after the child has ended.
type OpenCalls = Mutex<Option<BTreeMap<u64, (&'static str, Sender<Answer>)>>>;

#[derive(Debug)]
struct Child {
    /// If a forked child kept the socket, the command would outlive this process.
    socket: Uninherited<UnixStream>,
    waiting: Arc<OpenCalls>,
    /// The number of the last call. Held while a line is written, so that lines stay whole.
    last: Mutex<u64>,
}

impl Drop for Child {
    fn drop(&mut self) {
        // The reader thread has the same socket, and waits for the child to end.
        if let Err(error) = self.socket.shutdown(std::net::Shutdown::Write) {
            tracing::debug!(%error, "the child that calls the driver has gone");
        }
    }
}

impl ByCommand {
    /// Uses the `sublet` command at `command`. Starts nothing yet. The user `installer` owns the library that contains this code.
    pub fn new(command: PathBuf, installer: u32) -> Self {
        Self { command, installer, child: Mutex::new(None) }
    }

    /// Fails if a user can change or replace the command, but could not change our library. The folder may be one in which all
    /// users may add files, such as `/tmp`.
    fn check(&self) -> Result<(), String> {
        let trusted = [0, geteuid().as_raw(), self.installer];
        for path in [self.command.parent().unwrap_or(&self.command), &self.command] {
            let (shown, found) =
                (path.display(), path.metadata().map_err(|error| error.to_string())?);
            let owner = found.uid();
            if !trusted.contains(&owner) {
                return Err(format!("{shown} belongs to user {owner}: install Sublet as one user"));
            }
            if found.mode() & 0o002 != 0 {
                return Err(format!("any user may change {shown}: chmod o-w {shown}"));
            }
        }
        Ok(())
    }

    /// Returns the child, and starts it if it does not run.
    fn child(&self) -> Result<Arc<Child>, CheckpointError> {
        let mut child = lock(&self.child);
        if let Some(running) = child.as_ref().filter(|child| lock(&child.waiting).is_some()) {
            return Ok(Arc::clone(running));
        }
        let shown = self.command.display();
        self.check().map_err(|why| unavailable(format!("{shown} is not started: {why}")))?;
        let started = self
            .start()
            .map(Arc::new)
            .map_err(|error| unavailable(format!("{shown} cannot be started ({error})")))?;
        *child = Some(Arc::clone(&started));
        Ok(started)
    }

    fn start(&self) -> io::Result<Child> {
        let (own, theirs) = UnixStream::pair()?;
        let output = OwnedFd::from(theirs.try_clone()?);
        let mut command = Command::new(&self.command);
        command
            .arg(SUBCOMMAND)
            // The child calls the driver directly, without our preloaded library.
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(output))
            .stderr(Stdio::null())
            // A Ctrl-C for the job must not end a call half-way.
            .process_group(0);
        let mut process = command.spawn()?;
        // `command` holds the child's end of the socket. It must be closed here, so that this end notices when the child ends.
        drop(command);
        let own = Uninherited::from(own);
        let reads = Uninherited::from(own.try_clone()?);
        let waiting = Arc::new(Mutex::new(Some(BTreeMap::new())));
        let (heard, after_panic) = (Arc::clone(&waiting), Arc::clone(&waiting));
        let hear_all = move || {
            hear(&reads, &heard);
            // The closed channels tell the open calls that the child has ended.
            drop(lock(&heard).take());
            if let Err(error) = process.wait() {
                tracing::debug!(%error, "the application waits for children that it has not started");
            }
        };
        let forget_all = move |_: &str| drop(lock(&after_panic).take());
        vmm_pool::threads::spawn("sublet-answers", hear_all, forget_all)?;
        Ok(Child { socket: own, waiting, last: Mutex::new(0) })
    }

    fn call(&self, name: &'static str, line: &str, limit: Duration) -> Answer {
        let child = self.child()?;
        let (say, answer) = bounded(1);
        let gone = || unavailable(format!("{} ended before it answered", self.command.display()));
        let number = {
            let mut last = lock(&child.last);
            *last += 1;
            lock(&child.waiting).as_mut().ok_or_else(gone)?.insert(*last, (name, say));
            // A write to a closed socket must fail without a signal.
            let mut socket = &*child.socket;
            socket.write_all(format!("{last} {line}\n").as_bytes()).map_err(|_| gone())?;
            *last
        };
        answer.recv_timeout(limit).unwrap_or_else(|error| match error {
            RecvTimeoutError::Timeout => {
                if let Some(waiting) = lock(&child.waiting).as_mut() {
                    waiting.remove(&number);
                }
                Err(CheckpointError::Silent { call: name, waited: limit })
            }
            RecvTimeoutError::Disconnected => Err(gone()),
        })
    }
}

/// Delivers answers to their calls until there are no more.
fn hear(socket: &UnixStream, waiting: &OpenCalls) {
    for line in BufReader::new(socket).lines() {
        let Ok(line) = line else { return };
        let mut words = line.splitn(3, ' ');
        let number = words.next().and_then(|number| number.parse::<u64>().ok());
        let mut waiting = lock(waiting);
        let call =
            waiting.as_mut().zip(number).and_then(|(waiting, number)| waiting.remove(&number));
        let Some((call, say)) = call else { continue };
        let answer = match (words.next(), words.next()) {
            (Some("ok"), Some(answer)) => answer.parse().ok().map(Ok),
            (Some("code"), Some(code)) => code
                .parse()
                .ok()
                .map(|code| Err(CheckpointError::Driver { call, code: DriverCode(code) })),
            (Some("no"), Some(reason)) => Some(Err(unavailable(reason.to_owned()))),
            _ => None,
        };
        let unknown =
            || Err(unavailable(format!("the sublet command answered '{line}' to {call}")));
        // If the answer was too late, no call waits for it any more.
        drop(say.send(answer.unwrap_or_else(unknown)));
    }
}

impl Checkpointer for ByCommand {
    fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError> {
        let name = "cuCheckpointProcessGetState";
        self.call(name, &format!("state {pid}"), SOON).map(ProcessState::of)
    }

    fn make(&self, call: Call, pid: u32) -> Result<(), CheckpointError> {
        let line = match call {
            Call::Lock(timeout) => format!("{} {pid} {}", word(call), timeout.as_millis()),
            Call::Checkpoint | Call::Restore | Call::Unlock => format!("{} {pid}", word(call)),
        };
        self.call(call.name(), &line, limit(call)).map(drop)
    }
}

/// Makes the calls from `from` with `driver`, each on its own thread, and answers them on `to`. Returns when `from` and the calls
/// under way have ended.
///
/// # Errors
/// `from` cannot be read.
pub fn serve(
    from: impl BufRead,
    to: impl Write + Send,
    driver: &dyn Checkpointer,
) -> io::Result<()> {
    let to = Mutex::new(to);
    std::thread::scope(|scope| {
        for line in from.lines() {
            let line = line?;
            let to = &to;
            let answer = move || {
                let (number, call) = line.split_once(' ').unwrap_or((&line, ""));
                let said = match made(driver, call) {
                    Ok(answer) => format!("{number} ok {answer}\n"),
                    Err(CheckpointError::Driver { code, .. }) => {
                        format!("{number} code {}\n", code.0)
                    }
                    Err(error) => format!("{number} no {}\n", error.to_string().replace('\n', " ")),
                };
                let mut to = lock(to);
                // The calling process may have ended.
                drop(to.write_all(said.as_bytes()).and_then(|()| to.flush()));
            };
            std::thread::Builder::new().spawn_scoped(scope, answer)?;
        }
        Ok(())
    })
}

fn made(driver: &dyn Checkpointer, call: &str) -> Answer {
    let mut words = call.split(' ');
    let (name, pid, last) = (words.next(), words.next(), words.next());
    let unknown = || unavailable(format!("'{call}' is no call"));
    let pid = pid.and_then(|pid| pid.parse().ok()).ok_or_else(unknown)?;
    let call = match name {
        Some("state") => return driver.state(pid).map(ProcessState::number),
        Some("lock") => {
            let timeout_ms = last.and_then(|last| last.parse().ok()).ok_or_else(unknown)?;
            Call::Lock(Duration::from_millis(timeout_ms))
        }
        Some("checkpoint") => Call::Checkpoint,
        Some("restore") => Call::Restore,
        Some("unlock") => Call::Unlock,
        _ => return Err(unknown()),
    };
    driver.make(call, pid).map(|()| 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::path::Path;

    use super::*;

    /// Says what was called by its answers.
    #[derive(Debug)]
    struct Answers;

    impl Checkpointer for Answers {
        fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError> {
            Ok(ProcessState::of(pid))
        }
        fn make(&self, call: Call, pid: u32) -> Result<(), CheckpointError> {
            match call {
                Call::Lock(timeout) => {
                    assert_eq!((pid, timeout), (7, Duration::from_millis(1500)));
                    Ok(())
                }
                Call::Checkpoint => {
                    let code = DriverCode(pid.cast_signed());
                    Err(CheckpointError::Driver { call: "checkpoint", code })
                }
                Call::Restore => Err(unavailable("no\ndriver".to_owned())),
                Call::Unlock => Ok(()),
            }
        }
    }

    #[test]
    fn each_call_has_its_answer() {
        let calls = "1 state 2\n2 lock 7 1500\n3 checkpoint 801\n4 restore 5\n5 unlock 5\n6 jump 5\n7 lock 7\n8\n";
        let mut said = Vec::new();
        serve(calls.as_bytes(), &mut said, &Answers).unwrap();
        let said = String::from_utf8(said).unwrap();
        let mut said: Vec<_> = said.lines().collect();
        said.sort_unstable();
        assert_eq!(
            said,
            [
                "1 ok 2",
                "2 ok 0",
                "3 code 801",
                "4 no no driver",
                "5 ok 0",
                "6 no 'jump 5' is no call",
                "7 no 'lock 7' is no call",
                "8 no '' is no call",
            ]
        );
    }

    /// A command that is this script.
    fn by_script(script: &str) -> (tempfile::TempDir, ByCommand) {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("sublet");
        // A file that this process has written cannot be started while a child of another thread has its descriptor.
        let text = base.path().join("text");
        std::fs::write(&text, format!("#!/bin/sh\n{script}\n")).unwrap();
        assert!(Command::new("cp").args([&text, &path]).status().unwrap().success());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        (base, ByCommand::new(path, 0))
    }

    #[test]
    fn a_child_answers_many_calls_and_is_started_again_when_it_has_ended() {
        let (_base, by_command) = by_script(
            "[ \"$1\" = checkpoints ] || exit 9\nwhile read -r number call pid; do\n  case $call in\n    state) echo \"$number ok $pid\";;\n    \
             checkpoint) echo \"$number code 2\";;\n    restore) echo \"$number no driver\";;\n    unlock) exit 0;;\n  esac\ndone",
        );
        std::thread::scope(|scope| {
            for pid in 0..4 {
                let by_command = &by_command;
                scope.spawn(move || {
                    assert_eq!(by_command.state(pid), Ok(ProcessState::of(pid)));
                });
            }
        });
        let code = DriverCode::OUT_OF_MEMORY;
        let call = "cuCheckpointProcessCheckpoint";
        assert_eq!(
            by_command.make(Call::Checkpoint, 1),
            Err(CheckpointError::Driver { call, code })
        );
        assert_eq!(by_command.make(Call::Restore, 1), Err(unavailable("driver".to_owned())));
        let error = by_command.make(Call::Unlock, 1).unwrap_err().to_string();
        assert!(error.ends_with("ended before it answered"), "{error}");
        assert_eq!(by_command.state(3), Ok(ProcessState::Failed));
    }

    #[test]
    fn a_call_that_took_too_long_is_forgotten_and_so_is_its_answer() {
        // Both answers come behind the second call.
        let (_base, by_command) = by_script(
            "read -r first _\nread -r second _\necho \"$first ok 1\"\necho \"$second ok 2\"\nread -r _",
        );
        let waited = Duration::from_millis(50);
        let call = "cuCheckpointProcessGetState";
        let silent = Err(CheckpointError::Silent { call, waited });
        assert_eq!(by_command.call(call, "state 1", waited), silent);
        let child = by_command.child().unwrap();
        assert!(lock(&child.waiting).as_ref().unwrap().is_empty(), "it stays in the table");
        assert_eq!(by_command.state(1), Ok(ProcessState::of(2)));
    }

    #[test]
    fn a_ctrl_c_for_this_process_is_none_for_the_child() {
        let (_base, by_command) = by_script(
            "read -r number _\nread -r _ _ _ _ group _ </proc/$$/stat\necho \"$number no $group\"\nread -r _",
        );
        let group =
            by_command.make(Call::Unlock, 1).unwrap_err().to_string().parse::<i32>().unwrap();
        assert_ne!(group, nix::unistd::getpgrp().as_raw());
    }

    #[test]
    fn a_command_that_is_not_there_is_named() {
        let by_command = ByCommand::new("/nowhere/sublet".into(), 0);
        let error = by_command.state(1).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/sublet is not started"), "{error}");
    }

    const ANSWERS: &str = "while read -r number call pid; do echo \"$number ok 0\"; done";

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_command_that_others_may_change_is_never_started() {
        // By the mode of the folder and of the command.
        for (folder, file, part) in [
            (0o777, 0o755, "any user may change"),
            (0o1777, 0o755, "any user may change"),
            (0o755, 0o757, "sublet: chmod o-w"),
        ] {
            let (base, by_command) = by_script("touch \"$0.was-started\"");
            chmod(&by_command.command, file);
            chmod(base.path(), folder);
            let error = by_command.state(1).unwrap_err().to_string();
            assert!(error.contains(" is not started: ") && error.contains(part), "{error}");
            assert!(!error.contains('\n'), "{error}");
            assert!(!base.path().join("sublet.was-started").exists());
        }
        for (folder, file) in [(0o700, 0o700), (0o775, 0o775)] {
            let (base, by_command) = by_script(ANSWERS);
            chmod(&by_command.command, file);
            chmod(base.path(), folder);
            by_command.state(1).unwrap();
        }
    }

    #[test]
    fn a_link_to_a_command_is_followed_and_what_it_leads_to_is_checked() {
        let (base, by_command) = by_script(ANSWERS);
        let links = tempfile::tempdir().unwrap();
        let link = links.path().join("sublet");
        symlink(&by_command.command, &link).unwrap();
        ByCommand::new(link.clone(), 0).state(1).unwrap();
        chmod(&base.path().join("sublet"), 0o777);
        ByCommand::new(link.clone(), 0).state(1).unwrap_err();
        std::fs::remove_file(&link).unwrap();
        symlink("sublet", &link).unwrap();
        ByCommand::new(link, 0).state(1).unwrap_err();
    }

    #[test]
    fn a_command_of_another_user_is_never_started() {
        // Nobody else can give files away.
        if !geteuid().is_root() {
            return;
        }
        let other = Some(nix::unistd::Uid::from_raw(2002));
        for whose in ["sublet", "."] {
            let (base, by_command) = by_script(ANSWERS);
            nix::unistd::chown(&base.path().join(whose), other, None).unwrap();
            let error = by_command.state(1).unwrap_err().to_string();
            assert!(error.contains("belongs to user 2002"), "{error}");
            // Unless our library is that user's too.
            ByCommand::new(by_command.command.clone(), 2002).state(1).unwrap();
        }
    }
}
