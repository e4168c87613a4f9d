//! The ways in which a pause or resume is asked for: by the library in this process, by a process of its own
//! that may be killed, or by the real command.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sublet_tests::{Outcome, Trouble};
use tenants::coordinator::{
    Coordinator, CoordinatorError, DeviceShortage, Interrupt, LostImports, Options, Outcome as Done,
};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::scope::{Scope, TagNames};
use tenants::wire::Action;

/// Longer than any phase takes on a busy machine.
const PHASE_TIMEOUT: Duration = Duration::from_secs(30);
/// For all of a command.
const COMMAND_TIMEOUT: Duration = Duration::from_mins(2);

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// This process.
    Library,
    /// A child, which is killed after some time.
    ChildKilledAfter(Duration),
    /// This process, which calls it off after some time.
    CalledOffAfter(Duration),
    /// The `sublet` command.
    Command,
}

/// What is asked.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) tenant: TenantName,
    pub(crate) action: Action,
    pub(crate) lost_imports: LostImports,
    pub(crate) scope: Scope,
}

/// What came of it.
#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    /// It succeeded, with so many members lost on the way.
    Done { losses: usize, notes: Vec<String> },
    /// It did not.
    Refused(Refusal),
    /// Whoever asked was killed.
    Killed,
}

/// Why it did not succeed.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) text: String,
    /// Does it say that every process is as before?
    pub(crate) left_unchanged: bool,
    pub(crate) shortages: Vec<DeviceShortage>,
}

/// Where tenants are, and what can be run.
#[derive(Clone, Debug)]
pub(crate) struct Desk {
    pub(crate) run_dir: RunDir,
    pub(crate) run_dir_path: PathBuf,
    /// The `sublet` command, where it has been built.
    pub(crate) sublet: Option<PathBuf>,
}

impl Desk {
    pub(crate) fn ask(&self, way: Way, request: &Request) -> Outcome<Verdict> {
        match way {
            Way::Library => Ok(self.ask_library(request, None)),
            Way::CalledOffAfter(time) => self.ask_and_call_off(request, time),
            Way::ChildKilledAfter(time) => self.ask_child(request, time),
            Way::Command => match &self.sublet {
                Some(program) => self.ask_command(program, request),
                None => Ok(self.ask_library(request, None)),
            },
        }
    }

    fn ask_library(&self, request: &Request, interrupt: Option<Interrupt>) -> Verdict {
        match act(&self.run_dir, request, interrupt) {
            Ok(done) => Verdict::Done { losses: losses(&done), notes: notes(&done) },
            Err(error) => Verdict::Refused(Refusal::of(&error)),
        }
    }

    fn ask_and_call_off(&self, request: &Request, time: Duration) -> Outcome<Verdict> {
        let (interrupt, raise) = Interrupt::new()?;
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let raiser = scope.spawn(move || match end.recv_timeout(time) {
                Ok(()) => Ok(()),
                Err(_) => File::from(raise).write_all(b"x"),
            });
            // Ours is kept, so that there is one to raise when the command is over just then.
            let verdict = self.ask_library(request, Some(interrupt.clone()));
            // The other thread may have ended already.
            ended.send(()).ok();
            raiser.join().map_err(|_| Trouble::new("the thread that calls off panicked"))??;
            Ok(verdict)
        })
    }

    fn ask_child(&self, request: &Request, time: Duration) -> Outcome<Verdict> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("coordinate").arg(&self.run_dir_path).arg(request.tenant.as_str());
        command.args(words(request)).arg(serde_json::to_string(&request.scope)?);
        let (mut ours, theirs) = UnixStream::pair()?;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::from(OwnedFd::from(theirs)))
            .stderr(Stdio::null())
            .spawn()?;
        drop(command);
        ours.set_read_timeout(Some(time.max(Duration::from_micros(100))))?;
        let mut said = [0];
        let came_to_its_end = ours.read(&mut said).is_ok();
        child.kill()?;
        child.wait()?;
        Ok(if came_to_its_end && said == *b"k" {
            Verdict::Done { losses: 0, notes: Vec::new() }
        } else {
            Verdict::Killed
        })
    }

    fn ask_command(&self, program: &Path, request: &Request) -> Outcome<Verdict> {
        let (action, flag) = match (request.action, request.lost_imports) {
            (Action::Pause, _) => ("pause", None),
            (Action::Resume, LostImports::Refuse) => ("resume", None),
            (Action::Resume, LostImports::LeaveOut) => ("resume", Some("--without-lost")),
        };
        let mut command = Command::new(program);
        command.args([action, request.tenant.as_str(), "--timeout", "30s"]).args(flag);
        if let Scope::Tags { tags: TagNames::Named(names), .. } = &request.scope {
            command.args(names.iter().flat_map(|name| ["--tag", name]));
        }
        command.env("SUBLET_RUN_DIR", &self.run_dir_path).env_remove("LD_PRELOAD");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let begin = Instant::now();
        let output = command.output()?;
        if begin.elapsed() > COMMAND_TIMEOUT {
            return Err(Trouble::new("the command took too long"));
        }
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok(if output.status.success() {
            Verdict::Done { losses: 0, notes: Vec::new() }
        } else {
            Verdict::Refused(Refusal {
                left_unchanged: !text.contains("taking back failed") && !text.contains("half done"),
                text,
                shortages: Vec::new(),
            })
        })
    }
}

impl Refusal {
    fn of(error: &CoordinatorError) -> Self {
        Self {
            text: error.to_string(),
            left_unchanged: error.left_unchanged(),
            shortages: error.shortages().to_vec(),
        }
    }
}

fn words(request: &Request) -> [&'static str; 2] {
    let action = match request.action {
        Action::Pause => "pause",
        Action::Resume => "resume",
    };
    let lost = match request.lost_imports {
        LostImports::Refuse => "refuse",
        LostImports::LeaveOut => "leave-out",
    };
    [action, lost]
}

/// The child's part: does as its words say, and says `k` when it has succeeded.
pub(crate) fn run(arguments: &[String]) -> Outcome {
    let [run_dir, tenant, action, lost, scope] = arguments else {
        return Err(Trouble::new("a coordinator is started by the simulation only"));
    };
    let request = Request {
        tenant: TenantName::new(tenant)?,
        action: if action == "pause" { Action::Pause } else { Action::Resume },
        lost_imports: match lost.as_str() {
            "refuse" => LostImports::Refuse,
            _ => LostImports::LeaveOut,
        },
        scope: serde_json::from_str(scope)?,
    };
    let run_dir = RunDir::open(Some(run_dir.into()), None)?;
    let done = act(&run_dir, &request, None)?;
    if losses(&done) == 0 {
        std::io::stdout().write_all(b"k")?;
    }
    Ok(())
}

fn act(
    run_dir: &RunDir,
    request: &Request,
    interrupt: Option<Interrupt>,
) -> Result<Done, CoordinatorError> {
    let options = Options {
        timeout: Some(PHASE_TIMEOUT),
        lost_imports: request.lost_imports,
        scope: request.scope.clone(),
        interrupt,
        ..Options::default()
    };
    let mut coordinator = Coordinator::new(run_dir.clone(), request.tenant.clone(), options);
    match request.action {
        Action::Pause => coordinator.pause(&mut |_| {}),
        Action::Resume => coordinator.resume(&mut |_| {}),
    }
}

fn notes(done: &Done) -> Vec<String> {
    match done {
        Done::Completed(report) => report.notes.clone(),
        Done::AlreadyPaused | Done::AlreadyActive => Vec::new(),
    }
}

fn losses(done: &Done) -> usize {
    match done {
        Done::Completed(report) => report.losses.len(),
        Done::AlreadyPaused | Done::AlreadyActive => 0,
    }
}
