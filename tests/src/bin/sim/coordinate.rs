//! The ways in which a pause or resume is made: by the library in this process, by a process of its own
//! that may be killed, or by the real command.

mod checkpoints;
mod document;
mod refusal;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use sublet_tests::{Outcome, Trouble};
use tenants::coordinator::{Coordinator, Interrupt, LostImports, Options, Outcome as Done};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::scope::{Scope, TagNames};
use tenants::wire::Action;

pub(crate) use checkpoints::{CALLS, Fails, NodeCheckpoints};
pub(crate) use refusal::Refusal;

use crate::script::let_time_pass;

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
    /// The same, which gets a signal after some time.
    InterruptedAfter(Duration, Signal),
}

/// What is asked.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) tenant: TenantName,
    pub(crate) action: Action,
    pub(crate) lost_imports: LostImports,
    /// Does a pause release while it saves?
    pub(crate) early_release: bool,
    /// Does a pause take contexts too?
    pub(crate) is_deep: bool,
    /// A call of the driver's about other processes that fails; none where a child or the command asks.
    pub(crate) fails: Option<Fails>,
    pub(crate) scope: Scope,
    /// The tenant that comes while this one leaves.
    pub(crate) swap: Option<SwapWith>,
}

impl Request {
    /// All of a tenant, as far as it can be, without more ado.
    pub(crate) fn plain(tenant: &TenantName, action: Action) -> Self {
        Self {
            tenant: tenant.clone(),
            action,
            lost_imports: LostImports::LeaveOut,
            early_release: false,
            is_deep: false,
            fails: None,
            scope: Scope::Whole,
            swap: None,
        }
    }
}

/// Who comes, and how, while another tenant is paused.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SwapWith {
    pub(crate) tenant: String,
    pub(crate) window_bytes: Option<u64>,
    /// What of it comes.
    pub(crate) scope: Scope,
}

/// What came of it.
#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    /// It succeeded, with so many members lost on the way.
    Done {
        losses: usize,
        overlapped: bool,
        /// For people, and never looked at.
        notes: Vec<String>,
    },
    /// It did not.
    Refused(Refusal),
    /// The coordinator was killed.
    Killed,
}

/// Where tenants are, and what can be run.
#[derive(Clone, Debug)]
pub(crate) struct Desk {
    pub(crate) run_dir: RunDir,
    pub(crate) run_dir_path: PathBuf,
    /// The directory of the node.
    pub(crate) node: PathBuf,
    /// The `sublet` command, where it has been built.
    pub(crate) sublet: Option<PathBuf>,
}

impl Desk {
    pub(crate) fn ask(&self, way: Way, request: &Request) -> Outcome<Verdict> {
        match way {
            Way::Library => Ok(self.ask_library(request, None)),
            Way::CalledOffAfter(time) => self.ask_and_call_off(request, time),
            Way::ChildKilledAfter(time) => self.ask_child(request, time),
            Way::Command | Way::InterruptedAfter(..) => match &self.sublet {
                Some(program) => self.ask_command(program, request, way),
                None => Ok(self.ask_library(request, None)),
            },
        }
    }

    fn ask_library(&self, request: &Request, interrupt: Option<Interrupt>) -> Verdict {
        match act(&self.run_dir, &self.node, request, interrupt) {
            Ok(done) => Verdict::Done {
                losses: done.iter().map(losses).sum(),
                overlapped: done.iter().any(overlapped),
                notes: done.iter().flat_map(notes).cloned().collect(),
            },
            Err(refusal) => Verdict::Refused(refusal),
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
        command.arg(serde_json::to_string(&request.swap)?);
        command.arg(&self.node).arg(if request.is_deep { "deep" } else { "plain" });
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
            Verdict::Done { losses: 0, overlapped: false, notes: Vec::new() }
        } else {
            Verdict::Killed
        })
    }

    fn ask_command(&self, program: &Path, request: &Request, way: Way) -> Outcome<Verdict> {
        let mut command = Command::new(program);
        let first = request.tenant.as_str();
        if let Some(swap) = &request.swap {
            command.args(["swap", first, swap.tenant.as_str()]);
            command.args(tags_of(&request.scope).flat_map(|name| ["--out-tag", name]));
            command.args(tags_of(&swap.scope).flat_map(|name| ["--in-tag", name]));
        } else {
            let [action, ..] = words(request);
            let leaves_out =
                request.action == Action::Resume && request.lost_imports == LostImports::LeaveOut;
            command.args([action, first]).args(leaves_out.then_some("--without-lost"));
            command.args(tags_of(&request.scope).flat_map(|name| ["--tag", name]));
            let is_by_tag = tags_of(&request.scope).next().is_some();
            let runs_on = request.action == Action::Pause && is_by_tag;
            command.args(runs_on.then_some("--keep-running"));
        }
        command.args(request.is_deep.then_some("--deep"));
        command.args(["--timeout", "30s", "--json"]);
        // For the driver's calls about other processes.
        command.env("SIMCUDA_NODE", &self.node);
        if let Some(dir) = std::env::var_os("SUBLET_TEST_SIMCUDA_DIR") {
            command.env("LD_LIBRARY_PATH", dir);
        }
        command.env("SUBLET_RUN_DIR", &self.run_dir_path).env_remove("LD_PRELOAD");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let begin = Instant::now();
        let child = command.spawn()?;
        if let Way::InterruptedAfter(after, signal) = way {
            let_time_pass(after);
            // Nobody has waited for it yet, so that the number is still its own.
            kill(Pid::from_raw(i32::try_from(child.id())?), signal)?;
        }
        let output = child.wait_with_output()?;
        if begin.elapsed() > COMMAND_TIMEOUT {
            return Err(Trouble::new("the command took too long"));
        }
        document::read(&output)
    }
}

/// The tags that it names.
fn tags_of(scope: &Scope) -> impl Iterator<Item = &str> {
    let names = match scope {
        Scope::Tags { tags: TagNames::Named(names), .. } => Some(names),
        Scope::Tags { tags: TagNames::All, .. } | Scope::Whole => None,
    };
    names.into_iter().flatten().map(String::as_str)
}

fn words(request: &Request) -> [&'static str; 3] {
    let action = match request.action {
        Action::Pause => "pause",
        Action::Resume => "resume",
    };
    let lost = match request.lost_imports {
        LostImports::Refuse => "refuse",
        LostImports::LeaveOut => "leave-out",
    };
    [action, lost, if request.early_release { "early" } else { "late" }]
}

/// The child's part: does as its words say, and says `k` when it has succeeded.
pub(crate) fn run(arguments: &[String]) -> Outcome {
    let [run_dir, tenant, action, lost, release, scope, swap, node, depth] = arguments else {
        return Err(Trouble::new("a coordinator is started by the simulation only"));
    };
    let request = Request {
        tenant: TenantName::new(tenant)?,
        action: if action == "pause" { Action::Pause } else { Action::Resume },
        lost_imports: match lost.as_str() {
            "refuse" => LostImports::Refuse,
            _ => LostImports::LeaveOut,
        },
        early_release: release == "early",
        is_deep: depth == "deep",
        fails: None,
        scope: serde_json::from_str(scope)?,
        swap: serde_json::from_str(swap)?,
    };
    let run_dir = RunDir::open(Some(run_dir.into()), None)?;
    let done = act(&run_dir, Path::new(node), &request, None)
        .map_err(|refusal| Trouble::new(refusal.text))?;
    if done.iter().map(losses).sum::<usize>() == 0 {
        std::io::stdout().write_all(b"k")?;
    }
    Ok(())
}

/// What came of each part: one, or two of a swap.
fn act(
    run_dir: &RunDir,
    node: &Path,
    request: &Request,
    interrupt: Option<Interrupt>,
) -> Result<Vec<Done>, Refusal> {
    // Without a node there is nobody to freeze.
    let checkpointer = NodeCheckpoints::open(node, request.fails.clone()).ok();
    let options = Options {
        timeout: Some(PHASE_TIMEOUT),
        lost_imports: request.lost_imports,
        releases_early: request.early_release,
        interrupt,
        contexts: checkpointer.map(sublet_deep::contexts),
        room: Some(tenants::keep::room),
        ..Options::default()
    };
    let coordinator = |tenant: &TenantName, scope: &Scope| {
        let is_deep = request.is_deep && *tenant == request.tenant;
        let options = Options { scope: scope.clone(), is_deep, ..options.clone() };
        Coordinator::new(run_dir.clone(), tenant.clone(), options)
    };
    let mut first = coordinator(&request.tenant, &request.scope);
    if let Some(with) = &request.swap {
        let tenant = TenantName::new(&with.tenant).map_err(|error| Refusal::of_name(&error))?;
        let mut to = coordinator(&tenant, &with.scope);
        let done = tenants::swap::swap(&mut first, &mut to, with.window_bytes, &mut |_| {});
        return match done {
            Ok(done) => Ok(vec![done.paused, done.resumed]),
            Err(error) => Err(Refusal::of_swap(&error)),
        };
    }
    let done = match request.action {
        Action::Pause => first.pause(&mut |_| {}),
        Action::Resume => first.resume(&mut |_| {}),
    };
    done.map(|done| vec![done]).map_err(|error| Refusal::of(&error))
}

/// Did it go by stages, with another tenant on its way simultaneously?
fn overlapped(done: &Done) -> bool {
    match done {
        Done::Completed(report) => !report.stages.is_empty(),
        Done::AlreadyPaused { .. } | Done::AlreadyActive => false,
    }
}

fn notes(done: &Done) -> &[String] {
    match done {
        Done::Completed(report) => &report.notes,
        Done::AlreadyPaused { .. } | Done::AlreadyActive => &[],
    }
}

fn losses(done: &Done) -> usize {
    match done {
        Done::Completed(report) => report.losses.len(),
        Done::AlreadyPaused { .. } | Done::AlreadyActive => 0,
    }
}
