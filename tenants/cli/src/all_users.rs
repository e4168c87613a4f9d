//! The tenants of every user of this machine, for root.
//!
//! The command runs itself once for each run directory, with the rights of the directory's user: root opens nothing there. That
//! user can stop such a process, or control its output. So it has a session without a terminal, nothing of root's environment,
//! and limits on its time and output.

#![expect(unsafe_code, reason = "makes one call between fork and exec")]

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{Uid, User, geteuid, setsid};
use procfs::process::all_processes;
use serde_json::Value;
use tenants::code::Code;
use tenants::run_dir::{RUN_DIR_VARIABLE, RunDir};

use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::output::complain;
use crate::view::{Refused, View};

/// The time limit for the answers of all users together.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The longest answer of one user.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Adds the tenants of all other users to `view`, which has root's own tenants of `run_dir`. Each is then called `USER/TENANT`.
/// If the tenants of a user cannot be read, standard error and the view name the user. The other users are shown.
///
/// # Errors
/// This process is not root's.
pub(crate) fn add(view: &mut View, run_dir: &RunDir) -> Result<(), Failure> {
    if !geteuid().is_root() {
        let message = "--all-users looks with the rights of each user, which root alone may do: put sudo before the command";
        return Err(Failure::new(message.to_owned(), EXIT_UNCHANGED).because(Code::Usage));
    }
    let own = (0, run_dir.path().canonicalize().unwrap_or_default());
    let asked: Vec<_> = run_dirs()
        .into_iter()
        .filter(|found| *found != own)
        .map(|(uid, dir)| (name_of(uid), start(uid, &dir)))
        .collect();
    call(view, &name_of(0));
    let deadline = Instant::now() + TIMEOUT;
    for (user, child) in asked {
        let found = child.and_then(|child| answer(child, deadline)).map_err(|e| e.to_string());
        match found.and_then(|answer| parsed(&answer)) {
            Ok(mut found) => {
                call(&mut found, &user);
                merge(view, found);
            }
            Err(error) => {
                complain(&format!("the tenants of user '{user}' cannot be looked at: {error}"));
                view.refused.push(Refused {
                    tenant: format!("{user}/*"),
                    code: Code::Other,
                    error,
                });
            }
        }
    }
    Ok(())
}

/// Returns the run directories of this machine, each with its user: the default ones, and those of processes under Sublet.
fn run_dirs() -> BTreeSet<(u32, PathBuf)> {
    let of = |dir: &str, prefix: &str, name: &str| {
        let names = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let found = names.filter_map(|path| {
            let uid = path.file_name()?.to_str()?.strip_prefix(prefix)?.parse().ok()?;
            Some((uid, if name.is_empty() { path } else { path.join(name) }))
        });
        found.collect::<Vec<_>>()
    };
    let processes = all_processes().into_iter().flatten().flatten();
    let named = processes.filter_map(|process| {
        let dir = process.environ().ok()?.remove(OsStr::new(RUN_DIR_VARIABLE))?;
        Some((process.uid().ok()?, PathBuf::from(dir)))
    });
    let all = of("/tmp", "sublet-", "").into_iter().chain(of("/run/user", "", "sublet"));
    let all = all.chain(named).filter_map(|(uid, dir)| {
        let found = fs::symlink_metadata(&dir).ok()?;
        let is_theirs = found.is_dir() && found.uid() == uid;
        is_theirs.then(|| Some((uid, dir.canonicalize().ok()?)))?
    });
    all.collect()
}

fn name_of(uid: u32) -> String {
    let known = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    known.map_or_else(|| uid.to_string(), |user| user.name)
}

/// Starts `sublet ps --json` as this user.
fn start(uid: u32, run_dir: &Path) -> io::Result<Child> {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    let gid = user
        .map_or_else(|| fs::metadata(run_dir).map(|dir| dir.gid()), |user| Ok(user.gid.as_raw()))?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["ps", "--json"])
        .env_clear()
        .env(RUN_DIR_VARIABLE, run_dir)
        .current_dir("/")
        .uid(uid)
        .gid(gid)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    // SAFETY: it makes one call, which POSIX allows between fork and exec.
    unsafe { command.pre_exec(|| Ok(setsid().map(drop)?)) };
    command.spawn()
}

/// Returns the output of `child` until it ends or the deadline passes. Then kills it.
fn answer(mut child: Child, deadline: Instant) -> io::Result<Vec<u8>> {
    let said = read(&mut child, deadline);
    child.kill().ok();
    child.wait()?;
    said
}

fn read(child: &mut Child, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut said = Vec::new();
    let Some(mut from) = child.stdout.take() else { return Ok(said) };
    let mut part = vec![0; 64 << 10];
    while said.len() < ANSWER_BYTES_MAX {
        let rest = deadline.saturating_duration_since(Instant::now());
        let rest = PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX);
        if poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], rest)? == 0 {
            return Err(io::Error::new(ErrorKind::TimedOut, "no answer in time"));
        }
        match from.read(&mut part)? {
            0 => return Ok(said),
            count => said.extend_from_slice(&part[..count]),
        }
    }
    Err(io::Error::new(ErrorKind::InvalidData, "the answer is too long"))
}

/// Returns the view in a document of `sublet ps`, or else the error in it.
fn parsed(answer: &[u8]) -> Result<View, String> {
    serde_json::from_slice(answer).map_err(|error| {
        let said = serde_json::from_slice::<Value>(answer).ok();
        let said = said.and_then(|said| Some(said.get("error")?.as_str()?.to_owned()));
        said.unwrap_or_else(|| format!("its answer is no document of `sublet ps`: {error}"))
    })
}

/// Renames all tenants of `view` to `USER/TENANT`.
fn call(view: &mut View, user: &str) {
    let tenants = view.tenants.iter_mut().map(|tenant| &mut tenant.stats.tenant);
    let refused = view.refused.iter_mut().map(|refused| &mut refused.tenant);
    let outside = view.outside.iter_mut().flatten();
    let strayed = outside.filter_map(|outside| outside.strayed_from.as_mut());
    for name in tenants.chain(refused).chain(strayed) {
        *name = format!("{user}/{name}");
    }
}

/// Merges one user's view into those of others. A process is outside if it is in no user's tenants.
fn merge(view: &mut View, found: View) {
    for gpu in found.gpus {
        if view.gpus.iter().all(|known| known.uuid != gpu.uuid) {
            view.gpus.push(gpu);
        }
    }
    view.tenants.extend(found.tenants);
    view.refused.extend(found.refused);
    if let (Some(outside), Some(theirs)) = (&mut view.outside, found.outside) {
        outside.retain_mut(|one| {
            let same = theirs.iter().find(|other| other.pid == one.pid);
            let from = same.and_then(|same| same.strayed_from.clone());
            one.strayed_from = one.strayed_from.take().or(from);
            same.is_some()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Output;
    use crate::outsiders::Outside;
    use crate::view::tests::busy;

    fn outside(pid: u32, strayed_from: Option<&str>) -> Outside {
        let (command, strayed_from) = ("python x.py".to_owned(), strayed_from.map(str::to_owned));
        Outside { pid, command, strayed_from, gpus: Vec::new() }
    }

    fn document(view: &View) -> String {
        let mut output = Output::default();
        output.json(view).unwrap();
        output.text().to_owned()
    }

    #[test]
    fn a_view_is_read_back_as_it_was_printed() {
        let mut view = busy();
        view.outside = Some(vec![outside(7, Some("train"))]);
        let text = document(&view);
        assert_eq!(document(&parsed(text.as_bytes()).unwrap()), text);
    }

    #[test]
    fn a_failure_is_said_in_its_own_words() {
        let said = parsed(br#"{"version": 1, "error": "no such thing", "code": "other"}"#);
        assert_eq!(said.unwrap_err(), "no such thing");
        assert!(parsed(b"").unwrap_err().contains("no document"));
    }

    #[test]
    fn tenants_of_one_name_stay_apart_and_nobody_elses_process_is_outside() {
        let mut view = busy();
        view.outside = Some(vec![outside(7, None), outside(8, None)]);
        call(&mut view, "root");
        let mut other = busy();
        other.outside = Some(vec![outside(8, Some("infer"))]);
        call(&mut other, "alice");
        merge(&mut view, other);
        let names: Vec<_> = view.tenants.iter().map(|one| one.stats.tenant.as_str()).collect();
        assert_eq!(names, ["root/infer", "root/train", "alice/infer", "alice/train"]);
        assert_eq!(view.outside, Some(vec![outside(8, Some("alice/infer"))]));
        assert_eq!(view.gpus.len(), 1);
    }
}
