//! `sublet run`: becomes the command, with the preload object and the tenant's name in its environment. If no name is given, it
//! chooses one.

use std::collections::BTreeSet;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use tenants::budget::BUDGET_VARIABLE;
use tenants::class::{TURNS_VARIABLE, TurnSettings};
use tenants::identity::{MemberId, NameError, TENANT_NAME_BYTES_MAX, TenantName};
use tenants::run_dir::{RUN_DIR_VARIABLE, RunDir};
use tenants::settings::{FAMILY_VARIABLE, LAUNCH_VARIABLE, REQUIRED_VARIABLE, TENANT_VARIABLE};

use crate::args::RunArgs;
use crate::environment::{Environment, PRELOAD_VARIABLE, absolute};
use crate::failure::{EXIT_NOT_FOUND, EXIT_UNCHANGED, EXIT_USAGE, Failure};
use crate::{budget, early, launch, output, outsiders};

/// File name of the preload object.
pub(crate) const LIBRARY_NAME: &str = "libsublet.so";

/// Becomes the command. Returns only if the command could not be started.
pub(crate) fn run(
    args: &RunArgs,
    environment: &Environment,
    run_dir: &RunDir,
) -> Result<ExitCode, Failure> {
    // Lives as long as this process: see its type.
    let mut chosen = None;
    let mut _turn = None;
    let outer = || environment.settings().tenant.clone();
    let tenant = match args.tenant.clone().or_else(outer) {
        Some(tenant) if args.join => tenant,
        Some(tenant) => {
            _turn = launch::take(&tenant, run_dir, environment, output::complain)?;
            tenant
        }
        None => chosen.insert(choose(&args.command, run_dir)?).tenant.clone(),
    };
    let own = own_settings(args, &tenant, environment);
    check_settings(args, environment, &own)?;
    // All member ids have the same length: one path that fits shows that all do.
    run_dir.tenant(&tenant)?.socket_path(MemberId(0))?;
    let budgets = budget::for_run(&tenant, &args.budgets, environment, run_dir, &mut |text| {
        output::complain(text);
    })?;
    let library = find_library(args.library.as_deref(), environment)?;
    let (program, rest) = args
        .command
        .split_first()
        .ok_or_else(|| Failure::new("no command was given".to_owned(), EXIT_NOT_FOUND))?;
    // This check comes before any message about a job that cannot start.
    if !is_found(program, environment.get("PATH")) {
        return Err(Failure::of_start(program, &ErrorKind::NotFound.into()));
    }
    if let Some(chosen) = &chosen {
        output::complain(&note_of_name(chosen));
    } else if let Some(note) = note_of_others(&tenant, run_dir).filter(|_| args.join) {
        output::complain(&note);
    }
    let preload = prepend(&library, environment.get(PRELOAD_VARIABLE))?;
    let mut command = Command::new(program);
    if let Some(budgets) = budgets {
        command.env(BUDGET_VARIABLE, budgets.to_string());
    }
    let error = command
        .args(rest)
        .envs(own)
        .env(PRELOAD_VARIABLE, preload)
        .env(RUN_DIR_VARIABLE, absolute(run_dir.path()))
        .exec();
    Err(Failure::of_start(program, &error))
}

/// Is there a program with this name where the system would look for it?
fn is_found(program: &OsStr, path: Option<&OsStr>) -> bool {
    let is_path = program.as_bytes().contains(&b'/');
    let Some(path) = path.filter(|_| !is_path) else {
        return !is_path || Path::new(program).exists();
    };
    env::split_paths(path).any(|dir| dir.join(program).exists())
}

fn note_of_name(Chosen { tenant, taken, .. }: &Chosen) -> String {
    let taken = taken.as_ref().map(|taken| format!(", because '{taken}' runs already"));
    format!(
        "this job is tenant '{tenant}'{}; pause it with: sublet pause {tenant}",
        taken.unwrap_or_default()
    )
}

/// Returns a note that the job joins running processes. A name that was given by habit can make one tenant of two jobs.
fn note_of_others(tenant: &TenantName, run_dir: &RunDir) -> Option<String> {
    let others = run_dir.existing_tenant(tenant).ok().flatten()?.pids();
    let first = others.first()?;
    let command = outsiders::command_of(*first);
    let (words, more) = match others.len() {
        1 => ("a process".to_owned(), String::new()),
        count => (format!("{count} processes"), format!(", and {} more", count - 1)),
    };
    Some(format!(
        "note: tenant '{tenant}' has {words} already ({first}: {command}{more}); this job joins it, and a pause stops \
         all of them"
    ))
}

/// Returns the variables that options set in the environment of the command. The variables that an outer command has
/// set are the inner one's too, unless an option says otherwise.
fn own_settings(
    args: &RunArgs,
    tenant: &TenantName,
    environment: &Environment,
) -> Vec<(&'static str, String)> {
    let mut own =
        vec![(TENANT_VARIABLE, tenant.to_string()), (LAUNCH_VARIABLE, launch::mark(environment))];
    own.extend(args.family.as_ref().map(|family| (FAMILY_VARIABLE, family.to_string())));
    let before = environment.settings().turns;
    let given = args.turns.as_ref().and_then(|turns| turns.parse().ok());
    let given: TurnSettings = given.unwrap_or_default();
    let turns = TurnSettings {
        queues: given.queues || before.queues,
        deep: before.deep.or(given.deep),
        class: args.class.unwrap_or(before.class),
        weight: args.weight.unwrap_or(before.weight),
        ..before
    };
    own.extend((turns != before).then(|| (TURNS_VARIABLE, turns.to_string())));
    own.extend(args.require.then(|| (REQUIRED_VARIABLE, "1".to_owned())));
    own
}

/// Refuses settings that a process of the job would not understand, and warns of names that are no settings.
fn check_settings(
    args: &RunArgs,
    environment: &Environment,
    own: &[(&'static str, String)],
) -> Result<(), Failure> {
    for text in environment.unknown_settings() {
        output::complain(&text);
    }
    // Options replace settings, except for the turns, which they change.
    let names = own.iter().map(|(name, _)| *name);
    let mut replaced: Vec<_> = names.filter(|name| *name != TURNS_VARIABLE).collect();
    replaced.extend((!args.budgets.is_empty()).then_some(BUDGET_VARIABLE));
    let wrong = environment.wrong_settings(&replaced);
    if wrong.is_empty() { Ok(()) } else { Err(Failure::new(wrong.join("; "), EXIT_USAGE)) }
}

/// Returns the preload object: the given one, or that next to this command or in `../lib`.
pub(crate) fn find_library(
    given: Option<&Path>,
    environment: &Environment,
) -> Result<PathBuf, Failure> {
    if let Some(path) = given {
        return if path.is_file() {
            Ok(absolute(path))
        } else {
            let message = format!("--library names {}, which is no file", path.display());
            Err(Failure::new(message, EXIT_UNCHANGED))
        };
    }
    environment.installed(LIBRARY_NAME).ok_or_else(|| {
        let message = format!(
            "{LIBRARY_NAME} was found neither next to this command nor in ../lib: name it with --library"
        );
        Failure::new(message, EXIT_UNCHANGED)
    })
}

/// Returns the list of preloaded libraries with `library` in front.
fn prepend(library: &Path, before: Option<&OsStr>) -> Result<OsString, Failure> {
    let name = library.as_os_str();
    // The loader takes a list that blanks and colons divide, and has no way to quote them.
    let divides = |byte: &u8| *byte == b':' || byte.is_ascii_whitespace();
    if name.as_bytes().iter().any(divides) {
        let message = format!(
            "{} cannot be preloaded, because its path holds a blank or a colon: move or link it elsewhere",
            library.display()
        );
        return Err(Failure::new(message, EXIT_UNCHANGED));
    }
    let mut list = name.to_owned();
    let others = before.unwrap_or_default().as_bytes();
    let others = others.split(divides).filter(|other| !other.is_empty());
    for other in others.filter(|other| *other != name.as_bytes()) {
        list.push(":");
        list.push(OsStr::from_bytes(other));
    }
    Ok(list)
}

// A name for the tenant.

/// The name for a command without a letter that a name could have.
const NAMELESS: &str = "job";
/// Room for a number behind a name.
const NUMBER_BYTES: usize = 5;

/// A name that no process has. No other process chooses one while `_turn` is held. That lock ends when this process becomes its
/// command; then others see the name in its environment.
struct Chosen {
    tenant: TenantName,
    /// The first choice, if somebody has it.
    taken: Option<TenantName>,
    _turn: Option<File>,
}

/// Chooses a name for `command`. Jobs of one array start together, so each looks for a name while no other does. Blocks at most
/// as long as [`launch::turn`].
fn choose(command: &[OsString], run_dir: &RunDir) -> Result<Chosen, Failure> {
    let turn = launch::turn(run_dir.path());
    let live = run_dir.live_tenants()?.into_iter();
    let taken: BTreeSet<TenantName> = live.chain(early::find(run_dir).into_keys()).collect();
    let first = name_of(command).map_err(|error| Failure::of(&error, EXIT_USAGE))?;
    let is_free = |name: &TenantName| !taken.contains(name);
    let numbered =
        (2_u32..).filter_map(|number| TenantName::new(&format!("{first}-{number}")).ok());
    let tenant = std::iter::once(first.clone()).chain(numbered).find(is_free);
    let tenant = tenant.unwrap_or_else(|| first.clone());
    Ok(Chosen { taken: (tenant != first).then_some(first), tenant, _turn: turn })
}

/// Returns a name from the script that a command runs, or its Python module, or its program: `torchrun --nproc-per-node 4
/// examples/train.py` is `train`.
fn name_of(command: &[OsString]) -> Result<TenantName, NameError> {
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    let program = words.first().and_then(|word| Path::new(&**word).file_name());
    let program = program.unwrap_or_default().to_string_lossy();
    let is_script = |word: &&Path| word.extension().is_some_and(|end| end == "py" || end == "sh");
    let script = words.iter().map(|word| Path::new(&**word)).find(is_script);
    let script = script.and_then(Path::file_stem).map(OsStr::to_string_lossy);
    let module = || {
        let option = words.iter().position(|word| word == "-m")?;
        let module = words.get(option + 1).filter(|_| program.starts_with("python"))?;
        Some(module.rsplit('.').next()?.into())
    };
    named(&script.or_else(module).unwrap_or(program.clone()))
}

/// Returns `text` with the letters that a tenant's name can have.
fn named(text: &str) -> Result<TenantName, NameError> {
    let plain = |letter: char| match letter {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' => letter,
        _ => '-',
    };
    let name: String = text.chars().map(plain).collect();
    let name = name.trim_matches(['.', '-']);
    let name = &name[..name.len().min(TENANT_NAME_BYTES_MAX - NUMBER_BYTES)];
    TenantName::new(name).or_else(|_| TenantName::new(NAMELESS))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_library_goes_before_others_and_only_once() {
        let library = Path::new("/opt/lib/libsublet.so");
        let join = |before: Option<&str>| prepend(library, before.map(OsStr::new)).unwrap();
        assert_eq!(join(None), "/opt/lib/libsublet.so");
        assert_eq!(join(Some("/a.so:/b.so /c.so")), "/opt/lib/libsublet.so:/a.so:/b.so:/c.so");
        assert_eq!(join(Some("/a.so:/opt/lib/libsublet.so")), "/opt/lib/libsublet.so:/a.so");
        for path in ["/a b/libsublet.so", "/a:b/libsublet.so"] {
            let error = prepend(Path::new(path), None).unwrap_err();
            assert!(error.to_string().contains("blank or a colon"));
        }
    }

    #[test]
    fn the_library_is_looked_for_in_the_order_that_is_promised() {
        let base = tempfile::tempdir().unwrap();
        let root = base.path().canonicalize().unwrap();
        for folder in ["bin", "lib", "other"] {
            fs::create_dir(root.join(folder)).unwrap();
        }
        let bin = Some(root.join("bin/sublet"));
        let plain = Environment::of(&[], bin.clone());
        let error = find_library(None, &plain).unwrap_err();
        assert!(error.to_string().ends_with("name it with --library"));

        let in_lib = root.join("lib/libsublet.so");
        fs::write(&in_lib, "").unwrap();
        assert_eq!(find_library(None, &plain).unwrap(), in_lib);
        let next = root.join("bin/libsublet.so");
        fs::write(&next, "").unwrap();
        assert_eq!(find_library(None, &plain).unwrap(), next);

        let named = root.join("other/custom.so");
        fs::write(&named, "").unwrap();
        assert_eq!(find_library(Some(&named), &plain).unwrap(), named);
        let error = find_library(Some(Path::new("/no/such.so")), &plain).unwrap_err();
        assert_eq!(error.to_string(), "--library names /no/such.so, which is no file");
    }

    #[test]
    fn a_name_is_that_of_the_script_or_of_the_module_or_of_the_program() {
        for (command, name) in [
            ("python train.py --lr 1", "train"),
            ("torchrun --nproc-per-node 4 examples/train.py", "train"),
            ("python3 -m torch.distributed.run train.py -m x", "train"),
            ("/usr/bin/python3.11 -m vllm.entrypoints.api_server", "api_server"),
            ("bash run-all.sh", "run-all"),
            ("./build/trainer -m big", "trainer"),
            ("python", "python"),
            ("jupyter lab", "jupyter"),
            ("python .py", "python"),
            ("./...", "job"),
            ("./lauf+größe", "lauf-gr--e"),
            ("", "job"),
        ] {
            let words: Vec<_> = command.split(' ').map(OsString::from).collect();
            assert_eq!(name_of(&words).unwrap().as_str(), name, "{command}");
        }
        let long = "a".repeat(80);
        assert_eq!(named(&long).unwrap().as_str().len(), TENANT_NAME_BYTES_MAX - NUMBER_BYTES);
    }
}
