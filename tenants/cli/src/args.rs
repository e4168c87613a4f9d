//! What may be said on the command line.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::metrics::serve::{ADDRESS, address};
use crate::simulate::SimulateArgs;
use clap::{Args, Parser, Subcommand};
use tenants::budget::{BudgetError, Budgets};
use tenants::identity::{FamilyName, TenantName};
use tenants::scope::{LIBRARY_TAGS, Scope, TagNames};
use tenants::time;
use tenants::turns::{Class, ClassError, TURNS_AUTO, Weight, WeightError};

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 refused or failed, nothing changed; 2 wrong usage; 3 changed, but not wholly as asked; 130 called off by \
Ctrl-C or SIGTERM, nothing changed. `sublet run` and `sublet simulate` exit as the command that they run.";

/// Lets several jobs share the same GPUs by turns.
#[derive(Debug, Parser)]
#[command(name = "sublet", version, arg_required_else_help = true, after_long_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command whose processes form a tenant
    Run(RunArgs),
    /// Show tenants, their processes, and their bytes on each GPU
    Ps(JsonArgs),
    /// Have a tenant give its GPU memory back
    Pause(PauseArgs),
    /// Have a paused tenant take its GPU memory back, at the same addresses
    Resume(ResumeArgs),
    /// Pause one tenant and resume another, with both directions of the link busy
    Swap(SwapArgs),
    /// Have a tenant get its GPUs: pause what is in the way there, and resume it
    Switch(SwitchArgs),
    /// Show who has a turn on the GPUs, who waits for one, and what was decided last and why
    Turns(JsonArgs),
    /// Bring in the host memory that a tenant's next pause takes, while it runs, so that this pause need not
    Prepare(PrepareArgs),
    /// Write what a paused tenant has saved to files, with a map of them; the tenant stays as it is
    Save(SaveArgs),
    /// Show or change how much GPU memory a tenant may hold
    Budget(BudgetArgs),
    /// Show what the processes of a tenant hold, and how their last pause and resume went
    Stats(StatsArgs),
    /// Show tenants, GPUs, switches and who waits for whom, once a second, until q is pressed
    Top,
    /// Print figures of tenants and GPUs for Prometheus
    Metrics(MetricsArgs),
    /// Write a tenant's last pause and resume as a timeline for ui.perfetto.dev
    Trace(TraceArgs),
    /// Print a script with which a shell completes this command
    Completions(CompletionsArgs),
    /// Write a manual page for each command
    Man(ManArgs),
    /// Check whether this machine is able, and what is in the way
    Doctor(JsonArgs),
    /// Print versions, settings and the documents of `doctor`, `ps` and `turns`, for a report of a fault
    BugReport,
    /// Run a command on simulated GPUs, to try Sublet without a GPU
    Simulate(SimulateArgs),
}

impl Command {
    /// Was a document for programs asked for?
    pub(crate) fn wants_json(&self) -> bool {
        match self {
            Self::Ps(json) | Self::Turns(json) | Self::Doctor(json) => json.json,
            Self::Pause(args) => args.json.json,
            Self::Resume(args) => args.json.json,
            Self::Swap(args) => args.json.json,
            Self::Switch(args) => args.json.json,
            Self::Prepare(args) => args.json.json,
            Self::Save(args) => args.json.json,
            Self::Budget(args) => args.json.json,
            Self::Stats(args) => args.json.json,
            Self::Run(_)
            | Self::Simulate(_)
            | Self::Top
            | Self::Metrics(_)
            | Self::Trace(_)
            | Self::Completions(_)
            | Self::Man(_)
            | Self::BugReport => false,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Name of the tenant: letters, digits, '.', '_' and '-'
    #[arg(long, value_name = "NAME", value_parser = tenant)]
    pub(crate) tenant: TenantName,
    /// Tenants with the same family may open each other's CUDA IPC handles and exported memory
    #[arg(long, value_name = "NAME", value_parser = family)]
    pub(crate) family: Option<FamilyName>,
    /// What the tenant is to others when they take turns: guaranteed, fair (unless another is named) or background
    #[arg(long, value_name = "CLASS", value_parser = class)]
    pub(crate) class: Option<Class>,
    /// How many quanta a fair tenant has at a time, from 1 (unless another is named) to 100
    #[arg(long, value_name = "NUMBER", value_parser = weight)]
    pub(crate) weight: Option<Weight>,
    /// auto: its allocations that a GPU has no room for queue, and others that do the same make way and come back by themselves
    #[arg(long, value_name = "HOW", value_parser = [TURNS_AUTO])]
    pub(crate) turns: Option<String>,
    /// How much GPU memory all its processes together may hold: 60GiB on each GPU, or 0=60GiB on the one that nvidia-smi
    /// shows as 0, or GPU-...=60GiB; may be given more than once
    #[arg(long = "budget", value_name = "[GPU=]SIZE", value_parser = budgets)]
    pub(crate) budgets: Vec<Budgets>,
    /// End each process that cannot join the tenant, with exit code 1 and a message, at its first use of GPU memory; by default such a process
    /// runs on without Sublet
    #[arg(long)]
    pub(crate) require: bool,
    /// The preload object; found beside this command when not given
    #[arg(long, value_name = "PATH")]
    pub(crate) library: Option<PathBuf>,
    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    pub(crate) command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct JsonArgs {
    /// Print a report for programs
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Default, Args)]
pub(crate) struct TagArgs {
    /// Only memory of regions with this tag, in all processes: while it is away, they run on without it. May be given more than
    /// once
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Only this library's own memory, in all processes: while it is away, they run on, and calls into the library wait.
    /// May be given beside tags
    #[arg(long = "library", value_name = "LIBRARY", value_parser = LIBRARY_TAGS)]
    libraries: Vec<String>,
}

impl TagArgs {
    /// What to pause or resume.
    pub(crate) fn scope(&self) -> Scope {
        scope_of([&self.tags, &self.libraries])
    }
}

#[derive(Debug, Default, Args)]
pub(crate) struct SwapTagArgs {
    /// Only memory of regions with this tag, of both: FROM runs on without it, and TO gets it back. May be given more than once
    #[arg(long = "tag", value_name = "TAG")]
    both: Vec<String>,
    /// Only this library's own memory, of both; may be given beside tags
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
    /// What leaves.
    pub(crate) fn out_scope(&self) -> Scope {
        scope_of([&self.both, &self.libraries, &self.out])
    }

    /// What comes.
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
pub(crate) struct PauseArgs {
    /// The tenant
    #[arg(value_parser = tenant)]
    pub(crate) tenant: TenantName,
    #[command(flatten)]
    pub(crate) tags: TagArgs,
    /// Take the processes' contexts off the GPUs too, behind their memory; the tenant must be paused as a whole, and resume brings all back
    #[arg(long, conflicts_with_all = ["tags", "libraries"])]
    pub(crate) deep: bool,
    /// Time for each phase up to the point of no return, such as 500ms, 30s or 2m; each phase has its own default
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    pub(crate) timeout: Option<Duration>,
    /// Also write how it went to this file, as a timeline for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    /// The tenant
    #[arg(value_parser = tenant)]
    pub(crate) tenant: TenantName,
    #[command(flatten)]
    pub(crate) tags: TagArgs,
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
    /// Also write how it went to this file, as a timeline for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WaitArgs {
    /// While GPU memory is short, or somebody in the way is in a turn, wait until that is over: without end, or for the time given, such as
    /// --wait=90s
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
    /// How long to wait; nothing without the option, and no bound without a time.
    pub(crate) fn at_most(self) -> Duration {
        self.wait.unwrap_or_default()
    }
}

#[derive(Debug, Args)]
pub(crate) struct SwapArgs {
    /// The tenant to pause
    #[arg(value_parser = tenant, value_name = "FROM")]
    pub(crate) from: TenantName,
    /// The tenant to resume
    #[arg(value_parser = tenant, value_name = "TO")]
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
    /// Also write how it went to this file, as a timeline for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SwitchArgs {
    /// The tenant that is to have its GPUs
    #[arg(value_parser = tenant)]
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
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PrepareArgs {
    /// The tenant
    #[arg(value_parser = tenant)]
    pub(crate) tenant: TenantName,
    /// Return once it has begun; `sublet ps` shows how far it is
    #[arg(long)]
    pub(crate) no_wait: bool,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SaveArgs {
    /// The tenant
    #[arg(value_parser = tenant)]
    pub(crate) tenant: TenantName,
    /// Where to: made, or empty and closed to others. All processes of the tenant must see it under this path
    pub(crate) dir: PathBuf,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BudgetArgs {
    /// The tenant
    #[arg(value_parser = tenant)]
    pub(crate) tenant: TenantName,
    /// The new budgets: 60GiB for every GPU, 0=60GiB for one, 0=none or none to take them back; shown when not given
    #[arg(value_name = "[GPU=]SIZE", value_parser = budgets)]
    pub(crate) budgets: Vec<Budgets>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// The tenant; all tenants when not given
    #[arg(value_parser = tenant)]
    pub(crate) tenant: Option<TenantName>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct MetricsArgs {
    /// Write to this file, at once, instead of standard output: a `*.prom` in the directory of `node_exporter`'s textfile collector
    #[arg(long, value_name = "PATH")]
    pub(crate) textfile: Option<PathBuf>,
    /// Go on until Ctrl-C or SIGTERM, and write the file anew after each such time, such as 15s
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
    #[arg(value_parser = tenant)]
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

fn tenant(text: &str) -> Result<TenantName, String> {
    TenantName::new(text).map_err(|error| error.to_string())
}

fn family(text: &str) -> Result<FamilyName, String> {
    FamilyName::new(text).map_err(|error| error.to_string())
}

fn class(text: &str) -> Result<Class, String> {
    text.parse().map_err(|error: ClassError| error.to_string())
}

fn weight(text: &str) -> Result<Weight, String> {
    text.parse().map_err(|error: WeightError| error.to_string())
}

fn budgets(text: &str) -> Result<Budgets, String> {
    text.parse().map_err(|error: BudgetError| error.to_string())
}

fn wait_time(text: &str) -> Result<Duration, String> {
    if text == FOREVER { Ok(Duration::MAX) } else { time::parse(text) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use clap::CommandFactory as _;

    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.command)
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_command_to_run_keeps_its_own_options() {
        for line in [
            "sublet run --tenant train -- torchrun --nproc-per-node 4 train.py -- x",
            "sublet run --tenant train torchrun --nproc-per-node 4 train.py -- x",
        ] {
            let Command::Run(args) = parse(line).unwrap() else {
                panic!("{line}");
            };
            assert_eq!(args.tenant.as_str(), "train");
            assert_eq!(args.command, ["torchrun", "--nproc-per-node", "4", "train.py", "--", "x"]);
        }
    }

    #[test]
    fn bad_usage_is_refused() {
        for line in [
            "sublet",
            "sublet run -- true",
            "sublet run --tenant train",
            "sublet run --tenant ../x -- true",
            "sublet pause",
            "sublet pause train --timeout fast",
            "sublet pause train --deep --tag kv",
            "sublet swap train infer --deep --out-tag kv",
            "sublet swap train",
            "sublet switch",
            "sublet switch train infer",
            "sublet switch train --dry-run --wait",
            "sublet run --tenant train --class urgent -- true",
            "sublet run --tenant train --weight 0 -- true",
            "sublet prepare",
            "sublet prepare train other",
            "sublet save train",
            "sublet wake train",
            "sublet trace train",
            "sublet metrics --every 5s",
            "sublet metrics --listen localhost",
            "sublet metrics --listen 9400 --textfile a.prom",
            "sublet metrics --listen 9400 --every 5s",
            "sublet completions tcsh",
            "sublet top train",
            "sublet bug-report train",
            "sublet man",
            "sublet budget",
            "sublet budget train 60PB",
            "sublet budget train gpu=1GiB",
            "sublet run --tenant train --budget 0=0 -- true",
            "sublet simulate",
            "sublet simulate --gpus 0 -- true",
            "sublet simulate --gpus 17 -- true",
            "sublet simulate --memory 1MiB -- true",
            "sublet simulate --memory much -- true",
        ] {
            assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn options_are_read() {
        let Command::Resume(args) = parse("sublet resume a --wait=90 --json").unwrap() else {
            panic!();
        };
        assert_eq!(args.wait.at_most(), Duration::from_secs(90));
        assert!(args.json.json && !args.without_lost);
        let Command::Swap(args) = parse("sublet swap --wait a b").unwrap() else {
            panic!();
        };
        assert_eq!(args.wait.at_most(), Duration::MAX);
        let Command::Resume(args) = parse("sublet resume a").unwrap() else {
            panic!();
        };
        assert_eq!(args.wait.at_most(), Duration::ZERO);
        for (line, wanted) in [
            ("sublet metrics --listen", "127.0.0.1:9400"),
            ("sublet metrics --listen 9401", "127.0.0.1:9401"),
            ("sublet metrics --listen 10.0.0.7:9400", "10.0.0.7:9400"),
        ] {
            let Command::Metrics(args) = parse(line).unwrap() else {
                panic!();
            };
            assert_eq!(args.listen, wanted.parse().ok(), "{line}");
        }
        let Command::Stats(args) = parse("sublet stats").unwrap() else {
            panic!();
        };
        assert!(args.tenant.is_none());
    }

    /// What pages show of this command: code that begins with its name, each with the page.
    fn shown() -> Vec<(String, String)> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let docs = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
        let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
        let mut found = Vec::new();
        for page in pages.chain([root.join("README.md")]) {
            let text = fs::read_to_string(&page).unwrap();
            let parts: Vec<_> = text.split("```").collect();
            let blocks = parts.iter().skip(1).step_by(2).flat_map(|block| block.lines());
            let spans =
                parts.iter().step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2));
            let ours = blocks.chain(spans).filter(|code| code.starts_with("sublet "));
            found.extend(ours.map(|code| (page.display().to_string(), code.replace('\n', " "))));
        }
        found
    }

    #[test]
    fn pages_show_commands_and_options_that_there_are() {
        let cli = Cli::command();
        let shown = shown();
        assert!(shown.len() > 50, "{} commands in all pages", shown.len());
        for (page, line) in shown {
            let line = line.split(['#', '|', '>', '&']).next().unwrap_or_default();
            let words: Vec<_> =
                line.split_whitespace().skip(1).take_while(|word| *word != "--").collect();
            let Some((first, rest)) = words
                .split_first()
                .filter(|(first, _)| first.bytes().all(|byte| byte.is_ascii_lowercase()))
            else {
                continue;
            };
            let command = cli.find_subcommand(first);
            let command = command.unwrap_or_else(|| panic!("{page}: there is no `{line}`"));
            let known: Vec<_> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
            for word in
                rest.iter().filter_map(|word| word.trim_start_matches('[').strip_prefix("--"))
            {
                let name = word.split(['=', '[', ']']).next().unwrap_or_default();
                assert!(
                    name == "help" || known.contains(&name),
                    "{page}: `{line}` has no --{name}"
                );
            }
        }
    }
}
