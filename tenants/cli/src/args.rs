//! The arguments that the command line may have.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::environment::Environment;
use crate::explain::ExplainArgs;
use crate::larger::PlanArgs;
use crate::metrics::serve::{ADDRESS, address};
use crate::simulate::SimulateArgs;
use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use sublet_deep as by_command;
use tenants::budget::Budgets;
use tenants::class::{Class, TURNS_AUTO, Weight};
use tenants::identity::{FamilyName, TenantName};
use tenants::run_dir::RunDir;
use tenants::scope::{LIBRARY_TAGS, Scope, TagNames};
use tenants::time;

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 refused or failed, nothing changed; 2 wrong usage; 3 changed, but not wholly as asked; 130 called off by \
Ctrl-C or SIGTERM, nothing changed. `sublet run` and `sublet simulate` exit as the command that they run.

Messages of errors end with a code in brackets: sublet explain CODE says more, and sublet docs where the pages are.

A process that runs already attaches itself, from inside: sublet.attach() in Python, sublet_attach() in C.";

/// Lets several jobs take turns on the same GPUs.
#[derive(Debug, Parser)]
#[command(name = "sublet", version, arg_required_else_help = true, after_long_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command whose processes form a tenant
    #[command(
        after_help = "Example: sublet run --tenant train --budget 60GiB -- torchrun train.py"
    )]
    Run(RunArgs),
    /// Show tenants and what they hold on GPUs; with -v each process, by library and tag
    #[command(visible_alias = "status", aliases = ["list", "ls"])]
    #[command(after_help = "Example: sublet ps train -v")]
    Ps(PsArgs),
    /// Pause a tenant: its GPU memory goes to the host and is free for others
    #[command(after_help = "Example: sublet pause train")]
    Pause(PauseArgs),
    /// Resume a paused tenant, at the same addresses
    #[command(after_help = "Example: sublet resume train --wait 90s")]
    Resume(ResumeArgs),
    /// Pause one tenant and resume another, with both directions of the link busy
    #[command(after_help = "Example: sublet swap infer train")]
    Swap(SwapArgs),
    /// Resume a tenant, and pause others if it does not fit
    #[command(after_help = "Example: sublet switch train --dry-run")]
    Switch(SwitchArgs),
    /// Show who has a turn on the GPUs, who waits for one, and what was decided last and why
    #[command(after_help = "Example: sublet turns")]
    Turns(ShowArgs),
    /// Allocate host memory ahead, so that the first pause is fast
    #[command(after_help = "Example: sublet prepare train")]
    Prepare(PrepareArgs),
    /// Write what a paused tenant has saved to files, with a map of them; the tenant stays as it is
    #[command(after_help = "Example: sublet save train /data/saved")]
    Save(SaveArgs),
    /// Show or change how much GPU memory a tenant may hold
    #[command(after_help = "Example: sublet budget train 0=60GiB")]
    Budget(BudgetArgs),
    /// Show what the processes of a tenant hold, and how their last pause and resume went
    #[command(after_help = "Example: sublet stats train -v")]
    Stats(StatsArgs),
    /// Print figures of tenants and GPUs for Prometheus
    #[command(after_help = "Example: sublet metrics --listen 9400")]
    Metrics(MetricsArgs),
    /// Write a tenant's last pause and resume as a timeline for ui.perfetto.dev
    #[command(after_help = "Example: sublet trace train -o t.json")]
    Trace(TraceArgs),
    /// Calculate whether a training fits a smaller GPU with weights and optimizer in host memory, and its step
    #[command(
        after_help = "Example: sublet plan train --params 7B --gpu 24GiB --host 128GiB --tokens 8k"
    )]
    Plan(PlanArgs),
    /// Print what the code of an error means, how the tenant stands and what to do next
    #[command(after_help = "Example: sublet explain gpu-full")]
    Explain(ExplainArgs),
    /// Print where the pages of this version are
    #[command(after_help = "Example: sublet docs")]
    Docs,
    /// Print a script with which a shell completes this command
    #[command(after_help = "Example: source <(sublet completions bash)")]
    Completions(CompletionsArgs),
    /// Write a manual page for each command
    #[command(after_help = "Example: sublet man ~/.local/share/man/man1")]
    Man(ManArgs),
    /// Check whether this machine can run Sublet, and what is in the way
    #[command(after_help = "Example: sublet doctor -v")]
    Doctor(ShowArgs),
    /// Print versions, settings and the documents of `doctor`, `ps` and `turns`, for a report of a fault
    #[command(after_help = "Example: sublet bug-report")]
    BugReport,
    /// Call the driver about other processes, as a process of a job says on standard input
    #[command(hide = true, name = by_command::SUBCOMMAND)]
    #[command(after_help = "Example: sublet checkpoints")]
    Checkpoints,
    /// Run a command on simulated GPUs, to try Sublet without a GPU
    #[command(after_help = "Example: sublet simulate -- bash")]
    Simulate(SimulateArgs),
}

impl Command {
    /// Is something changed when it has done what it was asked?
    pub(crate) fn changes(&self) -> bool {
        matches!(self, Self::Resume(_) | Self::Swap(_) | Self::Prepare(_) | Self::Save(_))
            || matches!(self, Self::Pause(args) if !args.dry_run)
            || matches!(self, Self::Switch(args) if !args.dry_run)
            || matches!(self, Self::Budget(args) if !args.budgets.is_empty())
    }
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Name of the tenant: letters, digits, '.', '_' and '-'. By default it is that of the script or program, with a number if that
    /// is taken, and it is printed
    #[arg(long, value_name = "NAME", value_parser = TenantName::new)]
    pub(crate) tenant: Option<TenantName>,
    /// Be one job with what runs under this name already. Without it `sublet run` waits for up to ten seconds for a job of the same name to end,
    /// unless one launcher has started both
    #[arg(long, requires = "tenant")]
    pub(crate) join: bool,
    /// Tenants with the same family may open each other's CUDA IPC handles and exported memory
    #[arg(long, value_name = "NAME", value_parser = FamilyName::new)]
    pub(crate) family: Option<FamilyName>,
    /// Priority when tenants take turns: guaranteed, fair (default) or background
    #[arg(long, value_name = "CLASS", add = ArgValueCandidates::new(classes))]
    pub(crate) class: Option<Class>,
    /// How many quanta a fair tenant has at a time, from 1 (default) to 100
    #[arg(long, value_name = "NUMBER")]
    pub(crate) weight: Option<Weight>,
    /// auto: if a GPU is full, wait until another such job is paused; a paused job resumes when it needs the GPU.
    /// auto,deep: its CUDA contexts leave too, after a minute or when another job needs the room
    #[arg(long, value_name = "HOW", value_parser = [TURNS_AUTO, "auto,deep"])]
    pub(crate) turns: Option<String>,
    /// Limit of GPU memory for all its processes together: 60GiB (each GPU), 0=60GiB (GPU 0 of nvidia-smi),
    /// GPU-...=60GiB; may be given more than once
    #[arg(long = "budget", value_name = "[GPU=]SIZE")]
    pub(crate) budgets: Vec<Budgets>,
    /// End each process that cannot join the tenant, with exit code 1 and a message, at its first use of GPU memory; by default such a process
    /// runs on without Sublet
    #[arg(long)]
    pub(crate) require: bool,
    /// The preload object; by default it is found next to this command
    #[arg(long, value_name = "PATH")]
    pub(crate) library: Option<PathBuf>,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

/// What is printed. A command says one line for each thing that it did, or a table.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct ShowArgs {
    /// Print the details too
    #[arg(short, long, conflicts_with = "json")]
    pub(crate) verbose: bool,
    /// Print a report for programs
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Default, Args)]
pub(crate) struct TagArgs {
    /// Only memory of regions with this tag. The job stands still until the resume, unless it has agreed to run without it
    /// (`sublet.region(..., runs_without=True)`); may be given more than once
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Only this library's own memory: the processes run on, and calls into the library wait
    #[arg(long = "library", value_name = "LIBRARY", value_parser = LIBRARY_TAGS)]
    libraries: Vec<String>,
}

impl TagArgs {
    /// Returns the memory to pause or resume.
    pub(crate) fn scope(&self) -> Scope {
        scope_of([&self.tags, &self.libraries])
    }
}

#[derive(Debug, Default, Args)]
pub(crate) struct SwapTagArgs {
    /// Only memory of regions with this tag, of both: FROM runs on without it, and TO gets it back. May be given more than once
    #[arg(long = "tag", value_name = "TAG")]
    both: Vec<String>,
    /// Only this library's own memory, of both; may be given in addition to tags
    #[arg(long = "library", value_name = "LIBRARY", value_parser = LIBRARY_TAGS)]
    libraries: Vec<String>,
    /// Of FROM, only memory of regions with this tag, or of a library by its name; may be given more than once
    #[arg(long = "out-tag", value_name = "TAG")]
    out: Vec<String>,
    /// Of TO, only memory of regions with this tag, or of a library by its name, and where it is paused as a whole what has no tag;
    /// may be given more than once
    #[arg(long = "in-tag", value_name = "TAG")]
    back: Vec<String>,
}

impl SwapTagArgs {
    /// Returns the memory that leaves.
    pub(crate) fn out_scope(&self) -> Scope {
        scope_of([&self.both, &self.libraries, &self.out])
    }

    /// Returns the memory that comes.
    pub(crate) fn in_scope(&self) -> Scope {
        scope_of([&self.both, &self.libraries, &self.back])
    }
}

/// Memory with these tags; all of it where there are none.
fn scope_of<const N: usize>(tags: [&Vec<String>; N]) -> Scope {
    let names: BTreeSet<String> = tags.into_iter().flatten().cloned().collect();
    if names.is_empty() {
        return Scope::Whole;
    }
    Scope::Tags { tags: TagNames::Named(names), owner: None }
}

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "options of the command line")]
pub(crate) struct PauseArgs {
    /// The tenant
    #[arg(value_parser = TenantName::new, add = ArgValueCandidates::new(names))]
    pub(crate) tenant: Option<TenantName>,
    /// Every tenant, one after the other
    #[arg(long, conflicts_with_all = ["tenant", "tags", "libraries", "dry_run"])]
    pub(crate) all: bool,
    /// Show what would be freed, and how much host memory it needs; nothing moves
    #[arg(long, conflicts_with_all = ["deep", "timeout"])]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) tags: TagArgs,
    /// Let the job run on without the memory of --tag, also where it has not agreed. Copies and fills of that memory then fail, and a kernel
    /// that touches it ends the process
    #[arg(long, requires = "tags")]
    pub(crate) keep_running: bool,
    /// Take the processes' CUDA contexts off the GPUs too
    #[arg(long, conflicts_with_all = ["tags", "libraries"])]
    pub(crate) deep: bool,
    /// Leave what other tenants have open of the job's memory on the GPUs, and take the rest. The exit code is 3 then, since memory stays
    #[arg(long, conflicts_with = "deep")]
    pub(crate) leave_lent: bool,
    /// Wait until the job has GPU memory: without end, or for a time such as --wait 90s
    #[arg(
        long, value_name = "TIME", value_parser = wait_time, num_args = 0..=1, require_equals = true, default_missing_value = FOREVER,
        conflicts_with_all = ["all", "dry_run"]
    )]
    pub(crate) wait: Option<Duration>,
    /// Time for each phase up to the point of no return, such as 500ms, 30s or 2m; each phase has its own default
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    pub(crate) timeout: Option<Duration>,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    /// The tenant
    #[arg(value_parser = TenantName::new, add = ArgValueCandidates::new(names))]
    pub(crate) tenant: TenantName,
    /// Bring back only memory with this tag; may be given more than once
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Bring back only this library's own memory
    #[arg(long = "library", value_name = "LIBRARY", value_parser = LIBRARY_TAGS)]
    libraries: Vec<String>,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// Queue for the GPUs with those that take turns, and pause what is in the way when it is this tenant's turn; --wait says for how long
    #[arg(long, conflicts_with_all = ["tags", "libraries"])]
    pub(crate) queue: bool,
    /// Go on without memory that was imported from processes that have ended since: work that touches it
    /// fails, so that the job can take its own error path
    #[arg(long)]
    pub(crate) without_lost: bool,
    /// Time for each phase; each phase has its own default
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    pub(crate) timeout: Option<Duration>,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

impl ResumeArgs {
    /// Returns the memory to resume.
    pub(crate) fn scope(&self) -> Scope {
        scope_of([&self.tags, &self.libraries])
    }
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WaitArgs {
    /// Wait while GPU memory is short, or somebody is in a turn: without end, or for a time such as --wait 90s
    #[arg(
        long,
        value_name = "TIME",
        value_parser = wait_time,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = FOREVER
    )]
    wait: Option<Duration>,
}

const FOREVER: &str = "forever";

impl WaitArgs {
    /// Returns the longest time to wait: zero without the option, and no bound where the option has no time.
    pub(crate) fn at_most(self) -> Duration {
        self.wait.unwrap_or_default()
    }
}

#[derive(Debug, Args)]
pub(crate) struct SwapArgs {
    /// The tenant to pause
    #[arg(value_parser = TenantName::new, value_name = "FROM", add = ArgValueCandidates::new(names))]
    pub(crate) from: TenantName,
    /// The tenant to resume
    #[arg(value_parser = TenantName::new, value_name = "TO", add = ArgValueCandidates::new(names))]
    pub(crate) to: TenantName,
    #[command(flatten)]
    pub(crate) tags: SwapTagArgs,
    /// Take the contexts of FROM's processes off the GPUs too, once TO runs
    #[arg(long, conflicts_with_all = ["both", "libraries", "out"])]
    pub(crate) deep: bool,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// Time for each phase; each phase has its own default
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    pub(crate) timeout: Option<Duration>,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SwitchArgs {
    /// The tenant that is to have its GPUs
    #[arg(value_parser = TenantName::new, add = ArgValueCandidates::new(names))]
    pub(crate) tenant: TenantName,
    /// Show what would be done and why, and change nothing
    #[arg(long, conflicts_with = "wait")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// Time for each phase; each phase has its own default
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    pub(crate) timeout: Option<Duration>,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PrepareArgs {
    /// The tenant
    #[arg(value_parser = TenantName::new, add = ArgValueCandidates::new(names))]
    pub(crate) tenant: TenantName,
    /// Return once it has begun; `sublet ps` shows how far it is
    #[arg(long)]
    pub(crate) no_wait: bool,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SaveArgs {
    /// The tenant
    #[arg(value_parser = TenantName::new, add = ArgValueCandidates::new(names))]
    pub(crate) tenant: TenantName,
    /// Where to: made, or empty and closed to others. All processes of the tenant must see it under this path
    pub(crate) dir: PathBuf,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BudgetArgs {
    /// The tenant
    #[arg(value_parser = TenantName::new, add = ArgValueCandidates::new(names))]
    pub(crate) tenant: TenantName,
    /// The new budgets: 60GiB for every GPU, 0=60GiB for one, 0=none or none to take them back; shown when not given
    #[arg(value_name = "[GPU=]SIZE")]
    pub(crate) budgets: Vec<Budgets>,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// The tenant; all tenants when not given
    #[arg(value_parser = TenantName::new, add = ArgValueCandidates::new(names))]
    pub(crate) tenant: Option<TenantName>,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    #[command(flatten)]
    pub(crate) of: StatsArgs,
    /// Those of every user of this machine; for root
    #[arg(long, conflicts_with = "tenant")]
    pub(crate) all_users: bool,
}

#[derive(Debug, Args)]
pub(crate) struct MetricsArgs {
    /// Tenants of every user of this machine, with a label `user`; for root
    #[arg(long)]
    pub(crate) all_users: bool,
    /// Write to this file atomically, instead of standard output: a `*.prom` for `node_exporter`'s textfile collector
    #[arg(long, value_name = "PATH")]
    pub(crate) textfile: Option<PathBuf>,
    /// Go on until Ctrl-C or SIGTERM, and write the file again after each such time, such as 15s
    #[arg(long, value_name = "TIME", value_parser = time::parse, requires = "textfile")]
    pub(crate) every: Option<Duration>,
    /// Serve figures by HTTP at /metrics until Ctrl-C or SIGTERM; without an address or with a port alone to this machine only
    #[arg(
        long, value_name = "ADDRESS", value_parser = address, num_args = 0..=1, default_missing_value = ADDRESS,
        conflicts_with_all = ["textfile", "every"]
    )]
    pub(crate) listen: Option<SocketAddr>,
}

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// The tenant
    #[arg(value_parser = TenantName::new, add = ArgValueCandidates::new(names))]
    pub(crate) tenant: TenantName,
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_parser = ["bash", "zsh", "fish"])]
    pub(crate) shell: String,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// A directory that is there
    pub(crate) dir: PathBuf,
}

/// Does the command itself start another, whose words are its own?
fn starts_another(words: &[OsString]) -> bool {
    words.get(1).is_none_or(|verb| verb == "run" || verb == "simulate")
}

/// Is a document for programs wanted?
pub(crate) fn wants_json(words: &[OsString]) -> bool {
    !starts_another(words) && words.iter().any(|word| word == "--json")
}

/// The command line as clap reads it: `--wait 90s` is `--wait=90s`, and a tenant may be given as `--tenant NAME` everywhere. What
/// `sublet run` and `sublet simulate` start keeps its own words.
pub(crate) fn plain(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.into_iter().collect();
    if starts_another(&words) {
        return words;
    }
    let mut index = 2;
    while index < words.len() {
        let next = words.get(index + 1).and_then(|next| next.to_str());
        let is_time = |text: &&str| {
            text.starts_with(|first: char| first.is_ascii_digit()) && time::parse(text).is_ok()
        };
        match words[index].to_str() {
            Some("--wait") => {
                if let Some(time) = next.filter(is_time) {
                    words[index] = format!("--wait={time}").into();
                    words.remove(index + 1);
                }
            }
            Some("--tenant") => drop(words.remove(index)),
            Some(word) => {
                if let Some(name) = word.strip_prefix("--tenant=").map(OsString::from) {
                    words[index] = name;
                }
            }
            None => {}
        }
        index += 1;
    }
    words
}

/// Tenants in the run directory, for shells that complete.
fn names() -> Vec<CompletionCandidate> {
    let (explicit, xdg) = Environment::read().run_dir_sources();
    let tenants = RunDir::open(explicit, xdg).and_then(|dir| dir.live_tenants());
    let names = tenants.into_iter().flatten();
    names.map(|name| CompletionCandidate::new(name.as_str())).collect()
}

fn classes() -> Vec<CompletionCandidate> {
    ["guaranteed", "fair", "background"].map(CompletionCandidate::new).into()
}

fn wait_time(text: &str) -> Result<Duration, String> {
    if text == FOREVER { Ok(Duration::MAX) } else { time::parse(text) }
}

#[cfg(test)]
mod tests;
