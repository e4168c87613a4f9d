//! The name of a tenant that `sublet run` was given none for.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::Path;

use tenants::identity::{NameError, TENANT_NAME_BYTES_MAX, TenantName};
use tenants::run_dir::RunDir;

use crate::failure::{EXIT_USAGE, Failure};
use crate::{early, gpus};

/// Of a command that has no letter to make a name of.
const NAMELESS: &str = "job";
/// Room for a number behind a name.
const NUMBER_BYTES: usize = 5;

/// A name that no process has. Nobody else chooses while `turn` is held, which ends when this process becomes its command:
/// then others see the name in its environment.
pub(crate) struct Chosen {
    pub(crate) tenant: TenantName,
    /// The first choice, if somebody has it.
    pub(crate) taken: Option<TenantName>,
    _turn: Option<File>,
}

/// Chooses a name for `command`. Jobs of one array start together: each looks for a name while no other does. Blocks for as long as
/// [`gpus::in_time`] at most.
pub(crate) fn choose(command: &[OsString], run_dir: &RunDir) -> Result<Chosen, Failure> {
    let turn = turn(run_dir.path());
    let live = run_dir.live_tenants()?.into_iter().map(|name| name.as_str().to_owned());
    let taken: BTreeSet<String> = live.chain(early::find(run_dir).into_keys()).collect();
    let first = name_of(command).map_err(|error| Failure::of(&error, EXIT_USAGE))?;
    let is_free = |name: &TenantName| !taken.contains(name.as_str());
    let numbered =
        (2_u32..).filter_map(|number| TenantName::new(&format!("{first}-{number}")).ok());
    let tenant = std::iter::once(first.clone()).chain(numbered).find(is_free);
    let tenant = tenant.unwrap_or_else(|| first.clone());
    Ok(Chosen { taken: (tenant != first).then_some(first), tenant, _turn: turn })
}

/// None if it cannot be had in time: two jobs may then have one name.
fn turn(run_dir: &Path) -> Option<File> {
    let file = File::open(run_dir).ok()?;
    gpus::in_time(move || file.lock().ok().map(|()| file)).flatten()
}

/// The script that a command runs, or its Python module, or its program: `torchrun --nproc-per-node 4 examples/train.py` is `train`.
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

/// `text` as far as a tenant's name can have it.
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
    use super::*;

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
